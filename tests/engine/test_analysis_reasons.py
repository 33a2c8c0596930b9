"""What is said where a comparison is spoilt or a number is missing: true reasons, no direction."""

import math
from dataclasses import replace

from synthetic_run import KEEP, MIXES, a_study, make_run

from attacks.types import Interval
from engine.analysis import analyse, wording
from engine.analysis.wording import on_outliers
from engine.study import Mix

FLIP5 = {"flip5": MIXES["flip5"]}
CLEAN = {"clean": Mix()}
PAIR = ("bn", "nobn")


def test_no_direction_is_told_where_models_never_left_chance(tmp_path):
    stuck = [("flip5", arm, m) for arm in PAIR for m in range(8)]
    study = a_study(FLIP5, PAIR, models=8)
    findings = analyse(make_run(tmp_path / "both", study, stuck=stuck))
    assert findings.contrasts[0].differences["auc/online/all"].interval.low > 0
    assert findings.answer.startswith(
        "This run cannot say who leaks more, as 8 of 8 models of bn and "
        "8 of 8 models of nobn never left chance: the paired difference"
    )
    assert on_outliers(findings) == ""
    findings = analyse(make_run(tmp_path / "one", study, stuck=stuck[-1:]))
    assert "as 1 of 8 models of nobn never left chance" in findings.answer
    assert "easier" not in findings.answer
    assert on_outliers(findings) == ""
    assert "of the outliers" in on_outliers(analyse(make_run(tmp_path / "fine", study))).lower()
    alone = a_study(FLIP5, PAIR[:1], models=8)
    findings = analyse(make_run(tmp_path / "alone", alone, stuck=stuck[:3]))
    assert "cannot say how much bn leaks, as 3 of 8 models" in findings.answer


def test_no_direction_is_told_where_neither_attack_beats_guessing(tmp_path):
    study = a_study(CLEAN, PAIR)
    findings = analyse(make_run(tmp_path / "pair", study, shift=dict.fromkeys(PAIR, 0.0)))
    for low, high in ((0.007, 0.031), (-0.031, -0.007), (-0.01, 0.02)):
        contrast = findings.contrasts[0]
        decided = Interval(low=low, high=high, level=0.95, method="")
        estimate = replace(contrast.differences["auc/online/all"], interval=decided)
        differences = {**contrast.differences, "auc/online/all": estimate}
        lucky = replace(findings, contrasts=(replace(contrast, differences=differences),))
        told = wording.answer(lucky)
        assert told.startswith(
            "The attack beats guessing neither with bn nor with nobn: the paired"
        )
    study = a_study(CLEAN, PAIR[:1])
    findings = analyse(make_run(tmp_path / "alone", study, shift={"bn": 0.0}))
    assert findings.answer.startswith("LiRA does not beat guessing on members of bn: an AUC of 0.")


def test_both_arms_that_diverged_are_named_and_so_is_one_with_batch_norm(tmp_path):
    gone = [("flip5", arm, m) for arm in PAIR for m in range(8)]
    findings = analyse(make_run(tmp_path, a_study(FLIP5, PAIR, models=8), diverged=gone))
    assert findings.cell("flip5", "bn").rates["gamma_share"].reason == "every model of bn diverged"
    whys = {row.claim: row.why.partition(": ")[2] for row in findings.claims}
    assert whys.pop("C5") == "every model of bn diverged"
    assert set(whys.values()) == {"every model of bn and of nobn diverged"}
    assert "every model of bn diverged; the attack on nobn was refused: every" in findings.answer


def test_arms_without_a_model_in_common_diverged_in_part_only(tmp_path):
    gone = [("flip5", PAIR[m < 4], m) for m in range(8)]
    study = a_study(FLIP5, PAIR, models=8, query=KEEP)
    contrast = analyse(make_run(tmp_path, study, diverged=gone)).contrasts[0]
    why = "no model trained to the end in both arms"
    assert contrast.models == 0
    assert contrast.differences["outlier_gap"].reason == contrast.unmatched == why


def test_a_group_that_some_model_lacks_is_not_said_to_be_absent_from_the_mix(tmp_path):
    mixes = {"flip1": Mix(kind="flipped", share=0.01)}
    study = a_study(mixes, PAIR[:1], models=8, design="bernoulli")
    cell = analyse(make_run(tmp_path, study, samples=100)).cell("flip1", "bn")
    assert cell.rates["outlier_gap"].reason == "in some model there are no such samples"


def test_an_arm_that_diverged_altogether_is_undefined_not_zero(tmp_path):
    gone = [("flip5", "nobn", m) for m in range(8)]
    findings = analyse(make_run(tmp_path, a_study(FLIP5, PAIR, models=8), diverged=gone))
    cell = findings.cell("flip5", "nobn")
    assert cell.refused == "every model of nobn diverged"
    assert math.isnan(cell.rates["test_accuracy"].value)
    assert not cell.curves
    for name, rate in cell.rates.items():
        other = "the arm has no batch norm"
        assert rate.reason == (other if name == "gamma_share" else cell.refused), name
    assert findings.cell("flip5", "bn").attack("online", "all") is not None
    differences = findings.contrasts[0].differences
    assert {e.reason for n, e in differences.items() if n != "gamma_share"} == {cell.refused}
    assert {r.why.partition(": ")[2] for r in findings.claims if len(r.arms) == 2} == {cell.refused}
    assert "as the attack on nobn was refused: every model of nobn diverged" in findings.answer
