"""Faults of memory: of a host, a process and the object store, and results that go with it.

Scenarios as in scenarios.py.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path

from drive import Drive, fake, local, nodes, processes_of, trainers

from engine.executors import ray_cluster
from engine.executors.ray_shard import Policy

MODEL_MIB = 384
"""What a pretended model occupies."""

MOST_MIB = 800 + 6 * MODEL_MIB
"""Room for Ray and half a stack of 8, not for a whole one."""

GROUPS = Path("/sys/fs/cgroup/memory")

OFTEN = {"health_check_period_ms": 1000, "health_check_failure_threshold": 2}
"""The head looks for dead nodes more often than by default."""


def host_memory(folder, train):
    """Ray's monitor finds the machine's memory full and kills the worker of a stack of 8."""
    return starved_host(folder, monitored(MOST_MIB), 8, MODEL_MIB)


def kernel_memory(folder, train):
    """The kernel kills the worker of a stack of 8: its limit is one that Ray does not see."""
    return starved_host(folder, confined(MOST_MIB), 8, MODEL_MIB)


def too_large_models(folder, train):
    """Ray's monitor kills the worker of every model, even alone."""
    return starved_host(folder, monitored(MOST_MIB), 2, 8 * MODEL_MIB)


def starved_host(folder, limited, size: int, mib: int):
    """Stacks of so many models of so many MiB, on a host of little memory."""
    drive = Drive(folder, size=size)
    with limited as group, local(cpus=1) as ray:
        facts = drive.train(ray, fake(drive, mib=mib, seconds=1.5))
        killed = (group / "memory.oom_control").read_text().split("oom_kill ")[1]
        return {**facts, "killed_by_kernel": int(killed)}


@contextlib.contextmanager
def confined(mib: float):
    """This process and what it starts have so much memory together: a control group."""
    (own,) = (
        line.split(":", 2)[2]
        for line in Path("/proc/self/cgroup").read_text().splitlines()
        if line.split(":")[1] == "memory"
    )
    group = GROUPS / f"faults-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(int(mib * 2**20)))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield group
    finally:
        (GROUPS / own.lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


@contextlib.contextmanager
def monitored(mib: float):
    """As in a container: the group is all that Ray sees, and it kills from so much memory on.

    Mounted over the groups of the machine for this process and what it starts; others on the
    machine do not count.
    """
    share = {"RAY_memory_usage_threshold": "0.5"}
    with confined(2 * mib) as group, ray_cluster._environment(share):
        ctypes.CDLL(None).unshare(0x00020000)  # CLONE_NEWNS
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "--bind", str(group), str(GROUPS)], check=True)
        try:
            yield GROUPS
        finally:
            subprocess.run(["umount", str(GROUPS)], check=True)


def out_of_memory(folder, train):
    """Allocating fails for stacks of 8; the process survives."""
    drive = Drive(folder, size=8)
    with local() as ray:
        return drive.train(ray, fake(drive, mib=128, bound_mib=6 * 128, seconds=0.2))


def starved_store(folder, train):
    """An object store far smaller than the results that wait in it."""
    from ray._private.internal_api import memory_summary

    drive = Drive(folder, "query.views=18")
    drive.on_stored = lambda count: time.sleep(0.2)
    with local(object_store_bytes=80 * 2**20) as ray:
        facts = drive.train(ray, fake(drive, seconds=0.05, ballast_mb=20))
        return {**facts, "stats": memory_summary(stats_only=True)}


def lost_result(folder, train):
    """A node dies with a finished result, while the driver is busy storing another one."""
    drive = Drive(folder)
    with nodes(_system_config=OFTEN) as (ray, _, others):

        def strike(places: list[dict]) -> bool:
            if not any(place["node_ids"] == [others[0].node_id] for place in places):
                return False
            for pid in processes_of(others[0]):
                os.kill(pid, signal.SIGKILL)
            return True

        strike_finished(drive, ray, strike)
        return drive.train(ray, fake(drive, ballast_mb=1))


def lost_spill(folder, train):
    """Results that the object store put on the disk are deleted before the driver has them."""
    drive = Drive(folder)
    with local(object_store_bytes=80 * 2**20) as ray:
        session = Path(ray._private.worker._global_node.get_session_dir_path())

        def strike(places: list[dict]) -> bool:
            results, _ = spilled(session)
            if sum(place["did_spill"] for place in places) < 2:
                return False
            for path in results:
                path.unlink()
            return True

        strike_finished(drive, ray, strike)
        how = {"seconds": 0.05, "ballast_mb": 20}
        return drive.train(ray, fake(drive, **how), Policy(silence=12.0))


def lost_data(folder, train):
    """The study's data, put on the disk as well, are deleted there, and all workers killed."""
    drive = Drive(folder)
    with local(object_store_bytes=80 * 2**20) as ray:
        session = Path(ray._private.worker._global_node.get_session_dir_path())

        def strike(places: list[dict]) -> bool:
            if len(spilled(session)[0]) < 2:
                return False
            time.sleep(2.0)  # until all files are whole
            _, data = spilled(session)
            if not data:
                return False
            for path in data:
                path.unlink()
            for pid in trainers(drive):
                os.kill(pid, signal.SIGKILL)
            return True

        strike_finished(drive, ray, strike)
        how = {"seconds": 0.05, "ballast_mb": 20}
        return drive.train(ray, fake(drive, **how), Policy(silence=12.0, fetch=5.0))


def spilled(session: Path) -> tuple[list[Path], list[Path]]:
    """Files of objects that the store of this session put on the disk: results, all others."""
    files = list(session.glob("ray_spilled_objects*/*"))
    large = [path for path in files if path.stat().st_size > 2**20]
    return large, [path for path in files if path not in large]


def strike_finished(drive: Drive, ray, strike) -> None:
    """With the first stored shard, as long as it takes: what do you do to finished results?

    strike: is told where they are, as often as it answers False.
    """
    wait, submitted = ray.wait, []

    def remember(references, **how):
        submitted[:] = references
        return wait(references, **how)

    def finished() -> list:
        """As the driver knows, whether they are here or not."""
        everything = {"num_returns": len(submitted), "timeout": 0, "fetch_local": False}
        return wait(submitted, **everything)[0]

    def watch(count: int) -> None:
        if count == 1:
            while not strike(list(ray.experimental.get_object_locations(finished()).values())):
                time.sleep(0.05)
            drive.fault()

    ray.wait, drive.on_stored = remember, watch
