"""Everybody's files: one study read from every layout, written back, and refused when wrong."""

import warnings

import numpy as np
import pytest
from designs import study

from attacks.export import write_lira, write_lira_analysis, write_npz
from attacks.interop import groups, read, recognise
from attacks.lira import lira
from attacks.loaded import Loaded
from attacks.population import Population
from attacks.statistics import phi_from_logits
from attacks.types import ScoreMatrix

MODELS, SAMPLES, QUERIES, CLASSES = 12, 30, 2, 4


@pytest.fixture
def logits():
    """Logits and labels, and the matrix that they make."""
    rng = np.random.default_rng(0)
    keep = study(0, "paired", MODELS, SAMPLES).keep_MN
    labels = rng.integers(0, CLASSES, SAMPLES)
    values = rng.normal(size=(MODELS, SAMPLES, QUERIES, CLASSES)).astype(np.float32)
    matrix = ScoreMatrix(scores_MNQ=phi_from_logits(values, labels), keep_MN=keep)
    return values, labels, matrix


def save(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, array)


def as_lira(root, values, labels, matrix, scores=True, order=range(MODELS)):
    save(root / "y_train.npy", labels)
    for m in order:
        folder = root / f"experiment-{m}_{MODELS}"
        save(folder / "keep.npy", matrix.keep_MN[m])
        if scores:
            save(folder / "scores/0000000100.npy", matrix.scores_MNQ[m])
            save(folder / "scores/0000000020.npy", matrix.scores_MNQ[m] - 99)
        else:
            save(folder / "logits/0000000100.npy", values[m][:, None])


def as_lira_pytorch(root, values, labels, matrix, scores=True):
    save(root / "y_train.npy", labels)
    for m in range(MODELS):
        save(root / str(m) / "keep.npy", matrix.keep_MN[m])
        kind, array = ("scores", matrix.scores_MNQ[m]) if scores else ("logits", values[m])
        save(root / str(m) / f"{kind}.npy", array)


def as_lira_analysis(root, values, labels, matrix, scores=True):
    save(root / "y_train.npy", labels)
    save(root / "keep_indices.npy", matrix.keep_MN)
    for m in range(MODELS):
        if scores:
            save(root / f"model_{m}/scores/scores.npy", matrix.scores_MNQ[m])
        else:
            save(root / f"model_{m}/logits/logits.npy", values[m][:, None])


@pytest.mark.parametrize("scores", [True, False], ids=["scores", "logits"])
@pytest.mark.parametrize(
    ("layout", "write"),
    [
        ("lira", as_lira),
        ("lira_pytorch", as_lira_pytorch),
        ("lira_analysis", as_lira_analysis),
    ],
)
def test_folders_of_models_read_in_the_order_of_their_numbers(
    layout, write, scores, logits, tmp_path
):
    """Twelve models: by name alone, 10 and 11 would come before 2."""
    values, labels, matrix = logits
    write(tmp_path, values, labels, matrix, scores)
    assert recognise(tmp_path) == layout
    assert groups(tmp_path) == [""]
    loaded = read(tmp_path)
    np.testing.assert_allclose(loaded.matrix.scores_MNQ, matrix.scores_MNQ, rtol=1e-12)
    np.testing.assert_array_equal(loaded.matrix.keep_MN, matrix.keep_MN)
    np.testing.assert_array_equal(loaded.labels_N, labels)
    assert loaded.numbers_M.tolist() == list(range(MODELS))
    assert loaded.layout == layout
    if scores:
        assert loaded.correct_MN is None
    else:
        np.testing.assert_array_equal(loaded.correct_MN, values[:, :, 0].argmax(-1) == labels)


def test_a_folder_without_a_mask_is_named_and_left_out(logits, tmp_path):
    as_lira(tmp_path, *logits)
    (tmp_path / "experiment-7_12/keep.npy").unlink()
    with pytest.warns(UserWarning, match="experiment-7_12 without keep.npy: left out, 11 models"):
        assert read(tmp_path).numbers_M.tolist() == [m for m in range(MODELS) if m != 7]


def test_the_order_in_which_folders_were_made_does_not_matter(logits, tmp_path):
    values, labels, matrix = logits
    as_lira(tmp_path / "a", values, labels, matrix)
    as_lira(tmp_path / "b", values, labels, matrix, order=[7, 2, 11, 0, 9, 1, 3, 10, 8, 4, 6, 5])
    first, second = read(tmp_path / "a"), read(tmp_path / "b")
    assert np.array_equal(first.matrix.scores_MNQ, second.matrix.scores_MNQ)
    assert groups(tmp_path) == ["a", "b"]
    with pytest.raises(ValueError, match="holds 2 score matrices: choose a, b"):
        read(tmp_path)
    chosen = read(tmp_path, group="b")
    assert np.array_equal(chosen.matrix.keep_MN, matrix.keep_MN)


def test_names_without_numbers_go_by_natural_order(logits, tmp_path):
    _, _, matrix = logits
    names = ["first", "m2", "m10"]
    for m, name in enumerate(names):
        save(tmp_path / name / "keep.npy", matrix.keep_MN[m])
        save(tmp_path / name / "scores.npy", matrix.scores_MNQ[m])
    loaded = read(tmp_path)
    assert loaded.numbers_M.tolist() == [0, 1, 2]
    assert np.array_equal(loaded.matrix.scores_MNQ, matrix.scores_MNQ[:3])


def test_models_keep_their_numbers_when_some_are_missing(logits, tmp_path):
    values, labels, matrix = logits
    as_lira(tmp_path, values, labels, matrix, order=[3, 10, 5])
    loaded = read(tmp_path)
    assert loaded.numbers_M.tolist() == [3, 5, 10]
    assert loaded.indices([10, 3]) == [2, 0]
    with pytest.raises(ValueError, match="there is no model 4: models are numbered 3, 5, 10"):
        loaded.indices([4])


def test_datamodels_use_the_completed_models_only(tmp_path):
    matrix = study(2, "bernoulli", 8, SAMPLES)
    save(tmp_path / "masks.npy", matrix.keep_MN)
    save(tmp_path / "margins.npy", matrix.scores_MNQ[..., 0].astype(np.float16))
    done = np.arange(8) != 3
    save(tmp_path / "_completed.npy", done)
    loaded = read(tmp_path)
    assert loaded.numbers_M.tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert loaded.matrix.scores_MNQ.dtype == np.float16
    np.testing.assert_array_equal(loaded.matrix.keep_MN, matrix.keep_MN[done])
    save(tmp_path / "margins.npy", np.zeros((8, 10)))
    with pytest.raises(ValueError, match="margins of the very samples"):
        read(tmp_path)


@pytest.mark.parametrize("writer", [write_lira, write_lira_analysis, write_npz])
def test_what_is_written_reads_back_with_the_same_attack_scores(writer, logits, tmp_path):
    _, labels, matrix = logits
    loaded = Loaded(
        matrix=matrix,
        numbers_M=np.arange(MODELS),
        layout="npz",
        labels_N=labels.astype(np.int64),
        correct_MN=matrix.scores_MNQ[:, :, 0] > 0,
        kind_N=np.arange(SAMPLES) % 3,
    )
    path = tmp_path / ("study.npz" if writer is write_npz else "study")
    again = read(writer(path, loaded))
    assert np.array_equal(again.matrix.scores_MNQ, matrix.scores_MNQ)
    assert np.array_equal(again.matrix.keep_MN, matrix.keep_MN)
    assert np.array_equal(again.labels_N, labels)
    assert np.array_equal(lira(again.matrix).scores_TN, lira(matrix).scores_TN)
    if writer is write_npz:
        assert np.array_equal(again.correct_MN, loaded.correct_MN)
        assert np.array_equal(again.kind_N, loaded.kind_N)
        np.savez(path, **{**np.load(path), "kind_N": np.zeros(SAMPLES - 1, dtype=int)})
        with pytest.raises(ValueError, match="has kind_N of shape \\(29,\\) beside scores"):
            read(path)
    else:
        with pytest.raises(ValueError, match="is not empty"):
            writer(path, loaded)


def test_npz_holds_one_or_several_matrices(tmp_path):
    first, second = study(3, "paired", 6, 20), study(4, "paired", 8, 20)
    z = np.random.default_rng(0).normal(size=(8, 5, 1))
    path = tmp_path / "run.npz"
    np.savez(
        path,
        **{
            "clean/bn/scores_MNQ": first.scores_MNQ,
            "clean/bn/keep_MN": first.keep_MN,
            "flip5/bn/scores_MNQ": second.scores_MNQ,
            "flip5/bn/keep_MN": second.keep_MN,
            "flip5/bn/population_scores_MZQ": z,
        },
    )
    assert groups(path) == ["clean/bn", "flip5/bn"]
    loaded = read(path, group="flip5/bn")
    assert np.array_equal(loaded.matrix.scores_MNQ, second.scores_MNQ)
    assert isinstance(loaded.population, Population)
    assert read(path, group="clean/bn").population is None
    with pytest.raises(ValueError, match="holds no 'ood/bn'"):
        read(path, group="ood/bn")


def test_an_integer_mask_is_converted_with_a_warning_and_indices_are_refused(logits, tmp_path):
    values, labels, matrix = logits
    as_lira_analysis(tmp_path, values, labels, matrix)
    save(tmp_path / "keep_indices.npy", matrix.keep_MN.astype(np.int64))
    with pytest.warns(UserWarning, match="keep_indices.npy is of type int64: converted to bool"):
        loaded = read(tmp_path)
    assert loaded.matrix.keep_MN.dtype == bool
    assert np.array_equal(loaded.matrix.keep_MN, matrix.keep_MN)
    save(tmp_path / "keep_indices.npy", np.arange(MODELS * SAMPLES).reshape(MODELS, SAMPLES))
    with pytest.raises(ValueError, match="not the indices of members"):
        read(tmp_path)


def test_a_longer_mask_is_cut_as_the_research_code_does_and_says_so(logits, tmp_path):
    values, labels, matrix = logits
    as_lira(tmp_path, values, labels, matrix)
    for m in range(MODELS):
        longer = np.concatenate([matrix.keep_MN[m], np.ones(5, dtype=bool)])
        save(tmp_path / f"experiment-{m}_{MODELS}/keep.npy", longer)
    with pytest.warns(UserWarning, match="35 flags for 30 scored samples"):
        loaded = read(tmp_path)
    assert np.array_equal(loaded.matrix.keep_MN, matrix.keep_MN)


def test_a_model_that_is_there_twice_is_named(logits, tmp_path):
    values, labels, matrix = logits
    as_lira(tmp_path, values, labels, matrix)
    twin, copy = (tmp_path / f"experiment-{m}_{MODELS}" for m in (4, 7))
    for name in ("keep.npy", "scores/0000000100.npy"):
        (copy / name).write_bytes((twin / name).read_bytes())
    with pytest.warns(UserWarning, match="models 4 and 7 have the same members and scores"):
        read(tmp_path)
    third = tmp_path / f"experiment-1_{MODELS}"  # alike in the columns that are compared first
    (third / "keep.npy").write_bytes((twin / "keep.npy").read_bytes())
    with pytest.warns(UserWarning, match="models 4 and 7 have"):
        read(tmp_path)
    save(copy / "keep.npy", ~matrix.keep_MN[4])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(tmp_path)


def archive(path):
    """A .npz archive under the name of a .npy file."""
    with path.open("wb") as stream:
        np.savez(stream, scores=np.zeros((SAMPLES, QUERIES)))


THIRD = "experiment-3_12"
DAMAGE = {
    "disagree": lambda p: save(p / THIRD / "scores/0000000100.npy", np.zeros((29, 2))),
    "different lengths": lambda p: save(p / THIRD / "keep.npy", np.zeros(31, dtype=bool)),
    "no readable": lambda p: (p / THIRD / "keep.npy").write_bytes(b"x"),
    "one number": lambda p: save(p / "experiment-3_99/keep.npy", np.zeros(30, dtype=bool)),
    "Python objects": lambda p: save(p / THIRD / "keep.npy", np.array([{}])),
    r"scores/0000000100\.npy is a \.npz archive: expected one array": lambda p: archive(
        p / THIRD / "scores/0000000100.npy"
    ),
    r"keep\.npy is a \.npz archive: expected one array": lambda p: archive(p / THIRD / "keep.npy"),
    "m99999999999999999999999 names a model by a number above 9223372036854775807": lambda p: (
        p / THIRD
    ).rename(p / "m99999999999999999999999"),
    "neither scores": lambda p: save(p / "experiment-77_12/keep.npy", np.zeros(30, dtype=bool)),
}


@pytest.mark.parametrize("sentence", DAMAGE)
def test_damaged_folders_are_refused_in_one_sentence(sentence, logits, tmp_path):
    as_lira(tmp_path, *logits)
    DAMAGE[sentence](tmp_path)
    with pytest.raises(ValueError, match=sentence) as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


def test_what_nobody_knows_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        read(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no scores that are known"):
        read(tmp_path)
    (tmp_path / "scores.txt").write_text("1 2 3")
    with pytest.raises(ValueError, match="is no \\.npz file and no folder"):
        read(tmp_path / "scores.txt")
    np.savez(tmp_path / "x.npz", scores_MNQ=np.zeros((2, 3)))
    with pytest.raises(ValueError, match="has no scores_MNQ and keep_MN: it holds scores_MNQ"):
        read(tmp_path / "x.npz")
    (tmp_path / "y.npz").write_bytes(b"not a zip")
    with pytest.raises(ValueError, match="no readable \\.npz"):
        read(tmp_path / "y.npz")


def test_models_of_an_npz_come_in_the_order_of_their_numbers(logits, tmp_path):
    _, _, matrix = logits
    order = np.random.default_rng(0).permutation(MODELS)
    z = np.random.default_rng(1).normal(size=(MODELS, 7, QUERIES))
    arrays = {
        "scores_MNQ": matrix.scores_MNQ,
        "keep_MN": matrix.keep_MN,
        "population_scores_MZQ": z,
        "correct_MN": matrix.scores_MNQ[:, :, 0] > 0,
        "models_M": np.arange(MODELS),
    }
    np.savez(tmp_path / "x.npz", **{name: array[order] for name, array in arrays.items()})
    loaded = read(tmp_path / "x.npz")
    assert loaded.numbers_M.tolist() == list(range(MODELS))
    assert np.array_equal(loaded.matrix.scores_MNQ, matrix.scores_MNQ)
    assert np.array_equal(loaded.matrix.keep_MN, matrix.keep_MN)
    assert np.array_equal(loaded.population.scores_MZQ, z)
    assert np.array_equal(loaded.correct_MN, arrays["correct_MN"])


def test_unsigned_numbers_of_models_are_put_in_order(logits, tmp_path):
    _, _, matrix = logits
    np.savez(
        tmp_path / "x.npz",
        scores_MNQ=matrix.scores_MNQ[::-1],
        keep_MN=matrix.keep_MN[::-1],
        models_M=np.arange(MODELS, dtype=np.uint8)[::-1],
    )
    loaded = read(tmp_path / "x.npz")
    assert loaded.numbers_M.tolist() == list(range(MODELS))
    assert np.array_equal(loaded.matrix.scores_MNQ, matrix.scores_MNQ)


@pytest.mark.parametrize(
    ("name", "array", "sentence"),
    [
        ("scores_MNQ", np.zeros((MODELS, SAMPLES, QUERIES), dtype=int), "expected a floating"),
        ("scores_MNQ", np.zeros((MODELS, SAMPLES - 1)), "expected the same models and samples"),
        ("scores_MNQ", np.zeros((1, MODELS, SAMPLES, QUERIES)), r"expected \(models, samples, q"),
        ("scores_MNQ", np.array([[{}]]), "scores_MNQ is no readable array of numbers"),
        ("keep_MN", np.zeros((MODELS, SAMPLES)), "type float64 and no mask of 0 and 1"),
        ("keep_MN", np.full((MODELS, SAMPLES), 2), "no mask of 0 and 1"),
        ("models_M", np.array(["a"] * MODELS), "models_M of type <U1: expected integers"),
        ("models_M", np.zeros(MODELS, dtype=int), "gives two models one number"),
        ("models_M", np.arange(MODELS, dtype=np.uint64) + np.uint64(2**63), "models_M above 92233"),
        (
            "labels_N",
            np.full(SAMPLES, 2**63, dtype=np.uint64),
            "labels_N above 9223372036854775807",
        ),
        ("labels_N", np.zeros(SAMPLES), "labels_N of type float64: expected integers"),
        ("labels_N", np.zeros(3, dtype=int), r"labels_N of shape \(3,\) beside scores"),
        ("kind_N", np.zeros(SAMPLES), "kind_N of type float64: expected integers"),
        ("correct_MN", np.zeros((MODELS, SAMPLES)), "correct_MN is of type float64 and no mask"),
        ("population_scores_MZQ", np.zeros((MODELS, 4), dtype=int), "no floating array"),
    ],
)
def test_an_npz_that_does_not_fit_is_refused_in_one_sentence(
    name, array, sentence, logits, tmp_path
):
    _, _, matrix = logits
    held = {"scores_MNQ": matrix.scores_MNQ, "keep_MN": matrix.keep_MN, name: array}
    np.savez(tmp_path / "x.npz", **held)
    with pytest.raises(ValueError, match=sentence) as caught:
        read(tmp_path / "x.npz")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        ("lira", "has no folder of a model with its keep.npy"),
        ("lira_pytorch", "has no folder of a model with its keep.npy"),
        ("lira_analysis", r"keep_indices\.npy is not there"),
        ("privacy_meter", r"memberships\.npy is not there"),
        ("datamodels", r"masks\.npy is not there"),
        ("npz", "is no file: expected one .npz file"),
        ("lyra", "unknown layout 'lyra': known are lira, "),
    ],
)
def test_a_layout_that_the_folder_does_not_have_is_refused(layout, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        read(tmp_path, layout)
