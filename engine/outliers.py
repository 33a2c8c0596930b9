"""Outlier mixes: label flips and out-of-distribution (OOD) replacement, and the sample table.

N is the same in every mix: OOD images replace pool images, flips of 1 % are a subset of those of
5 %. One permutation of the pool, fixed by the study's seed, ranks the samples; a mix with share s
makes outliers of the first round(s * N). Outliers are wrong in the same way in all models.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine import seeds
from engine.study import Mix

CLEAN, FLIPPED, OOD = 0, 1, 2
KINDS = ("clean", "flipped", "ood")

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SampleTable:
    """What each of the N samples of a mix is.

    label_N: the label trained on. true_label_N: the right one (-1 for OOD images, which have none).
    kind_N: index into KINDS. source_N: pool index of the image, or index into the OOD source's
    images where kind is OOD.
    """

    label_N: Ints
    true_label_N: Ints
    kind_N: npt.NDArray[np.uint8]
    source_N: Ints


def sample_table(
    mix: Mix, study_seed: int, labels_N: Ints, classes: int, source_count: int = 0
) -> SampleTable:
    """The table of one mix over a pool with the given true labels.

    Args:
        mix: kind and share.
        study_seed: the study's seed.
        labels_N: true labels of the pool, 0 to `classes` - 1.
        classes: K, at least 2.
        source_count: how many images the OOD source has (kind "ood" only).

    Raises:
        ValueError: the OOD source has fewer images than the mix needs.
    """
    count = len(labels_N)
    outliers = ranking(study_seed, count)[: round(mix.share * count)]
    label_N, true_N, source_N = labels_N.copy(), labels_N.copy(), np.arange(count)
    kind_N = np.zeros(count, dtype=np.uint8)
    draws_N = seeds.raw_bits(seeds.key(study_seed, "outliers", name=mix.kind), count)
    if mix.kind == "flipped":
        shift = 1 + (draws_N % np.uint64(classes - 1)).astype(np.int64)
        label_N[outliers] = (labels_N[outliers] + shift[outliers]) % classes
        kind_N[outliers] = FLIPPED
    elif mix.kind == "ood":
        if source_count < len(outliers):
            raise ValueError(
                f"the OOD source has {source_count} images, the mix needs {len(outliers)}: "
                "lower its share or name a larger source"
            )
        label_N[outliers] = (draws_N % np.uint64(classes)).astype(np.int64)[outliers]
        true_N[outliers] = -1
        kind_N[outliers] = OOD
        rows = seeds.permutation(seeds.key(study_seed, "outliers", name="ood rows"), source_count)
        source_N[outliers] = rows[: len(outliers)]
    return SampleTable(label_N=label_N, true_label_N=true_N, kind_N=kind_N, source_N=source_N)


def ranking(study_seed: int, count: int) -> Ints:
    """The order in which pool samples become outliers as the share grows."""
    return seeds.permutation(seeds.key(study_seed, "outliers", name="ranking"), count)
