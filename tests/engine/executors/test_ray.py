"""Ray on one machine: the same bytes, faults survived, nothing exposed, nothing left behind."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "faults"))
import outcome

from engine.executors import ray_travel

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")

TINY = ["data.limit=240", "models=4", "train.epochs=3", "train.batch=32", "resources.stack=2"]
STUDY = "digits_bn_vs_nobn"


def engine(out, *more):
    sets = [part for pair in TINY for part in ("--set", pair)]
    run = [sys.executable, "-m", "engine", "run", "--study", STUDY, "--out", str(out)]
    return [*run, *sets, "--device", "cpu", *more]


def exported(out):
    (folder,) = Path(out).iterdir()
    file = folder.parent.parent / f"{folder.parent.name}.npz"
    subprocess.run(
        [sys.executable, "-m", "engine", "export", str(folder), "--out", str(file)], check=True
    )
    return file.read_bytes()


@pytest.fixture
def home():
    """A home and a temp folder of their own, both with short names; both must stay empty."""
    with tempfile.TemporaryDirectory(prefix="h-", dir="/tmp") as name:
        folders = {"HOME": Path(name) / "home", "TMPDIR": Path(name) / "tmp"}
        for folder in folders.values():
            folder.mkdir()
        yield {key: str(folder) for key, folder in folders.items()}


def belongings(home):
    """What lies in home and temp, the engine's and compilers' caches apart, and who runs there."""
    found = [str(p) for f in home.values() for p in Path(f).iterdir() if p.name != ".cache"]
    found = [name for name in found if "torchinductor" not in name]
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                if home["TMPDIR"].encode() in (path / "environ").read_bytes():
                    found.append((path / "cmdline").read_bytes().decode())
            except OSError:
                continue
    return found


@pytest.fixture(scope="module")
def other_checkout(tmp_path_factory):
    """A folder with a copy of the sources that draws other random numbers."""
    folder = tmp_path_factory.mktemp("other")
    for name in ray_travel.PACKAGES:
        found = Path(find_spec(name).origin).parent
        shutil.copytree(found, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    seeds = folder / "engine" / "seeds.py"
    seeds.write_text(seeds.read_text().replace("{counter}|{name}", "{counter}|{name}|other"))
    return folder


def script(command, folder, env):
    """The console script, which imports nothing from the folder it is called in."""
    words = [str(Path(sys.executable).parent / "engine"), *command[3:]]
    env = {name: value for name, value in env.items() if name != "PYTHONPATH"}
    return subprocess.run(
        words, capture_output=True, text=True, timeout=300, check=False, env=env, cwd=folder
    )


def test_one_command_gives_the_bytes_of_the_local_executor_and_leaves_nothing(
    tmp_path, home, other_checkout
):
    ours = outcome.environment(**home, MPLCONFIGDIR=str(tmp_path / "matplotlib"))
    local = script(engine(tmp_path / "local"), other_checkout, ours)
    assert local.returncode == 0, local.stderr
    ray = engine(tmp_path / "ray", "--executor", "ray")
    done = script(ray, other_checkout, ours)
    assert done.returncode == 0, done.stdout + done.stderr
    assert exported(tmp_path / "ray") == exported(tmp_path / "local")
    assert "(raylet)" not in done.stdout
    assert "12/12 models" in done.stdout
    (folder,) = (tmp_path / "ray").iterdir()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["executor"], manifest["hardware"]["nodes"]) == ("ray", 1)
    assert belongings(home) == []


def start(folder, home):
    return subprocess.Popen(
        outcome.command("long", folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=outcome.environment(**home),
    )


def until(process, word):
    for line in process.stdout:
        if line.startswith(word):
            return line
    raise AssertionError(process.stderr.read())


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_driver_keeps_what_is_finished_and_leaves_nothing(tmp_path, home, number, code):
    process = start(tmp_path, home)
    listening = json.loads(until(process, "listening").removeprefix("listening "))
    assert len(listening) > 5
    v4, v6 = "0100007F", "0000000000000000FFFF00000100007F"
    assert {address.split(":")[0] for address in listening} <= {v4, v6}
    until(process, "stored 1")
    process.send_signal(number)
    begun = time.monotonic()
    process.communicate(timeout=60)
    assert process.returncode == code
    assert time.monotonic() - begun < 20
    kept = len(outcome.open_run(tmp_path / "run").scan().rows)
    assert 2 <= kept < 24
    for _ in range(60):
        if not (rest := belongings(home)):
            break
        time.sleep(0.5)
    assert rest == []
    assert not list((tmp_path / "run").rglob("*.part"))


def process_of(name, home):
    """The process id of one of Ray's services."""
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes() if path.name.isdigit() else b""
            if words.split(b"\0")[0].endswith(name) and home["TMPDIR"].encode() in words:
                return int(path.name)
    raise AssertionError(f"no {name} runs")


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("service", "signals"),
    [
        (b"gcs_server", [signal.SIGINT]),
        pytest.param(b"gcs_server", [signal.SIGTERM] * 2, marks=pytest.mark.slow),
        pytest.param(b"raylet", [signal.SIGTERM], marks=pytest.mark.slow),
    ],
)
def test_a_driver_whose_ray_is_frozen_can_be_stopped(tmp_path, home, service, signals):
    long = ["--set", "train.epochs=60", "--set", "models=24", "--executor", "ray"]
    with open(tmp_path / "said", "w+") as said:
        driver = subprocess.Popen(
            engine(tmp_path / "out", *long),
            stderr=said,
            stdout=said,
            env=outcome.environment(**home),
        )
        try:
            wait_for(lambda: list((tmp_path / "out").rglob("*.safetensors")), 90)
            os.kill(process_of(service, home), signal.SIGSTOP)
            time.sleep(3)  # until the driver has asked it something
            begun = time.monotonic()
            for number in signals:
                driver.send_signal(number)
                time.sleep(0.5)
            assert driver.wait(20) == 128 + signals[-1]
            assert time.monotonic() - begun < (2 if len(signals) > 1 else 14)
        finally:
            driver.kill()
    wait_for(lambda: not belongings(home), 30)
    assert list((tmp_path / "out").rglob("*.safetensors"))


@pytest.mark.slow
def test_a_study_that_fails_leaves_nothing(tmp_path, home):
    done = subprocess.run(
        outcome.command("refusing_nodes", tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=outcome.environment(**home),
    )
    assert "no node can go on with this run" in json.loads(done.stdout)["failure"]
    assert belongings(home) == []


def test_a_killed_worker_costs_one_shard(tmp_path):
    facts = outcome.act("kill_worker", tmp_path / "killed")
    assert facts["failure"] is None
    assert facts["trainings"] - facts["stacks"] <= 1
    assert facts["models_done"] == 24
    assert outcome.left(tmp_path / "killed") == outcome.pretended(tmp_path / "plain")
