"""The rows of attacks.parquet: one a matrix, attack, group of samples and target.

M models, N samples, T targets.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from attacks.exclusion import Exclusion
from attacks.metrics import Transferred, advantage, auc, balanced_accuracy, tpr_at_fpr, transferred
from attacks.types import Array, AttackScores, Bools, Excluded, Ints
from engine.attack.groups import Groups
from engine.attack.settings import USES, Settings
from engine.attack.sources import Source

Row = dict[str, Any]
Counts = Mapping[str, Ints]

STATISTIC = "logit_scaled_confidence"


def model_counts(source: Source, plan: Exclusion, targets: Ints, groups: Groups) -> Counts:
    """Smallest, (lower) median and largest number of IN and OUT models of each target's samples.

    By group, shape (T, 2, 3).
    """
    found = {name: np.zeros((len(targets), 2, 3), dtype=np.int64) for name in groups}
    for i, both in enumerate(plan.counts(targets, source.alive_M)):
        for name, mask in groups.items():
            chosen_N = _of(mask, i)
            for side, count_N in enumerate(both):
                counts = np.sort(count_N[chosen_N])
                if counts.size:
                    found[name][i, side] = counts[[0, (counts.size - 1) // 2, -1]]
    return found


def rows(
    source: Source,
    name: str,
    settings: Settings,
    attacked: AttackScores,
    plan: Exclusion,
    groups: Groups,
    counts: Counts,
) -> list[Row]:
    """A row for each group and target that has samples in it."""
    found: list[Row] = []
    told = ", ".join(f"{key}={getattr(settings, key)}" for key in USES[name])
    for group, mask in groups.items():
        part = _restricted(attacked, mask)
        transfer = [
            transferred(part, alpha, plan.partner_M, settings.priors)
            for alpha in (settings.fpr if len(attacked.targets_T) > 1 else ())
        ]
        for i, target in enumerate(attacked.targets_T.tolist()):
            chosen_N = _of(mask, i)
            if not chosen_N.any():
                continue
            row = {
                "mix": source.mix,
                "arm": source.arm,
                "attack": name,
                "target": int(source.numbers_M[target]),
                "group": group,
                "statistic": STATISTIC,
                "variance": settings.variance if name.startswith("lira") else "none",
                "parameters": told,
                "query_mode": source.query_mode,
                "design": plan.design,
                "models": len(source.models),
                "queries": source.matrix.queries,
                "samples": int(chosen_N.sum()),
            }
            row |= _counted(attacked.excluded_TN[i, chosen_N], attacked.membership_TN[i, chosen_N])
            for s, side in enumerate(("in", "out")):
                for k, what in enumerate(("min", "median", "max")):
                    row[f"{side}_models_{what}"] = int(counts[group][i, s, k])
            scores, membership = (
                attacked.scores_TN[i, chosen_N],
                attacked.membership_TN[i, chosen_N],
            )
            row |= _measured(scores, membership, settings)
            for a, alpha in enumerate(settings.fpr):
                row |= _transferred(transfer[a] if transfer else None, i, alpha, settings.priors)
            found.append(row)
    return found


def _of(mask: Bools, target: int) -> Bools:
    """A target's own group."""
    chosen_N: Bools = mask if mask.ndim == 1 else mask[target]
    return chosen_N


def _restricted(attacked: AttackScores, mask: Bools) -> AttackScores:
    """The scores of a group alone."""
    if mask.ndim == 2:
        return replace(attacked, scores_TN=np.where(mask, attacked.scores_TN, np.nan))
    if mask.all():
        return attacked
    return replace(
        attacked,
        scores_TN=attacked.scores_TN[:, mask],
        membership_TN=attacked.membership_TN[:, mask],
        excluded_TN=attacked.excluded_TN[:, mask],
    )


def _counted(codes: Array, membership: Bools) -> Row:
    row: Row = {
        "excluded": int((codes > 0).sum()),
        "members": int((membership & (codes == 0)).sum()),
        "non_members": int((~membership & (codes == 0)).sum()),
    }
    for code in Excluded:
        if code:
            row[f"excluded_{code.name.lower()}"] = int((codes == code).sum())
    return row


def _measured(scores: Array, membership: Bools, settings: Settings) -> Row:
    row: Row = {
        "auc": _known(auc(scores, membership)),
        "balanced_accuracy": _known(balanced_accuracy(scores, membership)),
        "advantage": _known(advantage(scores, membership)),
    }
    for alpha in settings.fpr:
        rate = tpr_at_fpr(scores, membership, alpha)
        low, high = rate.bound or (math.nan, math.nan)
        row[f"tpr_at_{alpha:g}"] = _known(rate.tpr)
        row[f"realised_fpr_at_{alpha:g}"] = _known(rate.realised_fpr)
        row[f"tpr_at_{alpha:g}_refused"] = rate.refused
        row[f"tpr_at_{alpha:g}_at_least"] = _known(low)
        row[f"tpr_at_{alpha:g}_at_most"] = _known(high)
    return row


def _transferred(
    found: Transferred | None, target: int, alpha: float, priors: tuple[float, ...]
) -> Row:
    """Rates and precision at the threshold that the other targets set; nothing for one alone."""
    row: Row = {f"transferred_{rate}_at_{alpha:g}": None for rate in ("tpr", "fpr")}
    row |= {f"ppv_at_{alpha:g}_prior_{prior:g}": None for prior in priors}
    if found is not None:
        row[f"transferred_tpr_at_{alpha:g}"] = _known(float(found.tpr_T[target]))
        row[f"transferred_fpr_at_{alpha:g}"] = _known(float(found.fpr_T[target]))
        for p, prior in enumerate(priors):
            precision = float(found.ppv_PT[p, target])
            row[f"ppv_at_{alpha:g}_prior_{prior:g}"] = _known(precision)
    return row


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
