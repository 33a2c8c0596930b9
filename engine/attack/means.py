"""Means over targets of one attack on one matrix, with the jackknife's intervals and ROC curves.

M models, N samples, T targets, A false-positive rates.
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from attacks.evaluate import Evaluation, evaluate, measure
from attacks.exclusion import Exclusion
from attacks.metrics import rate_name
from attacks.types import AttackScores, Interval, Ints, ScoreMatrix, no_interval
from engine.analysis.findings import MOST_GROUPS, Roc
from engine.analysis.scoring import GRID_A, MOST_THREADS
from engine.attack.functions import function, is_slow
from engine.attack.groups import Groups
from engine.attack.settings import Settings
from engine.attack.sources import Source

FEWER_GROUPS = 8
"""Deletion groups of attacks that fit something anew for every target."""


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The mean TPR at a false-positive rate; NaN, and why, where some target cannot show it."""

    alpha: float
    tpr: float
    interval: Interval
    refused: str = ""


@dataclass(frozen=True, kw_only=True)
class Mean:
    """The mean over targets of one attack on one matrix and group.

    targets: those that have an AUC, having members and non-members in the group; asked: all.
    samples: the group's (the mean number where each target has its own). non_members: the fewest
    of a target that counts. excluded: (target, sample) entries without a score. roc: of groups by
    kind.
    """

    source: str
    attack: str
    group: str
    targets: int
    asked: int
    samples: int
    non_members: int
    excluded: int
    auc: float
    interval: Interval
    rates: tuple[Rate, ...]
    roc: Roc | None

    @property
    def over(self) -> str:
        """Over how many targets the mean is, as "36" or "2 of 36"."""
        return f"{self.targets}" + f" of {self.asked}" * (self.targets < self.asked)


def means(
    source: Source,
    name: str,
    settings: Settings,
    attacked: AttackScores,
    groups: Groups,
    drawn: tuple[str, ...],
) -> list[Mean]:
    """One for each group; with intervals where every model was a target. drawn: groups with ROC."""
    alphas = (*settings.fpr, *GRID_A.tolist())
    common = {group: mask for group, mask in groups.items() if mask.ndim == 1}
    own = {group: mask for group, mask in groups.items() if mask.ndim == 2}
    everyone = len(attacked.targets_T) == len(source.models)
    if everyone:
        found = _evaluated(source, name, settings, common, alphas)
    else:
        told = f"{len(attacked.targets_T)} of {len(source.models)} models were targets"
        found = _refusing(measure(attacked, common, alphas), f"{told}, it needs all")
    rows = [_mean(source, name, settings, found, group, group in drawn) for group in common]
    if own:
        reason = "deciles are found anew for each target"
        apart = _refusing(measure(attacked, own, settings.fpr), reason)
        rows += [_mean(source, name, settings, apart, group, False) for group in own]
    sizes = _sizes(groups)
    return [dataclasses.replace(row, samples=sizes[row.group]) for row in rows]


def _evaluated(
    source: Source, name: str, settings: Settings, groups: Groups, alphas: tuple[float, ...]
) -> Evaluation:
    run = function(name)

    def again(matrix: ScoreMatrix, models: Ints, plan: Exclusion) -> AttackScores:
        fewer = dataclasses.replace(source, matrix=matrix, models=models)
        return run(fewer, settings, models, plan)

    slow = is_slow(name, settings)
    cores = min(len(os.sched_getaffinity(0)), MOST_THREADS)
    return evaluate(
        source.matrix,
        again,
        groups,
        alphas=alphas,
        models=source.models,
        max_groups=FEWER_GROUPS if slow else MOST_GROUPS,
        threads=1 if slow else cores,
    )


def _refusing(found: Evaluation, reason: str) -> Evaluation:
    return dataclasses.replace(found, refusal=reason)


def _sizes(groups: Groups) -> Mapping[str, int]:
    return {
        name: int(mask.sum()) if mask.ndim == 1 else round(float(mask.sum(axis=1).mean()))
        for name, mask in groups.items()
    }


def _mean(
    source: Source, name: str, settings: Settings, found: Evaluation, group: str, drawn: bool
) -> Mean:
    """The mean of one group; `samples` is filled in by the caller."""
    g, k = found.groups.index(group), found.metrics.index("auc")
    counts_T = np.isfinite(found.targets_TGK[:, g, k])
    n_out_T = found.n_out_TG[:, g]
    fewest = int(n_out_T[counts_T].min() if counts_T.any() else n_out_T.min())
    value = found.value(group, "auc")
    return Mean(
        source=source.name,
        attack=name,
        group=group,
        targets=int(counts_T.sum()),
        asked=len(counts_T),
        samples=0,
        non_members=fewest,
        excluded=int(found.excluded_TG[:, g].sum()),
        auc=value,
        interval=found.interval(group, "auc", settings.level),
        rates=tuple(_rate(found, group, alpha, fewest, settings.level) for alpha in settings.fpr),
        roc=_roc(found, group, fewest, settings.level) if drawn and fewest > 1 else None,
    )


def _rate(found: Evaluation, group: str, alpha: float, fewest: int, level: float) -> Rate:
    """Refused where 1 / non-members of some target is above alpha."""
    if not fewest or 1 / fewest > alpha:
        reason = f"fewer than {math.ceil(1 / alpha):,} non-members of a target"
        missing = no_interval(level, "none", reason)
        return Rate(alpha=alpha, tpr=math.nan, interval=missing, refused=reason)
    metric = rate_name(alpha)
    return Rate(
        alpha=alpha,
        tpr=found.value(group, metric),
        interval=found.interval(group, metric, level),
    )


def _roc(found: Evaluation, group: str, fewest: int, level: float) -> Roc:
    rates = [_rate(found, group, alpha, fewest, level) for alpha in GRID_A.tolist()]
    return Roc(
        fpr_A=np.append(GRID_A, 1.0),
        tpr_A=np.array([*(rate.tpr for rate in rates), 1.0]),
        low_A=np.array([*(rate.interval.low for rate in rates), 1.0]),
        high_A=np.array([*(rate.interval.high for rate in rates), 1.0]),
        floor=1 / fewest,
    )
