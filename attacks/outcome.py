"""From sums over queries and reason codes to AttackScores; nothing is excluded without a reason."""

from collections.abc import Sequence

import numpy as np

from attacks.leave_out import Problem
from attacks.types import AttackScores, Bools, Codes, Excluded, Floats


def attack_scores(problem: Problem, sums_TN: Floats, codes_TN: Codes) -> AttackScores:
    """Means over queries from their sums, NaN where a reason code says so or none is finite.

    Both arrays are changed in place.
    """
    for row, code in zip(sums_TN, codes_TN, strict=True):
        if problem.matrix.queries > 1:
            row /= problem.matrix.queries
        code[(code == 0) & ~np.isfinite(row)] = Excluded.SCORE_NOT_FINITE
        row[code > 0] = np.nan
    return AttackScores(
        scores_TN=sums_TN,
        membership_TN=problem.membership_TN,
        excluded_TN=codes_TN,
        targets_T=problem.names_T,
    )


def enter(codes: Codes, code: Excluded, where: Bools) -> None:
    """Give a reason to entries that have none yet, or one of a higher code."""
    codes[where & ((codes == 0) | (codes > code))] = code


def all_coded(codes_TN: Codes, codes: Sequence[Excluded]) -> Bools:
    """Which targets have one of these codes at every sample."""
    known = np.zeros(256, dtype=np.bool_)
    known[list(codes)] = True
    return np.array([known[row].all() for row in codes_TN], dtype=np.bool_)


def need_models(problem: Problem, codes_TN: Codes, attack: str) -> None:
    """Raise ValueError when some target has no sample with the models that the attack needs."""
    empty = all_coded(codes_TN, (Excluded.NO_IN, Excluded.NO_OUT))
    if empty.any():
        raise ValueError(
            f"{attack} needs IN and OUT models of some sample beside target "
            f"{int(problem.names_T[int(empty.argmax())])} and its complement, and "
            f"{problem.shadows_S.size} models give none: train at least four, each on a random half"
        )
