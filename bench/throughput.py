"""Stacked training against its rivals, side by side in one run: models an hour, samples a second.

    python bench/throughput.py --net lenet --norm batch --models 32 --batch 32 --data FILE.npz

Arms, each on the same images, orders and initial weights, one process a core with one thread each:
- stacked: the engine, stacks of `--stack` models;
- sequential: engine/sequential.py, plain torch, one model after another;
- best-loop: the best sequential loop known to us: a resident normalised float tensor, index
  gather, no loss read back, the faster of NCHW and channels-last.

Repeats are interleaved, medians reported; a repeat whose CPU and wall time disagree by more than a
tenth is marked. A ratio is printed and stored only if the arms' losses agree in the same run.

With `--executor ray` it measures instead what Ray costs: `bench/ray_executor.py overhead`.
"""

import argparse
import csv
import itertools
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

if __name__ == "__main__":  # this folder's kernels.py must not shadow the package
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.rivals import ARMS, Job, Team, Timing

RESULTS = Path(__file__).parent / "results" / "throughput.csv"
LOSS_TOLERANCE = 2e-3
"""Relative difference of the first steps' losses between arms, in float32."""
BUSY = 0.1
"""A process that got less than this much under a whole core marks its repeat."""


@dataclass(kw_only=True)
class Row:
    """One line of the results file."""

    date: str
    net: str
    norm: str
    models: int
    batch: int
    stack: int
    processes: int
    arm: str
    samples_per_second: float
    samples_per_cpu_second: float
    models_per_hour: float
    ratio_to_best_loop: float
    cpu_ratio_to_best_loop: float
    ratio_to_sequential: float
    cpu_ratio_to_sequential: float
    repeats: int
    marked_repeats: int
    steps: int
    data: str
    machine: str
    versions: str
    note: str = field(default="")


def disagreement(one: Sequence[Timing], other: Sequence[Timing]) -> float:
    """The largest relative difference of the first steps' losses of the same models."""
    pairs = zip(one, other, strict=True)
    left, right = zip(*((a.first_losses, b.first_losses) for a, b in pairs), strict=True)
    a, b = (np.array(list(itertools.chain(*side))) for side in (left, right))
    return float(np.max(np.abs(a - b) / np.maximum(np.abs(b), 0.1)))


def measure(options: argparse.Namespace) -> list[Row]:
    """Warm up, check, repeat interleaved, and reduce to one row an arm."""
    job = Job(
        net=options.net,
        norm=options.norm,
        batch=options.batch,
        steps=options.steps,
        stack=options.stack,
        data=options.data,
    )
    processes = min(options.processes or os.cpu_count() or 1, options.models)
    team = Team(job, options.models, processes)
    print("warming up", file=sys.stderr)
    for arm in ARMS:
        team.run(arm, some=job.stack if arm == "stacked" else 1)
    loops = {arm: team.run(arm, some=2) for arm in ARMS[2:]}
    best = min(loops, key=lambda arm: sum(timing.cpu for timing in loops[arm]))
    arms = ("stacked", "sequential", best)
    runs: dict[str, list[list[Timing]]] = {arm: [] for arm in arms}
    for repeat in range(options.repeats):
        for arm in arms:
            print(f"repeat {repeat + 1} of {options.repeats}: {arm}", file=sys.stderr)
            runs[arm].append(team.run(arm))
    team.close()
    for arm in ("stacked", best):
        worst = disagreement(runs[arm][0], runs["sequential"][0])
        if not worst < LOSS_TOLERANCE:
            sys.exit(f"no number: losses of {arm} and sequential differ by {worst:.1e}")
    return [_row(options, job, processes, arm, runs, best) for arm in arms]


def _row(
    options: argparse.Namespace,
    job: Job,
    processes: int,
    arm: str,
    runs: dict[str, list[list[Timing]]],
    best: str,
) -> Row:
    samples = options.models * job.steps * job.batch
    wall = {name: _median(repeats, "wall") for name, repeats in runs.items()}
    cpu = {name: _median(repeats, "cpu") for name, repeats in runs.items()}
    marked = sum(
        any(timing.cpu < (1 - BUSY) * timing.wall for timing in repeat) for repeat in runs[arm]
    )
    return Row(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        net=job.net,
        norm=job.norm,
        models=options.models,
        batch=job.batch,
        stack=job.stack,
        processes=processes,
        arm=arm,
        samples_per_second=round(samples / wall[arm], 1),
        samples_per_cpu_second=round(samples / cpu[arm], 1),
        models_per_hour=round(samples / wall[arm] * 3600 / (options.members * options.epochs), 1),
        ratio_to_best_loop=round(wall[best] / wall[arm], 3),
        cpu_ratio_to_best_loop=round(cpu[best] / cpu[arm], 3),
        ratio_to_sequential=round(wall["sequential"] / wall[arm], 3),
        cpu_ratio_to_sequential=round(cpu["sequential"] / cpu[arm], 3),
        repeats=options.repeats,
        marked_repeats=marked,
        steps=job.steps,
        data=Path(job.data).name or "random",
        machine=_machine(),
        versions=_versions(),
        note=options.note,
    )


def _median(repeats: Sequence[Sequence[Timing]], what: str) -> float:
    """Over repeats: the slowest process's wall time, or the CPU time of all processes."""
    of_repeat = max if what == "wall" else sum
    return float(statistics.median(of_repeat(getattr(t, what) for t in r) for r in repeats))


def _machine() -> str:
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.split(":")[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        pass
    return f"{os.cpu_count()} x {model}"


def _versions() -> str:
    found = [f"python {platform.python_version()}"]
    for name in ("torch", "numba", "numpy"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def _store(rows: Sequence[Row]) -> None:
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    fresh = not RESULTS.exists()
    with RESULTS.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    from engine.models.catalog import NETS

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--executor", choices=("local", "ray"), default="local")
    parser.add_argument("--net", choices=NETS, default="lenet")
    parser.add_argument("--norm", default="batch")
    parser.add_argument("--models", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--stack", type=int, default=8, help="models a stack")
    parser.add_argument("--steps", type=int, default=40, help="batches a model and repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--processes", type=int, default=0, help="0: one a core")
    parser.add_argument("--data", default="", help="an .npz with train_images, train_labels")
    parser.add_argument("--members", type=int, default=25_000, help="for models/hour")
    parser.add_argument("--epochs", type=int, default=30, help="for models/hour")
    parser.add_argument("--note", default="", help="kept in the row")
    parser.add_argument("--json", default="", help="write the rows there too")
    parser.add_argument(
        "--store", action="store_true", help="append to bench/results/throughput.csv"
    )
    options = parser.parse_args(arguments)
    if options.norm not in NETS[options.net]:
        parser.error(f"{options.net} has norms {', '.join(NETS[options.net])}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one cell and print it; append it to the results if asked to."""
    options = _parse(arguments)
    if options.executor == "ray":
        from bench import ray_executor

        ray_executor.main(["overhead"])
        return
    rows = measure(options)
    for row in rows:
        mark = f", {row.marked_repeats} of {row.repeats} repeats marked" * bool(row.marked_repeats)
        print(
            f"{row.net}/{row.norm} batch {row.batch}, {row.models} models, {row.arm:15s}"
            f"{row.samples_per_second:10.0f} samples/s {row.samples_per_cpu_second:10.0f} per CPU s"
            f" {row.models_per_hour:8.1f} models/h ({options.epochs} epochs of "
            f"{options.members:,}); CPU ratio to best loop "
            f"{row.cpu_ratio_to_best_loop:.2f}, to sequential {row.cpu_ratio_to_sequential:.2f}"
            f" (wall {row.ratio_to_best_loop:.2f}, {row.ratio_to_sequential:.2f}){mark}"
        )
    if options.json:
        text = json.dumps([asdict(row) for row in rows], indent=1)
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    if options.store:
        _store(rows)


if __name__ == "__main__":
    main()
