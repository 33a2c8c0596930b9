"""Bad input for clusters: one sentence each, before anything is started."""

import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from engine.executors import ray_probe
from engine.executors.ray import opened
from engine.executors.ray_cluster import Where, connected
from engine.studyfile import load_study

sys.path.insert(0, str(Path(__file__).parent / "faults"))
import outcome

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch, tmp_path):
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def silent_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("auto", "no Ray cluster runs on this machine"),
        ("ray://head:10001", "expected local, auto or HOST:PORT"),
        ("somewhere", "expected local, auto or HOST:PORT"),
        ("no-such-host.invalid:6379", "no Ray head answers at no-such-host.invalid:6379"),
    ],
)
def test_wrong_addresses(address, words):
    with pytest.raises(ValueError, match=words), connected(Where(address=address)):
        pass


def test_nobody_listens(silent_port):
    where = Where(address=f"127.0.0.1:{silent_port}")
    with pytest.raises(ValueError, match=r"no Ray head answers.*firewall"), connected(where):
        pass


def test_something_else_listens(silent_port, monkeypatch):
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    with server:
        where = Where(address=f"127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(ray_probe, "PROBE_SECONDS", 1.0)
        with pytest.raises(ValueError, match="is no Ray head"), connected(where):
            pass


def test_a_token_file_that_is_not_there(monkeypatch, silent_port):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/nowhere/token")
    with pytest.raises(ValueError, match="/nowhere/token"):
        ray_probe.our_token()


def test_a_relative_out_inside_a_job(monkeypatch):
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    study = load_study("digits_bn_vs_nobn")
    with (
        pytest.raises(ValueError, match="absolute path"),
        opened(study, Where(), device="cpu", out=Path("runs")),
    ):
        pass


def test_auto_looks_where_ray_does(monkeypatch, tmp_path):
    """Ray writes the address of its head below RAY_TMPDIR, or else TMPDIR."""
    for number, name in enumerate(("TMPDIR", "RAY_TMPDIR")):
        folder = tmp_path / name
        (folder / "ray").mkdir(parents=True)
        (folder / "ray" / "ray_current_cluster").write_text(f"10.0.0.{number}:6379\n")
        monkeypatch.setenv(name, str(folder))
    assert ray_probe.gcs_address("auto") == "10.0.0.1:6379"
    monkeypatch.delenv("RAY_TMPDIR")
    assert ray_probe.gcs_address("auto") == "10.0.0.0:6379"


def test_who_named_a_wrong_address(monkeypatch, tmp_path):
    (tmp_path / "ray").mkdir()
    current = tmp_path / "ray" / "ray_current_cluster"
    current.write_text("10.0.0.1:6379")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert ray_probe.gcs_address("auto") == "10.0.0.1:6379"
    current.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=f"in '{current}' is '.*': expected HOST:PORT"):
        ray_probe.gcs_address("auto")
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(ValueError, match=r"^RAY_ADDRESS is 'ray://head:10001': expected auto or"):
        ray_probe.gcs_address("auto")


@pytest.mark.parametrize("token", ["äbcdef", "abc\ndef", "abc def", "abc\x00", "\udcff"])
def test_tokens_that_are_none(monkeypatch, tmp_path, token):
    """The sentence names where the token is from, and never the token."""
    if "\x00" not in token:
        monkeypatch.setenv("RAY_AUTH_TOKEN", token)
        with pytest.raises(ValueError, match=r"^RAY_AUTH_TOKEN holds") as caught:
            ray_probe.our_token()
        assert token[:3] not in str(caught.value)
        monkeypatch.delenv("RAY_AUTH_TOKEN")
    home = tmp_path / ".ray" / "auth_token"
    home.parent.mkdir()
    home.write_bytes(token.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=f"^the token file '{home}' holds no token"):
        ray_probe.our_token()
    named = tmp_path / "named"
    named.write_bytes(home.read_bytes())
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(named))
    with pytest.raises(ValueError, match=f"^the token file '{named}' holds"):
        ray_probe.our_token()
    named.write_bytes(b" abc-def=\n")
    assert ray_probe.our_token() == "abc-def="


def test_a_file_of_ones_own_called_ray(tmp_path):
    (tmp_path / "ray.py").write_text("")
    body = "from engine.executors.ray_cluster import *; connected(Where()).__enter__()"
    done = subprocess.run(
        [sys.executable, "-c", body],
        cwd=tmp_path,
        env=outcome.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"RuntimeError: '{tmp_path / 'ray.py'}'" in done.stderr
    assert "rename" in done.stderr
