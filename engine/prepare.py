"""From a study to all that training reads: pool, outliers, masks, resident images, digest.

N pool samples, M models, R resident images (pool, then OOD images, then population), Z population.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine import seeds
from engine.data import arrays as image_sets
from engine.data import beton
from engine.membership import keep_mask
from engine.outliers import CLEAN, KINDS, OOD, SampleTable, sample_table
from engine.plan import MixTable, StudyData
from engine.study import Study


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
    dataset, loader = beton.through_loader(dataset, study.data)
    pool, left_out = _even_pool(study, dataset.train)
    population = _population(study, dataset.test)
    samples, parts = {}, [pool.images_NHWC]
    first_row = len(pool.labels_N)
    tables: dict[str, MixTable] = {}
    rows: dict[str, npt.NDArray[np.int64]] = {}
    for name, mix in study.mixes.items():
        source = None
        if mix.kind == "ood":
            source = image_sets.load_source(
                mix.source, data=study.data, like=pool.images_NHWC.shape[1:], offline=offline
            )
        table = sample_table(
            mix, study.seed, pool.labels_N, dataset.classes, 0 if source is None else len(source)
        )
        samples[name] = table
        rows[name] = np.arange(len(pool.labels_N))
        if source is not None:
            ood = table.kind_N == OOD
            parts.append(source[table.source_N[ood]])
            rows[name][ood] = first_row + np.arange(ood.sum())
            first_row += int(ood.sum())
    mask = keep_mask(study.membership, study.seed, study.models, _strata(samples))
    for name, table in samples.items():
        tables[name] = MixTable(
            label_N=table.label_N,
            true_label_N=table.true_label_N,
            kind_N=table.kind_N,
            image_N=rows[name],
            keep_MN=mask,
        )
    mean_C, std_C = _moments(pool.images_NHWC)
    data = StudyData(
        images_RHWC=np.concatenate([*parts, population.images_NHWC]),
        population_rows_Z=first_row + np.arange(len(population.labels_N)),
        population_labels_Z=population.labels_N,
        tables=tables,
        classes=dataset.classes,
        mean_C=mean_C,
        std_C=std_C,
    )
    _check_sizes(study, mask, pool.images_NHWC.shape[1:])
    _check_outliers(study, samples)
    digest = study.digest(_digest(data))
    facts = {
        "name": study.data.name,
        "digest": _digest(data),
        "pool": len(pool.labels_N),
        "left_out": [] if left_out is None else [left_out],
        "population": len(population.labels_N),
        "classes": dataset.classes,
        "image": list(pool.images_NHWC.shape[1:]),
        "loader": loader,
        "outliers": {name: _kinds(table) for name, table in samples.items()},
    }
    masks = dict.fromkeys(samples, mask)
    return Prepared(data=data, samples=samples, masks=masks, digest=digest, facts=facts)


def _kinds(table: SampleTable) -> dict[str, int]:
    """How many samples of each kind."""
    return {kind: int((table.kind_N == code).sum()) for code, kind in enumerate(KINDS)}


def _even_pool(
    study: Study, train: image_sets.ImageArrays
) -> tuple[image_sets.ImageArrays, int | None]:
    """Paired masks need an even pool: of an odd one, one sample drawn by seed stays out."""
    count = len(train.labels_N)
    if count % 2 == 0 or study.membership.design != "paired":
        return train, None
    left_out = int(seeds.integers(seeds.key(study.seed, "left-out"), 1, count)[0])
    keep = np.arange(count) != left_out
    pool = image_sets.ImageArrays(
        images_NHWC=train.images_NHWC[keep], labels_N=train.labels_N[keep]
    )
    return pool, left_out


def _population(study: Study, test: image_sets.ImageArrays) -> image_sets.ImageArrays:
    """The never-trained images to ask about: all test images, or that many drawn by seed."""
    wanted, count = study.query.population, len(test.labels_N)
    if wanted > count:
        raise ValueError(
            f"query.population is {wanted}: the test split has {count} images: "
            "ask for fewer, or 0 for all"
        )
    if wanted in (0, count):
        return test
    chosen = np.sort(seeds.permutation(seeds.key(study.seed, "population"), count)[:wanted])
    return image_sets.ImageArrays(
        images_NHWC=test.images_NHWC[chosen], labels_N=test.labels_N[chosen]
    )


def _strata(samples: Mapping[str, SampleTable]) -> npt.NDArray[np.int64]:
    """One code for each combination of kinds over the mixes (shares nest, so they are few)."""
    kinds = np.stack([table.kind_N for table in samples.values()])
    return np.unique(kinds, axis=1, return_inverse=True)[1].reshape(-1)


def _moments(images_NHWC: npt.NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Exact mean and deviation of each channel over the pool, of pixels divided by 255."""
    means, deviations = [], []
    for channel in range(images_NHWC.shape[-1]):
        counts = np.bincount(images_NHWC[..., channel].reshape(-1), minlength=256)
        levels = np.arange(256) / 255
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
    for name, table in samples.items():
        mix = study.mixes[name]
        if mix.kind != "clean" and not (table.kind_N != CLEAN).any():
            count = len(table.kind_N)
            raise ValueError(
                f"mixes.{name}.share is {mix.share}: that is no sample of {count:,}; raise it to "
                f"{1 / count:.2g} or more"
            )


def _digest(data: StudyData) -> str:
    """SHA-256 over every image and label a model can see."""
    hasher = hashlib.sha256(repr(data.images_RHWC.shape).encode())
    hasher.update(np.ascontiguousarray(data.images_RHWC).data)
    hasher.update(np.ascontiguousarray(data.population_labels_Z).data)
    for name, table in sorted(data.tables.items()):
        hasher.update(name.encode())
        hasher.update(np.ascontiguousarray(table.label_N).data)
        hasher.update(np.ascontiguousarray(table.image_N).data)
    return hasher.hexdigest()
