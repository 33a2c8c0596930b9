"""Clusters that speak TLS, with certificates made here."""

import concurrent.futures
import contextlib
import importlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from engine.executors import ray_probe

sys.path.insert(0, str(Path(__file__).parent / "faults"))
import outcome

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed"),
]

ADDRESS = "subjectAltName=IP:127.0.0.1"
TOKEN = "0123456789abcdef0123456789abcdef"
TINY = ["data.limit=240", "models=4", "train.epochs=1", "train.batch=32", "resources.stack=2"]


def certificates(folder):
    """The settings of a node whose certificate is its own authority."""
    folder.mkdir()
    made = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=head -addext {ADDRESS} "
    made += f"-keyout {folder}/key.pem -out {folder}/cert.pem"
    subprocess.run(made.split(), check=True, capture_output=True)
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": f"{folder}/cert.pem",
        "RAY_TLS_SERVER_KEY": f"{folder}/key.pem",
        "RAY_TLS_CA_CERT": f"{folder}/cert.pem",
    }


def use(monkeypatch, settings):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch, tmp_path):
    for name in ("RAY_AUTH_TOKEN_PATH", "RAY_USE_TLS"):
        monkeypatch.delenv(name, raising=False)
    use(monkeypatch, {"RAY_AUTH_TOKEN": TOKEN, "RAY_AUTH_MODE": "", "HOME": str(tmp_path)})


@contextlib.contextmanager
def answering(settings):
    """What a head answers to one who asks whether it lives: OK to those with the token."""
    grpc = importlib.import_module("grpc")  # comes with Ray

    def alive(request, context):
        if f"Bearer {TOKEN}" not in dict(context.invocation_metadata()).values():
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "")
        return b""

    methods = {"CheckAlive": grpc.unary_unary_rpc_method_handler(alive)}
    files = [Path(settings[f"RAY_TLS_{name}"]).read_bytes() for name in KINDS]
    credentials = grpc.ssl_server_credentials([files[:2]], files[2], require_client_auth=True)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("ray.rpc.NodeInfoGcsService", methods)]
        )
        port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()


KINDS = ("SERVER_KEY", "SERVER_CERT", "CA_CERT")


def test_asking_a_head_with_tls(tmp_path, monkeypatch):
    ours, others = certificates(tmp_path / "ours"), certificates(tmp_path / "others")
    with answering(ours) as gcs:
        with pytest.raises(ValueError, match=r"is no Ray head .*set RAY_USE_TLS=1"):
            ray_probe.probe(gcs, insecure=False)
        use(monkeypatch, others)
        with pytest.raises(ValueError, match=r"is no Ray head .*RAY_TLS_CA_CERT"):
            ray_probe.probe(gcs, insecure=False)
        use(monkeypatch, ours)
        ray_probe.probe(gcs, insecure=False)
        monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
        with pytest.raises(ValueError, match="refuses this token"):
            ray_probe.probe(gcs, insecure=False)


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_tls_that_cannot_be_used(tmp_path, monkeypatch, kind):
    settings, name = certificates(tmp_path / "ours"), f"RAY_TLS_{kind}"
    with answering(settings) as gcs:
        use(monkeypatch, {**settings, name: "/nowhere.pem"})
        with pytest.raises(ValueError, match=f"^{name} names '/nowhere.pem', which cannot be read"):
            ray_probe.probe(gcs, insecure=False)
        (tmp_path / "junk").write_bytes(b"\xff")
        monkeypatch.setenv(name, str(tmp_path / "junk"))
        with pytest.raises(ValueError, match=f"^{name} names .*, which is no PEM file"):
            ray_probe.probe(gcs, insecure=False)
        monkeypatch.delenv(name)
        with pytest.raises(ValueError, match=f"^RAY_USE_TLS is set, but {name} is not"):
            ray_probe.probe(gcs, insecure=False)


@contextlib.contextmanager
def head(env):
    """`ray start --head` on loopback; yields its address."""
    folder = Path(tempfile.mkdtemp(prefix="tls-", dir="/tmp"))
    (folder / "ray").mkdir()
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--port=0"]
    command += [f"--temp-dir={folder}", "--num-cpus=1"]
    command += ["--node-ip-address=127.0.0.1", "--include-dashboard=false"]
    with open(folder / "head.log", "w") as log:
        own = {**env, "RAY_TMPDIR": str(folder)}
        process = subprocess.Popen(command, env=own, stdout=log, stderr=log)
        try:
            for _ in range(600):
                if "Ray runtime started" in (folder / "head.log").read_text():
                    break
                time.sleep(0.1)
            yield (folder / "ray_current_cluster").read_text()
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_a_study_on_a_head_with_tls(tmp_path):
    ours = certificates(tmp_path / "ours")
    env = outcome.environment(
        **ours,
        OMP_NUM_THREADS="1",
        HOME=str(tmp_path),
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN=TOKEN,
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        RAY_USAGE_STATS_ENABLED="0",
    )
    with head(env) as gcs:
        sets = [part for pair in TINY for part in ("--set", pair)]
        run = [sys.executable, "-m", "engine", "run", "--study", "digits_bn_vs_nobn", *sets]
        run += ["--device", "cpu", "--out", str(tmp_path / "runs")]
        done = subprocess.run(
            [*run, "--executor", "ray", "--address", gcs],
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "12/12 models" in done.stdout
