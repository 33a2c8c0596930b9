"""What is to be trained, laid out for workers: model references, study data, stacks and memory.

Imports no torch. N pool samples, R resident images, Z population images, B batch, E kept epochs,
Q queries.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.study import Study


@dataclass(frozen=True, kw_only=True, order=True)
class ModelRef:
    """One shadow model of a study."""

    mix: str
    arm: str
    model_id: int


@dataclass(frozen=True, kw_only=True)
class MixTable:
    """The sample table of a mix with its keep mask, and where each sample's image lies.

    kind_N: 0 clean, 1 flipped, 2 ood. image_N: row of the resident image table. keep_MN: bool.
    """

    label_N: npt.NDArray[np.int64]
    true_label_N: npt.NDArray[np.int64]
    kind_N: npt.NDArray[np.uint8]
    image_N: npt.NDArray[np.int64]
    keep_MN: npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class ImageTable:
    """Where a machine's resident images come from if not from the driver: see engine.data.table.

    beton: the digest that names it in the cache, and beton_sha256 that of its bytes. digest: the
    SHA-256 of the whole table. extra_EHWC: images that are not in the beton and stand at its end.
    """

    beton: str
    beton_sha256: str
    digest: str
    shape: tuple[int, ...]
    extra_EHWC: npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class StudyData:
    """All that training reads. mean_C and std_C are of the pool's images divided by 255.

    table: set where images are mapped from a file that every machine makes for itself.
    """

    images_RHWC: npt.NDArray[np.uint8]
    population_rows_Z: npt.NDArray[np.int64]
    population_labels_Z: npt.NDArray[np.int64]
    tables: Mapping[str, MixTable]
    classes: int
    mean_C: tuple[float, ...]
    std_C: tuple[float, ...]
    table: ImageTable | None = None

    def without_images(self) -> "StudyData":
        """The same, to be sent to where the images are already."""
        return dataclasses.replace(self, images_RHWC=self.images_RHWC[:0].copy())


@dataclass(frozen=True, kw_only=True)
class ModelResult:
    """The arrays of one trained model, by name (see engine.signals and engine.probes).

    seconds: the model's share of its stack's time; a fact of the machine, never stored as a result.
    """

    ref: ModelRef
    arrays: Mapping[str, npt.NDArray[np.generic]]
    seconds: float = 0.0


def family(study: Study, arm: str) -> tuple[object, ...]:
    """Arms of one family differ in scalars only (lr, weight decay, lambda) and share stacks."""
    chosen = study.arms[arm]
    penalty = chosen.penalty
    form = None if penalty is None else (penalty.form, penalty.tau, penalty.through_sigma)
    return (chosen.net, chosen.norm, chosen.freeze_gamma, form)


def stacks(
    study: Study, missing: Sequence[ModelRef], size: int, workers: int
) -> tuple[tuple[ModelRef, ...], ...]:
    """Cut the missing models into stacks of at most `size`, models of one family together.

    Stacks are kept even in size, and no larger than lets every worker have one.
    """
    families: dict[tuple[object, ...], list[ModelRef]] = {}
    for ref in missing:
        families.setdefault(family(study, ref.arm), []).append(ref)
    cut = []
    for refs in families.values():
        limit = min(size, -(-len(refs) // workers))
        count = -(-len(refs) // limit)
        bounds = [round(i * len(refs) / count) for i in range(count + 1)]
        cut += [tuple(refs[a:b]) for a, b in itertools.pairwise(bounds)]
    return tuple(cut)
