"""Masks and scores for the tests of attacks."""

import numpy as np
import oracles

from attacks.exclusion import plan_exclusion
from attacks.types import ScoreMatrix


def paired(rng, models, samples, pkeep=0.5):
    half = rng.random((models // 2, samples)) < pkeep
    keep = np.empty((models, samples), dtype=bool)
    keep[: 2 * half.shape[0] : 2], keep[1 : 2 * half.shape[0] : 2] = half, ~half
    if models % 2:
        keep[-1] = rng.random(samples) < 0.5
    return keep


def balanced(rng, models, samples, pkeep=0.5):
    """Every sample has the same number of members; complements only by accident."""
    members = round(models * pkeep)
    return np.argsort(rng.random((models, samples)), axis=0) < members


def bernoulli(rng, models, samples, pkeep=0.5):
    return rng.random((models, samples)) < pkeep


DESIGNS = {"paired": paired, "balanced": balanced, "bernoulli": bernoulli}


def scores(rng, keep, queries=1, gap=1.0):
    """phi with a level and a spread per sample, higher by `gap` for members."""
    models, samples = keep.shape
    level = rng.normal(0, 2, (1, samples, 1))
    spread = rng.uniform(0.5, 2, (1, samples, 1))
    noise = rng.normal(0, 1, (models, samples, queries))
    return level + spread * noise + gap * keep[:, :, None]


def study(seed, design, models, samples, queries=1, pkeep=0.5, gap=1.0):
    rng = np.random.default_rng(seed)
    keep = DESIGNS[design](rng, models, samples, pkeep)
    stated = design if design == "bernoulli" else "auto"
    return ScoreMatrix(scores_MNQ=scores(rng, keep, queries, gap), keep_MN=keep, design=stated)


def gone_of(matrix, target):
    """The models left out of each sample: by the oracle's rule, or as the package's hash chose."""
    if matrix.design == "bernoulli":
        return lambda n: {target}
    plan = plan_exclusion(matrix.keep_MN, matrix.design, matrix.scores_MNQ)
    if plan.opposite_M[target]:
        alive = np.ones(matrix.models, dtype=bool)
        chosen = plan.opposite(target, 0, matrix.samples, alive)
        return lambda n: {target, int(chosen[n])}
    return lambda n: oracles.left_out(matrix.keep_MN.tolist(), target)


def memo(function):
    """Remember what a rule gives for each sample."""
    known = {}

    def recall(n):
        if n not in known:
            known[n] = function(n)
        return known[n]

    return recall
