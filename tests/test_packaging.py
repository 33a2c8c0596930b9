"""The wheel carries code, types and studies, and works from elsewhere."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_wheel_carries_the_studies_and_runs_from_elsewhere(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("shadow_engine-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"engine", "kernels", "attacks"}
    shipped = sorted(path.name for path in (ROOT / "configs" / "studies").glob("*.toml"))
    assert sorted(Path(n).name for n in names if "configs/studies" in n) == shipped
    assert {f"{top}/py.typed" for top in tops} <= set(names)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "import engine.studyfile as s\n"
        "assert str(s.studies_folder()).startswith(sys.path[0])\n"
        "print(*s.shipped_studies())"
    )
    listed = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert listed.stdout.split() == [Path(name).stem for name in shipped]
