"""Accuracy, loss, learning curves, memorization and gamma/sigma of one cell of a run.

M models, N samples, Q queries, Z population images, E epochs, G curve groups or deletion groups,
L batch-norm layers. Everything here is a mean over models with leave-a-pair-out replicates.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from attacks.memorization import memorization
from engine.analysis.findings import (
    CURVE_GROUPS,
    RATE,
    RATES,
    Curve,
    Histogram,
    LayerCurves,
    Range,
)
from engine.analysis.replicates import Groups, Replicated, mean, mean_curve, undefined
from engine.outliers import CLEAN
from engine.store import Cell

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

LAYER_ARRAYS = ("gamma_EL", "sigma_EL", "weight_norm_EL", "gamma_over_sigma_EL")


@dataclass(frozen=True, kw_only=True)
class CellMeasures:
    """What the models of a cell did, before any attack."""

    rates: Mapping[str, Replicated]
    curves: Mapping[str, Curve]
    memorization: Mapping[str, Histogram]
    layers: LayerCurves | None


def sample_groups(kind_N: npt.NDArray[np.uint8]) -> dict[str, Bools]:
    """The groups of samples a mix has: "all", and "clean" and "outlier" where it has outliers."""
    clean_N = kind_N == CLEAN
    groups = {"all": np.ones(len(kind_N), dtype=bool)}
    if not clean_N.all():
        groups |= {"clean": clean_N, "outlier": ~clean_N}
    return groups


def diverged(cell: Cell) -> Bools:
    """Models whose training or whose scores left the finite numbers, (M,)."""
    models = len(cell.keep_MN)
    flags_M = np.zeros(models, dtype=bool)
    if "diverged" in cell.arrays:
        flags_M |= cell.arrays["diverged"].astype(bool).reshape(models)
    for name in ("phi_NQ", "population_phi_ZQ"):
        scores = cell.arrays[name]
        flags_M |= np.array([not np.isfinite(scores[m]).all() for m in range(models)])
    return flags_M


def untrained(cell: Cell) -> Bools:
    """Models that never left chance: below 2 / K correct on the clean samples trained on, (M,).

    K classes, by the labels trained on. Such a model finished, with finite numbers, and yet says
    nothing of what trained networks remember.
    """
    clean_N = cell.samples.kind_N == CLEAN
    chance = 1 / (1 + int(cell.samples.label_N.max()))
    correct_MN = cell.arrays["correct_N"].astype(bool)
    share_M = [correct[keep & clean_N].mean() if (keep & clean_N).any() else math.nan
               for correct, keep in zip(correct_MN, cell.keep_MN, strict=True)]  # fmt: skip
    return np.array(share_M) < 2 * chance


def measure(
    cell: Cell, models: npt.NDArray[np.int64], groups: Groups, level: float, nobody: str
) -> CellMeasures:
    """Measure the given models of a cell; `groups` index into `models`.

    nobody: why `models` is empty, where it is.
    """
    curves = _curves(cell, models, groups, level)
    per_model = {**_by_group(cell, models), **_speed(cell, models)}
    layers = _layers(cell, models, groups, level)
    if layers is not None:
        share_ML = np.abs(cell.arrays["gamma_over_sigma_EL"][models, -1]) > 1
        per_model["gamma_share"] = share_ML.mean(1)
    why = {name: _why_undefined(name, cell, "" if len(models) else nobody) for name in RATES}
    rates = {
        name: mean(per_model[name], groups, why[name], _possible(name))
        if name in per_model
        else undefined(why[name])
        for name in RATES
    }
    return CellMeasures(
        rates=rates, curves=curves, memorization=_histograms(cell, models), layers=layers
    )


def _possible(name: str) -> Range:
    what = name.rpartition("_")[2]
    return {"accuracy": RATE, "share": RATE, "gap": (-1.0, 1.0)}.get(what, (0.0, math.inf))


def _why_undefined(name: str, cell: Cell, nobody: str) -> str:
    if name == "gamma_share" and "gamma_over_sigma_EL" not in cell.arrays:
        return "the arm has no batch norm"
    if name.startswith("outlier") and (cell.samples.kind_N == CLEAN).all():
        return "the mix has no outliers"
    return nobody or "in some model there are no such samples"


def _by_group(cell: Cell, models: npt.NDArray[np.int64]) -> dict[str, Floats]:
    """Accuracy and loss of the label trained on, plain view, by group and membership, each (M,)."""
    groups = sample_groups(cell.samples.kind_N)
    groups.setdefault("clean", groups["all"])
    found: dict[str, list[float]] = {}
    for m in models:
        correct_N, keep_N = cell.arrays["correct_N"][m].astype(bool), cell.keep_MN[m]
        loss_N = _loss(cell.arrays["phi_NQ"][m, :, 0])
        row = {
            "test_accuracy": float(cell.arrays["population_correct_Z"][m].mean()),
            "test_loss": float(_loss(cell.arrays["population_phi_ZQ"][m, :, 0]).mean()),
        }
        for name, chosen_N in groups.items():
            for side, on_side_N in (("in", chosen_N & keep_N), ("out", chosen_N & ~keep_N)):
                row[f"{name}_{side}_accuracy"] = _mean(correct_N[on_side_N])
                row[f"{name}_{side}_loss"] = _mean(loss_N[on_side_N])
            row[f"{name}_gap"] = row[f"{name}_in_accuracy"] - row[f"{name}_out_accuracy"]
        for name, value in row.items():
            found.setdefault(name, []).append(value)
    return {name: np.array(values) for name, values in found.items()}


def _speed(cell: Cell, models: npt.NDArray[np.int64]) -> dict[str, Floats]:
    """Epochs that a training sample of the probe set stays misclassified, on average, (M,)."""
    if "curve_accuracy_EG" not in cell.arrays:
        return {}
    accuracy_MEG = cell.arrays["curve_accuracy_EG"][models].astype(np.float64)
    return {
        f"{kind}_unfit": (1 - accuracy_MEG[:, :, CURVE_GROUPS.index(f"{kind}_in")]).sum(1)
        for kind in ("clean", "outlier")
    }


def _curves(
    cell: Cell, models: npt.NDArray[np.int64], groups: Groups, level: float
) -> dict[str, Curve]:
    curves = {}
    for what in ("accuracy", "loss"):
        values = cell.arrays.get(f"curve_{what}_EG")
        if values is None:
            continue
        for column, name in enumerate(CURVE_GROUPS):
            values_ME = values[models][:, :, column]
            if len(values_ME) and not np.isnan(values_ME).all():
                curves[f"{what}/{name}"] = mean_curve(values_ME, groups, level)
    return curves


def _layers(
    cell: Cell, models: npt.NDArray[np.int64], groups: Groups, level: float
) -> LayerCurves | None:
    if not len(models) or any(name not in cell.arrays for name in LAYER_ARRAYS):
        return None
    means = [cell.arrays[name][models].astype(np.float64).mean(0) for name in LAYER_ARRAYS]
    share_ME = (np.abs(cell.arrays["gamma_over_sigma_EL"][models]) > 1).mean(2)
    return LayerCurves(
        gamma_EL=means[0],
        sigma_EL=means[1],
        weight_norm_EL=means[2],
        ratio_EL=means[3],
        share=mean_curve(share_ME, groups, level),
    )


def _histograms(cell: Cell, models: npt.NDArray[np.int64]) -> dict[str, Histogram]:
    """Memorization scores P[correct | IN] - P[correct | OUT] by kind of samples."""
    if not len(models):
        return {}
    keep_MN = cell.keep_MN[models]
    score_N = memorization(cell.arrays["correct_N"][models].astype(bool), keep_MN).score_N
    edges = memorization_bins(int(np.median(np.minimum(keep_MN.sum(0), (~keep_MN).sum(0)))))
    clean_N = cell.samples.kind_N == CLEAN
    found = {}
    for name, chosen_N in (("clean", clean_N), ("outlier", ~clean_N)):
        scores = score_N[chosen_N]
        known = scores[np.isfinite(scores)]
        if len(known):
            found[name] = Histogram(
                edges_B=edges,
                share_B=np.histogram(known, edges)[0] / len(known),
                samples=len(scores),
                undefined=len(scores) - len(known),
                mean=float(known.mean()),
            )
    return found


def memorization_bins(per_side: int) -> Floats:
    """Bin edges on [-1, 1] that fall between the values a score of `per_side` models can take.

    Scores are multiples of 1 / per_side: bins an odd number of steps wide, centred on 0, hold
    equally many of them, so that no comb appears.

    >>> memorization_bins(1).tolist()
    [-1.5, -0.5, 0.5, 1.5]
    """
    step = 1 / max(per_side, 1)
    width = step * (2 * round((0.08 / step - 1) / 2) + 1) if step < 0.08 else step
    count = math.ceil((1 - width / 2) / width - 1e-9)
    return np.arange(-count - 0.5, count + 1) * width


def _mean(values: npt.NDArray[Any]) -> float:
    return float(values.mean()) if len(values) else math.nan


def _loss(phi: npt.NDArray[np.floating]) -> Floats:
    """Cross-entropy softplus(-phi)."""
    return np.logaddexp(0.0, -phi.astype(np.float64)).astype(np.float64)
