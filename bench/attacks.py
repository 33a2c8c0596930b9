"""Speed, memory and growth of the attacks; every case in its own process, rows to bench/results/.

    OMP_NUM_THREADS=1 python bench/attacks.py [--cases pooled per_example ...] [--repeats 3]

pooled, per_example: online LiRA of all targets, 256 models x 60,000 samples x 2 queries, against
the column-loop form of the public code (timed on one target a repeat and scaled to all, and said
so); no row is written unless the scores agree to 1e-6. mapped: 1,000 models x 50,000 samples of
float16 on disk. rmia: offline, 64 targets x 60,000 samples, 10,000 population samples. ladder:
doubled sizes and the exponent of a fit. Repeats are interleaved: every repeat times each side, or
each size, once; medians are written. CPU seconds are of one thread. Four minutes on two quiet
cores.
"""

import argparse
import csv
import json
import platform
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import scipy

# Python puts this folder first on the path, where this very file is called attacks.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from attacks.lira import LiraParameters, lira  # noqa: E402
from attacks.population import Population  # noqa: E402
from attacks.rmia import RmiaParameters, rmia  # noqa: E402
from attacks.types import Array, Bools, Floats, ScoreMatrix  # noqa: E402

RESULTS = Path(__file__).parent / "results/attacks.csv"
MIB = 2**20


def paired(rng: np.random.Generator, models: int, samples: int) -> Bools:
    half = rng.random((models // 2, samples)) < 0.5
    return np.concatenate([half, ~half])


def study(models: int, samples: int, queries: int) -> ScoreMatrix:
    rng = np.random.default_rng(0)
    keep = paired(rng, models, samples)
    scores = np.empty((models, samples, queries), dtype=np.float32)
    for row, members in zip(scores, keep, strict=True):
        row[:] = rng.standard_normal((samples, queries), dtype=np.float32) + members[:, None]
    return ScoreMatrix(scores_MNQ=scores, keep_MN=keep)


def anonymous_mib() -> float:
    """Memory of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Peak:
    """The highest anonymous memory while the block runs, sampled every few milliseconds."""

    def __enter__(self) -> "Peak":
        self.mib, self._stop = anonymous_mib(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.004):
            self.mib = max(self.mib, anonymous_mib())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def interleaved(works: Sequence[Callable[[], object]], repeats: int) -> list[tuple[float, float]]:
    """Median wall and CPU seconds of each, all of them once in every repeat."""
    seconds = np.array([[timed(work) for work in works] for _ in range(repeats)])
    return [(float(wall), float(cpu)) for wall, cpu in np.median(seconds, axis=0)]


def column_loop(matrix: ScoreMatrix, target: int, partner: int, variance: str) -> Floats:
    """One target the way public code does it: gather each sample's IN and OUT scores in a loop."""
    from scipy.stats import norm

    others = [m for m in range(matrix.models) if m not in (target, partner)]
    scores, keep = matrix.scores_MNQ[others], matrix.keep_MN[others]
    sides = []
    for here in (keep, ~keep):
        columns = [scores[here[:, n], n, :] for n in range(matrix.samples)]
        centre = np.array([c.mean(axis=0, dtype=np.float64) for c in columns])
        squares = np.array(
            [((c - m) ** 2).sum(axis=0) for c, m in zip(columns, centre, strict=True)]
        )
        counts = np.array([len(c) for c in columns])[:, None]
        if variance == "pooled":
            spread = np.sqrt(squares.sum(axis=0) / (counts - 1).sum())
        else:
            spread = np.sqrt(squares / counts)
        own = matrix.scores_MNQ[target].astype(np.float64)
        sides.append(norm.logpdf(own, centre, spread))
    return np.asarray((sides[0] - sides[1]).mean(axis=1))


def lira_row(parameters: LiraParameters, repeats: int) -> dict[str, object]:
    before = anonymous_mib()
    matrix = study(256, 60_000, 2)
    size = (matrix.scores_MNQ.nbytes + matrix.keep_MN.nbytes) / MIB
    with Peak() as peak:
        result = lira(matrix, parameters)
    chosen = np.linspace(0, 255, repeats).astype(int).tolist()
    some = {target: result.scores_TN[target].copy() for target in chosen}
    del result
    walls, cpus, loops = [], [], []
    for target in chosen:
        wall, cpu = timed(lambda: lira(matrix, parameters))
        began = time.process_time()
        expected = column_loop(matrix, target, (target + 128) % 256, parameters.variance)
        loops.append(time.process_time() - began)
        np.testing.assert_allclose(some[target], expected, rtol=1e-6, atol=1e-6)
        walls.append(wall)
        cpus.append(cpu)
    wall, cpu = float(np.median(walls)), float(np.median(cpus))
    loop = float(np.median(loops)) * matrix.models
    return {
        "case": f"lira online {parameters.variance}",
        "models": 256,
        "samples": 60_000,
        "queries": 2,
        "dtype": "float32",
        "targets": 256,
        "seconds": round(wall, 2),
        "cpu_seconds": round(cpu, 2),
        "rival": f"column loop, CPU seconds of {repeats} targets scaled to 256",
        "rival_seconds": round(loop),
        "ratio": round(loop / cpu),
        "input_mib": round(size),
        "peak_over_input": round((peak.mib - before) / size, 2),
    }


def case_pooled(repeats: int) -> list[dict[str, object]]:
    return [lira_row(LiraParameters(variance="pooled"), repeats)]


def case_per_example(repeats: int) -> list[dict[str, object]]:
    return [lira_row(LiraParameters(variance="per_example"), repeats)]


def case_mapped(repeats: int) -> list[dict[str, object]]:
    models, samples = 1000, 50_000
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scores.npy"
        rng = np.random.default_rng(0)
        keep = paired(rng, models, samples)
        mapped = np.lib.format.open_memmap(path, "w+", np.float16, (models, samples))
        for row, members in zip(mapped, keep, strict=True):
            row[:] = rng.standard_normal(samples, dtype=np.float32) + members
        mapped.flush()
        del mapped
        matrix = ScoreMatrix(scores_MNQ=np.load(path, mmap_mode="r"), keep_MN=keep)
        before = anonymous_mib()
        with Peak() as peak:
            result = lira(matrix)
        output = result.scores_TN.nbytes / MIB
        size = models * samples * 2 / MIB
        del result
        wall, cpu = interleaved([partial(lira, matrix)], repeats)[0]
    return [
        {
            "case": "lira online pooled, memory-mapped",
            "models": models,
            "samples": samples,
            "queries": 1,
            "dtype": "float16",
            "targets": models,
            "seconds": round(wall, 2),
            "cpu_seconds": round(cpu, 2),
            "input_mib": round(size),
            "output_mib": round(output),
            "working_mib": round(peak.mib - before - output),
        }
    ]


def case_rmia(repeats: int) -> list[dict[str, object]]:
    matrix = study(128, 60_000, 1)
    population = Population(
        scores_MZQ=np.random.default_rng(1).standard_normal((128, 10_000), dtype=np.float32)
    )
    targets = list(range(64))
    with Peak() as peak:
        rmia(matrix, population, RmiaParameters(), targets)
    work = partial(rmia, matrix, population, RmiaParameters(), targets)
    wall, cpu = interleaved([work], repeats)[0]
    return [
        {
            "case": "rmia offline, population 10,000",
            "models": 128,
            "samples": 60_000,
            "queries": 1,
            "dtype": "float32",
            "targets": 64,
            "seconds": round(wall, 2),
            "cpu_seconds": round(cpu, 2),
            "working_mib": round(peak.mib),
        }
    ]


def exponent(sizes: list[int], seconds: list[float]) -> float:
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def case_ladder(repeats: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    base = {"models": 64, "samples": 100_000, "queries": 1}
    for axis in ("models", "samples", "queries"):
        sizes = [base[axis] * 2**k for k in range(4)]
        matrices = [study(**(base | {axis: size})) for size in sizes]
        works = [partial(lira, matrix) for matrix in matrices]
        rows.append(ladder_row("lira online pooled", axis, sizes, works, repeats))
        del matrices, works
    matrix = study(64, 1_000, 1)
    sizes, populations = [50_000 * 2**k for k in range(4)], []
    for size in sizes:
        z: Array = np.random.default_rng(1).standard_normal((64, size), dtype=np.float32)
        populations.append(Population(scores_MZQ=z))
    works = [partial(rmia, matrix, population) for population in populations]
    rows.append(ladder_row("rmia offline", "population", sizes, works, repeats))
    return rows


def ladder_row(
    case: str, axis: str, sizes: list[int], works: Sequence[Callable[[], object]], repeats: int
) -> dict[str, object]:
    seconds = [cpu for _, cpu in interleaved(works, repeats)]
    return {
        "case": f"{case}: growth in {axis}",
        "sizes": " ".join(map(str, sizes)),
        "cpu_seconds": " ".join(f"{s:.3f}" for s in seconds),
        "exponent": round(exponent(sizes, seconds), 2),
    }


CASES = {
    "pooled": case_pooled,
    "per_example": case_per_example,
    "mapped": case_mapped,
    "rmia": case_rmia,
    "ladder": case_ladder,
}
FIELDS = [
    *("case", "models", "samples", "queries", "dtype", "targets", "seconds", "cpu_seconds"),
    *("rival", "rival_seconds", "ratio", "input_mib", "peak_over_input", "output_mib"),
    *("working_mib", "sizes", "exponent", "repeats", "cpu", "python", "numpy", "scipy", "date"),
]


def where() -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": f"{names[0]} x{len(names)}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--inside", action="store_true", help="run one case here, print its rows")
    chosen = parser.parse_args()
    if chosen.inside:
        print(json.dumps(CASES[chosen.cases[0]](chosen.repeats)))
        return
    rows = []
    for case in chosen.cases:
        command = [sys.executable, __file__, "--inside", "--cases", case]
        command += ["--repeats", str(chosen.repeats)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        for row in json.loads(done.stdout.splitlines()[-1]):
            rows.append(row | {"repeats": chosen.repeats} | where())
            print(row, flush=True)
    fresh = not chosen.out.exists()
    with chosen.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if fresh:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
