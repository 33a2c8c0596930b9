"""Exports: the promised keys and folders, the same bytes, nothing written on bad input."""

import json

import numpy as np
import pytest
from synthetic_run import a_study, make_run

from engine.export import export


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"), a_study(models=4, arms=("bn", "nobn")), views=2)


def test_npz_has_every_cell_under_the_promised_keys(run, tmp_path):
    out = export(run, "npz", tmp_path / "deep" / "scores.npz")
    names = ("scores_MNQ", "keep_MN", "correct_MN", "labels_N", "true_labels_N", "kind_N")
    names = (*names, "population_scores_MZQ")
    cells = [f"{mix}/{arm}" for mix in ("clean", "flip5") for arm in ("bn", "nobn")]
    with np.load(out, allow_pickle=False) as exported:
        assert sorted(exported.files) == sorted(f"{c}/{n}" for c in cells for n in names)
        cell = run.load("flip5", "bn")
        got = {name: exported[f"flip5/bn/{name}"] for name in names}
    np.testing.assert_array_equal(got["scores_MNQ"], cell.arrays["phi_NQ"])
    assert got["scores_MNQ"].shape == (4, 400, 2)
    np.testing.assert_array_equal(got["keep_MN"], cell.keep_MN)
    np.testing.assert_array_equal(got["labels_N"], cell.samples.label_N)
    assert (got["labels_N"] != got["true_labels_N"]).sum() == (got["kind_N"] == 1).sum() == 20


def test_npz_bytes_are_the_same_every_time(run, tmp_path):
    first = export(run, "npz", tmp_path / "a.npz").read_bytes()
    assert export(run, "npz", tmp_path / "b.npz").read_bytes() == first


def test_tf_layout_reads_as_the_research_code_reads_it(run, tmp_path):
    """Folders that start with "experiment", the last file of scores/, keep.npy: as plot.py does."""
    out = export(run, "tf", tmp_path / "tf")
    experiments = sorted((out / "flip5" / "nobn").glob("experiment*"))
    scores = np.array([np.load(sorted((e / "scores").iterdir())[-1]) for e in experiments])
    keep = np.array([np.load(e / "keep.npy") for e in experiments])
    cell = run.load("flip5", "nobn")
    np.testing.assert_array_equal(scores, cell.arrays["phi_NQ"])
    np.testing.assert_array_equal(keep, cell.keep_MN)
    assert experiments[1].name == "experiment-1_4"
    assert json.loads((experiments[1] / "hparams.json").read_text())["expid"] == 1
    np.testing.assert_array_equal(
        np.load(out / "flip5" / "nobn" / "y_train.npy"), cell.samples.label_N
    )


@pytest.mark.parametrize(
    ("format", "out", "sentence"),
    [
        ("npy", "a.npz", "did you mean 'npz'"),
        ("npz", "scores.bin", "ends in .npz"),
        ("npz", "full", "is a folder"),
        ("npz", "full/theirs.npz", "is there already: name a new file"),
        ("tf", "full", "new or an empty folder"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(run, tmp_path, format, out, sentence):
    (tmp_path / "full").mkdir()
    theirs = tmp_path / "full" / "theirs.npz"
    theirs.write_text("kept")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=sentence):
        export(run, format, tmp_path / out)
    assert sorted(tmp_path.rglob("*")) == before
    assert theirs.read_text() == "kept"


def test_an_unfinished_run_exports_nothing(tmp_path):
    run = make_run(tmp_path / "run", a_study(models=4, arms=("bn",)))
    shard = next((run.path / "shards" / "flip5").rglob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    for format, out in (("npz", "a.npz"), ("tf", "tf")):
        with pytest.raises(ValueError, match=r"4 of 4 models of flip5/bn are not finished"):
            export(run, format, tmp_path / out)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
