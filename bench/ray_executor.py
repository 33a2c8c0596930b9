"""What Ray costs: workers against plain processes, and a driver that feeds 64 pretended workers.

    python bench/ray_executor.py overhead
    python bench/ray_executor.py scale

`overhead` trains the digits study with local processes and with Ray, on two workers and on one in
turn, and compares the exported arrays. Beyond training is what a run took more than the sum of its
stacks' times, on one worker, where nothing is hidden. `scale` sleeps instead of training and
returns arrays of real size, which the driver stores: it shows what the driver can take, once all
workers have started. Rows go to bench/results/ray_executor.csv.
"""

import argparse
import csv
import hashlib
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":  # this folder's kernels.py must not shadow the package
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from engine import manifest
from engine.executors.base import Job, Stack, Watch
from engine.executors.local import LocalExecutor
from engine.executors.ray import RayExecutor
from engine.executors.ray_cluster import Where, connected
from engine.executors.ray_place import survey
from engine.executors.ray_worker import TrainStack
from engine.plan import ModelResult, stacks
from engine.prepare import prepare
from engine.store import Run, study_refs, write_results
from engine.studyfile import load_study

RESULTS = Path(__file__).parent / "results" / "ray_executor.csv"
SILENT = Watch(say=lambda sentence: None, figures=lambda figures: None)


def ballast(stack: Stack, count: int) -> list[ModelResult]:
    """Results that hold so many zeros a model."""
    values = np.zeros(count, np.float32)
    return [ModelResult(ref=ref, arrays={"ballast_X": values}, seconds=1.0) for ref in stack]


class Sleep:
    """Sleeps and returns `megabytes` of scores a model."""

    def __init__(self, seconds: float, megabytes: float) -> None:
        self.seconds, self.megabytes = seconds, megabytes

    def __call__(
        self, job: Job, stack: Stack, on_epoch: Callable[[int], None]
    ) -> list[ModelResult]:
        """The same array for every model."""
        time.sleep(self.seconds)
        return ballast(stack, int(self.megabytes * 2**18))


class Gather:
    """Keeps a process until all of `workers` are here: they take long to start."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder, self.workers = folder, workers

    def __call__(
        self, job: Job, stack: Stack, on_epoch: Callable[[int], None]
    ) -> list[ModelResult]:
        """Waits for the others."""
        (self.folder / str(os.getpid())).touch()
        end = time.monotonic() + 600
        while len(list(self.folder.iterdir())) < self.workers and time.monotonic() < end:
            time.sleep(1)
        return ballast(stack, 1)


def tiny_job(models: int, epochs: int) -> Job:
    """The digits study."""
    overrides = [f"models={models}", f"train.epochs={epochs}", "data.loader=resident"]
    study = load_study("digits_bn_vs_nobn", overrides)
    plan = manifest.numerics("cpu")["kernels"]
    return Job(study=study, data=prepare(study).data, device="cpu", kernel_plan=plan)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One run: its seconds, those of its stacks added up, and a hash of all results."""

    wall: float
    training: float
    digest: str


def timed(executor: Any, job: Job, work: Sequence[Stack]) -> Timing:
    """Run once."""
    hashes: dict[str, str] = {}
    training = [0.0]

    def keep(results: Sequence[ModelResult]) -> None:
        for result in results:
            training[0] += result.seconds
            for name, values in result.arrays.items():
                hashes[f"{result.ref}{name}"] = hashlib.sha256(values.tobytes()).hexdigest()

    start = time.perf_counter()
    executor.run(job, work, keep, lambda index, done: None)
    wall = time.perf_counter() - start
    digest = hashlib.sha256(repr(sorted(hashes.items())).encode()).hexdigest()
    return Timing(wall=wall, training=training[0], digest=digest)


def overhead(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Local and Ray, two workers and one in turn; Ray's have started before they are timed."""
    job, short = tiny_job(options.models, options.epochs), tiny_job(options.models, 1)
    work = stacks(job.study, list(study_refs(job.study)), 8, 2)
    found: dict[str, list[Timing]] = {}
    for workers in (2, 1) * options.repeats:
        with connected(Where(address="local", cpus=workers)) as ray:
            train = TrainStack(numerics=survey(ray, "cpu").numerics)
            ready = RayExecutor(ray, train, SILENT)
            timed(ready, short, work)
            for name, executor in (("ray", ready), ("local", LocalExecutor(workers))):
                timing = timed(executor, job, work)
                found.setdefault(f"{name} {workers}", []).append(timing)
                print(f"{name} {workers} worker(s): {timing.wall:.1f} s", flush=True)
    assert len({t.digest for timings in found.values() for t in timings}) == 1, "executors disagree"
    return [overhead_row(name, found, len(work)) for name in found]


def overhead_row(name: str, found: dict[str, list[Timing]], shards: int) -> dict[str, Any]:
    """Medians of one executor with one number of workers; ratios are of neighbouring runs."""
    executor, workers = name.split()
    usual = statistics.median(timing.wall for timing in found[name])
    alone = found[f"{executor} 1"]
    note = f"n = {len(found[name])}; "
    if workers == "1":
        beyond = statistics.median(timing.wall - timing.training for timing in alone) / shards
        note += f"beyond training {beyond:.2f} s a shard, {beyond / 0.6:.1f} % of a minute"
    else:
        ratios = [one.wall / two.wall for one, two in zip(alone, found[name], strict=True)]
        shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        note += f"{statistics.median(ratios):.2f} times one worker ({shown})"
    what = f"{name} worker(s), {shards} shards"
    return {"what": what, "value": f"{usual:.2f} s", "note": note}


def scale(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Driver seconds and memory for many short shards of many pretended workers."""
    job = tiny_job(options.shards, 1)
    refs = [ref for ref in study_refs(job.study) if ref.arm == "bn"]
    work = [(ref,) for ref in refs]
    seen: list[int] = []
    storing = [0.0]
    with (
        connected(Where(address="local", cpus=options.workers)) as ray,
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory() as meeting,
    ):
        run = Run(path=Path(folder), study=job.study, digest="", manifest={})
        gather = Gather(Path(meeting), options.workers)
        warm = [(ref,) for ref in refs[: options.workers]]
        started = time.perf_counter()
        RayExecutor(ray, gather, SILENT).run(job, warm, lambda results: None, lambda i, done: None)
        started = time.perf_counter() - started
        there = len(list(Path(meeting).iterdir()))
        assert there == options.workers, f"only {there} of {options.workers} workers started"
        executor = RayExecutor(ray, Sleep(options.seconds, options.megabytes), SILENT)
        cpu, start = time.process_time(), time.perf_counter()

        def keep(results: Sequence[ModelResult]) -> None:
            before = time.process_time()
            write_results(run, results)
            storing[0] += time.process_time() - before
            seen.append(private_bytes())

        executor.run(job, work, keep, lambda index, done: None)
        cpu, seconds = time.process_time() - cpu, time.perf_counter() - start
    ideal = len(work) * options.seconds / options.workers
    quarter = len(seen) // 4
    growth = (max(seen[-quarter:]) - max(seen[:quarter])) / 2**20
    return [
        {
            "what": f"{options.workers} pretended workers, {len(work)} shards of "
            f"{options.seconds:g} s with {options.megabytes:g} MiB",
            "value": f"{seconds:.1f} s",
            "note": f"ideal {ideal:.1f} s, after {started:.0f} s in which the workers' processes "
            f"started; driver CPU {1000 * cpu / len(work):.1f} ms a shard, "
            f"{1000 * storing[0] / len(work):.1f} of them to store it; "
            f"driver memory from first to last quarter {growth:+.0f} MiB; "
            f"{len(work) / seconds:.0f} shards/s",
        }
    ]


def private_bytes() -> int:
    """Memory of this process that is not shared with the object store."""
    fields = Path("/proc/self/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * resource.getpagesize()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the two and append its rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("overhead", "scale"))
    parser.add_argument("--models", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--shards", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--megabytes", type=float, default=2.0)
    options = parser.parse_args(arguments)
    rows = overhead(options) if options.what == "overhead" else scale(options)
    common = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "versions": f"ray {version('ray')}, torch {version('torch')}",
    }
    new = not RESULTS.is_file()
    with open(RESULTS, "a", newline="") as stream:
        writer = csv.DictWriter(stream, ["date", "what", "value", "note", "machine", "versions"])
        if new:
            writer.writeheader()
        for row in rows:
            writer.writerow({**common, **row})
            print(f"{row['what']}: {row['value']} ({row['note']})")


if __name__ == "__main__":
    main()
