"""Starting a Ray cluster of our own, or attaching to one: addresses, tokens, noise, leftovers.

Clusters that we start listen on loopback only, want a fresh token that is kept in memory, and
leave nothing behind however the driver ends. Ray reads its settings when it is first imported,
so they are set before.
"""

import contextlib
import importlib
import importlib.util
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from engine.executors.ray_probe import gcs_address, probe

OWN_CLUSTER = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # every listener on loopback
    "RAY_AUTH_MODE": "token",
    "RAY_USE_TLS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

LONGEST_BASE = 22
"""The names of Ray's sockets add 85 bytes to it, and may have 107."""

REAPER = """
import os, shutil, signal, sys, time
sys.stdin.read()
folder, driver = sys.argv[1], int(sys.argv[2])
mine, marker = (os.getpid(), driver), os.fsencode(sys.argv[3])
def ours(pid):
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            if marker in environ.read().split(bytes(1)):
                return True
        with open(f"/proc/{pid}/cmdline", "rb") as title:
            if not title.read().startswith(b"ray::"):
                return False
        links = os.scandir(f"/proc/{pid}/fd")
        return any(os.readlink(link.path).startswith(folder + "/") for link in links)
    except OSError:
        return False
for _ in range(20):
    others = [int(p) for p in os.listdir("/proc") if p.isdigit() and int(p) not in mine]
    left = [pid for pid in others if ours(pid)]
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    shutil.rmtree(folder, ignore_errors=True)
    if not left and not os.path.exists(folder):
        break
    time.sleep(0.25)
"""
"""Waits for the driver's end, however it ends; ends what our Ray started, removes the folder.

What it started has our marker in its environment, unless Ray wrote a title like `ray::…` over it:
then open files in the folder tell. Others may have files open there too.
"""

MARKER = "SHADOW_RAY_SESSION"


@dataclass(frozen=True, kw_only=True)
class Where:
    """Which cluster to use.

    address: "local", "auto" or HOST:PORT; empty means the cluster whose job this process is, else
    "local". insecure: accept a cluster without token authentication. cpus, gpus: of a local
    cluster; by default what the machine has.
    """

    address: str = ""
    insecure: bool = False
    cpus: int | None = None
    gpus: int | None = None
    object_store_bytes: int | None = None


def in_job() -> bool:
    """Whether this process is the driver of a submitted Ray job."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


@contextlib.contextmanager
def connected(where: Where) -> Iterator[Any]:
    """The `ray` module, connected; everything is undone at the end.

    Raises:
        ValueError: the address, token or version is wrong; the sentence says what to do.
        RuntimeError: Ray is not installed or did not start.
    """
    _require()
    address = where.address or ("auto" if in_job() else "local")
    with contextlib.ExitStack() as undo:
        undo.enter_context(_sigterm_as_143())
        undo.enter_context(_standard_streams())
        undo.enter_context(_clean_stdout())
        if address == "local":
            ray = _start(where, undo)
        else:
            ray = _attach(address, undo, insecure=where.insecure)
        undo.callback(ray.shutdown)
        yield ray


def _require() -> None:
    spec = importlib.util.find_spec("ray")
    if spec is None or spec.origin is None:  # a mere folder of that name has no origin
        raise RuntimeError(
            "Ray is not installed: pip install 'shadow-engine[ray]', or leave out --executor ray"
        )
    if not list(Path(spec.origin).parent.glob("_raylet*")):
        raise RuntimeError(
            f"'{spec.origin}' is imported instead of Ray: rename it, or start in another folder"
        )


def _start(where: Where, undo: contextlib.ExitStack) -> Any:
    folder = undo.enter_context(_session_folder())
    token = secrets.token_hex(32)
    undo.enter_context(_environment({**OWN_CLUSTER, "RAY_AUTH_TOKEN": token}))
    import ray

    undo.enter_context(_tamed())
    _forget_settings()
    try:
        with _environment({MARKER: os.path.dirname(folder)}):  # not in what we start ourselves
            ray.init(
                address="local",
                num_cpus=where.cpus,
                num_gpus=where.gpus,
                object_store_memory=where.object_store_bytes,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                _temp_dir=folder,
                _node_ip_address="127.0.0.1",
            )
    except Exception as error:
        ray.shutdown()
        raise RuntimeError(f"Ray did not start: {_first_line(error)}") from None
    return ray


def _attach(address: str, undo: contextlib.ExitStack, *, insecure: bool) -> Any:
    gcs = gcs_address(address)
    probe(gcs, insecure=insecure)
    import ray

    undo.enter_context(_tamed())
    _forget_settings()
    try:
        ray.init(address=gcs, log_to_driver=False, configure_logging=False)
    except Exception as error:
        ray.shutdown()
        text = " ".join(str(error).split())
        if "ersion mismatch" in text:
            raise ValueError(
                f"the cluster at {gcs} runs other versions: install the cluster's Ray and Python "
                f"here, or ours there ({text[:300]})"
            ) from None
        raise ValueError(f"could not attach to the cluster at {gcs}: {text[:300]}") from None
    return ray


def _forget_settings() -> None:
    """Make Ray read its environment again, should it have been imported earlier."""
    private: Any = importlib.import_module("ray._raylet")
    private.Config.initialize("")
    private.AuthenticationTokenLoader.instance().reset_cache()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0][:300]


@contextlib.contextmanager
def _session_folder() -> Iterator[str]:
    """A folder with a short name that others cannot enter, removed even if this process is killed.

    It lies in a private one, because Ray lets everybody into the folder that it is given.
    """
    base = tempfile.gettempdir()
    if len(base) > LONGEST_BASE or not base.isascii():  # Ray writes such names as ASCII
        base = "/tmp"
    private = tempfile.mkdtemp(prefix="engine-", dir=base)
    marker = f"{MARKER}={private}"
    command = [sys.executable, "-I", "-S", "-c", REAPER, private, str(os.getpid()), marker]
    reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        folder = os.path.join(private, "r")
        os.mkdir(folder)
        yield folder
    finally:
        assert reaper.stdin is not None
        reaper.stdin.close()
        reaper.wait(timeout=30)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _sigterm_as_143() -> Iterator[None]:
    """From the start of Ray on, SIGTERM ends us in order; a second one at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        print("stopping: what is stored is kept (again to stop at once)", file=sys.stderr)
        raise SystemExit(128 + number)

    if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def _tamed() -> Iterator[None]:
    """Ray leaves the handler of SIGTERM and stdout alone.

    `ray.init` would exit with code 15. A thread of Ray's prints what happens to workers and nodes
    to `sys.stdout`, with colours, whatever `log_to_driver` says: that goes to stderr.
    """
    worker: Any = importlib.import_module("ray._private.worker")
    utils: Any = importlib.import_module("ray._private.utils")
    printer, set_handler = worker.print_worker_logs, utils.set_sigterm_handler

    def to_stderr(data: Any, print_file: Any, ignore_prefix: bool = False) -> None:
        printer(data, sys.stderr, ignore_prefix)

    worker.print_worker_logs = to_stderr
    utils.set_sigterm_handler = lambda handler: None
    try:
        with _environment({} if sys.stderr.isatty() else {"RAY_COLOR_PREFIX": "0"}):
            yield
    finally:
        worker.print_worker_logs = printer
        utils.set_sigterm_handler = set_handler


@contextlib.contextmanager
def _standard_streams() -> Iterator[None]:
    """Where we were started with closed descriptors (`>&-`) Ray's processes get the null device."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
            os.set_inheritable(null, True)
    if sys.stderr is not None:
        yield
        return
    with open(os.devnull, "w") as nowhere:
        sys.stderr = nowhere
        try:
            yield
        finally:
            sys.stderr = None


@contextlib.contextmanager
def _clean_stdout() -> Iterator[None]:
    """Ray's processes write to descriptor 1: give them stderr, keep our own stdout."""
    if sys.stdout is None:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    stream, sys.stdout = sys.stdout, os.fdopen(os.dup(kept), "w", buffering=1, closefd=True)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.close()
        sys.stdout = stream
        os.dup2(kept, 1)
        os.close(kept)
