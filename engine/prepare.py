"""From a study to all that training reads: pool, outliers, masks, resident images, digest.

N pool samples, M models, R resident images (pool, then OOD images, then population), Z population.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine import seeds
from engine.data import arrays as image_sets
from engine.data import beton, table
from engine.membership import keep_mask
from engine.outliers import CLEAN, KINDS, OOD, SampleTable, sample_table
from engine.plan import ImageTable, MixTable, StudyData
from engine.study import Study

Ints = npt.NDArray[np.int64]
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A study made concrete on its data."""

    data: StudyData
    samples: Mapping[str, SampleTable]
    masks: Mapping[str, npt.NDArray[np.bool_]]
    digest: str
    facts: Mapping[str, object]
    """What the manifest says of the data: sizes, digests, loader, the sample left out."""


def prepare(study: Study, *, offline: bool = False) -> Prepared:
    """Read the data, decide outliers and membership, lay out the resident images.

    Raises:
        ValueError: the data is missing or unfit; the sentence says what to do.
    """
    dataset = image_sets.load(study.data, offline=offline, seed=study.seed)
    mapped, loader = table.wanted(dataset, study.data), ""
    if not mapped:
        dataset, loader = beton.through_loader(dataset, study.data)
    pool_N, left_out = _even_pool(study, len(dataset.train))
    asked_Z = _population(study, len(dataset.test))
    drawn = _outliers(study, dataset, pool_N, offline)
    layout = _Layout(dataset=dataset, pool_N=pool_N, extra=drawn.extra, asked_Z=asked_Z)
    mask = keep_mask(study.membership, study.seed, study.models, _strata(drawn.samples))
    made = None
    if mapped:
        made, loader = layout.mapped(study)
    images_RHWC = layout.resident() if made is None else table.opened(made, study.data)
    row_R = layout.rows(made is not None)
    tables = {
        name: MixTable(
            label_N=samples.label_N,
            true_label_N=samples.true_label_N,
            kind_N=samples.kind_N,
            image_N=row_R[drawn.rows[name]],
            keep_MN=mask,
        )
        for name, samples in drawn.samples.items()
    }
    mean_C, std_C = _moments(dataset.train.images_NHWC, pool_N)
    data = StudyData(
        images_RHWC=images_RHWC,
        population_rows_Z=row_R[len(row_R) - len(asked_Z) :],
        population_labels_Z=dataset.test.labels_N[asked_Z],
        tables=tables,
        classes=dataset.classes,
        mean_C=mean_C,
        std_C=std_C,
        table=made,
    )
    image = dataset.train.images_NHWC.shape[1:]
    _check_sizes(study, mask, image)
    _check_outliers(study, drawn.samples)
    seen = _digest(layout, data, drawn.rows)
    facts = {
        "name": study.data.name,
        "digest": seen,
        "pool": len(pool_N),
        "left_out": [] if left_out is None else [left_out],
        "population": len(asked_Z),
        "classes": dataset.classes,
        "image": list(image),
        "loader": loader,
        "outliers": {name: _kinds(samples) for name, samples in drawn.samples.items()},
    }
    return Prepared(
        data=data,
        samples=drawn.samples,
        masks=dict.fromkeys(drawn.samples, mask),
        digest=study.digest(seen),
        facts=facts,
    )


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """Outliers by mix: sample tables, OOD images, and rows of images in the order of _Layout."""

    samples: dict[str, SampleTable]
    extra: list[npt.NDArray[np.uint8]]
    rows: dict[str, Ints]


def _outliers(study: Study, dataset: image_sets.Dataset, pool_N: Ints, offline: bool) -> _Drawn:
    labels_N, image = dataset.train.labels_N[pool_N], dataset.train.images_NHWC.shape[1:]
    drawn, first_row = _Drawn(samples={}, extra=[], rows={}), len(pool_N)
    for name, mix in study.mixes.items():
        source = None
        if mix.kind == "ood":
            source = image_sets.load_source(
                mix.source, data=study.data, like=image, offline=offline
            )
        samples = sample_table(
            mix, study.seed, labels_N, dataset.classes, 0 if source is None else len(source)
        )
        drawn.samples[name] = samples
        drawn.rows[name] = np.arange(len(pool_N))
        if source is not None:
            ood = samples.kind_N == OOD
            drawn.extra.append(source[samples.source_N[ood]])
            drawn.rows[name][ood] = first_row + np.arange(ood.sum())
            first_row += int(ood.sum())
    return drawn


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Every image a model can see, in order: the pool, OOD images, the population."""

    dataset: image_sets.Dataset
    pool_N: Ints
    extra: list[npt.NDArray[np.uint8]]
    asked_Z: Ints

    @property
    def shape(self) -> tuple[int, ...]:
        """R x H x W x C."""
        count = len(self.pool_N) + sum(map(len, self.extra)) + len(self.asked_Z)
        return (count, *self.dataset.train.images_NHWC.shape[1:])

    def pieces(self) -> Iterator[npt.NDArray[np.uint8]]:
        """All of them, a few at a time."""
        yield from _pieces(self.dataset.train.images_NHWC, self.pool_N)
        yield from self.extra
        yield from _pieces(self.dataset.test.images_NHWC, self.asked_Z)

    def resident(self) -> npt.NDArray[np.uint8]:
        """All of them in memory."""
        images_RHWC, first = np.empty(self.shape, np.uint8), 0
        for piece in self.pieces():
            images_RHWC[first : first + len(piece)] = piece
            first += len(piece)
        return images_RHWC

    def mapped(self, study: Study) -> tuple[ImageTable | None, str]:
        """All of them, and others, in a file, or the reason why not."""
        try:
            return table.made(self.dataset, self.extra, study.data), "ffcv, mapped"
        except (RuntimeError, OSError) as error:
            if study.data.spread == "beton":
                raise RuntimeError(f"data.spread is 'beton', but {error}") from error
            log.warning("images are held in memory: %s", error)
            return None, f"resident: {error}"

    def rows(self, mapped: bool) -> Ints:
        """Where each of them lies, in `resident` or in `mapped`."""
        if not mapped:
            return np.arange(self.shape[0])
        first, count = len(self.dataset.train), sum(map(len, self.extra))
        last = first + len(self.dataset.test)
        return np.concatenate([self.pool_N, last + np.arange(count), first + self.asked_Z])


def _pieces(images_NHWC: npt.NDArray[np.uint8], row_X: Ints) -> Iterator[npt.NDArray[np.uint8]]:
    for rows in beton.batches(len(row_X)):
        yield images_NHWC[row_X[rows]]


def _kinds(table: SampleTable) -> dict[str, int]:
    """How many samples of each kind."""
    return {kind: int((table.kind_N == code).sum()) for code, kind in enumerate(KINDS)}


def _even_pool(study: Study, count: int) -> tuple[Ints, int | None]:
    """Paired masks need an even pool: of an odd one, one sample drawn by seed stays out."""
    if count % 2 == 0 or study.membership.design != "paired":
        return np.arange(count), None
    left_out = int(seeds.integers(seeds.key(study.seed, "left-out"), 1, count)[0])
    return np.flatnonzero(np.arange(count) != left_out), left_out


def _population(study: Study, count: int) -> Ints:
    """The never-trained images to ask about: all test images, or that many drawn by seed."""
    wanted = study.query.population
    if wanted > count:
        raise ValueError(
            f"query.population is {wanted}: the test split has {count} images: "
            "ask for fewer, or 0 for all"
        )
    if wanted in (0, count):
        return np.arange(count)
    return np.sort(seeds.permutation(seeds.key(study.seed, "population"), count)[:wanted])


def _strata(samples: Mapping[str, SampleTable]) -> npt.NDArray[np.int64]:
    """One code for each combination of kinds over the mixes (shares nest, so they are few)."""
    kinds = np.stack([table.kind_N for table in samples.values()])
    return np.unique(kinds, axis=1, return_inverse=True)[1].reshape(-1)


def _moments(
    images_NHWC: npt.NDArray[np.uint8], pool_N: Ints
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Exact mean and deviation of each channel over the pool, of pixels divided by 255."""
    channels = images_NHWC.shape[-1]
    counts_CL = np.zeros((channels, 256), np.int64)
    for piece in _pieces(images_NHWC, pool_N):
        for channel in range(channels):
            counts_CL[channel] += np.bincount(piece[..., channel].reshape(-1), minlength=256)
    means, deviations, levels = [], [], np.arange(256) / 255
    for counts in counts_CL:
        mean = float((counts * levels).sum() / counts.sum())
        variance = float((counts * (levels - mean) ** 2).sum() / counts.sum())
        means.append(mean)
        deviations.append(max(variance**0.5, 1 / 255))
    return tuple(means), tuple(deviations)


def _check_sizes(study: Study, mask: npt.NDArray[np.bool_], image: tuple[int, ...]) -> None:
    smallest = min(image[:2])
    for key in ("crop", "cutout"):
        value = getattr(study.train, key)
        if value >= smallest:
            raise ValueError(
                f"train.{key} is {value}, but images are {image[0]} x {image[1]}: expected less"
            )
    members = int(mask.sum(1).min())
    if members < study.train.batch:
        raise ValueError(
            f"train.batch is {study.train.batch}, but a model has only {members} members: "
            "lower the batch or use more data"
        )


def _check_outliers(study: Study, samples: Mapping[str, SampleTable]) -> None:
    for name, drawn in samples.items():
        mix = study.mixes[name]
        if mix.kind != "clean" and not (drawn.kind_N != CLEAN).any():
            count = len(drawn.kind_N)
            raise ValueError(
                f"mixes.{name}.share is {mix.share}: that is no sample of {count:,}; raise it to "
                f"{1 / count:.2g} or more"
            )


def _digest(layout: _Layout, data: StudyData, rows: Mapping[str, Ints]) -> str:
    """SHA-256 over every image and label a model can see, wherever the images are held."""
    hasher = hashlib.sha256(repr(layout.shape).encode())
    for piece in layout.pieces():
        hasher.update(piece.data)
    hasher.update(np.ascontiguousarray(data.population_labels_Z).data)
    for name, mix in sorted(data.tables.items()):
        hasher.update(name.encode())
        hasher.update(np.ascontiguousarray(mix.label_N).data)
        hasher.update(np.ascontiguousarray(rows[name]).data)
    return hasher.hexdigest()
