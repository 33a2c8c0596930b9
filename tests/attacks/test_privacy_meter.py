"""Privacy Meter's folders: probabilities or losses, a population beside, refusals."""

import numpy as np
import pytest
from designs import study

from attacks.interop import read

MODELS, SAMPLES = 12, 30


def save(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, array)


def test_privacy_meter_gives_probabilities_and_a_population(tmp_path):
    rng = np.random.default_rng(1)
    phi, z = rng.normal(0, 3, (MODELS, SAMPLES)), rng.normal(0, 3, (MODELS, 9))
    keep = study(0, "paired", MODELS, SAMPLES).keep_MN
    save(tmp_path / "models/memberships.npy", keep)
    save(tmp_path / "signals/rmia_signals.npy", (1 / (1 + np.exp(-phi))).T)
    save(tmp_path / "signals/rmia_signals_pop.npy", (1 / (1 + np.exp(-z))).T)
    loaded = read(tmp_path)
    np.testing.assert_allclose(loaded.matrix.scores_MNQ[..., 0], phi, rtol=1e-9)
    np.testing.assert_allclose(loaded.population.scores_MZQ[..., 0], z, rtol=1e-9)


def test_privacy_meter_losses_are_no_probabilities(tmp_path):
    """Its LOSS algorithm stores cross-entropies; small ones would pass for probabilities."""
    rng = np.random.default_rng(1)
    phi, z = rng.normal(3, 1, (MODELS, SAMPLES)), rng.normal(3, 1, (MODELS, 9))
    keep = study(0, "paired", MODELS, SAMPLES).keep_MN
    save(tmp_path / "models/memberships.npy", keep)
    save(tmp_path / "signals/loss_signals.npy", np.logaddexp(0, -phi).T)
    save(tmp_path / "signals/loss_signals_pop.npy", np.logaddexp(0, -z).T)
    loaded = read(tmp_path)
    np.testing.assert_allclose(loaded.matrix.scores_MNQ[..., 0], phi, rtol=1e-9)
    np.testing.assert_allclose(loaded.population.scores_MZQ[..., 0], z, rtol=1e-9)
    save(tmp_path / "signals/rmia_signals.npy", (1 / (1 + np.exp(1 - phi))).T)
    both = read(tmp_path)
    np.testing.assert_allclose(both.matrix.scores_MNQ[..., 0], phi - 1, rtol=1e-9)
    assert both.population is None
    (tmp_path / "signals/rmia_signals.npy").unlink()
    save(tmp_path / "signals/loss_signals.npy", np.zeros((SAMPLES, MODELS), dtype=np.float32))
    with pytest.warns(UserWarning, match="360 of 360 losses are saturated"):
        assert np.isfinite(read(tmp_path).matrix.scores_MNQ).all()
    save(tmp_path / "signals/loss_signals.npy", -np.ones((SAMPLES, MODELS)))
    with pytest.raises(
        ValueError, match=r"loss_signals\.npy holds negative losses: expected losses, 0 or"
    ):
        read(tmp_path)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.ones((SAMPLES, MODELS), dtype=int), "is of type int64: expected"),
        (np.ones((SAMPLES, MODELS), dtype=bool), "is of type bool: expected"),
        (np.full((SAMPLES, MODELS), "0.5"), "is of type <U3: expected"),
        (np.full((SAMPLES, MODELS), np.nan), "holds 360 NaN of 360 values: expected"),
    ],
)
@pytest.mark.parametrize("beside", ["", "_pop"])
@pytest.mark.parametrize(
    ("name", "expected"),
    [("loss_signals", "losses, 0 or more"), ("rmia_signals", "probabilities of the label, 0 to 1")],
)
def test_signals_that_are_no_numbers_of_their_kind_are_refused(
    name, expected, beside, values, words, tmp_path
):
    save(tmp_path / "memberships.npy", study(0, "paired", MODELS, SAMPLES).keep_MN)
    save(tmp_path / f"{name}.npy", np.full((SAMPLES, MODELS), 0.5))
    save(tmp_path / f"{name}{beside}.npy", values)
    with pytest.raises(ValueError, match=rf"{name}{beside}\.npy {words} {expected}") as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


def test_saturated_probabilities_are_held_finite_and_counted(tmp_path):
    p = np.linspace(0.4, 0.6, 40, dtype=np.float32).reshape(5, 8)
    p[0, 0], p[1, 1], p[2, 2] = 1, 0, np.float32(1) - np.finfo(np.float32).epsneg
    save(tmp_path / "memberships.npy", np.zeros((8, 5), dtype=bool))
    save(tmp_path / "rmia_signals.npy", p)
    with pytest.warns(UserWarning, match="2 of 40 probabilities are saturated"):
        loaded = read(tmp_path)
    assert np.isfinite(loaded.matrix.scores_MNQ).all()
    assert loaded.matrix.scores_MNQ.max() == pytest.approx(np.log(2**24 - 1))
