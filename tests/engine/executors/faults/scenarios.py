"""Faults, one a process: a study on a cluster, and something that happens to it on the way.

    python scenarios.py SCENARIO FOLDER [real]

FOLDER/run receives the run directory, FOLDER/marks one file a training. "real" trains networks
instead of sleeping. The last line printed is a JSON object of facts.
"""

import contextlib
import inspect
import json
import os
import random
import shutil
import signal
import sys
import time
import urllib.request
from pathlib import Path

import broken
import memory
from broken import Broken
from drive import REAL, Drive, after, fake, fashion, local, nodes, processes_of, trainers

from engine.executors import ray_cluster
from engine.executors.ray_place import Demand
from engine.executors.ray_shard import Policy

IMPATIENT = Policy(silence=12.0)


def longer(train):
    """Overrides that make a stack of real training take a second or two."""
    return REAL if train else []


def plain(folder, train):
    """Nothing happens."""
    drive = Drive(folder, *longer(train))
    with local() as ray:
        return drive.train(ray, train or fake(drive, seconds=0.2))


def two_nodes(folder, train):
    """Nothing happens, on two nodes."""
    drive = Drive(folder, *longer(train))
    with nodes() as (ray, _, _):
        return drive.train(ray, train or fake(drive, seconds=0.2))


def fashion_two_nodes(folder, train):
    """Nothing happens, on two nodes, with larger images."""
    drive = Drive(folder, *fashion(Path(os.environ["FASHION"])))
    with nodes() as (ray, _, _):
        return drive.train(ray, train)


def uneven_nodes(folder, train):
    """A worker of one node holds three models at once, one of the other eight."""
    drive = Drive(folder, *longer(train), size=8)
    limit = lambda job, nbytes: 8 if nbytes > 2**32 else 3  # noqa: E731
    with nodes(memory=[2**33, 2**30]) as (ray, _, others):
        facts = drive.train(ray, train or fake(drive), limit=limit)
        small = set(processes_of(others[0]))
    sizes: dict[str, list[int]] = {"small": [], "large": []}
    for path in drive.marks.iterdir():
        name, _, pid = path.name.split(".")
        sizes["small" if int(pid) in small else "large"].append(name.count("-") - 1)
    return {**facts, **sizes}


def own_copies(folder, train):
    """Two nodes read the images from their own copies of the beton; the driver sends none."""
    return spread(folder, train, {"one": shutil.copy, "two": shutil.copy})


def one_copy(folder, train):
    """Only one of two nodes has a copy of the beton."""
    return spread(folder, train, {"one": shutil.copy, "two": None})


def altered_copies(folder, train):
    """Both nodes have a file of that name which is another one."""

    def alter(file: Path, copy: Path) -> None:
        copy.write_bytes(file.read_bytes() + b"more")

    return spread(folder, train, {"one": alter, "two": alter})


def spread(folder, train, copies):
    """Two nodes with caches of their own, into which the driver's beton is copied, or not."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "driver")
    sets = ["data.spread=beton", "data.loader=ffcv", *fashion(Path(os.environ["FASHION"]))]
    drive = Drive(folder, *sets)
    (file,) = (folder / "driver").rglob("*.beton")
    for name, copy in copies.items():
        place = folder / name / file.relative_to(folder / "driver")
        place.parent.mkdir(parents=True)
        if copy is not None:
            copy(file, place)
    with nodes(caches=[folder / name for name in copies]) as (ray, _, _):
        put, sizes = ray.put, []

        def weighed(value):
            sizes.append(len(ray.cloudpickle.dumps(value)))
            return put(value)

        ray.put = weighed
        facts = drive.train(ray, train)
    data = drive.job.data
    pool = next(iter(data.tables.values())).label_N
    images = (len(pool) + len(data.population_labels_Z)) * data.images_RHWC[0].nbytes
    tables = [len(list((folder / name).rglob("*.images"))) for name in copies]
    workers = len(drive.figures["speeds"])
    return {**facts, "put": sum(sizes), "images": images, "tables": tables, "workers": workers}


def kill_worker(folder, train):
    """SIGKILL one training worker at a random moment after the second stack."""
    drive = Drive(folder, *longer(train))
    wait = random.Random(str(folder)).uniform(0, 1.0)

    def kill() -> None:
        drive.fault()
        os.kill(random.choice(drive.workers() or trainers(drive)), signal.SIGKILL)

    drive.on_stored = lambda count: after(wait, kill) if count == 2 else None
    with local() as ray:
        return drive.train(ray, train or fake(drive))


def metrics(folder, train):
    """What Prometheus would read from the driver's node while shards are trained."""
    drive, read = Drive(folder), []
    with local() as ray:
        port = ray.nodes()[0]["MetricsExportPort"]

        def scrape() -> None:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
                lines = page.read().decode().splitlines()
            read[:] = [line for line in lines if line.startswith("ray_shadow_engine")] or read

        drive.on_stored = lambda count: after(0.0, scrape)
        facts = drive.train(ray, fake(drive, seconds=3.0))
        return {**facts, "read": read}


def shared_gpu(folder, train):
    """Two workers on the one (pretended) GPU that the cluster has."""
    drive = Drive(folder, size=4)
    with local(gpus=1) as ray:
        facts = drive.train(ray, fake(drive), demand=Demand(shards_per_gpu=2))
        return {**facts, "workers": len(drive.figures["speeds"])}


def other_version(folder, train):
    """This process has another Ray than the cluster."""
    with nodes(1) as (ray, cluster, _):
        ray.shutdown()
        ray.__version__ = "2.59.0"
        try:
            with ray_cluster.connected(ray_cluster.Where(address=cluster.address)):
                return {"failure": None}
        except ValueError as error:
            return {"failure": str(error)}


def kill_workers(folder, train):
    """Twenty studies after one another, in each of them a worker killed at a random moment."""
    runs = []
    with local() as ray:
        for number in range(20):
            drive = Drive(folder / str(number))
            chance = random.Random(number)

            def kill(drive=drive, chance=chance) -> None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chance.choice(drive.workers() or trainers(drive)), signal.SIGKILL)

            wait = chance.uniform(0, 2.0)
            drive.on_stored = lambda n, wait=wait, kill=kill: after(wait, kill) if n == 2 else None
            runs.append(drive.train(ray, train or fake(drive)))
    together = ("trainings", "stacks", "models", "again", "models_done", "retrained")
    sums = {name: sum(run[name] for run in runs) for name in together}
    return {**runs[0], **sums, "failure": [r["failure"] for r in runs if r["failure"]] or None}


def remove_node(folder, train):
    """A node leaves in order, as on scaling down."""
    drive = Drive(folder)
    with nodes() as (ray, cluster, others):

        def remove(count: int) -> None:
            if count == 2:
                drive.fault()
                after(0.0, lambda: cluster.remove_node(others[0], allow_graceful=True))

        drive.on_stored = remove
        return drive.train(ray, train or fake(drive), IMPATIENT)


def strike(folder, train, fault, seconds=2.0, **head):
    """Something happens to a node while it trains a shard of `seconds`."""
    drive = Drive(folder, *longer(train), size=4)
    with nodes(**head) as (ray, _, others):
        struck = []

        def wait_and_strike() -> None:
            while not drive.busy(others[0], 0.5):
                time.sleep(0.05)
            drive.fault()
            struck.extend(fault(processes_of(others[0])))

        drive.on_stored = lambda count: after(0.0, wait_and_strike) if count == 1 else None
        try:
            return drive.train(ray, train or fake(drive, seconds=seconds), IMPATIENT)
        finally:
            for pid in struck:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def kill_node(folder, train):
    """SIGKILL to a node's raylet and all its workers."""
    return strike(folder, train, lambda pids: [os.kill(pid, signal.SIGKILL) for pid in pids][:0])


def kill_raylet(folder, train):
    """SIGKILL to a node's raylet alone: its worker lives on as an orphan and may still deliver.

    The head looks for dead nodes more often than by default, so that a shard need not be long.
    """
    often = {"health_check_period_ms": 1000, "health_check_failure_threshold": 2}
    kill = lambda pids: [os.kill(pids[0], signal.SIGKILL)][:0]  # noqa: E731
    return strike(folder, train, kill, seconds=8.0, _system_config=often)


def own_raylet(folder, train):
    """SIGKILL to the raylet of the driver's own machine, the only one."""
    drive = Drive(folder)
    with local() as ray:
        pid = ray._private.worker._global_node.all_processes["raylet"][0].process.pid
        drive.on_stored = lambda count: os.kill(pid, signal.SIGKILL) if count == 3 else None
        return drive.train(ray, train or fake(drive))


def freeze_node(folder, train):
    """SIGSTOP to a node's raylet and workers: silence, but nothing closes."""

    def freeze(pids):
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        return pids

    return strike(folder, train, freeze)


def freeze_worker(folder, train):
    """A worker process stops; its node is well."""
    drive = Drive(folder)
    with local() as ray:
        return drive.train(ray, fake(drive, freezes=3), IMPATIENT)


def join_node(folder, train):
    """A second node joins while the first one trains."""
    drive = Drive(folder)
    with nodes(1) as (ray, cluster, _):

        def join(count: int) -> None:
            if count == 1:  # here, not in a thread: starting a node sets a signal handler
                cluster.add_node(num_cpus=1, node_ip_address="127.0.0.1")

        drive.on_stored = join
        facts = drive.train(ray, train or fake(drive, seconds=3.0))
        return {**facts, "workers": len(drive.figures["speeds"])}


def lost_board(folder, train):
    """The actor that hears signs of life is killed."""
    drive = Drive(folder)
    with local() as ray:

        def kill(count: int) -> None:
            if count == 3:
                os.kill(drive.board_pid(), signal.SIGKILL)

        drive.on_stored = kill
        return drive.train(ray, train or fake(drive))


def raising_model(folder, train):
    """One model of a stack raises whenever it is trained."""
    drive = Drive(folder, *longer(train), size=8)
    with local() as ray:
        real = train and Broken(train=drive.real(ray), cause=broken.raises, model_id=5)
        return drive.train(ray, real or fake(drive, raises=5, seconds=0.2))


def refusing_nodes(folder, train):
    """No machine can run the numeric plan."""
    drive = Drive(folder)
    with local() as ray:
        return drive.train(ray, fake(drive, refuses=True))


def wrong_arrays(folder, train):
    """A worker of another version sends arrays of another size."""
    drive = Drive(folder, "models=4")
    with local() as ray:
        return drive.train(ray, fake(drive, seconds=0.1, cuts=True))


def diverging_model(folder, train):
    """One model's loss becomes NaN."""
    drive = Drive(folder, *longer(train), size=4)
    with local() as ray:
        real = train and Broken(train=drive.real(ray), cause=broken.diverges, model_id=5)
        return drive.train(ray, real or fake(drive, diverges=5, seconds=0.2))


def full_disk(folder, train):
    """The run directory's file system fills up (FOLDER/run is a small tmpfs)."""
    drive = Drive(folder)
    with local() as ray:
        return drive.train(ray, train or fake(drive, seconds=0.2, ballast_mb=1))


def long(folder, train):
    """Long enough to be interrupted or killed from outside."""
    drive = Drive(folder)
    drive.on_stored = lambda count: print(f"stored {count}", flush=True)
    with local() as ray:
        print(f"listening {json.dumps(drive.listeners())}", flush=True)
        return drive.train(ray, train or fake(drive, seconds=1.5))


def main() -> None:
    scenarios = dict(inspect.getmembers(memory, inspect.isfunction))
    scenarios.update(inspect.getmembers(sys.modules[__name__], inspect.isfunction))
    folder = Path(sys.argv[2])
    try:
        facts = scenarios[sys.argv[1]](folder, "real" if "real" in sys.argv[3:] else None)
    except KeyboardInterrupt:
        sys.exit(130)  # as `engine` does
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
