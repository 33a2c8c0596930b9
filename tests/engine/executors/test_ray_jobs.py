"""A head started by hand, attached to and given jobs: `pytest -m slow`, minutes."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "faults"))
import outcome

from engine.executors.ray_travel import PACKAGES

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
pytestmark = [pytest.mark.slow, needs_ray]

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
STUDY = "digits_bn_vs_nobn"
DIGITS = ["data.limit=240", "models=4", "train.epochs=3", "train.batch=32", "resources.stack=2"]


def free_port():
    """It and the next one, outside the range in which Ray's workers listen."""
    for port in range(6400, 9900, 2):
        with (
            contextlib.suppress(OSError),
            socket.socket() as server,
            socket.socket() as second,
        ):
            server.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port + 0
    raise AssertionError("no free port")


@contextlib.contextmanager
def head(cpus=2, **settings):
    """`ray start --head` on loopback; yields (environment, GCS address, dashboard's address)."""
    folder = tempfile.mkdtemp(prefix="head-", dir="/tmp")
    gcs = free_port()
    board = gcs + 1
    env = outcome.environment(
        RAY_TMPDIR=folder,
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        RAY_USAGE_STATS_ENABLED="0",
        HOME=folder,
        PATH=f"{BIN}:{os.environ['PATH']}",
        **settings,
    )
    (Path(folder) / "ray").mkdir()
    command = [str(BIN / "ray"), "start", "--head", "--block", f"--num-cpus={cpus}"]
    command += ["--node-ip-address=127.0.0.1", f"--port={gcs}", "--dashboard-host=127.0.0.1"]
    command += [f"--dashboard-port={board}", f"--temp-dir={folder}", "--disable-usage-stats"]
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        token = settings.get("RAY_AUTH_TOKEN", "")
        ask = urllib.request.Request(
            f"http://127.0.0.1:{board}/api/version", headers={"Authorization": f"Bearer {token}"}
        )
        for _ in range(120):
            with contextlib.suppress(OSError), urllib.request.urlopen(ask, timeout=5):
                break
            time.sleep(1)
        yield env, f"127.0.0.1:{gcs}", f"http://127.0.0.1:{board}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def engine(study, out, sets, *more):
    pairs = [part for pair in sets for part in ("--set", pair)]
    command = ["-m", "engine", "run", "--study", study, "--out", str(out), "--device", "cpu"]
    return [sys.executable, *command, *pairs, *more]


def call(command, env, limit=900.0):
    return subprocess.run(
        command, capture_output=True, text=True, timeout=limit, check=False, env=env, cwd=ROOT
    )


def exported(out):
    (folder,) = Path(out).iterdir()
    file = folder.parent.parent / f"{folder.parent.name}.npz"
    file.unlink(missing_ok=True)  # `engine export` overwrites nothing
    done = call(
        [sys.executable, "-m", "engine", "export", str(folder), "--out", str(file)], None, 120
    )
    assert done.returncode == 0, done.stderr
    return file.read_bytes()


def submit(board, env, *command):
    runtime = "configs/ray/runtime_env.yaml"
    start = [str(BIN / "ray"), "job", "submit", "--address", board, "--working-dir", "."]
    for _ in range(30):  # the head takes jobs a while after it answers
        done = call([*start, "--runtime-env", runtime, "--", *command], env)
        if "No available agent to submit job" not in done.stdout + done.stderr:
            break
        time.sleep(1)
    return done


def fashion(real_data):
    return [
        "data.name=npz",
        f"data.path={real_data('fashion_mnist')}",
        *("data.limit=400", "models=4", "train.epochs=1", "train.batch=32"),
        *("query.population=100", "resources.stack=2"),
    ]


def secret():
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}


def locally(tmp_path, sets, *more):
    done = call(engine(STUDY, tmp_path / "-".join(["local", *more]), sets, *more), None)
    assert done.returncode == 0, done.stderr
    return exported(tmp_path / "-".join(["local", *more]))


def test_a_job_gives_the_bytes_of_the_local_executor(tmp_path):
    expected = locally(tmp_path, DIGITS)
    with head(**secret()) as (env, gcs, board):
        _, *command = engine(STUDY, tmp_path / "job", DIGITS, "--executor", "ray")
        done = submit(board, env, "python", *command)
        assert done.returncode == 0, done.stdout + done.stderr
        assert exported(tmp_path / "job") == expected
        refused_jobs_and_callers(board, gcs, env, command, tmp_path, expected)


def test_a_job_and_a_local_ray_give_its_bytes_on_fashion_mnist(tmp_path, real_data):
    sets = fashion(real_data)
    expected = locally(tmp_path, sets)
    assert locally(tmp_path, sets, "--executor", "ray") == expected
    with head(**secret()) as (env, _, board):
        _, *command = engine(STUDY, tmp_path / "job", sets, "--executor", "ray")
        done = submit(board, env, "python", *command)
        assert done.returncode == 0, done.stdout + done.stderr
        assert exported(tmp_path / "job") == expected


def refused_jobs_and_callers(board, gcs, env, command, tmp_path, expected):
    """Bad input against a running head: one sentence each, within seconds."""
    relative = [("runs" if part == str(tmp_path / "job") else part) for part in command]
    done = submit(board, env, "python", *relative)
    assert done.returncode == 1
    assert "give an absolute path on the head" in done.stdout
    attach = engine(STUDY, tmp_path / "x", DIGITS, "--executor", "ray")
    attach += ["--address", gcs]
    for token, words in (("", "without a token"), ("0" * 32, "refuses this token")):
        done = call(attach, {**env, "RAY_AUTH_TOKEN": token}, 120)
        assert done.returncode == 1
        assert words in done.stderr.splitlines()[-1]
        assert env["RAY_AUTH_TOKEN"] not in done.stdout + done.stderr
    done = call([*attach, "--device", "cuda"], env, 120)
    assert "Ray finds no GPU" in done.stderr.splitlines()[-1]
    done = call(attach, env)
    assert done.returncode == 0, done.stderr
    assert exported(tmp_path / "x") == expected
    texts = [p.read_text() for p in (tmp_path / "x").rglob("*.json")]
    assert not any(env["RAY_AUTH_TOKEN"] in text for text in texts)


@pytest.mark.parametrize("where", ["installed", "folder"])
def test_a_cluster_with_other_sources_is_refused_in_one_sentence(tmp_path, where):
    other, nowhere = tmp_path / "other", tmp_path / "nowhere"
    nowhere.mkdir()
    for name in PACKAGES:
        shutil.copytree(ROOT / name, other / name)
    with open(other / "kernels" / "sgd" / "cpu.py", "a") as file:
        file.write("# another version\n")
    nodes = {"PYTHONPATH": str(other if where == "installed" else ROOT)}
    with head(1, **secret(), **nodes) as (env, gcs, _):
        attach = engine(STUDY, tmp_path / "x", DIGITS, "--executor", "ray", "--address", gcs)
        words = [str(BIN / "engine"), *attach[3:]]
        caller = {name: value for name, value in env.items() if name != "PYTHONPATH"}
        cwd = nowhere if where == "installed" else other
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=120, check=False, env=caller, cwd=cwd
        )
    assert done.returncode == 1, done.stdout
    said = done.stderr.splitlines()[-1]
    assert f"import engine, kernels and attacks from {other}, which are not those of" in said
    assert "install the driver's release on every node" in said
    assert not (tmp_path / "x").exists()


def test_an_upload_over_the_limit_is_refused_with_the_words_of_our_page(tmp_path):
    (tmp_path / "data.bin").write_bytes(os.urandom(101 * 2**20))
    with head(**secret()) as (env, _, board):
        start = [str(BIN / "ray"), "job", "submit", "--address", board]
        done = call([*start, "--working-dir", str(tmp_path), "--", "true"], env, 240)
    assert done.returncode == 1
    words = "Maximum request body size 104857600 exceeded"
    assert words in done.stdout + done.stderr
    assert words in (ROOT / "docs" / "ray.md").read_text()  # Ray does not say what to do


def test_an_open_cluster_is_refused_unless_asked_for(tmp_path):
    with head(RAY_AUTH_MODE="disabled") as (env, gcs, _):
        attach = engine(STUDY, tmp_path / "x", DIGITS, "--executor", "ray")
        attach += ["--address", gcs]
        done = call(attach, env, 120)
        assert done.returncode == 1
        assert "--insecure-cluster" in done.stderr.splitlines()[-1]
        done = call([*attach, "--insecure-cluster"], env)
        assert done.returncode == 0, done.stderr


def test_the_upload_is_small(tmp_path):
    from ray._private.runtime_env.packaging import create_package

    file = tmp_path / "upload.zip"
    create_package(str(ROOT), file, include_gitignore=True)
    assert file.stat().st_size < 2**21
