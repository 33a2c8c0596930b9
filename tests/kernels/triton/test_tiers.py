"""The two tiers that prove the Triton kernels without a GPU, each set up in its own processes.

    pytest -m interpret tests     numerics, memory, races, bytes: the interpreter under a tracer
    pytest -m aot tests           registers, spills, access widths: compiled for real targets

The first has a short version that always runs.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CHECKS = sorted(path.name for path in (HERE / "checks").glob("check_*.py"))
OLDEST = "3.6.0"
QUICK = (
    "check_harness.py",
    "check_batch_norm.py::test_outputs_and_gradients_equal_float64_autograd[hinge penalty]",
    "check_batch_norm.py::test_bytes_moved_are_exactly_those_of_the_formula",
)


def run(command, *, tier, triton=None, cache=None):
    """Run a command in its own process with the tier's environment; its output, if it passes."""
    environment = os.environ | {"KERNEL_TIER": tier, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(str(p) for p in (triton, ROOT) if p)
    if tier == "interpret":
        environment["TRITON_INTERPRET"] = "1"
    if cache:
        environment["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


def check(*names, triton=None):
    paths = [str(HERE / "checks" / name) for name in names]
    command = [
        "-m",
        "pytest",
        "-q",
        "-x",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-W",
        "error",
        *paths,
    ]
    run(command, tier="interpret", triton=triton)


@pytest.fixture(scope="session")
def oldest_triton():
    """A folder with the oldest triton that we support, fetched once beside the installed one."""
    folder = Path(tempfile.gettempdir()) / f"shadow-triton-{OLDEST}"
    if (folder / "triton").exists():
        return folder
    wheel = f"triton=={OLDEST}"
    with tempfile.TemporaryDirectory(dir=folder.parent) as fresh:
        target = Path(fresh) / "whole"
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
        done = subprocess.run([*command, str(target), wheel], capture_output=True, text=True)
        if done.returncode:
            pytest.fail(
                f"this half of the tier needs {wheel}, which pip could not fetch: go online, or "
                f"unpack it into {folder} (pip install --no-deps --target): "
                f"{done.stderr.strip().splitlines()[-1]}",
                pytrace=False,
            )
        target.replace(folder)
    return folder


def test_a_few_checks_run_under_the_interpreter():
    check(*QUICK)


@pytest.mark.interpret
@pytest.mark.parametrize("name", CHECKS)
def test_kernels_under_the_interpreter(name):
    check(name)


@pytest.mark.interpret
def test_kernels_under_the_oldest_interpreter(oldest_triton):
    check(*QUICK, triton=oldest_triton)


OPS = {"batch_norm", "group_norm", "cross_entropy", "sgd", "grad_norm", "augment"}
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


@pytest.mark.aot
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("version", ["installed", OLDEST])
def test_kernels_compile_without_spills(target, version, request, tmp_path):
    triton = None if version == "installed" else request.getfixturevalue("oldest_triton")
    command = [str(HERE / "aot.py"), "--targets", target, "--hold"]
    lines = run(command, tier="aot", triton=triton, cache=tmp_path).splitlines()
    rows = [json.loads(line) for line in lines]
    assert {row["op"] for row in rows} == OPS
    assert version == "installed" or {row["triton"] for row in rows} == {OLDEST}
