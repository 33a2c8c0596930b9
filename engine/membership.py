"""Keep masks: which model trains on which sample, decided before anything is trained.

M models, N samples. Halves are stratified by kind (to within one sample), so outliers are half IN
and half OUT like every other sample. Masks are keyed by pair (or model), so a study can grow.
"""

import numpy as np
import numpy.typing as npt

from engine import seeds
from engine.study import Membership

Mask = npt.NDArray[np.bool_]


def keep_mask(
    membership: Membership, study_seed: int, models: int, strata_N: npt.NDArray[np.integer]
) -> Mask:
    """The (M, N) keep mask of a study.

    paired: models 2k and 2k + 1 are complementary; every model has N / 2 members and every sample
    M / 2 models (an odd last model waits for its complement). balanced: every sample has
    the same number of models, no complements. bernoulli: independent coins of `pkeep`.

    Args:
        membership: the design and `pkeep`.
        study_seed: the study's seed.
        models: M.
        strata_N: integer code of each sample's stratum (its kinds over all mixes). N must be
            even for paired masks.
    """
    if membership.design == "paired":
        halves = [_half(study_seed, pair, strata_N) for pair in range((models + 1) // 2)]
        return np.stack([row for half in halves for row in (half, ~half)])[:models]
    if membership.design == "bernoulli":
        draws = [
            seeds.uniform(seeds.key(study_seed, "keep", model_id=model), len(strata_N))
            for model in range(models)
        ]
        return np.stack(draws) < membership.pkeep
    return _balanced(study_seed, models, strata_N)


def without_complement(design: str, models: int) -> list[int]:
    """The models that wait for a complement: of paired masks the last of an odd number.

    >>> without_complement("paired", 9), without_complement("paired", 8)
    ([8], [])
    """
    return [models - 1] if design == "paired" and models % 2 else []


def odd_one_out(design: str, models: int) -> str:
    """What becomes of a model without complement, in one line; empty where all have theirs."""
    if not without_complement(design, models):
        return ""
    return (
        f"an odd number of models: model {models - 1} has no complement; as a target it is scored "
        "from all others, and the intervals leave it out alone"
    )


def _half(study_seed: int, pair: int, strata_N: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
    """A random half of each stratum; strata of odd size give their odd one out by turns."""
    order = seeds.permutation(seeds.key(study_seed, "keep", counter=pair), len(strata_N))
    by_stratum = order[np.argsort(strata_N[order], kind="stable")]
    keep = np.zeros(len(strata_N), dtype=bool)
    keep[by_stratum[(pair % 2) :: 2]] = True
    return keep


def _balanced(study_seed: int, models: int, strata_N: npt.NDArray[np.integer]) -> Mask:
    """Every sample is kept by exactly M / 2 models, chosen sample by sample."""
    if models % 2:
        raise ValueError(f"balanced masks need an even number of models, not {models}")
    keep = np.zeros((models, len(strata_N)), dtype=bool)
    for sample in range(len(strata_N)):
        chosen = seeds.permutation(seeds.key(study_seed, "keep", counter=sample), models)
        keep[chosen[: models // 2], sample] = True
    return keep
