"""Findings: planted effects are found, intervals are the jackknife, gaps are told with reasons."""

import json
import math

import numpy as np
import pyarrow.parquet as parquet
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score
from synthetic_run import ARMS, KEEP, MIXES, OOD, SHIFT, a_study, make_run

from attacks.lira import lira
from attacks.types import ScoreMatrix
from engine.analysis import analyse
from engine.analysis.results import _estimate
from engine.analysis.wording import interval
from engine.plan import ModelRef, ModelResult
from engine.report import write_report
from engine.report.summary import tables
from engine.store import open_run, write_results
from engine.study import Attacks, Mix

FLIP5 = {"flip5": MIXES["flip5"]}
CLEAN = {"clean": Mix()}
PAIR = ("bn", "nobn")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def findings(run):
    return analyse(run)


def aucs(run, mix, arm, without=()):
    """The textbook: attack each model with the others, one after the other."""
    cell = run.load(mix, arm)
    here = [m for m in range(len(cell.keep_MN)) if m not in without]
    matrix = ScoreMatrix(
        scores_MNQ=cell.arrays["phi_NQ"][here], keep_MN=cell.keep_MN[here], design="paired"
    )
    found = lira(matrix)
    pairs = zip(found.membership_TN, found.scores_TN, strict=True)
    return np.mean([roc_auc_score(member, score) for member, score in pairs])


def test_auc_and_its_paired_interval_are_those_of_the_textbook_jackknife(run, findings):
    expected = [aucs(run, "flip5", arm) for arm in PAIR]
    replicates = np.array(
        [
            np.subtract(*[aucs(run, "flip5", arm, (2 * k, 2 * k + 1)) for arm in PAIR])
            for k in range(8)
        ]
    )
    error = math.sqrt(7 / 8 * ((replicates - replicates.mean()) ** 2).sum())
    half = stats.t.ppf(0.975, 7) * error
    found = findings.contrasts[2]
    assert (found.mix, found.left, found.right) == ("flip5", *PAIR)
    difference = found.differences["auc/online/all"]
    assert difference.value == pytest.approx(expected[0] - expected[1], abs=1e-12)
    assert difference.interval.low == pytest.approx(difference.value - half, abs=1e-12)
    assert difference.interval.high == pytest.approx(difference.value + half, abs=1e-12)
    for arm, auc in zip(PAIR, expected, strict=True):
        assert findings.cell("flip5", arm).attack("online", "all").auc.value == pytest.approx(auc)


def test_accuracies_and_losses_are_means_over_models_with_jackknife_errors(run, findings):
    cell = run.load("flip5", "nobn")
    rates = findings.cell("flip5", "nobn").rates
    outlier = cell.samples.kind_N != 0
    inside = np.array(
        [c[k & outlier].mean() for c, k in zip(cell.arrays["correct_N"], cell.keep_MN, strict=True)]
    )
    assert rates["outlier_in_accuracy"].value == pytest.approx(inside.mean())
    pairs = inside.reshape(-1, 2).mean(1)
    error = pairs.std(ddof=1) / math.sqrt(len(pairs))
    assert rates["outlier_in_accuracy"].standard_error == pytest.approx(error)
    loss = np.logaddexp(0, -cell.arrays["population_phi_ZQ"].astype(float)).mean()
    assert rates["test_loss"].value == pytest.approx(loss)
    unfit = (1 - cell.arrays["curve_accuracy_EG"][:, :, 2]).sum(1).mean()
    assert rates["outlier_unfit"].value == pytest.approx(unfit, rel=1e-6)


def test_planted_effects_are_found_and_claims_held(findings):
    verdicts = {(row.claim, row.mix): row.verdict for row in findings.claims}
    assert verdicts["C1", "flip5"] == verdicts["C3", "flip5"] == verdicts["C4", "clean"] == "held"
    assert ("C4", "flip5") not in verdicts
    assert ("C3", "clean") not in verdicts
    assert "easier" in findings.answer
    rows = [row for row in findings.claims if row.claim == "C3"]
    assert [row.measures[0].threshold for row in rows] == [0.04]
    assert [row.subject for row in rows] == ["bn − nobn"]


def test_ends_are_shown_within_the_possible_and_kept_whole(tmp_path):
    study = a_study(FLIP5, PAIR, models=8)
    findings = analyse(make_run(tmp_path, study, samples=200, shift=dict.fromkeys(PAIR, 6.0)))
    rate = findings.cell("flip5", "bn").rates["clean_in_accuracy"]
    low, high = rate.interval.low, rate.interval.high
    assert high > 1
    assert rate.ends == (low, 1)
    assert interval(rate, 1, 100) == f"{100 * low:.1f} to 100.0"
    kept = _estimate(rate)
    assert (kept["low"], kept["high"]) == (low, high)
    ranges = {name: e.possible for name, e in findings.contrasts[0].differences.items()}
    assert ranges["auc/online/all"] == ranges["test_accuracy"] == ranges["tpr@0.01/online/all"]
    assert ranges["auc/online/all"] == (-1, 1)
    assert ranges["outlier_gap"] == (-2, 2)
    assert ranges["test_loss"] == (-math.inf, math.inf)
    assert ranges["relative_auc/online/all"] == (-1, math.inf)


def test_no_effect_is_not_held(tmp_path):
    study = a_study(FLIP5, PAIR)
    run = make_run(tmp_path, study, samples=1600, shift=dict.fromkeys(SHIFT, 1.4))
    findings = analyse(run)
    verdicts = {row.claim: row for row in findings.claims}
    assert verdicts["C3"].verdict == "not held"
    assert verdicts["C1"].verdict == "not decidable here"
    assert verdicts["C1"].models_needed is None or verdicts["C1"].models_needed > 16
    assert "stays open" in findings.answer


def test_reversed_effect_is_the_other_side(tmp_path):
    run = make_run(tmp_path, a_study(CLEAN, PAIR), shift={"bn": 1.0, "nobn": 2.5})
    findings = analyse(run)
    assert {row.claim: row.verdict for row in findings.claims}["C4"] == "not held"
    assert "harder" in findings.answer


def test_shares_without_a_claimed_number_are_not_judged(tmp_path):
    mixes = {"flip10": Mix(kind="flipped", share=0.1)}
    findings = analyse(make_run(tmp_path, a_study(mixes, PAIR, models=8)))
    row = next(row for row in findings.claims if row.claim == "C3")
    assert row.verdict == "not decidable here"
    assert "not for 10 %" in row.why
    assert row.beside[0].what == "AUC, all samples"


@pytest.mark.parametrize("models", [1, 2, 4])
def test_too_few_models_give_no_number_and_say_why(tmp_path, models):
    findings = analyse(make_run(tmp_path, a_study(FLIP5, PAIR, models=models)))
    cell = findings.cell("flip5", "bn")
    assert "six" in cell.refused
    assert not cell.attacks
    assert math.isfinite(cell.rates["test_accuracy"].value)
    assert "needs 3" in cell.rates["test_accuracy"].reason
    assert math.isnan(findings.contrasts[0].differences["auc/online/all"].value)
    assert all(row.verdict == "not decidable here" for row in findings.claims)
    assert findings.answer.startswith("This run cannot say")


def test_six_models_give_a_number_without_an_interval(tmp_path):
    findings = analyse(make_run(tmp_path, a_study(FLIP5, PAIR, models=6)))
    auc = findings.cell("flip5", "bn").attack("online", "all").auc
    assert 0.5 < auc.value < 1
    assert not auc.interval.given
    assert "too few models" in auc.reason


def test_odd_models_ood_and_several_mixes(tmp_path):
    mixes = {**CLEAN, **OOD, "flip1": Mix(kind="flipped", share=0.01)}
    findings = analyse(make_run(tmp_path, a_study(mixes, PAIR, models=9), samples=800))
    assert [(m.name, m.outliers) for m in findings.mixes] == [
        ("clean", 0),
        ("ood1", 40),
        ("flip1", 8),
    ]
    cell = findings.cell("ood1", "bn")
    assert cell.attack("online", "outlier").auc.value > 0.9
    assert cell.attack("online", "outlier").auc.interval.given
    assert cell.counts["in"] == (3, 3, 4)
    thresholds = {
        row.mix: row.measures[0].threshold for row in findings.claims if row.claim == "C3"
    }
    assert thresholds == {"ood1": 0.04, "flip1": 0.03}
    clean = findings.cell("clean", "bn").rates
    assert clean["outlier_gap"].undefined == "the mix has no outliers"
    assert clean["clean_gap"].value == clean["all_gap"].value


def test_rates_too_small_to_show_are_refused(findings):
    rates = {rate.alpha: rate for rate in findings.cell("flip5", "bn").attack("online", "all").tpr}
    assert math.isnan(rates[0.001].tpr.value)
    assert "1,000" in rates[0.001].refused
    low, high = rates[0.001].bound
    assert 0 <= low < high <= rates[0.01].tpr.value
    assert rates[0.01].bound is None
    assert rates[0.01].realised_fpr == 0.01
    assert rates[0.01].non_members == 200


def test_diverged_models_are_counted_and_change_nothing_else(tmp_path, run):
    broken = make_run(tmp_path, diverged=[("flip5", "nobn", 4)])
    findings = analyse(broken)
    cell = findings.cell("flip5", "nobn")
    assert cell.diverged == (4,)
    assert cell.models == 16
    assert cell.excluded == {}
    assert cell.counts["in"] == (6, 6, 7)
    for rate in ("test_accuracy", "all_in_loss", "outlier_unfit"):
        assert cell.rates[rate].interval.given
    contrast = next(c for c in findings.contrasts if (c.mix, c.right) == ("flip5", "nobn"))
    assert contrast.models == 15
    assert contrast.differences["auc/online/all"].interval.given
    assert findings.cell("clean", "nobn").diverged == ()


def test_arms_are_compared_where_training_accuracies_are_closest(tmp_path):
    study = a_study(FLIP5, PAIR, epochs=30, query=KEEP)
    findings = analyse(make_run(tmp_path, study, shift={"bn": 6.0, "nobn": 1.0}))
    matched = findings.contrasts[0].matched
    assert matched.epochs[1] == 30
    curve = findings.cell("flip5", "bn").curves["accuracy/clean_in"].value_E
    goal = findings.cell("flip5", "nobn").curves["accuracy/clean_in"].value_E[-1]
    closest = min((2, 4, 30), key=lambda epoch: abs(curve[epoch - 1] - goal))
    assert matched.epochs[0] == closest
    assert matched.accuracy == pytest.approx((curve[closest - 1], goal))
    assert matched.auc.interval.given


def test_without_kept_epochs_the_reason_is_told(findings):
    assert findings.contrasts[0].matched is None
    assert "query.keep_epochs" in findings.contrasts[0].unmatched


def test_gamma_share_and_curves(run, findings):
    cell = findings.cell("clean", "bn")
    ratio_MEL = run.load("clean", "bn").arrays["gamma_over_sigma_EL"]
    assert cell.rates["gamma_share"].value == pytest.approx((ratio_MEL[:, -1] > 1).mean())
    assert cell.layers.share.value_E[0] == pytest.approx((ratio_MEL[:, 0] > 1).mean())
    assert findings.cell("clean", "nobn").layers is None
    assert {row.subject for row in findings.claims if row.claim == "C5"} == {"bn"}


def test_memorization_histograms_hold_every_sample(findings):
    cell = findings.cell("flip5", "bn")
    for kind, samples in (("clean", 380), ("outlier", 20)):
        histogram = cell.memorization[kind]
        assert (histogram.samples, histogram.undefined) == (samples, 0)
        assert histogram.share_B.sum() == pytest.approx(1)
    assert cell.memorization["outlier"].mean == pytest.approx(cell.rates["outlier_gap"].value)


def test_files_hold_a_row_for_every_target_and_group(run, findings):
    table = parquet.read_table(run.path / "attacks.parquet").to_pylist()
    assert len(table) == 16 * 2 * len(ARMS) * (1 + 3)
    row = next(r for r in table if (r["mix"], r["group"], r["mode"]) == ("flip5", "all", "online"))
    assert (row["arm"], row["target"], row["models"], row["excluded"]) == ("bn", 0, 16, 0)
    assert (row["in_models_min"], row["in_models_median"], row["out_models_max"]) == (7, 7, 7)
    assert (row["variance"], row["query_mode"]) == ("pooled", "eval")
    assert row["tpr_at_0.001"] is None
    assert row["tpr_bound_low_at_0.001"] <= row["tpr_bound_high_at_0.001"] <= row["tpr_at_0.01"]
    assert row["tpr_bound_low_at_0.01"] is None
    per_target = [
        r["auc"]
        for r in table
        if (r["mix"], r["arm"], r["group"], r["mode"]) == ("clean", "nobn", "all", "offline")
    ]
    auc = findings.cell("clean", "nobn").attack("offline", "all").auc.value
    assert np.mean(per_target) == pytest.approx(auc)
    claims = json.loads((run.path / "claims.json").read_text())
    assert [c["claim"] for c in claims["claims"]] == [row.claim for row in findings.claims]
    assert claims["answer"] == findings.answer
    assert claims["claims"][0]["measures"][0]["low"] < claims["claims"][0]["measures"][0]["high"]


def test_bernoulli_masks_and_several_views(tmp_path):
    study = a_study(FLIP5, PAIR, models=12, design="bernoulli")
    findings = analyse(make_run(tmp_path, study, views=2))
    assert findings.cell("flip5", "bn").attack("online", "all").auc.interval.given
    assert findings.contrasts[0].differences["auc/online/all"].interval.given


def test_balanced_masks(tmp_path):
    study = a_study(FLIP5, PAIR, models=12, design="balanced")
    findings = analyse(make_run(tmp_path, study, samples=200))
    cell = findings.cell("flip5", "bn")
    assert cell.counts == {"in": (5, 5, 5), "out": (5, 5, 5)}
    assert findings.contrasts[0].differences["auc/online/all"].interval.given


def test_samples_without_a_side_are_excluded_by_count(tmp_path):
    study = a_study(FLIP5, PAIR, models=5, design="bernoulli")
    run = make_run(tmp_path, study)
    cell = analyse(run).cell("flip5", "bn")
    inside = run.load("flip5", "bn").keep_MN.sum(0)
    lonely = sum(
        ((inside - k == 0) | (5 - inside - ~k == 0)).sum() for k in run.membership("flip5")[0]
    )
    assert sum(cell.excluded.values()) == lonely > 0
    assert set(cell.excluded) == {"no_in", "no_out"}


def test_tied_scores_are_attacked_all_the_same(tmp_path):
    study = a_study(FLIP5, PAIR, models=8)
    run = make_run(tmp_path, study)
    cell = run.load("flip5", "bn")
    results = []
    for model, phi_NQ in enumerate(cell.arrays["phi_NQ"]):
        arrays = {name: values[model] for name, values in cell.arrays.items()}
        arrays["phi_NQ"] = np.round(phi_NQ).astype(np.float32)
        ref = ModelRef(mix="flip5", arm="bn", model_id=model)
        results.append(ModelResult(ref=ref, arrays=arrays))
    write_results(run, results)
    attack = analyse(run).cell("flip5", "bn").attack("online", "all")
    assert attack.auc.interval.given
    assert np.isfinite(attack.roc.tpr_A[-10:]).all()


def test_no_rates_asked_for(tmp_path):
    study = a_study(FLIP5, PAIR, models=8, attacks=Attacks(fpr=()))
    findings = analyse(make_run(tmp_path, study))
    assert findings.cell("flip5", "bn").attack("online", "all").tpr == ()
    assert len(tables(findings)) == 2
    assert (
        "TPR at" not in write_report(open_run(tmp_path), findings).read_text().split("<dt>AUC")[0]
    )


def test_analysing_twice_gives_the_same_files(run, findings):
    before = {n: (run.path / n).read_bytes() for n in ("attacks.parquet", "claims.json")}
    again = analyse(run)
    assert again.answer == findings.answer
    assert {n: (run.path / n).read_bytes() for n in before} == before
