"""Who may import whom: the rules of the folders, held by reading the imports."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [
    p for top in ("engine", "kernels", "attacks") for p in sorted((ROOT / top).rglob("*.py"))
]
TORCH_FREE = ("study", "studyfile", "seeds", "membership", "outliers", "plan", "store", "files")


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize(
    ("library", "allowed"),
    [
        ("ray", lambda p: p.startswith("engine/executors/ray")),
        ("ffcv", lambda p: p == "engine/data/beton.py"),
        ("triton", lambda p: p.startswith("kernels/") and "triton" in p),
        ("numba", lambda p: p.endswith("/cpu.py") or p.startswith("engine/data/")),
        ("torch", lambda p: not p.startswith("attacks/")),
        ("engine", lambda p: p.startswith("engine/")),
        ("kernels", lambda p: p.startswith(("engine/", "kernels/"))),
        ("attacks", lambda p: p.startswith(("engine/", "attacks/"))),
    ],
)
def test_each_library_stays_in_its_place(library, allowed):
    wrong = [name(p) for p in SOURCES if library in imports(p) and not allowed(name(p))]
    assert not wrong


@pytest.mark.parametrize("module", TORCH_FREE)
def test_planning_imports_no_torch(module):
    code = f"import sys, engine.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_attacks_import_with_numpy_scipy_and_sklearn_alone():
    sklearn = {"sklearn", "threadpoolctl"}  # the second is a requirement of the first
    allowed = {"numpy", "scipy", "attacks"} | sklearn | sys.stdlib_module_names
    wrong = {
        name(p): sorted(extra)
        for p in SOURCES
        if name(p).startswith("attacks/") and (extra := imports(p) - allowed)
    }
    assert not wrong


def test_the_core_imports_with_torch_triton_numpy_scipy_and_sklearn_alone():
    blocked = ["ray", "ffcv", "numba", "torchvision", "matplotlib", "pyarrow", "safetensors"]
    blocked += ["typer", "rich", "tomli_w", "PIL", "cv2"]
    code = (
        f"import sys\nsys.modules.update(dict.fromkeys({blocked}))\n"
        "import kernels, attacks, engine.train, engine.sequential, engine.signals, engine.models\n"
        "from engine.models import build\n"
        "build('lenet', norm='batch', classes=10, channels=1, size=28)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
