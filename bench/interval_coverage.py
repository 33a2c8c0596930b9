"""Coverage of the 95 % jackknife intervals over redrawn Gaussian studies.

    python bench/interval_coverage.py [--studies 2000] [--models 8 16 32 64] [--designs paired ...]
        [--redraw-samples]

Every study redraws masks, shadow models and targets, on the same samples: what the intervals are
about. With --redraw-samples the samples are redrawn as well, which the intervals do not promise to
cover; such rows say so in their statistic. Each row: how often the
interval of the mean AUC, and of a paired difference of two arms, covers the mean over all studies;
its mean width beside the oracle's, 2 * 1.96 * the estimate's true standard deviation. Writes
bench/results/.
"""

import argparse
import csv
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

# Python puts this folder first on the path, where bench/attacks.py is called attacks.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from attacks.evaluate import difference, evaluate, lira_attack  # noqa: E402
from attacks.types import Bools, Design, Floats, ScoreMatrix  # noqa: E402

SAMPLES, GAP = 100, 1.5


def mask(rng: np.random.Generator, design: str, models: int) -> Bools:
    if design == "paired":
        half = rng.random((models // 2, SAMPLES)) < 0.5
        return np.concatenate([half, ~half])
    if design == "balanced":
        return np.argsort(rng.random((models, SAMPLES)), axis=0) < models // 2
    return rng.random((models, SAMPLES)) < 0.5


def two_arms(
    rng: np.random.Generator, design: str, models: int, redraw: bool
) -> Iterator[ScoreMatrix]:
    """Two arms on the same masks, whose scores share half of their noise."""
    keep = mask(rng, design, models)
    samples = rng if redraw else np.random.default_rng(0)
    level, spread = samples.normal(0, 2, SAMPLES), samples.uniform(0.5, 2, SAMPLES)
    shared = rng.normal(size=keep.shape)
    for gap in (GAP, GAP / 2):
        noise = (shared + rng.normal(size=keep.shape)) / np.sqrt(2)
        scores = level + spread * noise + gap * keep
        stated: Design = "bernoulli" if design == "bernoulli" else "auto"
        yield ScoreMatrix(scores_MNQ=scores, keep_MN=keep, design=stated)


def simulate(design: str, models: int, studies: int, redraw: bool) -> tuple[Floats, Floats, Floats]:
    everyone = {"all": np.ones(SAMPLES, dtype=bool)}
    values, lows, highs = (np.empty((studies, 2)) for _ in range(3))
    for s in range(studies):
        rng = np.random.default_rng([s, models, len(design)])
        arms = [
            evaluate(matrix, lira_attack(), everyone, alphas=())
            for matrix in two_arms(rng, design, models, redraw)
        ]
        for i, result in enumerate((arms[0], difference(*arms))):
            interval = result.interval("all", "auc")
            values[s, i] = result.value("all", "auc")
            lows[s, i], highs[s, i] = interval.low, interval.high
    return values, lows, highs


def cpu_name() -> str:
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [row.split(":")[1].strip() for row in text.splitlines() if row.startswith("model name")]
    return f"{names[0] if names else platform.processor()} x{len(names)}"


def rows(design: str, models: int, studies: int, redraw: bool) -> Iterator[dict[str, object]]:
    began = time.perf_counter()
    values, lows, highs = simulate(design, models, studies, redraw)
    for i, statistic in enumerate(("auc", "paired difference of auc")):
        truth = values[:, i].mean()
        covered = float(((lows[:, i] <= truth) & (truth <= highs[:, i])).mean())
        yield {
            "design": design,
            "models": models,
            "statistic": statistic + ", samples redrawn" * redraw,
            "studies": studies,
            "coverage": round(covered, 4),
            "coverage_se": round((covered * (1 - covered) / studies) ** 0.5, 4),
            "mean_width": f"{(highs[:, i] - lows[:, i]).mean():.5f}",
            "oracle_width": f"{2 * 1.96 * values[:, i].std(ddof=1):.5f}",
            "seconds": round(time.perf_counter() - began),
            "cpu": cpu_name(),
            "numpy": np.__version__,
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d"),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=2000)
    parser.add_argument("--models", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--designs", nargs="+", default=["paired", "balanced", "bernoulli"])
    parser.add_argument("--redraw-samples", action="store_true")
    parser.add_argument("--out", default=Path(__file__).parent / "results/interval_coverage.csv")
    chosen = parser.parse_args()
    out = Path(chosen.out)
    fresh = not out.exists()
    with out.open("a", newline="") as file:
        for design in chosen.designs:
            for models in chosen.models:
                for row in rows(design, models, chosen.studies, chosen.redraw_samples):
                    writer = csv.DictWriter(file, list(row))
                    if fresh:
                        writer.writeheader()
                        fresh = False
                    writer.writerow(row)
                    file.flush()
                    print(row, flush=True)


if __name__ == "__main__":
    main()
