"""Who is left out when a target is attacked, so that counts never reveal membership.

Scoring target t from all other models is biased wherever the number of members of a sample is
fixed by design: if t is IN, one IN model fewer remains. Three rules undo that exactly
(docs/science.md):

- paired masks: leave out t and its complement, the model whose keep row is exactly `~keep[t]`;
- masks in which every sample has the same number of members, without complements: besides t
  leave out, sample by sample, one model of the side opposite to t's, chosen by a hash;
- Bernoulli masks: leave out t alone.

A mask may mix them: models with a complement are paired, and the rest is "balanced" when its
column sums are all equal (two models at least), else left out alone; an odd last model of a paired
study is such a rest. A balanced mask that lost some of its models fits none of the rules: what
remains of the bias is that of leaving the target alone out.

The hash draws uniformly, for each target and sample, among the models of the opposite side: a
favourite among them would stay on one side more often when the target is a member, and models that
differ in level would tell. Nothing depends on the position of a model or a sample: models and
samples are known by the mask's own structure (row overlaps, then member sets), and samples with
equal members by how the models rank on them.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from attacks.types import DESIGNS as _DESIGNS
from attacks.types import Array, Bools, Design, Ints, choose, mask_of, require

Words = npt.NDArray[np.uint64]
_COLUMNS = 1 << 14
_ATTEMPTS = 64
CHANCE = 64
"""From so many samples on, no independent coins make exact complements or equal counts."""


def _mixed(words: Words) -> Words:
    """SplitMix64's finaliser, elementwise."""
    x = words + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _tie_break(scores_NQ: Array) -> bytes:
    """What tells models with one keep row apart: the ranking of their scores, then the scores."""
    row = np.ascontiguousarray(scores_NQ, dtype=np.float64)
    ranking = np.argsort(row.mean(axis=-1), kind="stable").astype(np.int64)
    return _digest(ranking.tobytes()) + _digest(row.tobytes())


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """The rule of every model of one mask.

    order_M: a canonical order of the models, the same for any order they came in.
    partner_M: index of the model's complement, or -1.
    opposite_M: True where, sample by sample, one model of the opposite side is left out as well.
    scores_MNQ: tells samples with equal members apart; without it they share their choice.
    """

    keep_MN: Bools
    order_M: Ints
    partner_M: Ints
    opposite_M: Bools
    scores_MNQ: Array | None = None

    @property
    def design(self) -> str:
        """What the mask is, in a word: paired, balanced, bernoulli, or mixed."""
        paired, opposite = self.partner_M >= 0, self.opposite_M
        alone = ~paired & ~opposite
        if paired.any() and not opposite.any() and alone.sum() <= 1:
            return "paired"
        if opposite.all():
            return "balanced"
        return "bernoulli" if alone.all() else "mixed"

    @cached_property
    def _rest(self) -> tuple[Ints, Words]:
        """The models under the opposite rule in an order of their colours, and those colours."""
        rest = self.order_M[self.opposite_M[self.order_M]]
        rows = _row_colours(self.keep_MN[rest])
        order = np.argsort(rows, kind="stable")
        return rest[order], rows[order]

    @cached_property
    def _samples(self) -> Words:
        """One hash a sample, of its members and of how the models rank on it."""
        rest, rows = self._rest
        words = np.zeros(self.keep_MN.shape[1], dtype=np.uint64)
        for row, colour in zip(self.keep_MN[rest], _mixed(rows), strict=True):
            words += np.where(row, colour, np.uint64(0))
        if self.scores_MNQ is not None:
            for start in range(0, words.size, _COLUMNS):
                block = slice(start, start + _COLUMNS)
                phi = [self.scores_MNQ[m, block].mean(axis=-1, dtype=np.float64) for m in rest]
                ranking = np.argsort(np.stack(phi), axis=0, kind="stable")
                for place, chosen in enumerate(ranking):
                    words[block] += _mixed(rows[chosen] + np.uint64(place + 1))
        return _mixed(words)

    @cached_property
    def _by_side(self) -> tuple[npt.NDArray[np.int32], int]:
        """For each sample the places in `_rest` of its IN models, then its OUT ones; IN count."""
        keep = self.keep_MN[self._rest[0]]
        places = np.empty(keep.shape, dtype=np.int32)
        for start in range(0, keep.shape[1], _COLUMNS):
            block = slice(start, start + _COLUMNS)
            places[:, block] = np.argsort(~keep[:, block], axis=0, kind="stable")
        return places, int(keep[:, 0].sum())

    def opposite(self, target: int, start: int, stop: int, alive_M: Bools) -> Ints:
        """For samples start to stop, the model of the side opposite to the target's to leave out.

        Drawn uniformly, by hash, among the models alive; -1 where there is none. A model that is no
        longer alive changes the choice only where it was chosen. Shape (stop - start,).
        """
        rest, rows = self._rest
        places, members = self._by_side
        inside = self.keep_MN[target, start:stop]
        first = np.where(inside, members, 0)
        count = np.where(inside, rest.size - members, members)
        base = _mixed(self._samples[start:stop] ^ _mixed(rows[rest == target][:1]))
        found = np.full(stop - start, -1, dtype=np.int64)
        open_ = np.flatnonzero(count > 0)
        for attempt in range(_ATTEMPTS):
            drawn = _mixed(base[open_] + np.uint64(attempt)) % count[open_].astype(np.uint64)
            chosen = rest[places[first[open_] + drawn.astype(np.int64), start + open_]]
            hit = alive_M[chosen]
            found[open_[hit]] = chosen[hit]
            open_ = open_[~hit]
            if not open_.size:
                return found
        for n in open_.tolist():
            side = rest[places[first[n] : first[n] + count[n], start + n]]
            stays = side[alive_M[side]]
            found[n] = stays[0] if stays.size else -1
        return found

    def companions(self, target: int, alive_M: Bools) -> Ints:
        """The model left out beside a target, sample by sample; -1 where there is none. (N,)."""
        samples = self.keep_MN.shape[1]
        if self.opposite_M[target]:
            return self.opposite(target, 0, samples, alive_M)
        partner = int(self.partner_M[target])
        there = partner >= 0 and bool(alive_M[partner])
        return np.full(samples, partner if there else -1, dtype=np.int64)

    def counts(self, targets: Ints, alive_M: Bools) -> Iterator[tuple[Ints, Ints]]:
        """How many IN and OUT models each target is scored from, sample by sample. Each (N,)."""
        total_in = self.keep_MN[alive_M].sum(axis=0)
        total_out = int(alive_M.sum()) - total_in
        columns = np.arange(self.keep_MN.shape[1])
        for target in targets.tolist():
            n_in, n_out = total_in, total_out
            companion = self.companions(target, alive_M)
            for model, gone in (
                (np.full_like(companion, target), bool(alive_M[target])),
                (companion, companion >= 0),
            ):
                inside = self.keep_MN[model, columns]
                n_in, n_out = n_in - (gone & inside), n_out - (gone & ~inside)
            yield n_in, n_out

    def deletion_groups(self) -> tuple[tuple[int, ...], ...]:
        """Models to delete together in a jackknife, in canonical order.

        Pairs where there are complements; groups of two by hash where the rest is balanced (an odd
        one stands alone); single models otherwise.
        """
        groups: list[tuple[int, ...]] = []
        seen: set[int] = set()
        for m in self.order_M.tolist():
            partner = int(self.partner_M[m])
            if self.opposite_M[m] or m in seen:
                continue
            groups.append((m,) if partner < 0 else (m, partner))
            seen.update(groups[-1])
        if self.opposite_M.any():
            rest, rows = self._rest
            shuffled = rest[np.argsort(_mixed(rows), kind="stable")].tolist()
            groups += [tuple(shuffled[i : i + 2]) for i in range(0, len(shuffled), 2)]
        return tuple(groups)


def _row_colours(keep_RN: Bools) -> Words:
    """Hashes of rows that follow any reordering of rows and do not see one of columns."""
    count, samples = keep_RN.shape
    overlap = np.zeros((count, count), dtype=np.float64)
    for start in range(0, samples, _COLUMNS):
        part = keep_RN[:, start : start + _COLUMNS].astype(np.float32)
        overlap += part @ part.T
    hashed = _mixed(overlap.astype(np.uint64))
    rows = _mixed(hashed.sum(axis=1) ^ _mixed(np.diagonal(hashed)))
    return _mixed((_mixed(hashed + rows[None, :])).sum(axis=1) ^ rows)


def _require_coins(keep_MN: Bools, same: dict[bytes, list[int]]) -> None:
    """Refuse to call a mask independent whose structure no accident explains."""
    models, samples = keep_MN.shape
    if samples < CHANCE or models < 2:
        return
    complements = any(
        np.packbits(~keep_MN[members[0]]).tobytes() in same for members in same.values()
    )
    sums = keep_MN.sum(axis=0)
    found = "complements" if complements else "the same number of members in every sample"
    require(
        not complements and not (sums == sums[0]).all(),
        f"the mask is not bernoulli: it has {found}, so that counts would tell members; leave "
        "design out",
    )


def plan_exclusion(
    keep_MN: Bools, design: Design = "auto", scores_MNQ: Array | None = None
) -> Exclusion:
    """The exclusion rule of every model of a mask.

    keep_MN: bool (M, N). design: "auto" finds the rule from the mask; "paired", "balanced" and
    "bernoulli" state it (useful where few samples make a mask look like another by accident).
    scores_MNQ tells models with identical keep rows apart; without it they go by position.
    Raises ValueError where a stated design contradicts the mask.

    >>> keep = np.array([[True, False], [True, True], [False, True], [False, False]])
    >>> plan_exclusion(keep).partner_M.tolist()
    [2, 3, 0, 1]
    """
    keep = mask_of(keep_MN)
    choose("mask design", design, _DESIGNS)
    models = keep.shape[0]
    rows = [np.packbits(row).tobytes() for row in keep]
    same: dict[bytes, list[int]] = {}
    for m, row in enumerate(rows):
        same.setdefault(row, []).append(m)
    keys = [(_digest(row), b"") for row in rows]
    for members in same.values():
        if len(members) > 1 and scores_MNQ is not None:
            for m in members:
                keys[m] = (keys[m][0], _tie_break(scores_MNQ[m]))
    order = np.array(sorted(range(models), key=keys.__getitem__), dtype=np.int64)
    partner = np.full(models, -1, dtype=np.int64)
    if design == "bernoulli":
        _require_coins(keep, same)
    if design in ("auto", "paired"):
        for members in same.values():
            others = same.get(np.packbits(~keep[members[0]]).tobytes(), [])
            for m, other in zip(
                sorted(members, key=keys.__getitem__),
                sorted(others, key=keys.__getitem__),
                strict=False,
            ):
                partner[m] = other
    rest = partner < 0
    sums = keep[rest].sum(axis=0)
    constant = bool(rest.sum() >= 2 and (sums == sums[0]).all())
    if design == "paired":
        require(
            bool(rest.sum() <= models % 2),
            f"the mask is not paired: {int(rest.sum())} of {models} models have no complement",
        )
    if design == "balanced":
        require(constant, "the mask is not balanced: samples differ in their number of members")
    opposite = rest & constant & (design in ("auto", "balanced"))
    return Exclusion(
        keep_MN=keep,
        order_M=order,
        partner_M=partner,
        opposite_M=opposite,
        scores_MNQ=scores_MNQ if opposite.any() else None,
    )
