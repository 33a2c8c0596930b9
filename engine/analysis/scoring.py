"""LiRA on one cell of a run: AUC and TPR of each group of samples, with replicates.

M models, N samples, Q queries, T targets, A false-positive rates, G deletion groups.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from attacks.evaluate import Evaluation, evaluate, lira_attack
from attacks.exclusion import Exclusion
from attacks.lira import LiraParameters, lira
from attacks.metrics import tpr_at_fpr
from attacks.types import AttackScores, Design, ScoreMatrix
from engine.analysis.findings import MOST_GROUPS, RATE
from engine.analysis.replicates import Replicated, undefined
from engine.analysis.wording import percent

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

Mode = Literal["online", "offline"]
MODES: tuple[Mode, ...] = ("online", "offline")
GRID_A = np.logspace(-4, 0, 41)[:-1]
"""The false-positive rates below 1 at which ROC curves are drawn."""
MOST_THREADS = 8
"""Each holds a (targets, samples) matrix of scores."""


@dataclass(frozen=True, kw_only=True)
class GroupScores:
    """One group of samples under one attack: per target, and the mean with its replicates."""

    auc_T: Floats
    tpr_TA: Floats
    realised_fpr_TA: Floats
    bound_TA2: Floats
    """What encloses a refused TPR; NaN where it is given."""
    non_members_T: Ints
    members_T: Ints
    excluded_T: Ints
    auc: Replicated
    tpr_A: tuple[Replicated, ...]


@dataclass(frozen=True, kw_only=True)
class CellScores:
    """An attack on a cell: what came of every group, what was excluded, or why it was refused."""

    mode: Mode
    targets_T: Ints
    groups: Mapping[str, GroupScores]
    excluded: Mapping[str, int]
    refused: str = ""


def score_cell(
    scores_MNQ: npt.NDArray[np.floating],
    plan: Exclusion,
    design: Design,
    models: Ints,
    groups: Mapping[str, Bools],
    alphas: Sequence[float],
    mode: Mode,
    parameters: LiraParameters,
    nobody: str,
) -> CellScores:
    """Attack every model of `models` with the others.

    Models outside `models` count as never trained; nobody says why there are none, where there are
    none. groups: masks (N,) of samples. alphas: the study's false-positive rates; the online attack
    is read at GRID_A too, for its ROC curves.
    """
    if not len(models):
        return _refused(mode, models, nobody)
    matrix = ScoreMatrix(
        scores_MNQ=_blanked(scores_MNQ, models), keep_MN=plan.keep_MN, design=design
    )
    try:
        attacked = lira(matrix, parameters, targets=models, plan=plan)
    except ValueError as error:
        return _refused(mode, models, str(error))
    evaluation = evaluate(
        matrix,
        lira_attack(parameters),
        groups,
        alphas=[*alphas, *(GRID_A if parameters.online else ())],
        max_groups=MOST_GROUPS,
        threads=min(len(os.sched_getaffinity(0)), MOST_THREADS),
    )
    return CellScores(
        mode=mode,
        targets_T=models,
        groups={
            name: _group_scores(evaluation, attacked, models, name, chosen_N, alphas)
            for name, chosen_N in groups.items()
        },
        excluded=attacked.exclusions(),
    )


def _blanked(scores_MNQ: npt.NDArray[np.floating], models: Ints) -> npt.NDArray[np.floating]:
    """The scores with NaN for models that do not count; the array itself where all do."""
    gone = np.setdiff1d(np.arange(len(scores_MNQ)), models)
    if not len(gone):
        return scores_MNQ
    scores = scores_MNQ.copy()
    scores[gone] = np.nan
    return scores


def _group_scores(
    evaluation: Evaluation,
    attacked: AttackScores,
    models: Ints,
    name: str,
    chosen_N: Bools,
    alphas: Sequence[float],
) -> GroupScores:
    column = evaluation.groups.index(name)
    values_TK = evaluation.targets_TGK[models, column]
    here = set(models.tolist())
    counted = [r for r, gone in enumerate(evaluation.deletions) if here & set(gone)]
    replicates_RK = evaluation.replicates_RGK[counted, column]
    fewest = int(evaluation.n_out_TG[models, column].min())
    means = [
        Replicated(
            value=float(evaluation.value_GK[column, k]),
            replicates_G=replicates_RK[:, k],
            possible=RATE,
        )
        for k in range(len(evaluation.metrics))
    ]
    realised_TA, bound_TA2 = _read_off(attacked, chosen_N, alphas)
    for k, alpha in enumerate(alphas):
        if fewest * alpha < 1:
            means[k + 1] = undefined(
                f"fewer than {math.ceil(1 / alpha):,} non-members: they cannot show a "
                f"false-positive rate of {percent(alpha)}"
            )
    return GroupScores(
        auc_T=values_TK[:, 0],
        tpr_TA=values_TK[:, 1:],
        realised_fpr_TA=realised_TA,
        bound_TA2=bound_TA2,
        members_T=evaluation.n_in_TG[models, column],
        non_members_T=evaluation.n_out_TG[models, column],
        excluded_T=evaluation.excluded_TG[models, column],
        auc=means[0],
        tpr_A=tuple(means[1:]),
    )


def _read_off(
    attacked: AttackScores, chosen_N: Bools, alphas: Sequence[float]
) -> tuple[Floats, Floats]:
    """The false-positive rates at which TPRs were read, (T, A), and what encloses refused ones."""
    shape = (len(attacked.targets_T), len(alphas))
    realised_TA, bound_TA2 = np.full(shape, math.nan), np.full((*shape, 2), math.nan)
    for t, member_N in enumerate(attacked.membership_TN):
        for a, alpha in enumerate(alphas):
            found = tpr_at_fpr(attacked.scores_TN[t, chosen_N], member_N[chosen_N], alpha)
            realised_TA[t, a] = found.realised_fpr
            if found.bound is not None:
                bound_TA2[t, a] = found.bound
    return realised_TA, bound_TA2


def _refused(mode: Mode, models: Ints, reason: str) -> CellScores:
    return CellScores(mode=mode, targets_T=models, groups={}, excluded={}, refused=reason)


def shadow_counts(plan: Exclusion, models: Ints, chosen_N: Bools) -> dict[str, Ints]:
    """IN and OUT models behind the chosen samples: (T, 3) smallest, (lower) median, largest."""
    alive_M = np.zeros(len(plan.keep_MN), dtype=np.bool_)
    alive_M[models] = True
    found: dict[str, list[tuple[int, int, int]]] = {"in": [], "out": []}
    for both in plan.counts(models, alive_M):
        for side, counts_N in zip(("in", "out"), both, strict=True):
            here = counts_N[chosen_N]
            median = np.quantile(here, 0.5, method="lower")
            found[side].append((int(here.min()), int(median), int(here.max())))
    return {side: np.array(rows, dtype=np.int64).reshape(-1, 3) for side, rows in found.items()}
