"""One score matrix to a table row: means over targets by group, with jackknife replicates.

    result = evaluate(matrix, lira_attack(LiraParameters()), {"all": everything, "flipped": mask})
    result.value("all", "auc"), result.interval("all", "auc")
    difference(result_bn, result_nobn).interval("flipped", "auc")

The replicates leave one group of models out (as targets and as shadows) and are kept, so that a
paired difference of two arms is the jackknife of the differences of their replicates.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from attacks.exclusion import Exclusion, plan_exclusion
from attacks.intervals import jackknife, keep_digest
from attacks.lira import LiraParameters, lira
from attacks.metrics import allowed_false_positives, auc_and_tpr, rate_name
from attacks.types import (
    AttackScores,
    Bools,
    Floats,
    Interval,
    Ints,
    ScoreMatrix,
    no_interval,
    require,
    resolve_targets,
)

FEWEST_GROUPS = 3
_TOGETHER = 1 << 18

Attack = Callable[[ScoreMatrix, Ints, Exclusion], AttackScores]
"""Attacks every model among those that exist: (matrix, models that exist, exclusion rule)."""


def lira_attack(parameters: LiraParameters | None = None) -> Attack:
    """LiRA with these parameters, in the form `evaluate` takes."""

    def attack(matrix: ScoreMatrix, models: Ints, plan: Exclusion) -> AttackScores:
        return lira(matrix, parameters, models=models, plan=plan)

    return attack


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Means over targets (G groups, K metrics), the same without each of R groups of models.

    value_GK: NaN where no target defines the metric. targets_TGK: each target's own value.
    replicates_RGK: NaN throughout, with `refusal` set, where the attack needs more models.
    n_in, n_out, excluded: per target and group. deletions: the models left out of each replicate.
    """

    groups: tuple[str, ...]
    metrics: tuple[str, ...]
    value_GK: Floats
    targets_TGK: Floats
    replicates_RGK: Floats
    n_in_TG: Ints
    n_out_TG: Ints
    excluded_TG: Ints
    deletions: tuple[tuple[int, ...], ...]
    keep_digest: str
    refusal: str = ""

    def _at(self, group: str, metric: str) -> tuple[int, int]:
        require(group in self.groups, f"unknown group '{group}': known are {self.groups}")
        require(metric in self.metrics, f"unknown metric '{metric}': known are {self.metrics}")
        return self.groups.index(group), self.metrics.index(metric)

    def value(self, group: str, metric: str) -> float:
        """The mean over targets."""
        return float(self.value_GK[self._at(group, metric)])

    def interval(self, group: str, metric: str, level: float = 0.95) -> Interval:
        """Its jackknife interval, or the reason why there is none."""
        g, k = self._at(group, metric)
        if self.refusal:
            return no_interval(level, "delete-a-group jackknife, t", self.refusal)
        return jackknife(
            float(self.value_GK[g, k]),
            self.replicates_RGK[:, g, k],
            level=level,
            targets=len(self.targets_TGK),
        )


def difference(first: Evaluation, second: Evaluation) -> Evaluation:
    """first - second, replicate by replicate. Raises ValueError unless the masks are the same."""
    require(
        first.keep_digest == second.keep_digest and first.deletions == second.deletions,
        "a paired difference needs the same masks on both sides: these differ",
    )
    require(
        first.groups == second.groups and first.metrics == second.metrics,
        "a paired difference needs the same groups and metrics on both sides",
    )
    return Evaluation(
        groups=first.groups,
        metrics=first.metrics,
        value_GK=first.value_GK - second.value_GK,
        targets_TGK=first.targets_TGK - second.targets_TGK,
        replicates_RGK=first.replicates_RGK - second.replicates_RGK,
        n_in_TG=np.minimum(first.n_in_TG, second.n_in_TG),
        n_out_TG=np.minimum(first.n_out_TG, second.n_out_TG),
        excluded_TG=np.maximum(first.excluded_TG, second.excluded_TG),
        deletions=first.deletions,
        keep_digest=first.keep_digest,
        refusal=first.refusal or second.refusal,
    )


def evaluate(
    matrix: ScoreMatrix,
    attack: Attack,
    groups: Mapping[str, Bools],
    *,
    alphas: Sequence[float] = (0.001, 0.01),
    models: npt.ArrayLike | None = None,
    replicates: bool = True,
    max_groups: int = 0,
    threads: int = 1,
) -> Evaluation:
    """Mean AUC and TPR at each alpha over all targets, by group of samples, with replicates.

    groups: name to bool (N,). Metrics are "auc" and "tpr@ALPHA"; TPR is NaN where 1 / n_out >
    alpha. models: those that exist (others count as never trained). max_groups: merge deletion
    groups to at most so many (0: none merged; each replicate attacks all models once more).
    threads share the replicates. Raises ValueError for bad groups, and what the attack raises on
    all models.
    """
    require(bool(groups), "evaluate needs one group of samples at least")
    for name, mask in groups.items():
        require(
            mask.shape == (matrix.samples,) and mask.dtype == np.bool_,
            f"group '{name}' is not a bool mask over the {matrix.samples} samples",
        )
    plan = plan_exclusion(matrix.keep_MN, matrix.design)
    if plan.opposite_M.any():
        plan = replace(plan, scores_MNQ=matrix.scores_MNQ)
    everyone = np.sort(resolve_targets(models, matrix.models))
    full = measure(attack(matrix, everyone, plan), groups, alphas)
    deletions = _merged(_among(plan, everyone), max_groups) if replicates else ()
    refusal = "" if replicates else "no replicates were asked for"
    if replicates and len(deletions) < FEWEST_GROUPS:
        groups_ = f"{len(deletions)} group{'' if len(deletions) == 1 else 's'} of models"
        deletions, refusal = (), f"{groups_}: three needed"

    def replicate(deleted: tuple[int, ...]) -> Floats:
        return measure(
            attack(matrix, np.setdiff1d(everyone, deleted), plan), groups, alphas
        ).value_GK

    shape = (len(deletions), len(groups), 1 + len(alphas))
    values = np.full(shape, np.nan)
    try:
        with ThreadPoolExecutor(max(1, threads)) as pool:
            for r, value in enumerate(pool.map(replicate, deletions)):
                values[r] = value
    except ValueError as error:
        refusal = str(error)
        values = np.full(shape, np.nan)
    return replace(
        full,
        replicates_RGK=values,
        deletions=deletions,
        keep_digest=keep_digest(matrix.keep_MN),
        refusal=refusal,
    )


def measure(
    attacked: AttackScores, groups: Mapping[str, Bools], alphas: Sequence[float] = (0.001, 0.01)
) -> Evaluation:
    """The same means of attack scores that are there already, without replicates or intervals.

    groups: name to bool (N,), or (T, N) where each target has a group of its own.
    """
    shape = (len(attacked.targets_T), len(groups))
    values = np.full((*shape, 1 + len(alphas)), np.nan)
    counts = np.zeros((3, *shape), dtype=np.int64)
    unknown = np.isnan(attacked.scores_TN)
    for g, group in enumerate(groups.values()):
        if group.ndim == 2:
            _own_groups(attacked, group, tuple(alphas), values[:, g], counts[:, :, g])
        else:
            _one_group(attacked, group, unknown, tuple(alphas), values[:, g], counts[:, :, g])
    return Evaluation(
        groups=tuple(groups),
        metrics=("auc", *(rate_name(alpha) for alpha in alphas)),
        value_GK=_mean(values),
        targets_TGK=values,
        replicates_RGK=np.full((0, len(groups), 1 + len(alphas)), np.nan),
        n_in_TG=counts[0],
        n_out_TG=counts[1],
        excluded_TG=counts[2],
        deletions=(),
        keep_digest="",
        refusal="it was measured without replicates",
    )


def _among(plan: Exclusion, everyone: Ints) -> tuple[tuple[int, ...], ...]:
    """The deletion groups, of the models that exist."""
    here = set(everyone.tolist())
    kept = (tuple(m for m in group if m in here) for group in plan.deletion_groups())
    return tuple(group for group in kept if group)


def _merged(deletions: tuple[tuple[int, ...], ...], most: int) -> tuple[tuple[int, ...], ...]:
    if not most or len(deletions) <= most:
        return deletions
    require(most >= 3, f"max_groups is {most}: expected 0 or 3 and more")
    return tuple(tuple(m for group in deletions[i::most] for m in group) for i in range(most))


def _mean(values_TGK: Floats) -> Floats:
    """Mean over the targets that define the metric; NaN where none does."""
    known = ~np.isnan(values_TGK)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(known, values_TGK, 0).sum(axis=0) / known.sum(axis=0))


def _one_group(
    attacked: AttackScores,
    group: Bools,
    unknown: Bools,
    alphas: tuple[float, ...],
    values_TK: Floats,
    counts_CT: Ints,
) -> None:
    """Metrics and counts (in, out, excluded) of every target on the samples of one group."""
    used = group & ~unknown.all(axis=0)
    columns = slice(None) if used.all() else np.flatnonzero(used)
    size = max(1, _TOGETHER // max(1, int(used.sum())))
    for first in range(0, len(values_TK), size):
        part = slice(first, first + size)
        scores = attacked.scores_TN[part, columns]
        labels, missing = attacked.membership_TN[part, columns], unknown[part, columns]
        counts_CT[0, part] = (labels & ~missing).sum(axis=1)
        counts_CT[1, part] = (~labels & ~missing).sum(axis=1)
        values_TK[part] = _metrics(scores, labels, missing, alphas)
    counts_CT[2] = int(group.sum()) - counts_CT[0] - counts_CT[1]


def _own_groups(
    attacked: AttackScores,
    group_TN: Bools,
    alphas: tuple[float, ...],
    values_TK: Floats,
    counts_CT: Ints,
) -> None:
    for t, group in enumerate(group_TN):
        scores, labels = attacked.scores_TN[t, group], attacked.membership_TN[t, group]
        known = ~np.isnan(scores)
        counts_CT[:, t] = (labels & known).sum(), (~labels & known).sum(), (~known).sum()
        values_TK[t] = auc_and_tpr(scores, labels, alphas)


def _metrics(
    scores_Tn: Floats, labels_Tn: Bools, missing_Tn: Bools, alphas: tuple[float, ...]
) -> Floats:
    """AUC, then TPR at each alpha (NaN where refused), of each target.

    One sort of integers that order like the scores, with the label in their last bit. Where two of
    them agree in the rest there may be ties: there, and where scores are missing, the plain
    functions decide.
    """
    result = np.full((len(scores_Tn), 1 + len(alphas)), np.nan)
    bits = (scores_Tn + 0.0).view(np.int64)
    bits ^= (bits >> 63) & np.int64(0x7FFFFFFFFFFFFFFF)
    bits &= np.int64(-2)
    bits |= labels_Tn
    bits.sort(axis=1)
    plain = missing_Tn.any(axis=1) | ((bits[:, 1:] >> 1) == (bits[:, :-1] >> 1)).any(axis=1)
    for t in np.flatnonzero(plain).tolist():
        result[t] = auc_and_tpr(scores_Tn[t], labels_Tn[t], alphas)
    out = (bits & 1) == 0
    n_out = out.sum(axis=1)
    n_in = out.shape[1] - n_out
    fast = np.flatnonzero(~plain & (n_in > 0) & (n_out > 0))
    if not fast.size:
        return result
    places = np.nonzero(out[fast])[1]
    n_in, n_out = n_in[fast], n_out[fast]
    begin = np.cumsum(n_out) - n_out
    members_below = np.add.reduceat(places, begin) - n_out * (n_out - 1) // 2
    result[fast, 0] = (n_out * n_in - members_below) / (n_in * n_out)
    for k, alpha in enumerate(alphas, start=1):
        allowed = np.array([allowed_false_positives(alpha, n) for n in n_out.tolist()])
        place = n_out - 1 - np.minimum(allowed, n_out - 1)
        above = n_in - (places[begin + place] - place)
        rate = np.where(allowed >= n_out, 1.0, above / n_in)
        result[fast, k] = np.where(1 / n_out > alpha, np.nan, rate)
    return result
