"""Bad input: one clear sentence, a non-zero exit, nothing written."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

TINY = ["--set", "data.limit=200", "--set", "models=2", "--set", "train.epochs=1"]


def engine(*arguments, cwd, **environment):
    return subprocess.run(
        [sys.executable, "-m", "engine", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"COLUMNS": "200"} | environment,
    )


def images(count=40, size=8, classes=4, **changes):
    rng = np.random.default_rng(0)
    arrays = {
        "train_images": rng.integers(0, 256, (count, size, size, 1), dtype=np.uint8),
        "train_labels": np.arange(count) % classes,
        "test_images": rng.integers(0, 256, (count, size, size, 1), dtype=np.uint8),
        "test_labels": np.arange(count) % classes,
    }
    return arrays | changes


def refused(tmp_path, arguments, *words, **environment):
    """Run and demand one sentence on stderr with these words, and nothing written."""
    before = sorted(p for p in tmp_path.rglob("*"))
    done = engine(*arguments, cwd=tmp_path, **environment)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    sentence = done.stderr.strip()
    assert len(sentence.splitlines()) == 1, sentence
    assert sentence.startswith("engine: ")
    for word in words:
        assert word in sentence
    assert sorted(p for p in tmp_path.rglob("*")) == before


def run_of(path):
    npz = ["--set", "data.name=npz", "--set", f"data.path={path}"]
    return ["run", "--study", "digits_bn_vs_nobn", *npz, "--set", "train.batch=4"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--study", "digits"], ("unknown study 'digits'", "did you mean 'digits_bn_vs_nobn'")),
        (["--study", "none.toml"], ("no study file at 'none.toml'",)),
        (["--set", "train.epoch=1"], ("did you mean 'train.epochs'",)),
        (["--set", "arms.bn.net=resnet"], ("unknown network 'resnet'", "resnet8")),
        (["--set", "arms.bn.norm=layer"], ("unknown norm", "batch, none, group")),
        (["--set", "data.name=cifar11"], ("did you mean 'cifar10'",)),
        (["--device", "tpu"], ("unknown device 'tpu'", "cuda")),
        (["--executor", "slurm"], ("unknown executor 'slurm'", "local")),
        (["--address", "auto"], ("--address", "for --executor ray")),
        (["--insecure-cluster"], ("--insecure-cluster", "for --executor ray")),
        (["--set", "train.batch=5000"], ("train.batch is 5000", "members")),
        (["--set", "query.population=99999"], ("query.population is 99999", "images")),
        (["--set", "data.limit=99999"], ("data.limit", "99999")),
        (["--set", "resources.stack=9000000"], ("stack of 9000000", "GiB", "resources.stack=")),
        (["--set", "resources.memory_gib=0.001"], ("GiB", "lower train.batch")),
    ],
)
def test_wrong_names_and_sizes(tmp_path, arguments, words):
    study = [] if "--study" in arguments else ["--study", "digits_bn_vs_nobn"]
    refused(tmp_path, ["run", *study, *arguments], *words)


@pytest.mark.skipif(
    os.path.exists("/dev/nvidia0"), reason="needs a machine without a GPU to ask for one"
)
def test_cuda_where_there_is_none(tmp_path):
    refused(tmp_path, ["run", "--study", "digits_bn_vs_nobn", "--device", "cuda"], "no GPU")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train_images": np.zeros((40, 8, 8, 1), dtype=np.float32)}, ("float32", "uint8")),
        ({"train_images": np.zeros((40, 8, 8), dtype=np.uint8)}, ("(40, 8, 8)",)),
        ({"test_images": np.zeros((40, 9, 9, 1), dtype=np.uint8)}, ("9", "8")),
        ({"train_labels": np.arange(40) % 4 - 1}, ("label", "-1")),
        ({"train_labels": np.arange(39) % 4}, ("39", "40")),
        ({"train_labels": np.zeros(40, dtype=np.int64)}, ("class",)),
        ({"test_labels": np.zeros(40, dtype=np.int64)}, ("class",)),
        ({"train_labels": np.linspace(0, 3, 40)}, ("label", "float64")),
    ],
)
def test_images_and_labels_that_do_not_fit(tmp_path, changes, words):
    np.savez(tmp_path / "set.npz", **images(**changes))
    refused(tmp_path, run_of(tmp_path / "set.npz"), *words)


def test_missing_data(tmp_path):
    refused(tmp_path, run_of(tmp_path / "nowhere.npz"), "nowhere.npz")
    np.savez(tmp_path / "half.npz", train_images=images()["train_images"])
    refused(tmp_path, run_of(tmp_path / "half.npz"), "train_labels")
    (tmp_path / "no.npz").write_text("text")
    refused(tmp_path, run_of(tmp_path / "no.npz"), "no.npz")
    offline = ["run", "--study", "cifar10_small", "--offline", "--set", f"data.cache={tmp_path}"]
    refused(tmp_path, offline, "cifar10", "--offline")


def test_output_folders_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    study = ["run", "--study", "digits_bn_vs_nobn"]
    refused(tmp_path, [*study, "--out", "file"], "'file'", "--out")
    refused(tmp_path, [*study, "--out", "/proc/runs"], "/proc/runs", "--out")
    refused(tmp_path, [*study, "--out", "/dev/full"], "/dev/full", "--out")


def test_commands_on_a_folder_that_is_no_run(tmp_path):
    for command in (["status"], ["report"], ["export", "--out", tmp_path / "x.npz"]):
        refused(tmp_path, [command[0], tmp_path, *command[1:]], "no run directory")


def test_a_dry_run_writes_nothing_and_states_the_cost(tmp_path):
    done = engine("run", "--study", "cifar10_bn_vs_nobn", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "cost: 2560 models" in done.stdout
    assert "resnet18" in done.stdout
    assert not list(tmp_path.iterdir())


def test_help_is_quick_because_nothing_heavy_is_imported():
    code = (
        "import sys, engine.cli\n"
        "heavy = {'torch', 'numpy', 'ray', 'ffcv', 'matplotlib', 'sklearn', 'scipy'}\n"
        "sys.exit(bool(heavy & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_another_distribution_named_kernels_is_noticed(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("")
    done = engine("studies", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode != 0
    assert "'kernels'" in done.stderr.splitlines()[-1]
    assert "another distribution" in done.stderr.splitlines()[-1]


def test_signs_that_a_locale_lacks_are_replaced(tmp_path):
    shipped = Path(__file__).parents[2] / "configs" / "studies" / "digits_bn_vs_nobn.toml"
    text = shipped.read_text().replace('question = "', 'question = "Größer … ')
    (tmp_path / "mine.toml").write_text(text)
    dry = ["run", "--study", "mine.toml", "--dry-run"]
    done = engine(*dry, cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "Gr??er ? " in done.stdout
