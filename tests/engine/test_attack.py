"""`engine attack`: every attack by name on runs and on other people's files."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pyarrow.parquet
import pytest
from synthetic_run import a_study, foreign, make_run

from attacks.exclusion import plan_exclusion
from attacks.export import write_lira, write_npz
from attacks.lira import LiraParameters, lira
from attacks.memorization import memorization_without
from attacks.metrics import auc, deciles
from attacks.rmia import RmiaParameters, rmia
from attacks.types import ScoreMatrix
from engine.attack import attack
from engine.attack.settings import USES
from engine.store import open_run

POPULATION_FREE = ("loss", "calibrated", "attack_r", "lira_online", "lira_offline")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    study = a_study(mixes={"flip5": a_study().mixes["flip5"]}, arms=("bn", "nobn"), models=8)
    return make_run(tmp_path_factory.mktemp("runs") / "run", study, samples=200)


@pytest.mark.parametrize("name", USES)
def test_every_attack_finds_the_planted_effect_in_a_run(name, run):
    found = attack(run.path, [name], targets="all")
    assert {row["arm"] for row in found.rows} == {"bn", "nobn"}
    assert {row["group"] for row in found.rows} == {"all", "clean", "flipped"}
    means = {(s.source, s.group): s for s in found.means}
    bn, nobn = means["flip5/bn", "all"], means["flip5/nobn", "all"]
    assert bn.auc > nobn.auc > 0.5
    assert bn.interval.given
    assert bn.interval.low < bn.auc < bn.interval.high


def test_rows_say_what_they_rest_on(run):
    found = attack(run.path, ["lira_online,loss"], cells=["flip5/bn"], settings=["fpr=0.1"])
    assert len(found.rows) == 2 * 8 * 3
    row = next(r for r in found.rows if r["attack"] == "lira_online" and r["group"] == "all")
    assert row["statistic"] == "logit_scaled_confidence"
    assert (row["variance"], row["query_mode"], row["models"]) == ("pooled", "eval", 8)
    assert row["parameters"] == "variance=pooled, centre=mean, shrinkage=8.0"
    assert row["design"] == "paired"
    assert [row[f"in_models_{what}"] for what in ("min", "median", "max")] == [3, 3, 3]
    assert [row[f"out_models_{what}"] for what in ("min", "median", "max")] == [3, 3, 3]
    assert row["members"] + row["non_members"] + row["excluded"] == row["samples"] == 200
    assert row["realised_fpr_at_0.1"] <= 0.1
    outlier = next(r for r in found.rows if r["group"] == "flipped")
    assert outlier["tpr_at_0.1_refused"]
    assert outlier["tpr_at_0.1"] is outlier["ppv_at_0.1_prior_0.5"] is None
    assert 0 <= outlier["tpr_at_0.1_at_least"] <= outlier["tpr_at_0.1_at_most"] <= 1
    assert row["advantage"] == pytest.approx(2 * row["balanced_accuracy"] - 1)
    tpr, fpr = row["transferred_tpr_at_0.1"], row["transferred_fpr_at_0.1"]
    assert row["ppv_at_0.1_prior_0.01"] == pytest.approx(0.01 * tpr / (0.01 * tpr + 0.99 * fpr))


def test_files_hold_scores_by_attack_and_by_cell(run, tmp_path):
    one = attack(run.path, ["lira_online"], cells=["flip5/nobn"], out=tmp_path / "one")
    assert [path.name for path in one.written] == [
        "attacks.parquet",
        "means.json",
        "scores.npz",
        "roc_flip5_lira_online.svg",
        "memorization.svg",
        "attacks.html",
    ]
    assert all(path.is_file() for path in one.written)
    cell = open_run(run.path).load("flip5", "nobn")
    matrix = ScoreMatrix(scores_MNQ=cell.arrays["phi_NQ"], keep_MN=cell.keep_MN)
    expected = lira(matrix)
    with np.load(tmp_path / "one/scores.npz") as stored:
        assert sorted(stored.files) == [
            "lira_online/excluded_TN",
            "lira_online/membership_TN",
            "lira_online/scores_TN",
        ]
        np.testing.assert_array_equal(stored["lira_online/scores_TN"], expected.scores_TN)
        np.testing.assert_array_equal(stored["lira_online/membership_TN"], cell.keep_MN)
    table = pyarrow.parquet.read_table(tmp_path / "one/attacks.parquet").to_pylist()
    assert table == list(one.rows)
    last = attack(run.path, ["loss"], cells=["flip5/bn"], targets="last", out=tmp_path / "last")
    schema = pyarrow.parquet.read_schema(last.written[0])
    assert str(schema.field("ppv_at_0.01_prior_0.5").type) == "double"
    before = {path: path.read_bytes() for path in one.written}
    with pytest.raises(ValueError, match=r"holds attacks\.parquet and means\.json and") as caught:
        attack(run.path, ["loss"], out=tmp_path / "one")
    assert str(caught.value).endswith("already: name a new folder")
    assert {path: path.read_bytes() for path in one.written} == before
    attack(run.path, ["loss"], out=tmp_path / "two")
    with np.load(tmp_path / "two/scores.npz") as stored:
        assert "flip5/bn/loss/scores_TN" in stored.files
        assert "flip5/nobn/loss/scores_TN" in stored.files


@pytest.mark.parametrize("layout", ["npz", "lira"])
def test_other_peoples_scores_give_the_same_numbers(layout, tmp_path):
    loaded = foreign()
    if layout == "npz":
        path = write_npz(tmp_path / "x.npz", loaded)
    else:
        path = write_lira(tmp_path / "x", loaded)
    names = [n for n in USES if layout == "npz" or n in POPULATION_FREE]
    out = tmp_path / "out"
    attack(path, names, settings=["variance=per_example"], targets="4,9", out=out)
    with np.load(out / "scores.npz") as stored:
        got = {name: stored[f"{name}/scores_TN"] for name in names}
    parameters = LiraParameters(variance="per_example")
    want = lira(loaded.matrix, parameters, targets=[1, 6]).scores_TN
    np.testing.assert_array_equal(got["lira_online"], want)
    if layout == "npz":
        want = rmia(loaded.matrix, loaded.population, RmiaParameters(online=True), [1, 6])
        np.testing.assert_array_equal(got["rmia_online"], want.scores_TN)


def test_means_are_kept_with_their_intervals(run, tmp_path):
    found = attack(run.path, ["loss"], out=tmp_path, settings=["fpr=0.001", "level=0.9"])
    stored = json.loads((tmp_path / "means.json").read_text())
    for mean, row in zip(found.means, stored, strict=True):
        assert (row["source"], row["group"], row["auc"]) == (mean.source, mean.group, mean.auc)
        assert row["interval"]["level"] == 0.9
        assert row["interval"]["low"] <= row["auc"] <= row["interval"]["high"]
        assert row["rates"][0]["tpr"] is None
        assert "fewer than 1,000 non-members" in row["rates"][0]["interval"]["reason"]


def test_groups_by_class_and_by_memorization_of_the_other_models(run):
    found = attack(run.path, ["loss"], cells=["flip5/bn"], groups="class,decile")
    cell = open_run(run.path).load("flip5", "bn")
    names = [mean.group for mean in found.means]
    assert names[0] == "all"
    assert "clean" not in names
    classes = [name for name in names if name.startswith("class_")]
    assert len(classes) == np.unique(cell.samples.label_N).size
    plan = plan_exclusion(cell.keep_MN)
    for target in (0, 5):
        apart = memorization_without(cell.arrays["correct_N"], cell.keep_MN, [target], plan=plan)
        top = deciles(apart[0])["decile_10"]
        row = next(r for r in found.rows if (r["target"], r["group"]) == (target, "decile_10"))
        assert row["samples"] == top.sum()
        expected = auc(
            cell.arrays["phi_NQ"][target, top, 0].astype(float), cell.keep_MN[target, top]
        )
        assert row["auc"] == pytest.approx(expected)
    ranked = [mean for mean in found.means if mean.group.startswith("decile_")]
    assert all("anew for each target" in mean.interval.reason for mean in ranked)
    for mean in ranked:
        known = [r for r in found.rows if r["group"] == mean.group and r["auc"] is not None]
        assert (mean.targets, mean.asked) == (len(known), 8)
        if known:
            assert mean.auc == pytest.approx(np.mean([row["auc"] for row in known]))
            assert mean.non_members > 0
    assert any(0 < mean.targets < 8 for mean in ranked)
    assert all(mean.over == f"{mean.targets} of 8" for mean in ranked if mean.targets < 8)


def test_groups_of_other_peoples_scores_need_what_they_are_about(tmp_path):
    loaded = foreign()
    path = write_npz(tmp_path / "x.npz", loaded)
    with pytest.raises(ValueError, match="put labels_N into the"):
        attack(path, ["loss"], groups="class")
    with pytest.raises(ValueError, match="which predictions are correct"):
        attack(path, ["loss"], groups="kind,decile")
    known = dataclasses.replace(
        loaded,
        labels_N=np.arange(80) % 2,
        kind_N=np.arange(80) // 70,
        correct_MN=loaded.matrix.scores_MNQ[:, :, 0] > 0,
    )
    path = write_npz(tmp_path / "y.npz", known)
    found = attack(path, ["loss"], groups="kind,class,decile", out=tmp_path / "out")
    names = [mean.group for mean in found.means]
    assert names[:5] == ["all", "clean", "flipped", "class_0", "class_1"]
    assert (tmp_path / "out/figures/memorization.svg").is_file()


def test_targets_are_numbers_of_models(tmp_path):
    path = write_npz(tmp_path / "x.npz", foreign())
    assert [row["target"] for row in attack(path, ["loss"], targets="last").rows] == [14]
    assert [row["target"] for row in attack(path, ["loss"], targets="5,3").rows] == [5, 3]
    few = attack(path, ["loss"], targets="5,3").means[0]
    assert not few.interval.given
    assert "2 of 12 models were targets" in few.interval.reason


def test_models_that_diverged_are_neither_targets_nor_shadows(tmp_path):
    study = a_study(mixes={"clean": a_study().mixes["clean"]}, arms=("bn",), models=12)
    run = make_run(tmp_path / "run", study, samples=120, diverged=[("clean", "bn", 4)])
    found = attack(run.path, ["lira_online"])
    assert sorted(row["target"] for row in found.rows) == [m for m in range(12) if m != 4]
    assert {row["models"] for row in found.rows} == {11}
    assert {row["excluded"] for row in found.rows} == {0}
    with pytest.raises(ValueError, match="model 4 of clean/bn diverged"):
        attack(run.path, ["loss"], targets="4")


@pytest.mark.parametrize(
    ("names", "arguments", "sentence"),
    [
        (["liar_online"], {}, "unknown attack 'liar_online': did you mean 'lira_online'"),
        ([], {}, "name an attack: known are loss, calibrated"),
        (["loss"], {"settings": ["variance=pooled"]}, "variance is used by none of loss"),
        (["lira_online"], {"settings": ["varianze=pooled"]}, "did you mean 'variance'"),
        (["lira_online"], {"settings": ["variance=global"]}, "unknown variance 'global'"),
        (["lira_online"], {"settings": ["variance"]}, "expected key=value"),
        (["rmia_offline"], {"settings": ["gamma=big"]}, "expected a value like 2.0"),
        (["loss"], {"targets": "first"}, "expected all, last, or numbers"),
        (["loss"], {"targets": "99"}, "there is no model 99"),
        (["loss"], {"targets": "3,3"}, "names a model twice"),
        (["loss"], {"cells": ["clean/x"]}, "holds no 'clean/x': it is one score matrix"),
        (["loss"], {"groups": "kinds"}, "unknown grouping 'kinds': did you mean 'kind'"),
        (["loss"], {"groups": ","}, "names nothing: known are kind, class, decile"),
        (["loss"], {"settings": ["fpr=2"]}, "--set fpr=2: expected rates between 0 and 1"),
        (["loss"], {"settings": ["fpr=nan"]}, "--set fpr=nan: expected rates between 0 and 1"),
        (["loss"], {"settings": ["fpr=0.1234567,0.1234568"]}, "both would be called 0.123457"),
        (["loss"], {"settings": ["priors=.1,.10000001"]}, "both would be called 0.1, leave one"),
        (
            ["quantile"],
            {"settings": ["seed=4294967296"]},
            "seed=4294967296: expected 0 to 42949672",
        ),
        (["loss"], {"settings": ["fpr="]}, "expected a value like 0.001,0.01"),
        (["loss"], {"settings": ["level=95"]}, "--set level=95: expected rates between"),
        (["loss"], {"settings": ["level=.9", "level=.8"]}, "--set level is given twice"),
        (["loss"], {"settings": ["design=pairs"]}, "unknown design 'pairs'"),
        (["loss"], {"settings": ["layout=lyra"]}, "unknown layout 'lyra': did you mean 'lira'"),
        (["rmia_offline"], {"settings": ["a=2"]}, "--set a=2: expected 0 to 1, or tuned"),
        (["rmia_online"], {"settings": ["gamma=0"]}, "--set gamma=0.0: expected above 0"),
        (["attack_p"], {}, "attack_p needs scores of samples that no model trained on"),
    ],
)
def test_what_does_not_work_is_one_sentence_and_writes_nothing(
    names, arguments, sentence, tmp_path
):
    path = write_npz(tmp_path / "x.npz", foreign(population=False))
    with pytest.raises(ValueError, match=sentence) as caught:
        attack(path, names, out=tmp_path / "out", **arguments)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "out").glob("*"))


def test_the_command_prints_a_table_and_writes(tmp_path):
    path = write_npz(tmp_path / "x.npz", foreign())
    command = [sys.executable, "-m", "engine", "attack", str(path), "--attack", "lira_online,loss"]
    done = subprocess.run(
        [*command, "--set", "variance=pooled", "--targets", "all", "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "lira_online" in done.stdout
    assert (tmp_path / "out/attacks.parquet").is_file()
    wrong = subprocess.run([*command[:-1], "liar"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("engine: unknown attack 'liar'")


@pytest.mark.parametrize(
    ("models", "names", "sentence"),
    [
        (2, "calibrated", "2 models give none: train at least four"),
        (4, "lira_online", "4 models give none: train at least six"),
    ],
)
def test_too_few_models_say_how_many_would_do(models, names, sentence, tmp_path):
    path = write_npz(tmp_path / "x.npz", foreign(models=models))
    with pytest.raises(ValueError, match=sentence):
        attack(path, [names])
    few = attack(path, ["loss"]).means[0]
    assert few.interval.reason == f"{models // 2} group{'s' * (models > 2)} of models: three needed"


def test_scores_without_a_number_are_refused_and_single_ones_excluded(tmp_path):
    loaded = foreign()
    loaded.matrix.scores_MNQ[2, 5] = np.nan
    loaded.matrix.scores_MNQ[4, 6, 1] = np.inf
    found = attack(write_npz(tmp_path / "x.npz", loaded), ["loss,lira_online"])
    for row in found.rows:
        lost = {5: 1, 7: 1}.get(row["target"], 0)
        assert row["excluded_target_not_finite"] == row["excluded"] == lost
    loaded.population.scores_MZQ[:] = np.nan
    path = write_npz(tmp_path / "z.npz", loaded)
    for name in ("attack_p", "rmia_online", "rmia_offline", "quantile"):
        with pytest.raises(ValueError, match=f"{name}: the population of z holds no finite score"):
            attack(path, ["loss", name])
    attack(path, ["loss"])
    loaded.matrix.scores_MNQ[:] = np.nan
    with pytest.raises(ValueError, match="holds no finite score"):
        attack(write_npz(tmp_path / "y.npz", loaded), ["loss"])


def test_one_non_member_and_huge_scores_warn_of_nothing(tmp_path):
    """Warnings are errors here: no curve can be drawn from one non-member."""
    keep = np.ones((8, 90), dtype=bool)
    keep[np.arange(8), np.arange(8)] = False
    scores = 1.7e308 * np.random.default_rng(0).uniform(-1, 1, (8, 90))
    z = scores[:, ::-1] / 2
    np.savez(tmp_path / "x.npz", scores_MNQ=scores, keep_MN=keep, population_scores_MZQ=z)
    found = attack(tmp_path / "x.npz", ["loss,attack_p"], out=tmp_path / "out")
    assert found.means[0].non_members == 1
    assert found.means[0].roc is None
    assert not list((tmp_path / "out/figures").iterdir())


def test_a_run_that_is_half_finished_is_refused(tmp_path):
    study = a_study(mixes={"clean": a_study().mixes["clean"]}, arms=("bn", "nobn"), models=8)
    run = make_run(tmp_path / "run", study, samples=60)
    for shard in (run.path / "shards/clean/nobn").iterdir():
        shard.unlink()
    with pytest.raises(ValueError, match="run the study again to train what is missing"):
        attack(run.path, ["loss"])
    assert attack(run.path, ["loss"], cells=["clean/bn"]).means[0].targets == 8
    with pytest.raises(ValueError, match="--set design is for other people's scores"):
        attack(run.path, ["loss"], settings=["design=bernoulli"])


def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    path = write_npz(tmp_path / "x.npz", foreign())
    with pytest.raises(ValueError, match=r"cannot be written .*: name another folder"):
        attack(path, ["loss"], out="/proc/nowhere/out")
    with pytest.raises(ValueError, match="is a file: name a folder"):
        attack(path, ["loss"], out=path)


def test_an_empty_out_is_refused_and_the_current_folder_where_it_holds_files(tmp_path, monkeypatch):
    path = write_npz(tmp_path / "x.npz", foreign())
    monkeypatch.chdir(tmp_path)
    for out in ("", "."):
        with pytest.raises(ValueError, match="--out is empty or the current folder, which holds"):
            attack(path, ["loss"], out=out)
    assert list(tmp_path.iterdir()) == [path]
