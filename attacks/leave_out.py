"""Counts, means and spreads of each sample's IN and OUT scores without the models left out.

The sums over all shadow models are made once per block of samples; each target then takes its own
and its companion's share out again. Deviations are kept around each side's own mean, so sums stay
small, and an entry that loses more than six digits in the subtraction is summed afresh. Models are
summed in a canonical order: reordering them changes no bit of the result.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attacks.exclusion import Exclusion, plan_exclusion
from attacks.types import (
    Array,
    Bools,
    Floats,
    Ints,
    ScoreMatrix,
    require,
    resolve_targets,
)

Targets = ScoreMatrix | npt.ArrayLike | None
_BLOCK_BYTES = 1 << 22
_DIGITS_LOST = 1e-6
_TOGETHER = 1 << 15
_AFRESH = 1 << 11


class Problem:
    """Shadow models, targets and the exclusion rule, whichever way the targets were given.

    targets: None (every model in turn), model indices, or a ScoreMatrix of separate targets over
    the same samples and queries. models: the models that exist at all (others count as deleted);
    the rule stays that of the whole mask. Targets that are deleted are not attacked.
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
        self._serve(self.alive_A)

    def only(self, chosen_T: Bools, shadows: Sequence[int] | None = None) -> "Problem":
        """The same problem with some of its targets, and of its shadow models."""
        one = copy.copy(self)
        one.targets_T, one.names_T = self.targets_T[chosen_T], self.names_T[chosen_T]
        if shadows is not None:
            one._serve(np.isin(np.arange(self.alive_A.size), shadows) & self.alive_A)
        return one

    def _serve(self, alive_A: Bools) -> None:
        """Let these models be the shadow models."""
        self.alive_A = alive_A
        self.shadows_S: Ints = self.plan.order_M[alive_A[self.plan.order_M]]
        self.row_A: Ints = np.full(alive_A.size, -1, dtype=np.int64)
        self.row_A[self.shadows_S] = np.arange(self.shadows_S.size)

    @property
    def membership_TN(self) -> Bools:
        """The truth about the targets."""
        everyone = np.array_equal(self.targets_T, np.arange(self.keep_AN.shape[0]))
        membership: Bools = self.keep_AN if everyone else self.keep_AN[self.targets_T]
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

    def companions(self, targets: Ints, start: int, stop: int) -> Ints:
        """Rows among the shadows of the models left out beside the targets, -1 for none.

        Shape (T, 1), or (T, stop - start) where the choice differs from sample to sample.
        """
        partner = self.plan.partner_M[targets]
        row = np.where(partner >= 0, self.row_A[partner], -1)[:, None]
        opposite = self.plan.opposite_M[targets]
        if not opposite.any():
            return row
        rows = np.repeat(row, stop - start, axis=1)
        alive = self.alive_A.copy()
        alive[self.matrix.models :] = False
        for i in np.flatnonzero(opposite).tolist():
            found = self.plan.opposite(int(targets[i]), start, stop, alive)
            rows[i] = np.where(found >= 0, self.row_A[found], -1)
        return rows

    def parts(self, samples: int) -> Iterator[slice]:
        """Slices of the targets that are worked on together, for a block of so many samples."""
        size = max(1, _TOGETHER // samples)
        for first in range(0, self.targets_T.size, size):
            yield slice(first, min(self.targets_T.size, first + size))


@dataclass(frozen=True, kw_only=True)
class Moments:
    """One side of some targets: how many models each sample has, their mean and squared deviations.

    least: a lower bound of the counts.
    """

    count_TB: Floats
    mean_TB: Floats
    squares_TB: Floats
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
        self.lost_B = self.squares_B
        self._sorted_SB = np.sort(np.where(here_SB > 0, x_SB, np.inf), axis=0) if median else None

    def add(self, deviation_B: Floats, square_B: Floats) -> None:
        """Count in one model's deviations, which are 0 where it does not belong to this side."""
        self.sum_B += deviation_B
        np.multiply(deviation_B, deviation_B, out=square_B)
        self.squares_B += square_B

    def median(self, gone_TB: Bools, value_TB: Floats) -> Floats:
        """The median of the models that stay: `value_TB` is taken out where `gone_TB`."""
        assert self._sorted_SB is not None
        count = (self.count_B - gone_TB).astype(np.int64)
        last = self._sorted_SB.shape[0] - 1
        columns = np.arange(count.shape[1])
        middle = []
        for place in (np.maximum(count - 1, 0) // 2, count // 2):
            low = self._sorted_SB[np.minimum(place, last), columns]
            high = self._sorted_SB[np.minimum(place + 1, last), columns]
            middle.append(np.where(gone_TB & ~(low < value_TB), high, low))
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
        for side in sides:
            side.lost_B = _DIGITS_LOST * side.squares_B
        return deviations

    def leave_out(self, part: slice) -> "LeftOut":
        """The block without each of these targets and what goes with it."""
        return LeftOut(self, self.problem.targets_T[part])

    def own(self, targets: Ints) -> Floats:
        """The targets' own scores on the block, not finite where they are not. Shape (T, B)."""
        rows = self.problem.row_A[targets]
        if self.all_finite and (rows >= 0).all():
            known: Floats = self.x_SB[rows]
            return known
        read = [self.problem.read(int(t), self.start, self.stop, self.query) for t in targets]
        own = np.stack(read).astype(np.float64)
        return own if self._transform is None else self._transform(own)


class LeftOut:
    """Some targets against a block: what each side is without the models left out.

    Selections are products with 0 and 1: several times faster than branches on a random mask.
    """

    def __init__(self, block: Block, targets: Ints) -> None:
        self._block = block
        self._row = block.problem.row_A[targets][:, None]
        self._companion = block.problem.companions(targets, block.start, block.stop)
        self._all_there = bool((self._row >= 0).all() and (self._companion >= 0).all())
        self._member_TB = block.problem.keep_AN[targets, block.start : block.stop].astype(
            np.float64
        )
        self._other_TB = 1.0 - self._member_TB
        self._kept: tuple[Array, Array | None] | None = None
        self.own_TB = block.own(targets)
        self.own_is_finite = block.all_finite and bool((self._row >= 0).all())

    def _picked(self, values_SB: Array, rows: Ints) -> Array:
        """Rows of a shadow matrix, one a target or one a target and sample; 0 for row -1."""
        if rows.shape[1] == 1:
            picked: Array = values_SB[rows[:, 0]]
        else:
            picked = values_SB[rows, np.arange(rows.shape[1])]
        return picked if self._all_there else picked * (rows >= 0)

    def _taken(self, values_SB: Array, inside: bool) -> Floats:
        """What a side loses of a shadow matrix: the target's row or the companion's, or 0."""
        own_here, other_here = self._member_TB, self._other_TB
        if not inside:
            own_here, other_here = other_here, own_here
        own, other = self._both(values_SB)
        taken: Floats = own * own_here
        if other is not None:
            taken += other * other_here
        return taken

    def _both(self, values_SB: Array) -> tuple[Array, "Array | None"]:
        """The targets' and the companions' rows; those of the deviations are kept."""
        deviations = values_SB is self._block.deviation_SB
        if deviations and self._kept is not None:
            return self._kept
        own = self._picked(values_SB, self._row)
        some = bool((self._companion >= 0).any())
        both = own, self._picked(values_SB, self._companion) if some else None
        if deviations:
            self._kept = both
        return both

    def _gone(self, inside: bool) -> "Floats | None":
        """1 where this side loses a model; None: everywhere."""
        block = self._block
        if block.all_finite and self._all_there:
            return None
        if block.all_finite and (self._row >= 0).all() and not (self._companion >= 0).any():
            return self._member_TB if inside else self._other_TB
        return self._taken(block.finite_SB, inside)

    def side(self, inside: bool, *, spread: bool = True) -> Moments:
        """Count, mean (or median) and squared deviations around it of the models that stay."""
        block = self._block
        side = block.inside if inside else block.outside
        taken = self._taken(block.deviation_SB, inside)
        gone = self._gone(inside)
        if gone is None:
            count = np.broadcast_to(side.count_B - 1, taken.shape)
            inverse = side.inverse_less_B
        else:
            count = side.count_B - gone
            inverse = gone * side.inverse_less_B + (1 - gone) * side.inverse_B
        total = side.sum_B - taken
        shift = total * inverse
        mean = shift + side.centre_B
        squares = np.broadcast_to(block.zero_B, taken.shape)
        if spread or block.is_median:
            taken *= taken
            squares = np.subtract(side.squares_B, taken, out=taken)
            total *= shift
            squares -= total
            lost = squares < side.lost_B
            if lost.any():
                self._afresh(side, lost, mean, squares)
        if block.is_median:
            everywhere = np.ones(mean.shape, np.bool_) if gone is None else gone > 0
            centre = side.median(everywhere, self._taken(block.x_SB, inside))
            squares += count * (mean - centre) ** 2
            mean = centre
        return Moments(count_TB=count, mean_TB=mean, squares_TB=squares, least=side.least - 1)

    def _afresh(self, side: Side, lost: Bools, mean_TB: Floats, squares_TB: Floats) -> None:
        """Sum again, in place, the entries whose digits the subtraction lost."""
        block = self._block
        targets, columns = np.nonzero(lost)
        companions = np.broadcast_to(self._companion, lost.shape)
        for start in range(0, targets.size, _AFRESH):
            t, at = targets[start : start + _AFRESH], columns[start : start + _AFRESH]
            x, here = block.x_SB[:, at], side.here_SB[:, at] > 0
            for rows in (self._row[t, 0], companions[t, at]):
                there = np.flatnonzero(rows >= 0)
                here[rows[there], there] = False
            count = np.maximum(here.sum(axis=0), 1)
            mean = np.where(here, x, 0.0).sum(axis=0) / count
            mean_TB[t, at] = mean
            squares_TB[t, at] = np.where(here, (x - mean) ** 2, 0.0).sum(axis=0)
