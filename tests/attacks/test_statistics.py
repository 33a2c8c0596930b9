"""phi, loss, p and margin from logits of any type and size."""

import numpy as np
import oracles
import pytest

from attacks import statistics
from attacks.statistics import (
    loss_from_phi,
    margin_from_logits,
    phi_from_logits,
    probability_from_phi,
)


@pytest.mark.parametrize("shape", [(3, 5, 4), (2, 5, 3, 2), (2, 4, 18, 10)])
@pytest.mark.parametrize("block_bytes", [1, 1 << 25])
def test_phi_and_margin_agree_with_the_loops(shape, block_bytes, monkeypatch):
    monkeypatch.setattr(statistics, "_BLOCK_BYTES", block_bytes)
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 5, shape)
    before = logits.copy()
    labels = rng.integers(0, shape[-1], shape[1])
    phi, margin = phi_from_logits(logits, labels), margin_from_logits(logits, labels)
    assert np.array_equal(logits, before), "the input was written to"
    assert phi.shape == shape[:-1]
    for index in np.ndindex(*shape[:-1]):
        row, label = logits[index].tolist(), int(labels[index[1]])
        assert phi[index] == pytest.approx(oracles.phi(row, label), rel=1e-12, abs=1e-12)
        others = [z for k, z in enumerate(row) if k != label]
        assert margin[index] == row[label] - max(others)


def test_saturated_logits_keep_their_gap():
    logits = np.array([[2000.0, 0.0, -5.0], [0.0, 3000.0, 1.0], [-1e4, 1e4, 0.0]])
    phi = phi_from_logits(logits, np.array([0, 0, 0]), axis=0)
    np.testing.assert_allclose(phi, [2000 - np.log1p(np.exp(-5)), -3000, -2e4], rtol=1e-14)
    np.testing.assert_allclose(loss_from_phi(phi), [0, 3000, 2e4], atol=1e-300)
    assert probability_from_phi(phi)[0] == 1


def test_two_classes_give_the_difference_of_logits():
    logits = np.array([[1.5, -2.0]])
    assert phi_from_logits(logits, np.array([0]), axis=0)[0] == 3.5
    assert phi_from_logits(logits, np.array([1]), axis=0)[0] == -3.5


def test_loss_and_p_are_those_of_the_softmax():
    logits = np.random.default_rng(1).normal(0, 3, (50, 7))
    labels = np.arange(50) % 7
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    own = p[np.arange(50), labels]
    phi = phi_from_logits(logits, labels, axis=0)
    np.testing.assert_allclose(probability_from_phi(phi), own, rtol=1e-12)
    np.testing.assert_allclose(loss_from_phi(phi), -np.log(own), rtol=1e-12)


def test_logits_that_are_not_finite_give_limits_or_nan():
    inf, nan = np.inf, np.nan
    logits = np.array(
        [[1, -inf, -inf], [inf, 0, 0], [0, inf, 0], [inf, inf, 0], [nan, 0, 0], [0, nan, 0]]
    )
    phi = phi_from_logits(logits, np.zeros(6, dtype=int), axis=0)
    np.testing.assert_array_equal(phi, [inf, inf, -inf, nan, nan, nan])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int8])
def test_any_dtype_goes_in(dtype):
    logits = np.random.default_rng(2).integers(-60, 60, (4, 6, 5)).astype(dtype)
    labels = np.arange(6) % 5
    exact = phi_from_logits(logits.astype(np.float64), labels)
    assert np.array_equal(phi_from_logits(logits, labels), exact)


def test_memory_maps_go_in_and_out(tmp_path):
    logits = np.random.default_rng(3).normal(size=(3, 50, 2, 4)).astype(np.float16)
    np.save(tmp_path / "logits.npy", logits)
    mapped = np.load(tmp_path / "logits.npy", mmap_mode="r")
    out = np.lib.format.open_memmap(tmp_path / "phi.npy", "w+", np.float32, (3, 50, 2))
    labels = np.arange(50) % 4
    phi_from_logits(mapped, labels, out=out)
    exact = phi_from_logits(logits, labels)
    np.testing.assert_allclose(np.load(tmp_path / "phi.npy"), exact, rtol=1e-6)


@pytest.mark.parametrize(
    ("logits", "labels", "axis", "sentence"),
    [
        (np.zeros((2, 1)), [0, 0], 0, "1 class: phi needs two"),
        (np.zeros((2, 3)), [0, 3], 0, "labels run from 0 to 3: expected 0 to 2"),
        (np.zeros((2, 3)), [0.0, 1.0], 0, "of type float64"),
        (np.zeros((2, 3)), [0, 1, 2], 0, "3 labels for 2 samples"),
        (np.zeros((2, 3)), [0, 1], 1, "expected \\(models, samples"),
        (np.zeros((2, 3)), [0, 1], 2, "axis is 2"),
    ],
)
def test_bad_logits_are_refused(logits, labels, axis, sentence):
    with pytest.raises(ValueError, match=sentence):
        phi_from_logits(logits, np.array(labels), axis=axis)
