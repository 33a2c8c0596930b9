"""What the Triton kernels compile to and what they move, without a GPU: two tables.

    python bench/kernels.py compiled [OP …] [--triton 3.6.0]   registers, occupancy, widths
    python bench/kernels.py moved                              bytes over the floor

Both write under bench/results/ with the versions they were made with. They run the scripts of
tests/kernels/triton/, which hold the same figures to their limits (pytest -m aot, -m interpret).
"""

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "tests" / "kernels" / "triton"
RESULTS = Path(__file__).parent / "results"


def run(script: str, arguments: list[str], variables: dict[str, str]) -> list[dict[str, object]]:
    """The JSON rows that a script prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script), *arguments],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def installed(version: str, folder: str) -> str:
    """A folder with another version of triton, for PYTHONPATH."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder]
    subprocess.run([*command, f"triton=={version}"], check=True)
    return folder


def write(name: str, rows: list[dict[str, object]]) -> None:
    """One CSV, the fields of the first row first, and the machine and Python in every row."""
    machine = {"machine": platform.machine(), "python": platform.python_version()}
    with (RESULTS / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *machine], lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | machine for row in rows)
    print(f"{len(rows)} rows in {RESULTS / name}")


def compiled(version: str | None, targets: str, ops: list[str]) -> None:
    """Every kernel on every target; named ops replace their earlier rows."""
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        variables = {"TRITON_CACHE_DIR": f"{folder}/cache"}
        if version:
            variables["PYTHONPATH"] = installed(version, f"{folder}/triton")
        for target in targets.split(","):
            found = run("aot.py", [*ops, "--targets", target], variables)
            rows += [{k: v for k, v in row.items() if k != "wide"} for row in found]
    name = f"kernels_compiled_triton_{rows[0]['triton']}.csv"
    path = RESULTS / name
    if ops and path.exists():
        with path.open() as file:
            kept = [row for row in csv.DictReader(file) if row["op"] not in ops]
        rows = [{k: v for k, v in row.items() if k in rows[0]} for row in kept] + rows
    write(name, rows)


def moved() -> None:
    rows = run("moved.py", [], {"TRITON_INTERPRET": "1", "KERNEL_TIER": "interpret"})
    write("kernels_moved.csv", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=["compiled", "moved"])
    parser.add_argument("ops", nargs="*", help="only these ops (compiled)")
    parser.add_argument("--triton", help="another version of triton, installed for the run")
    parser.add_argument("--targets", default="sm_80,sm_90,sm_100,gfx942")
    chosen = parser.parse_args()
    if chosen.table == "compiled":
        compiled(chosen.triton, chosen.targets, chosen.ops)
    else:
        moved()


if __name__ == "__main__":
    main()
