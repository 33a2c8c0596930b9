"""Counts, means and spreads of each sample's IN and OUT scores without the models left out.

The sums over all shadow models are made once per block of samples; each target then takes its own
and its companion's share out again. Deviations are kept around each side's own mean, so sums stay
small, and an entry that loses more than six digits in the subtraction is summed afresh. Models are
summed in a canonical order: reordering them changes no bit of the result.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attacks.exclusion import Exclusion, plan_exclusion
from attacks.types import (
    Array,
    AttackScores,
    Bools,
    Codes,
    Excluded,
    Floats,
    Ints,
    ScoreMatrix,
    require,
    resolve_targets,
)

Targets = ScoreMatrix | npt.ArrayLike | None
_BLOCK_BYTES = 1 << 24
_DIGITS_LOST = 1e-6


class Problem:
    """Shadow models, targets and the exclusion rule, whichever way the targets were given.

    targets: None (every model in turn), model indices, or a ScoreMatrix of separate targets over
    the same samples and queries. models: the models that exist at all (others count as deleted);
    the rule stays that of the whole mask. Targets of `models` that are deleted are not attacked.
    """

    def __init__(
        self,
        matrix: ScoreMatrix,
        targets: Targets = None,
        *,
        models: npt.ArrayLike | None = None,
        plan: Exclusion | None = None,
    ) -> None:
        self.matrix = matrix
        self.separate: ScoreMatrix | None = None
        listed: npt.ArrayLike | None = None
        if isinstance(targets, ScoreMatrix):
            self.separate = targets
        else:
            listed = targets
        keep = matrix.keep_MN
        if self.separate is not None:
            require(
                self.separate.scores_MNQ.shape[1:] == matrix.scores_MNQ.shape[1:],
                f"separate targets have shape {self.separate.scores_MNQ.shape} beside shadow "
                f"models {matrix.scores_MNQ.shape}: expected the same samples and queries",
            )
            keep = np.concatenate([keep, self.separate.keep_MN])
        alive = resolve_targets(models, matrix.models)
        self.keep_AN: Bools = keep
        self.alive_A: Bools = np.zeros(keep.shape[0], dtype=np.bool_)
        self.alive_A[alive] = True
        if plan is None:
            scores = matrix.scores_MNQ
            if self.separate is not None:
                scores = np.concatenate([scores, self.separate.scores_MNQ])
            plan = plan_exclusion(keep, matrix.design, scores)
        require(plan.keep_MN.shape == keep.shape, "the exclusion plan is of another mask")
        self.plan = plan
        if self.separate is not None:
            self.targets_T: Ints = np.arange(matrix.models, keep.shape[0], dtype=np.int64)
            self.names_T: Ints = np.arange(self.separate.models, dtype=np.int64)
        else:
            chosen = resolve_targets(listed, matrix.models)
            self.targets_T = chosen[self.alive_A[chosen]]
            self.names_T = self.targets_T
        self.shadows_S: Ints = plan.order_M[self.alive_A[plan.order_M]]
        self.row_A = np.full(keep.shape[0], -1, dtype=np.int64)
        self.row_A[self.shadows_S] = np.arange(self.shadows_S.size)

    def only(self, target: int) -> "Problem":
        """The same problem with one of its targets."""
        one = copy.copy(self)
        chosen = self.targets_T == target
        one.targets_T, one.names_T = self.targets_T[chosen], self.names_T[chosen]
        return one

    @property
    def membership_TN(self) -> Bools:
        """The truth about the targets."""
        membership: Bools = self.keep_AN[self.targets_T]
        return membership

    def read(self, model: int, start: int, stop: int, query: int) -> Array:
        """Scores of one model, shadow or separate target, on a range of samples."""
        if model < self.matrix.models:
            return self.matrix.scores_MNQ[model, start:stop, query]
        assert self.separate is not None
        return self.separate.scores_MNQ[model - self.matrix.models, start:stop, query]

    def blocks(self, block_bytes: int = _BLOCK_BYTES) -> Iterator[tuple[int, int]]:
        """Ranges of samples whose scores under one query fit the bytes given, in float64."""
        samples = self.matrix.samples
        size = max(512, block_bytes // (8 * max(1, self.shadows_S.size)) // 64 * 64)
        for start in range(0, samples, size):
            yield start, min(samples, start + size)

    def companions(self, target: int, start: int, stop: int) -> "int | Ints":
        """Rows among the shadows of the models left out beside the target, -1 for none."""
        if self.plan.opposite_M[target]:
            alive = self.alive_A.copy()
            alive[self.matrix.models :] = False
            found = self.plan.opposite(target, start, stop, alive)
            return np.where(found >= 0, self.row_A[found], -1)
        partner = int(self.plan.partner_M[target])
        return int(self.row_A[partner]) if partner >= 0 else -1


@dataclass(frozen=True, kw_only=True)
class Moments:
    """One side of one target: how many models each sample has, their mean and squared deviations.

    least: a lower bound of the counts.
    """

    count_B: Floats
    mean_B: Floats
    squares_B: Floats
    least: float


class Side:
    """The IN or the OUT models of a block of samples; here_SB is 1 where a model counts."""

    def __init__(self, x_SB: Floats, here_SB: Floats, median: bool) -> None:
        self.here_SB = here_SB
        self.count_B = here_SB.sum(axis=0)
        self.least = float(self.count_B.min())
        total, part = np.zeros(x_SB.shape[1]), np.empty(x_SB.shape[1])
        for x, here in zip(x_SB, here_SB, strict=True):
            np.multiply(x, here, out=part)
            total += part
        self.inverse_B = 1 / np.maximum(self.count_B, 1)
        self.inverse_less_B = 1 / np.maximum(self.count_B - 1, 1)
        self.centre_B = total * self.inverse_B
        self.sum_B = np.zeros_like(total)
        self.squares_B = np.zeros_like(total)
        self._sorted_SB = np.sort(np.where(here_SB > 0, x_SB, np.inf), axis=0) if median else None

    def add(self, deviation_B: Floats, square_B: Floats) -> None:
        """Count in one model's deviations, which are 0 where it does not belong to this side."""
        self.sum_B += deviation_B
        np.multiply(deviation_B, deviation_B, out=square_B)
        self.squares_B += square_B

    def median(self, gone_B: Bools, value_B: Floats) -> Floats:
        """The median of the models that stay: `value_B` is taken out where `gone_B`."""
        assert self._sorted_SB is not None
        count = (self.count_B - gone_B).astype(np.int64)
        last = self._sorted_SB.shape[0] - 1
        columns = np.arange(count.size)
        middle = []
        for place in (np.maximum(count - 1, 0) // 2, count // 2):
            low = self._sorted_SB[np.minimum(place, last), columns]
            high = self._sorted_SB[np.minimum(place + 1, last), columns]
            middle.append(np.where(gone_B & ~(low < value_B), high, low))
        return np.where(count > 0, middle[0] + (middle[1] - middle[0]) / 2, 0.0)


class Block:
    """Scores of all shadow models on a block of samples under one query, ready to be left out."""

    def __init__(
        self,
        problem: Problem,
        start: int,
        stop: int,
        query: int,
        *,
        transform: Callable[[Floats], Floats] | None = None,
        median: bool = False,
    ) -> None:
        self.problem, self.start, self.stop, self.query = problem, start, stop, query
        self._transform = transform
        shadows = problem.shadows_S
        x = np.empty((shadows.size, stop - start))
        for row, model in zip(x, shadows.tolist(), strict=True):
            row[:] = problem.read(model, start, stop, query)
        if transform is not None:
            x = transform(x)
        keep = problem.keep_AN[shadows, start:stop]
        finite = np.isfinite(x)
        self.all_finite = bool(finite.all())
        if not self.all_finite:
            x[~finite] = 0.0
        self.inside = Side(x, (keep & finite).astype(np.float64), median)
        self.outside = Side(x, (~keep & finite).astype(np.float64), median)
        self.finite_SB, self.x_SB = finite, x
        self.deviation_SB = self._deviations()
        self.zero_B = np.zeros(stop - start)
        self.is_median = median

    def _deviations(self) -> Floats:
        """Each score minus its own side's mean, and the sides' sums of them."""
        deviations = np.empty_like(self.x_SB)
        part, square = np.empty((2, self.x_SB.shape[1]))
        sides = (self.inside, self.outside)
        for s, deviation in enumerate(deviations):
            deviation[:] = self.x_SB[s]
            for side in sides:
                np.multiply(side.centre_B, side.here_SB[s], out=part)
                deviation -= part
            for side in sides:
                np.multiply(deviation, side.here_SB[s], out=part)
                side.add(part, square)
        return deviations

    def leave_out(self, target: int) -> "LeftOut":
        """The block without this target and what goes with it."""
        return LeftOut(self, target, self.problem.companions(target, self.start, self.stop))

    def own(self, target: int) -> Floats:
        """The target's own scores on the block, not finite where they are not."""
        row = int(self.problem.row_A[target])
        if row >= 0 and self.all_finite:
            known: Floats = self.x_SB[row]
            return known
        own = np.asarray(
            self.problem.read(target, self.start, self.stop, self.query), dtype=np.float64
        )
        return own if self._transform is None else self._transform(own)


class LeftOut:
    """One target against a block: what each side is without the models left out.

    Selections are products with 0 and 1: several times faster than branches on a random mask.
    """

    def __init__(self, block: Block, target: int, companion: "int | Ints") -> None:
        self._block = block
        self._row = int(block.problem.row_A[target])
        self._companion = companion
        member = block.problem.keep_AN[target, block.start : block.stop]
        self._member_B = member.astype(np.float64)
        self._other_B = 1.0 - self._member_B
        self.own_B = block.own(target)
        self.own_is_finite = block.all_finite and self._row >= 0

    def _taken(self, values_SB: Array, inside: bool) -> Floats:
        """What a side loses of a shadow matrix: the target's row or the companion's, or 0."""
        own_here, other_here = self._member_B, self._other_B
        if not inside:
            own_here, other_here = other_here, own_here
        taken = self._block.zero_B
        if self._row >= 0:
            taken = values_SB[self._row] * own_here
        if isinstance(self._companion, int):
            return (
                taken + values_SB[self._companion] * other_here if self._companion >= 0 else taken
            )
        there = self._companion >= 0
        picked = values_SB[self._companion, np.arange(there.size)]
        return taken + picked * (there * other_here)

    def _gone(self, inside: bool) -> "Floats | None":
        """1 where this side loses a model; None: everywhere."""
        block = self._block
        if block.all_finite and self._row >= 0 and isinstance(self._companion, int):
            if self._companion >= 0:
                return None
            return self._member_B if inside else self._other_B
        return self._taken(block.finite_SB, inside)

    def side(self, inside: bool, *, spread: bool = True) -> Moments:
        """Count, mean (or median) and squared deviations around it of the models that stay."""
        block = self._block
        side = block.inside if inside else block.outside
        taken = self._taken(block.deviation_SB, inside)
        gone = self._gone(inside)
        if gone is None:
            count, inverse = side.count_B - 1, side.inverse_less_B
        else:
            count = side.count_B - gone
            inverse = gone * side.inverse_less_B + (1 - gone) * side.inverse_B
        total = side.sum_B - taken
        shift = total * inverse
        mean = side.centre_B + shift
        squares = block.zero_B
        if spread or block.is_median:
            taken *= taken
            squares = side.squares_B - taken
            total *= shift
            squares -= total
            lost = squares < _DIGITS_LOST * side.squares_B
            if lost.any():
                self._afresh(side, np.flatnonzero(lost), mean, squares)
        if block.is_median:
            everywhere = np.ones(mean.size, np.bool_) if gone is None else gone > 0
            centre = side.median(everywhere, self._taken(block.x_SB, inside))
            squares += count * (mean - centre) ** 2
            mean = centre
        return Moments(count_B=count, mean_B=mean, squares_B=squares, least=side.least - 1)

    def _afresh(self, side: Side, lost: Ints, mean_B: Floats, squares_B: Floats) -> None:
        """Sum again, in place, the entries whose digits the subtraction lost."""
        block = self._block
        for at in np.array_split(lost, max(1, lost.size // 2048)):
            x, here = block.x_SB[:, at], side.here_SB[:, at] > 0
            if self._row >= 0:
                here[self._row] = False
            if isinstance(self._companion, int):
                if self._companion >= 0:
                    here[self._companion] = False
            else:
                there = np.flatnonzero(self._companion[at] >= 0)
                here[self._companion[at][there], there] = False
            count = np.maximum(here.sum(axis=0), 1)
            mean = np.where(here, x, 0.0).sum(axis=0) / count
            mean_B[at] = mean
            squares_B[at] = np.where(here, (x - mean) ** 2, 0.0).sum(axis=0)


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


def enter(codes_B: Codes, code: Excluded, where_B: Bools) -> None:
    """Give a reason to samples that have none yet, or one of a higher code."""
    codes_B[where_B & ((codes_B == 0) | (codes_B > code))] = code


def need_models(problem: Problem, codes_TN: Codes, attack: str) -> None:
    """Raise ValueError when some target has no sample with the models that the attack needs."""
    empty = np.isin(codes_TN, (Excluded.NO_IN, Excluded.NO_OUT)).all(axis=1)
    if empty.any():
        raise ValueError(
            f"{attack} finds no sample with IN and OUT models once target "
            f"{int(problem.names_T[int(empty.argmax())])} and its complement are left out of "
            f"{problem.shadows_S.size} models: train at least four"
        )
