"""One cell of a run measured and attacked: numbers with replicates, then findings.

M models, N samples, Q queries, T targets, A false-positive rates.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attacks.exclusion import Exclusion, plan_exclusion
from attacks.lira import LiraParameters
from engine.analysis.findings import AttackFinding, CellFindings, RateAt, Roc
from engine.analysis.measures import CellMeasures, measure, sample_groups, untrained
from engine.analysis.scoring import (
    GRID_A,
    MODES,
    CellScores,
    GroupScores,
    score_cell,
    shadow_counts,
)
from engine.store import Cell
from engine.study import Study

Ints = npt.NDArray[np.int64]
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Analysed:
    """A cell's numbers with their replicates, and the models they are over."""

    models: Ints
    measures: CellMeasures
    scores: Mapping[str, CellScores]


def exclusion_plan(study: Study, cell: Cell) -> Exclusion:
    """Who is left out when a target of this cell is attacked."""
    return plan_exclusion(cell.keep_MN, study.membership.design)


def analyse_cell(
    study: Study,
    cell: Cell,
    models: Ints,
    nobody: str,
    phi: npt.NDArray[np.floating] | None = None,
) -> Analysed:
    """Measure and attack the given models of a cell (with `phi` in place of the final scores).

    nobody: why there are no models, where there are none.
    """
    plan = exclusion_plan(study, cell)
    deletion = _deletion_groups(plan.deletion_groups(), models)
    position = {int(m): i for i, m in enumerate(models)}
    measures = measure(
        cell,
        models,
        [tuple(position[m] for m in group) for group in deletion],
        study.attacks.level,
        nobody,
    )
    scores: dict[str, CellScores] = {
        mode: score_cell(
            cell.arrays["phi_NQ"] if phi is None else phi,
            plan,
            study.membership.design,
            models,
            sample_groups(cell.samples.kind_N),
            study.attacks.fpr,
            mode,
            LiraParameters(online=mode == "online", variance=study.attacks.variance),
            nobody,
        )
        for mode in (MODES if phi is None else MODES[:1])
    }
    return Analysed(models=models, measures=measures, scores=scores)


def _deletion_groups(groups: Groups, models: Ints) -> Groups:
    """The jackknife's groups without the models that are left out."""
    here = set(models.tolist())
    kept = (tuple(m for m in group if m in here) for group in groups)
    return tuple(group for group in kept if group)


def cell_findings(
    study: Study,
    mix: str,
    arm: str,
    cell: Cell,
    broken_M: npt.NDArray[np.bool_],
    found: Analysed,
) -> CellFindings:
    """What the report says of a cell."""
    level = study.attacks.level
    online = found.scores["online"]
    attacks = [
        _attack_finding(study, scores, group, int(mask_N.sum()))
        for scores in found.scores.values()
        for group, mask_N in sample_groups(cell.samples.kind_N).items()
        if not scores.refused
    ]
    return CellFindings(
        mix=mix,
        arm=arm,
        models=len(broken_M),
        diverged=tuple(np.flatnonzero(broken_M).tolist()),
        untrained=tuple(np.flatnonzero(untrained(cell) & ~broken_M).tolist()),
        refusals={mode: scores.refused for mode, scores in found.scores.items()},
        rates={name: rate.estimate(level) for name, rate in found.measures.rates.items()},
        attacks=tuple(attacks),
        excluded=online.excluded,
        entries=len(online.targets_T) * cell.keep_MN.shape[1],
        counts=_counts(exclusion_plan(study, cell), found.models),
        memorization=found.measures.memorization,
        curves=found.measures.curves,
        layers=found.measures.layers,
    )


def _counts(plan: Exclusion, models: Ints) -> dict[str, tuple[int, int, int]]:
    """Shadow models a sample, IN and OUT: smallest, median and largest over targets."""
    if not len(models):
        return {}
    every_N = np.ones(plan.keep_MN.shape[1], dtype=bool)
    return {
        side: (int(rows[:, 0].min()), int(np.median(rows[:, 1])), int(rows[:, 2].max()))
        for side, rows in shadow_counts(plan, models, every_N).items()
    }


def _attack_finding(study: Study, scores: CellScores, group: str, samples: int) -> AttackFinding:
    level, alphas = study.attacks.level, study.attacks.fpr
    found = scores.groups[group]
    return AttackFinding(
        mode=scores.mode,
        group=group,
        samples=samples,
        auc=found.auc.estimate(level),
        tpr=tuple(_rate_at(found, i, alpha, level) for i, alpha in enumerate(alphas)),
        roc=_roc(found, len(alphas), level) if scores.mode == "online" else None,
    )


def _rate_at(found: GroupScores, column: int, alpha: float, level: float) -> RateAt:
    rate = found.tpr_A[column]
    low, high = found.bound_TA2[:, column].mean(0)
    return RateAt(
        alpha=alpha,
        tpr=rate.estimate(level),
        realised_fpr=float(found.realised_fpr_TA[:, column].mean()),
        non_members=int(found.non_members_T.min()),
        refused=rate.undefined,
        bound=(float(low), float(high)) if rate.undefined and np.isfinite(low + high) else None,
    )


def _roc(found: GroupScores, first: int, level: float) -> Roc:
    estimates = [rate.estimate(level) for rate in found.tpr_A[first:]]
    return Roc(
        fpr_A=np.append(GRID_A, 1.0),
        tpr_A=np.array([*(e.value for e in estimates), 1.0]),
        low_A=np.array([*(e.interval.low for e in estimates), 1.0]),
        high_A=np.array([*(e.interval.high for e in estimates), 1.0]),
        floor=1 / max(1, int(found.non_members_T.min())),
    )
