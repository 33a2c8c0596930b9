"""A Ray that we start: who can enter its folder, what it prints, how it ends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from engine.executors import ray_cluster

sys.path.insert(0, str(Path(__file__).parent / "faults"))
import outcome

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")

OPEN = """
import json, os, signal, sys, time
from pathlib import Path
from engine.executors.ray_cluster import Where, connected
"""


def driver(body, *, shell="", env=None, **how):
    """Start Python with `body`, by way of a shell where descriptors are to be closed."""
    command = [sys.executable, "-c", OPEN + body]
    if shell:
        command = ["sh", "-c", f'exec "$@" {shell}', "sh", *command]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=outcome.environment(OMP_NUM_THREADS="1", **(env or {})),
        **how,
    )


def outcome_of(process, limit=90):
    out, err = process.communicate(timeout=limit)
    return process.returncode, out, err


@pytest.fixture
def temp():
    """A folder for temporary files with a short name."""
    with tempfile.TemporaryDirectory(prefix="s-", dir="/tmp") as name:
        yield name


def test_others_cannot_enter_the_folder_and_the_users_settings_do_not_matter(temp):
    """Ray opens the folder it is given to everybody; TLS is not for a Ray of our own."""
    body = """
with connected(Where(cpus=1)) as ray:
    folder = ray._private.worker.global_worker.node.get_temp_dir_path()
    print(json.dumps([folder, ray.get(ray.remote(lambda: 7).remote())]))
    print(json.dumps([oct(p.stat().st_mode & 0o777) for p in Path(os.environ["TMPDIR"]).iterdir()]))
"""
    code, out, err = outcome_of(driver(body, env={"TMPDIR": temp, "RAY_USE_TLS": "1"}))
    assert code == 0, err
    (folder, seven), modes = map(json.loads, out.splitlines())
    assert (folder.startswith(temp), seven) == (True, 7)
    assert modes == ["0o700"]
    assert os.listdir(temp) == []


def test_what_the_driver_starts_itself_outlives_ray():
    body = """
import subprocess
with connected(Where(cpus=1)):
    sleep = subprocess.Popen(["sleep", "60"])
print(sleep.poll())
sleep.kill()
"""
    code, out, err = outcome_of(driver(body))
    assert (code, out) == (0, "None\n"), err


def test_stdout_is_clean_after_faults():
    body = """
from drive import family, title
with connected(Where(cpus=1)) as ray:
    print("begun")
    with_retries = ray.remote(lambda: time.sleep(60)).options(max_retries=0)
    with_retries.remote()
    time.sleep(2)
    for pid in family(os.getpid()):
        if title(pid).startswith("ray::"):
            os.kill(pid, signal.SIGKILL)
    time.sleep(3)
    for pid in family(os.getpid()):
        if "/raylet/raylet" in title(pid):
            os.kill(pid, signal.SIGKILL)
    time.sleep(3)
    print("ended")
"""
    path = f"{outcome.HERE}:{os.getcwd()}"
    code, out, err = outcome_of(driver(body, env={"PYTHONPATH": path}))
    assert (code, out) == (0, "begun\nended\n"), err
    assert "(raylet)" in err
    assert "\x1b" not in err


def test_sigterm_while_ray_starts(temp):
    body = "with connected(Where(cpus=1)): print('connected')"
    process = driver(body, env={"TMPDIR": temp})
    for _ in range(200):
        if list(Path(temp).glob("engine-*/**/gcs_server*")):
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    code, out, err = outcome_of(process)
    assert (code, out) == (143, "")
    assert "stopping" in err
    assert "Traceback" not in err
    assert os.listdir(temp) == []


SLOW = [pytest.param(shell, marks=pytest.mark.slow) for shell in (">&-", "2>&-", "<&-")]


@pytest.mark.parametrize("shell", ["<&- >&- 2>&-", *SLOW])
def test_closed_descriptors(temp, shell):
    body = """
with connected(Where(cpus=1)) as ray:
    Path("FOLDER/found").write_text(str(ray.get(ray.remote(lambda: 7).remote())))
"""
    code, _, err = outcome_of(driver(body.replace("FOLDER", temp), shell=shell))
    assert (code, err) == (0, "")
    assert (Path(temp) / "found").read_text() == "7"


@pytest.mark.parametrize("name", ["ä", "ü" * 9, "long" * 9])
def test_a_folder_that_sockets_cannot_lie_in(temp, name, monkeypatch):
    base = Path(temp) / name
    base.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    with ray_cluster._session_folder() as folder:
        assert Path(folder).is_relative_to("/tmp/")
        assert not Path(folder).is_relative_to(base)
        assert len(os.fsencode(folder)) <= 40
    assert not Path(folder).exists()


@pytest.mark.slow
def test_ray_starts_with_such_a_folder(temp):
    base = Path(temp) / "ä b"
    base.mkdir()
    body = "with connected(Where(cpus=1)) as ray: print(ray.get(ray.remote(lambda: 7).remote()))"
    code, out, err = outcome_of(driver(body, env={"TMPDIR": str(base)}))
    assert (code, out) == (0, "7\n"), err


def test_only_what_our_ray_started_is_ended(temp, monkeypatch):
    """Somebody may read a log of the session while it ends."""
    monkeypatch.setattr(tempfile, "tempdir", temp)
    with contextlib.ExitStack() as undo:
        with ray_cluster._session_folder() as folder:
            log = Path(folder) / "raylet.out"
            log.touch()
            reader = undo.enter_context(subprocess.Popen(["tail", "-f", str(log)]))
            undo.callback(reader.kill)
            marked = {**os.environ, ray_cluster.MARKER: os.path.dirname(folder)}
            ours = undo.enter_context(subprocess.Popen(["sleep", "60"], env=marked))
            undo.callback(ours.kill)
        assert ours.wait(5) == -signal.SIGKILL
        assert reader.poll() is None
    assert os.listdir(temp) == []
