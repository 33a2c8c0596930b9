"""A finished run with planted effects, written through the store, and other people's scores."""

import numpy as np

from attacks.loaded import Loaded
from attacks.population import Population
from attacks.types import ScoreMatrix
from engine import seeds, store
from engine.membership import keep_mask
from engine.outliers import CLEAN, sample_table
from engine.plan import ModelRef, ModelResult
from engine.study import Arm, Attacks, Data, Membership, Mix, Penalty, Query, Study, Train

CLASSES, LAYERS, POPULATION = 10, 3, 200
ARMS = {
    "bn": Arm(net="lenet", norm="batch"),
    "nobn": Arm(net="lenet", norm="none"),
    "bn_penalty": Arm(net="lenet", norm="batch", penalty=Penalty(form="hinge", lambda_=0.01)),
}
MIXES = {"clean": Mix(), "flip5": Mix(kind="flipped", share=0.05)}
SHIFT = {"bn": 2.2, "nobn": 1.4, "bn_penalty": 1.8}
"""How far membership moves phi, by arm: the planted effect."""


def a_study(mixes=MIXES, arms=tuple(ARMS), models=16, epochs=6, design="paired", **changes):
    return Study(
        name="planted",
        question="Does batch norm make a small net remember more of what it was trained on?",
        data=Data(name="digits"),
        mixes=dict(mixes),
        arms={name: ARMS[name] for name in arms},
        models=models,
        train=Train(epochs=epochs, batch=32, lr=0.05),
        membership=Membership(design=design),
        **{"attacks": Attacks(fpr=(0.001, 0.01)), **changes},
    )


def make_run(
    folder, study=None, samples=400, diverged=(), shift=SHIFT, inflated=None, views=1, stuck=()
):
    """Write a run. (mix, arm, model) refs diverged: their numbers are NaN; stuck: at chance."""
    study = study or a_study()
    labels = seeds.integers(seeds.key(study.seed, "labels"), samples, CLASSES)
    tables = {
        n: sample_table(m, study.seed, labels, CLASSES, 10_000) for n, m in study.mixes.items()
    }
    kinds = np.stack([t.kind_N for t in tables.values()])
    strata = np.unique(kinds, axis=1, return_inverse=True)[1].reshape(-1)
    mask = keep_mask(study.membership, study.seed, study.models, strata)
    folder.mkdir(parents=True, exist_ok=True)
    run = store.declare(
        folder, study, dict.fromkeys(tables, mask), tables, manifest(study, samples, tables)
    )
    for mix, table in tables.items():
        for arm in study.arms:
            refs = [ModelRef(mix=mix, arm=arm, model_id=m) for m in range(study.models)]
            results = [
                planted(study, ref, table, mask[ref.model_id], shift[arm], views, ref in bad)
                for bad in [{ModelRef(mix=a, arm=b, model_id=c) for a, b, c in diverged}]
                for ref in refs
            ]
            for result in results:
                if (mix, arm, result.ref.model_id) in stuck:
                    result.arrays["correct_N"][:] = False
            store.write_results(run, results)
    return run


def manifest(study, samples, tables):
    return {
        "format": store.FORMAT,
        "study": study.name,
        "digest": "0123456789ab",
        "data": {
            "name": "digits",
            "digest": "f" * 64,
            "pool": samples,
            "left_out": [7],
            "population": POPULATION,
            "classes": CLASSES,
            "image": [8, 8, 1],
            "loader": "resident: ffcv is not installed",
            "outliers": {},
        },
        "query_mode": study.query.mode,
        "seed": study.seed,
        "executor": "local",
        "numerics": {
            "device": "cpu",
            "isa": "AVX512",
            "versions": {"torch": "2.14.1"},
            "kernels": {
                "isa": "AVX512",
                "conv2d:cpu:float32": "cpu",
                "conv2d_backward:cpu:float32": "cpu",
                "max_pool:cpu:float32": "reference",
            },
        },
        "hardware": {"cpu": "a processor", "cores": 2},
        "versions": {"python": "3.11.2", "shadow-engine": "0.1.0", "torch": "2.14.1"},
        "started": "2026-01-01T00:00:00+00:00",
        "shards": {},
    }


def planted(study, ref, table, keep_N, shift, views, broken):
    """One model's arrays: membership raises phi by `shift`, of outliers by twice as much."""
    rng = np.random.default_rng([ref.model_id, len(ref.mix), len(ref.arm)])
    hard = np.random.default_rng(len(keep_N)).normal(3, 2, len(keep_N))
    outlier_N = table.kind_N != CLEAN
    centre_N = np.where(outlier_N, -4, hard) + shift * keep_N * np.where(outlier_N, 2.5, 0.5)
    phi_NQ = (centre_N[:, None] + rng.normal(0, 1, (len(keep_N), views))).astype(np.float32)
    population = rng.normal(2.6 + 0.1 * shift, 2, (POPULATION, views)).astype(np.float32)
    arrays = {
        "phi_NQ": phi_NQ,
        "correct_N": phi_NQ[:, 0] > 0,
        "population_phi_ZQ": population,
        "population_correct_Z": population[:, 0] > 0,
        "diverged": np.bool_(broken),
        **curves(study.train.epochs, arrays_of_groups(phi_NQ[:, 0], keep_N, outlier_N, population)),
    }
    if study.query.keep_epochs:
        kept = np.array(study.query.keep_epochs) / study.train.epochs
        arrays["kept_phi_ENQ"] = (kept[:, None, None] * phi_NQ).astype(np.float32)
        arrays["kept_population_phi_EZQ"] = (kept[:, None, None] * population).astype(np.float32)
    if study.arms[ref.arm].norm == "batch":
        arrays |= layer_curves(study.train.epochs, shift, rng)
    if broken:
        arrays = {
            name: np.full_like(values, np.nan) if values.dtype == np.float32 else values
            for name, values in arrays.items()
        }
    return ModelResult(ref=ref, arrays=arrays, seconds=1.0)


def arrays_of_groups(phi_N, keep_N, outlier_N, population):
    masks = (~outlier_N & keep_N, ~outlier_N & ~keep_N, outlier_N & keep_N, outlier_N & ~keep_N)
    return [*(phi_N[mask] for mask in masks), population[:, 0]]


def curves(epochs, groups):
    """Accuracy and loss that approach the final ones of each group; NaN where it is empty."""
    progress = 1 - np.exp(-3 * np.arange(1, epochs + 1) / epochs)
    accuracy = np.full((epochs, len(groups)), np.nan, dtype=np.float32)
    loss = np.full_like(accuracy, np.nan)
    for column, phi in enumerate(groups):
        if len(phi):
            accuracy[:, column] = 0.1 + progress * ((phi > 0).mean() - 0.1)
            loss[:, column] = 2.3 + progress * (np.logaddexp(0, -phi).mean() - 2.3)
    return {
        "curve_accuracy_EG": accuracy,
        "curve_loss_EG": loss,
        "train_loss_E": loss[:, 0].copy(),
    }


def layer_curves(epochs, shift, rng):
    time = np.linspace(0.2, 1, epochs)[:, None] * np.array([1.4, 1.1, 0.7])
    noise = rng.normal(0, 0.02, (epochs, LAYERS))
    gamma, sigma = 0.6 + 0.2 * time + noise, 1.2 - 0.4 * shift / 2 * time + noise
    return {
        "gamma_EL": gamma.astype(np.float32),
        "sigma_EL": sigma.astype(np.float32),
        "weight_norm_EL": (2 + time + noise).astype(np.float32),
        "gamma_over_sigma_EL": (gamma / sigma).astype(np.float32),
    }


def foreign(models=12, samples=80, queries=2, population=True):
    rng = np.random.default_rng(0)
    half = rng.random((models // 2, samples)) < 0.5
    keep = np.concatenate([half, ~half])
    scores = rng.normal(size=(models, samples, queries)) + 1.5 * keep[:, :, None]
    z = Population(scores_MZQ=rng.normal(size=(models, 60, queries))) if population else None
    matrix = ScoreMatrix(scores_MNQ=scores, keep_MN=keep)
    numbers = np.arange(models) + 3
    return Loaded(matrix=matrix, numbers_M=numbers, layout="npz", population=z)


KEEP = Query(keep_epochs=(2, 4))
OOD = {"ood1": Mix(kind="ood", share=0.05, source="mnist")}
