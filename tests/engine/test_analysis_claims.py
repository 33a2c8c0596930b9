"""Verdicts: which side an interval lies on, what would decide, Holm's correction."""

import math

import pytest

from attacks.types import Interval, no_interval
from engine.analysis.claims import decide, holm, models_needed
from engine.analysis.findings import ClaimRow, Estimate, Measure
from engine.report.tables import measured


def measure(value, error, threshold=0.0, upward=True, degrees=15):
    half = 2.131 * error
    interval = Interval(low=value - half, high=value + half, level=0.95, method="")
    estimate = Estimate(value=value, interval=interval, standard_error=error, degrees=degrees)
    return Measure(what="it", estimate=estimate, threshold=threshold, upward=upward)


@pytest.mark.parametrize(
    ("measures", "verdict"),
    [
        ([measure(1, 0.1)], "held"),
        ([measure(-1, 0.1)], "not held"),
        ([measure(-1, 0.1, upward=False)], "held"),
        ([measure(1, 0.1, threshold=4)], "not held"),
        ([measure(0.1, 0.1)], "not decidable here"),
        ([measure(1, 0.1), measure(0.1, 0.1)], "not decidable here"),
        ([measure(1, 0.1), measure(-1, 0.1)], "not held"),
    ],
)
def test_a_row_is_held_when_every_interval_lies_on_the_claimed_side(measures, verdict):
    assert decide(measures, 32, 0.95).verdict == verdict


@pytest.mark.parametrize("unit", ["points", "share", "epochs"])
@pytest.mark.parametrize("threshold", [0.0, 0.03, 0.04, 0.5])
@pytest.mark.parametrize("gap", [0.2, 4e-4, 3e-5, -3e-5, -4e-4, -0.2])
def test_a_printed_interval_shows_on_which_side_of_the_threshold_it_ends(unit, threshold, gap):
    for low, high in ((threshold + gap, threshold + 0.3), (threshold - 0.3, threshold + gap)):
        near = Interval(low=low, high=high, level=0.95, method="")
        estimate = Estimate(value=low + 0.1, interval=near, standard_error=0.1, degrees=15)
        decided = Measure(what="it", estimate=estimate, threshold=threshold, unit=unit)
        printed = measured(decided)[1].replace("−", "-").split(" to ")
        bar = threshold * (1 if unit == "epochs" else 100)
        shown = [(float(end) > bar) - (float(end) < bar) for end in printed]
        assert shown == [(end > threshold) - (end < threshold) for end in (low, high)]


def test_a_missing_interval_leaves_the_row_open_with_its_reason():
    estimate = Estimate(value=1.0, interval=no_interval(0.95, "", "2 pairs of models"))
    ruling = decide([Measure(what="it", estimate=estimate, threshold=0.0)], 4, 0.95)
    assert ruling.verdict == "not decidable here"
    assert ruling.why == "it: 2 pairs of models"
    assert math.isnan(ruling.p_value)


def test_the_number_of_models_that_would_decide():
    assert models_needed(measure(1, 1), 32, 0.95) == 128
    assert models_needed(measure(1, 1, threshold=0.5), 32, 0.95) > 4 * 100
    assert models_needed(measure(1e-6, 1), 32, 0.95) is None
    assert decide([measure(1, 1)], 32, 0.95).models_needed == 128


@pytest.mark.parametrize(
    ("groups", "verdict"),
    [(3, "not decidable here"), (5, "not decidable here"), (6, "held"), (16, "held")],
)
def test_an_interval_of_no_width_is_no_evidence_but_many_equal_groups_are(groups, verdict):
    ruling = decide([measure(1.0, 0.0, threshold=0.5, degrees=groups - 1)], 2 * groups, 0.95)
    assert ruling.verdict == verdict
    assert ruling.p_value == 2.0 ** (1 - groups)
    assert ruling.models_needed == (None if verdict == "held" else 12)
    assert ("too few to tell" in ruling.why) == (verdict != "held")


def row(p_value, verdict="held"):
    return ClaimRow(
        claim="C3",
        statement="",
        mix="",
        kind="",
        share=0.05,
        net="",
        arms=("bn", "nobn"),
        measures=(),
        beside=(),
        verdict=verdict,
        why="",
        p_value=p_value,
    )


def test_holm_steps_down_over_all_rows_and_stops_at_the_first_that_fails():
    rows = holm([row(0.04), row(0.001), row(0.02), row(math.nan, "not decidable here")], 0.95)
    assert [r.after_holm for r in rows] == [True, True, True, False]
    rows = holm([row(0.04), row(0.001), row(0.03)], 0.95)
    assert [r.after_holm for r in rows] == [False, True, False]
    rows = holm([row(0.001, "not decidable here")], 0.95)
    assert not rows[0].after_holm
