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
        first = int(empty.argmax())
        inside = [
            bool((codes_TN[first] == code).any()) for code in (Excluded.NO_IN, Excluded.NO_OUT)
        ]
        sides = [side for side, lacks in zip((True, False), inside, strict=True) if lacks]
        raise ValueError(
            f"{attack} needs {_named(sides)} models of some sample beside target "
            f"{int(problem.names_T[first])} and its complement, and "
            f"{cause(problem, sides, 4)}"
        )


def cause(problem: Problem, sides: Sequence[bool], enough: int) -> str:
    """Why no sample has the models that an attack needs on these sides (True: IN).

    enough: so many models on random halves would do.
    """
    keep_SN = problem.keep_AN[problem.shadows_S]
    size = problem.shadows_S.size
    finite_SN = np.empty(keep_SN.shape, dtype=np.bool_)
    for row, m in zip(finite_SN, problem.shadows_S.tolist(), strict=True):
        row[:] = np.isfinite(problem.matrix.scores_MNQ[m]).any(axis=1)
    most = {}
    for inside in sides:
        here_SN = keep_SN == inside
        most[inside] = int((here_SN & finite_SN).sum(axis=0).max(initial=0))
        if size >= enough and not here_SN.any():
            return f"no model is {_named([inside])} on any sample: train each on a random half"
        if size >= enough and not most[inside]:
            return f"no {_named([inside])} model has a finite score of any sample"
    if size < enough:
        words = {4: "four", 6: "six"}[enough]
        return f"{size} models give none: train at least {words}, each on a random half"
    told = " and ".join(f"{most[inside]} {_named([inside])}" for inside in sides)
    return (
        f"{size} models give none: a sample has at most {told} models with a finite score; train "
        "each on a random half"
    )


def _named(sides: Sequence[bool]) -> str:
    return " and ".join("IN" if inside else "OUT" for inside in sides)
