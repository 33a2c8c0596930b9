"""Privacy bounds: at most the truth as often as stated, near it, refused where invalid."""

import math

import numpy as np
import pytest
from designs import balanced, bernoulli, paired
from scipy.stats import binom

from attacks.audit import (
    epsilon_lower_bound,
    gdp_delta,
    gdp_epsilon,
    mu_lower_bound,
    one_run,
    one_run_p_value,
    thresholds_from,
)


def randomized_response(rng, epsilon, members):
    """Answers the truth with probability e^eps / (1 + e^eps): exactly epsilon-private."""
    truth = rng.random(members.size) < 1 / (1 + math.exp(-epsilon))
    return np.where(truth, members, ~members).astype(float)


@pytest.mark.parametrize("delta", [0.0, 0.01])
def test_nulls_give_zero_in_95_of_100(delta):
    rng = np.random.default_rng(0)
    values = []
    for _ in range(400):
        members = rng.random(300) < 0.5
        bars = thresholds_from(rng.normal(size=2000))
        bound = epsilon_lower_bound(rng.normal(size=300), members, bars, delta=delta)
        values.append(bound.value)
        assert bound.tested == 2 * len(bars)
    assert np.mean(np.array(values) == 0) >= 0.95


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_epsilon_of_randomized_response_is_bounded_from_below_and_approached(epsilon):
    rng = np.random.default_rng(1)
    values = []
    for _ in range(300):
        members = rng.random(2000) < 0.5
        scores = randomized_response(rng, epsilon, members)
        values.append(epsilon_lower_bound(scores, members, [0.5]).value)
    assert np.mean(np.array(values) <= epsilon) >= 0.95
    assert np.mean(values) > 0.6 * epsilon


def test_both_directions_are_looked_at():
    members = np.arange(400) < 200
    sure_in = np.where(members & (np.arange(400) < 60), 1.0, 0.0)
    sure_out = np.where(~members & (np.arange(400) < 260), -1.0, 0.0)
    first = epsilon_lower_bound(sure_in, members, [0.5])
    second = epsilon_lower_bound(sure_out, members, [-0.5])
    assert first.value == pytest.approx(second.value)
    assert first.detail.startswith("members at 0.5: 60/200 hits, 0/200")
    assert second.detail.startswith("non-members at -0.5: 60/200 hits, 0/200")


def test_more_thresholds_cost_confidence():
    members = np.arange(400) < 200
    scores = members + np.linspace(0, 0.1, 400)
    values = [epsilon_lower_bound(scores, members, [0.5] * count).value for count in (1, 10, 100)]
    assert values[0] > values[1] > values[2] > 0


@pytest.mark.parametrize("epsilon", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("delta", [0.0, 1e-4])
def test_the_one_run_auditor_keeps_its_level(epsilon, delta):
    values = []
    for seed in range(200 if delta == 0 else 100):
        rng = np.random.default_rng(seed)
        keep = bernoulli(rng, 4, 500)
        scores = randomized_response(rng, epsilon, keep[2]) + rng.random(500) / 10
        values.append(one_run(scores, keep, 2, delta=delta).value)
    assert np.mean(np.array(values) <= epsilon) >= 0.95
    if epsilon:
        assert np.mean(values) > 0.5 * epsilon


def test_the_one_run_p_value_is_the_papers_loop():
    """Appendix D, written out."""
    for m, r, v, epsilon, delta in (
        (100, 60, 50, 1.0, 1e-3),
        (40, 40, 21, 0.1, 1e-2),
        (9, 4, 0, 1, 0.1),
    ):
        q = 1 / (1 + math.exp(-epsilon))
        beta = binom.sf(v - 1, r, q)
        alpha = total = 0.0
        for i in range(1, v + 1):
            total += binom.pmf(v - i, r, q)
            alpha = max(alpha, total / i)
        want = min(1.0, beta + alpha * delta * 2 * m)
        assert one_run_p_value(m, r, v, epsilon, delta) == pytest.approx(want, rel=1e-9)


def test_the_one_run_auditor_refuses_masks_that_are_no_coins():
    rng = np.random.default_rng(3)
    scores = rng.normal(size=200)
    for keep, word in (
        (paired(rng, 8, 200), "this mask is paired"),
        (balanced(rng, 8, 200), "this mask is balanced"),
        (np.argsort(rng.random((8, 200)), axis=1) < 100, "fixed number of members"),
    ):
        with pytest.raises(ValueError, match=f"independent coins .*{word}"):
            one_run(scores, keep, 1)
    with pytest.raises(ValueError, match="the coins were not fair"):
        one_run(scores, bernoulli(rng, 8, 200, 0.2), 1)


def test_gdp_curves_are_those_of_two_gaussians():
    for mu in (0.3, 1.0, 2.5):
        for epsilon in (0.0, 0.5, 2.0):
            x = np.linspace(-30, 30, 600_001)
            p = np.exp(-((x - mu) ** 2) / 2) / math.sqrt(2 * math.pi)
            q = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
            want = np.sum(np.maximum(p - math.exp(epsilon) * q, 0)) * (x[1] - x[0])
            assert gdp_delta(mu, epsilon) == pytest.approx(want, abs=1e-6)
        assert gdp_delta(mu, gdp_epsilon(mu, 1e-5)) == pytest.approx(1e-5, rel=1e-6)
    assert gdp_delta(0.0, 0.0) == 0
    assert gdp_epsilon(0.1, 0.5) == 0


def test_mu_of_gaussian_scores_is_bounded_and_approached():
    values = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        members = rng.random(4000) < 0.5
        scores = rng.normal(size=4000) + 1.0 * members
        bars = [0.0, 0.5, 1.0]
        values.append(mu_lower_bound(scores, members, bars, mechanism="gaussian").value)
    assert np.mean(np.array(values) <= 1.0) >= 0.95
    assert np.mean(values) > 0.8


def test_bounds_refuse_what_they_are_not_about():
    members = np.arange(10) < 5
    with pytest.raises(ValueError, match="mu-GDP does not apply to mechanism 'sgd'"):
        mu_lower_bound(members.astype(float), members, [0.5], mechanism="sgd")
    with pytest.raises(ValueError, match="about one target"):
        epsilon_lower_bound(np.zeros((2, 10)), np.stack([members] * 2), [0.5])
    with pytest.raises(ValueError, match="fixed without these scores"):
        epsilon_lower_bound(members.astype(float), members, [])
    with pytest.raises(ValueError, match="members and non-members"):
        epsilon_lower_bound(np.zeros(10), np.ones(10, dtype=bool), [0.5])
    with pytest.raises(ValueError, match="the level is 1"):
        epsilon_lower_bound(np.zeros(10), members, [0.5], level=1)
