"""A study on a Ray of our own or on several nodes, with everything noted; see scenarios.py."""

import collections
import contextlib
import os
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from fake import FakeTrain, Marked

from engine import manifest, store
from engine.executors import ray_cluster, ray_place
from engine.executors.base import Job, Watch
from engine.executors.ray import RayExecutor
from engine.executors.ray_shard import Policy, describe
from engine.executors.ray_worker import TrainStack
from engine.plan import stacks
from engine.prepare import prepare
from engine.studyfile import load_study

TINY = [
    "data.limit=240",
    "data.loader=resident",
    "models=8",
    "train.epochs=3",
    "train.batch=32",
]

REAL = ["train.epochs=20"]
"""For real training: long enough to be struck."""


def fashion(path: Path) -> list[str]:
    """Overrides for a little of Fashion-MNIST."""
    sizes = ["data.limit=400", "query.population=100", "models=4", "train.epochs=2"]
    return ["data.name=npz", f"data.path={path}", *sizes]


class Drive:
    """One study in FOLDER: prepared, declared, trained on `ray`, with everything noted."""

    def __init__(self, folder: Path, *overrides: str, size: int = 2) -> None:
        self.study = load_study("digits_bn_vs_nobn", [*TINY, *overrides])
        self.prepared = prepare(self.study, offline=True)
        self.marks = folder / "marks"
        self.marks.mkdir(parents=True, exist_ok=True)
        numerics = manifest.numerics("cpu")
        head = {"format": store.FORMAT, "digest": self.prepared.digest, "numerics": numerics}
        (folder / "run").mkdir(exist_ok=True)
        self.run = store.declare(
            folder / "run", self.study, self.prepared.masks, self.prepared.samples, head
        )
        done = self.run.scan()
        store.clean(self.run.path, done.rejected)
        missing = [ref for ref in self.run.refs() if ref not in done.rows]
        self.stacks = stacks(self.study, missing, size, 1)
        self.job = Job(
            study=self.study,
            data=self.prepared.data,
            device="cpu",
            kernel_plan=numerics["kernels"],
        )
        self.said: list[str] = []
        self.figures: dict = {}
        self.stored = 0
        self.on_stored = lambda count: None
        self._fault_at: float | None = None
        self._noticed: float | None = None
        self._recovered: float | None = None

    def train(self, ray, train, policy: Policy | None = None, **how) -> dict:
        """Train what is missing; returns the facts."""
        train = self.real(ray) if train == "real" else train
        watch = Watch(say=self._say, figures=self._figures)
        failure, self._start = None, time.monotonic()
        executor = RayExecutor(ray, train, watch, policy=policy, **how)
        try:
            executor.run(self.job, self.stacks, self._store, lambda index, done: None)
        except (RuntimeError, OSError) as error:
            failure = str(error)
        return {
            "failure": failure,
            "seconds": time.monotonic() - self._start,
            "said": self.said,
            "noticed": self._noticed,
            "recovered": self._recovered,
            "trainings": len(list(self.marks.iterdir())),
            "models": len(self.run.refs()),
            "again": self.again(),
            "stacks": len(self.stacks),
            **{name: self.figures[name] for name in ("done", "failed", "retrained", "models_done")},
        }

    def real(self, ray) -> Marked:
        """Training proper, with marks."""
        proper = TrainStack(numerics=ray_place.survey(ray, "cpu").numerics)
        return Marked(marks=str(self.marks), train=proper)

    def fault(self) -> None:
        """The fault happens now: the time until it is noticed and made good counts from here."""
        self._fault_at = time.monotonic()

    def again(self) -> int:
        """Trainings of models beyond the first of each, in this folder so far."""
        names = [path.name.split(".")[0].split("-") for path in self.marks.iterdir()]
        starts = collections.Counter((mix, arm, m) for mix, arm, *ids in names for m in ids)
        return sum(starts.values()) - len(starts)

    def _say(self, sentence: str) -> None:
        self.said.append(sentence)
        if self._fault_at and self._noticed is None:
            self._noticed = time.monotonic() - self._fault_at
        print(f"{time.monotonic() - self._start:.1f} {sentence}", file=sys.stderr, flush=True)

    def _figures(self, figures) -> None:
        self.figures = dict(figures)

    def busy(self, node, age: float) -> bool:
        """Whether a shard began on this node less than `age` seconds ago."""
        begun = [path.name.rsplit(".", 2)[1:] for path in self.marks.iterdir()]
        now, pids = time.time_ns(), processes_of(node)
        return any(now - int(at) < age * 1e9 and int(pid) in pids for at, pid in begun)

    def workers(self) -> list[int]:
        """Process ids of the workers that finished a shard, where they live."""
        pids = [int(name.split("/")[1]) for name in self.figures.get("speeds", {})]
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]

    def board_pid(self) -> int:
        """The process of the actor that hears signs of life."""
        (pid,) = [p for p in family(os.getpid()) if "ray::Board" in title(p)]
        return pid

    def listeners(self) -> list[str]:
        """Local addresses that this process and its family listen on."""
        inodes = set()
        for pid in [os.getpid(), *family(os.getpid())]:
            with contextlib.suppress(OSError):
                for link in os.scandir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(OSError):
                        inodes.add(os.readlink(link.path))
        found = []
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().split("\n")[1:]:
                parts = line.split()
                if parts and parts[3] == "0A" and f"socket:[{parts[9]}]" in inodes:
                    found.append(parts[1])
        return found

    def _store(self, results) -> None:
        store.write_results(self.run, results)
        lost = describe(tuple(result.ref for result in results))
        if self._fault_at and any(sentence.startswith(f"{lost}:") for sentence in self.said):
            self._recovered = time.monotonic() - self._fault_at
        self.stored += 1
        self.on_stored(self.stored)


def fake(drive: Drive, **how) -> FakeTrain:
    return FakeTrain(marks=str(drive.marks), **how)


@contextlib.contextmanager
def local(**how):
    """A Ray of our own, as `engine run --executor ray` starts it."""
    where = ray_cluster.Where(**{"address": "local", "cpus": 2, **how})
    with ray_cluster.connected(where) as ray:
        yield ray


@contextlib.contextmanager
def nodes(count: int = 2, caches: Sequence[Path] = (), memory: Sequence[int] = (), **head):
    """A cluster of nodes with one CPU each on this machine; yields (ray, Cluster, its nodes).

    caches: for each node its own folder of caches. memory: what each node is said to have.
    """
    own: list[dict] = [{} for _ in range(count)]
    for node, cache in zip(own, caches, strict=False):
        node["env_vars"] = {"XDG_CACHE_HOME": str(cache)}
    for node, nbytes in zip(own, memory, strict=False):
        node["memory"] = nbytes
    with ray_cluster._session_folder() as folder, contextlib.ExitStack() as undo:
        ours = {"RAY_AUTH_TOKEN": secrets.token_hex(16), "RAY_TMPDIR": folder}
        undo.enter_context(ray_cluster._environment({**ray_cluster.OWN_CLUSTER, **ours}))
        (Path(folder) / "ray").mkdir()
        from ray.cluster_utils import Cluster

        ray_cluster._forget_settings()
        place = {"node_ip_address": "127.0.0.1", "temp_dir": folder}
        first = {"num_cpus": 1, "include_dashboard": False, **place, **own[0], **head}
        cluster = Cluster(initialize_head=True, head_node_args=first)
        undo.callback(cluster.shutdown)
        others = [
            cluster.add_node(num_cpus=1, node_ip_address="127.0.0.1", **own[number])
            for number in range(1, count)
        ]
        where = ray_cluster.Where(address=cluster.address)
        ray = undo.enter_context(ray_cluster.connected(where))
        yield ray, cluster, others


def after(seconds: float, act) -> threading.Thread:
    """Do something to the run from a thread."""

    def wait_and_act() -> None:
        time.sleep(seconds)
        act()

    thread = threading.Thread(target=wait_and_act, daemon=True)
    thread.start()
    return thread


def parents() -> dict[int, int]:
    """Process id -> its parent's."""
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                found[int(path.name)] = int(
                    (path / "stat").read_text().rsplit(")", 1)[1].split()[1]
                )
    return found


def family(pid: int) -> list[int]:
    """All processes that descend from this one."""
    known, found = parents(), []
    frontier = {pid}
    while frontier:
        frontier = {child for child, parent in known.items() if parent in frontier}
        found += sorted(frontier)
    return found


def title(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def processes_of(node) -> list[int]:
    """A node's raylet, then its workers and agents."""
    raylet = node.all_processes["raylet"][0].process.pid
    return [raylet, *family(raylet)]


def trainers(drive: Drive) -> list[int]:
    """Process ids that left marks and live."""
    pids = {int(path.name.rsplit(".", 1)[1]) for path in drive.marks.iterdir()}
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]
