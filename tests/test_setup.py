"""setup.sh on machines that this one is not, with stand-ins for Python and the system's tools."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOLS = (
    "bash basename cat dirname env flock grep head ls mkdir mktemp mv pwd rm sha256sum sleep tail"
)

PYTHON = """#!/bin/bash
# Notes what it is asked and makes environments that do the same.
here=${BASH_SOURCE[0]}
case "$*" in
  --version) echo "Python VERSION" ;;
  *version_info*3,\\ 11*) [[ VERSION != 3.9* ]] ;;
  "-m venv"*) mkdir -p .venv/bin && cp "$here" .venv/bin/python && echo venv >>asked ;;
  "-m pip "*) [[ ! -e break ]] && echo "${*:3}" >>asked ;;
  *Python.h*) exit 0 ;;
  *) exit 0 ;;
esac
"""


@pytest.fixture
def machine(tmp_path):
    """A machine without compiler and apt-get, and a copy of the set-up in a folder of its own."""
    tools, clone = tmp_path / "bin", tmp_path / "clone"
    tools.mkdir()
    clone.mkdir()
    for tool in (*TOOLS.split(), "cp"):
        where = shutil.which(tool)
        assert where, tool
        (tools / tool).symlink_to(where)
    for file in ("setup.sh", "pyproject.toml"):
        shutil.copy(ROOT / file, clone)
    add_python(tools, "3.12.1")
    return clone


def add_python(tools, version):
    (tools / "python3").write_text(PYTHON.replace("VERSION", version))
    (tools / "python3").chmod(0o755)


def set_up(clone, **extra):
    """Exit status, output and what Python was asked since last time."""
    done = subprocess.run(
        [str(clone.parent / "bin" / "bash"), "setup.sh"],
        cwd=clone,
        env={"PATH": str(clone.parent / "bin"), "HOME": str(clone)} | extra,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    asked = clone / "asked"
    lines = asked.read_text().splitlines() if asked.exists() else []
    asked.unlink(missing_ok=True)
    return done.returncode, done.stdout.splitlines(), lines


READY = "ready: .venv/bin/engine run --study digits_bn_vs_nobn"


def test_without_system_packages_it_says_so_and_goes_on_without_ffcv(machine):
    status, said, asked = set_up(machine)
    assert status == 0, said
    assert said[-1] == READY
    missing = [line for line in said if "not installed:" in line]
    assert len(missing) == 1
    assert "g++ pkg-config" in missing[0]
    assert any("going on without FFCV" in line for line in said)
    assert asked[0] == "venv"
    installs = [line for line in asked if line.startswith("install")]
    assert installs[0].startswith("install torch>=2.11 torchvision>=0.26")
    assert installs[1].startswith("install --editable .[study,ray,dev]")
    assert len(installs) == 2


def test_a_second_run_installs_nothing_and_tries_ffcv_again(machine):
    set_up(machine)
    status, said, asked = set_up(machine)
    assert (status, said[-1], asked) == (0, READY, [])
    assert any("going on without FFCV" in line for line in said)


@pytest.mark.parametrize("file", ["pyproject.toml", "setup.sh"])
def test_a_changed_recipe_is_followed(machine, file):
    set_up(machine)
    with open(machine / file, "a") as stream:
        stream.write("\n# changed\n")
    _, _, asked = set_up(machine)
    assert any("--editable" in line for line in asked)


def test_an_interrupted_installation_is_done_again(machine):
    (machine / "break").touch()
    status, said, _ = set_up(machine)
    assert status != 0
    assert READY not in said
    (machine / "break").unlink()
    cut_short = machine / ".venv/lib/python3.12/site-packages/torch-9.dist-info"
    sound = cut_short.with_name("numpy-9.dist-info")
    for folder in (cut_short, sound):
        folder.mkdir(parents=True)
    (sound / "RECORD").touch()
    status, said, asked = set_up(machine)
    assert (status, said[-1]) == (0, READY)
    assert any("--editable" in line for line in asked)
    assert not cut_short.exists()
    assert sound.exists()


@pytest.mark.skipif(
    not os.path.exists("/usr/include/opencv4/opencv2/imgproc.hpp"),
    reason="OpenCV's headers are not where Debian and Ubuntu have them",
)
def test_with_what_ffcv_needs_it_is_built(machine):
    for tool in ("g++", "pkg-config"):
        (machine.parent / "bin" / tool).symlink_to("/bin/true")
    status, said, asked = set_up(machine)
    assert (status, said[-1]) == (0, READY)
    assert any(line.startswith("install --no-deps --no-cache-dir ffcv==1.0.2") for line in asked)
    shim = (machine / ".venv/ffcv-shim/opencv4.pc").read_text()
    assert f"-I{machine}/.venv/ffcv-shim -I/usr/include/opencv4" in shim
    assert set_up(machine)[1:] == ([READY], [])


def test_an_old_or_absent_python_is_named(machine):
    status, said, _ = set_up(machine, PYTHON="/nowhere/python3")
    assert status == 1
    assert said == [
        "setup: PYTHON=/nowhere/python3 is no Python that can make virtual environments"
    ]
    add_python(machine.parent / "bin", "3.9.2")
    status, said, _ = set_up(machine)
    assert status == 1
    assert said == ["setup: Python 3.9.2 is too old: Python 3.11 or newer is needed (set PYTHON=…)"]
    (machine.parent / "bin" / "python3").unlink()
    status, said, _ = set_up(machine)
    assert status == 1
    assert said == [
        "setup: no apt-get here; not installed: python3 python3-venv",
        "setup: python3 and its venv module are needed: install them",
    ]
    assert not (machine / ".venv").exists()


def test_another_python_makes_the_environment_anew(machine):
    set_up(machine)
    other = machine.parent / "python3.13"
    other.write_text(PYTHON.replace("VERSION", "3.13.0"))
    other.chmod(0o755)
    _, _, asked = set_up(machine, PYTHON=str(other))
    assert asked[0] == "venv"
    assert any("--editable" in line for line in asked)
