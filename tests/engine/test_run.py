"""A whole study, end to end: same bits however it is laid out, resumed, killed or fed."""

import contextlib
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from engine.executors.local import LocalPlace
from engine.run import PLACES, Options, run_study
from engine.status import FIGURES
from engine.studyfile import load_study

TINY = ["data.limit=240", "models=6", "train.epochs=3", "train.batch=32", "data.loader=resident"]
STUDY = "digits_bn_vs_nobn"


def command(out, *overrides):
    sets = [part for pair in (*TINY, *overrides) for part in ("--set", pair)]
    return [sys.executable, "-m", "engine", "run", "--study", STUDY, "--out", str(out), *sets]


def run(out, *overrides):
    """Run the tiny study; returns (run directory, what it printed)."""
    done = subprocess.run(
        command(out, *overrides), capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = Path(out).iterdir()
    return folder, done.stdout


def exported(folder):
    """The exported bytes of a run."""
    out = folder.parent.parent / f"{folder.parent.name}.npz"
    out.unlink(missing_ok=True)
    subprocess.run(
        [sys.executable, "-m", "engine", "export", str(folder), "--out", str(out)], check=True
    )
    return out.read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "runs"
    folder, printed = run(out, "resources.stack=2")
    return folder, printed, exported(folder)


def test_a_run_prints_its_answer_and_leaves_the_run_directory(undisturbed):
    folder, printed, _ = undisturbed
    for words in ("cost: 18 models", "bn", "nobn", "AUC", "eval", "report: "):
        assert words in printed
    assert re.search(r"training: 18/18 models · 54/54 epochs · [\d,]+ models/hour", printed)
    names = {path.name for path in folder.iterdir()}
    assert names >= {"study.toml", "manifest.json", "mixes", "shards", "report.html", "figures"}
    assert names >= {"attacks.parquet", "claims.json"}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["query_mode"] == "eval"
    assert manifest["executor"] == "local"
    assert manifest["data"]["pool"] == 240
    assert manifest["numerics"]["device"] == "cpu"


def test_the_export_holds_every_array_of_every_cell(undisturbed):
    folder, _, _ = undisturbed
    with np.load(folder.parent.parent / "runs.npz") as arrays:
        for arm in ("bn", "nobn", "bn_penalty"):
            cell = {k.removeprefix(f"flip5/{arm}/"): arrays[k] for k in arrays if f"/{arm}/" in k}
            assert cell["scores_MNQ"].shape == (6, 240, 1)
            assert cell["keep_MN"].dtype == np.bool_
            assert (cell["keep_MN"].sum(1) == 120).all()
            assert (cell["labels_N"] != cell["true_labels_N"]).sum() == 12
            assert (cell["kind_N"] != 0).sum() == 12
            assert np.isfinite(cell["scores_MNQ"]).all()
            assert cell["correct_MN"].shape == (6, 240)
            assert cell["population_scores_MZQ"].shape[0] == 6


@pytest.mark.parametrize("stack", [1, 4, 32])
def test_the_same_bytes_in_any_stack_and_with_either_loader(undisturbed, tmp_path, stack):
    loader = "auto" if stack == 4 else "resident"
    folder, _ = run(tmp_path / "runs", f"resources.stack={stack}", f"data.loader={loader}")
    assert exported(folder) == undisturbed[2]


def test_the_same_command_again_trains_nothing(undisturbed):
    folder, _, before = undisturbed
    shards = {path: path.stat().st_mtime_ns for path in folder.glob("shards/*/*/*")}
    _, printed = run(folder.parent)
    assert "18 of 18 models are finished already" in printed
    assert "training:" not in printed
    assert {path: path.stat().st_mtime_ns for path in folder.glob("shards/*/*/*")} == shards
    assert exported(folder) == before


@pytest.mark.parametrize(
    ("overrides", "finished", "left"),
    [
        ((), "18 of 18", 0),
        (("models=8",), "18 of 24", 6),
        (("models=8", "train.lr=0.04"), "", 24),
    ],
)
def test_a_dry_run_counts_what_is_trained_already(undisturbed, overrides, finished, left):
    out = undisturbed[0].parent
    before = sorted(out.parent.rglob("*"))
    told = io.StringIO()
    study = load_study(STUDY, [*TINY, *overrides])
    run_study(study, Options(out=out, dry_run=True, device="cpu"), Console(file=told, width=200))
    assert f"cost: {left} models to train" in told.getvalue()
    assert (f"{finished} models are finished already" in told.getvalue()) == bool(finished)
    assert sorted(out.parent.rglob("*")) == before


def test_a_dry_run_passes_over_damaged_manifests(tmp_path):
    for name, text in (("a", "{"), ("b", '{"format": 1, "digest": "b"}')):
        folder = tmp_path / f"{STUDY}-{name}"
        folder.mkdir()
        (folder / "manifest.json").write_text(text)
    told = io.StringIO()
    options = Options(out=tmp_path, dry_run=True, device="cpu")
    run_study(load_study(STUDY, TINY), options, Console(file=told, width=200))
    assert "cost: 18 models to train" in told.getvalue()


def test_the_resolved_study_repeats_the_run(undisturbed, tmp_path):
    folder, _, before = undisturbed
    again = [sys.executable, "-m", "engine", "run", "--study", str(folder / "study.toml")]
    subprocess.run([*again, "--out", str(tmp_path / "runs")], check=True, capture_output=True)
    (copy,) = (tmp_path / "runs").iterdir()
    assert copy.name == folder.name
    assert exported(copy) == before


def test_growing_keeps_finished_models_and_damage_is_retrained(undisturbed, tmp_path):
    folder, _ = run(tmp_path / "runs", "models=4")
    _, printed = run(tmp_path / "runs")
    assert "12 of 18 models are finished already" in printed
    assert "cost: 6 models to train" in printed
    assert exported(folder) == undisturbed[2]
    shard = sorted(folder.glob("shards/*/nobn/*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-3])
    _, printed = run(tmp_path / "runs")
    assert f"set aside {shard}" in printed.replace("\n", "")
    assert exported(folder) == undisturbed[2]


def test_a_changed_study_reuses_nothing(undisturbed):
    folder, _, _ = undisturbed
    other, _ = run(folder.parent.parent / "changed", "train.lr=0.04", "models=2")
    assert other.name != folder.name


def test_an_odd_number_of_paired_models_is_said_from_start_to_end(tmp_path):
    folder, printed = run(tmp_path, "models=3", "train.epochs=1")
    assert printed.count("model 2 has no complement") == 2
    assert json.loads((folder / "manifest.json").read_text())["without_complement"] == [2]
    assert "model 2 has no complement" in (folder / "report.html").read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_says_what_is_kept_and_leaves_no_process(number, code, tmp_path):
    heeded = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    python, _, _, *rest = command(tmp_path / "runs", "train.epochs=2000")
    process = subprocess.Popen(  # tests may run where interrupts are ignored
        [python, "-c", f"{heeded}; from engine.cli import main; main()", *rest],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not list((tmp_path / "runs").rglob("manifest.json")) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert said.strip() == (
        "engine: interrupted: finished models are kept; the same command goes on from here"
    )


def kill_and_resume(out, kills):
    """Kill -9 the run at random moments, then let it finish."""
    rng = random.Random(0)
    for _ in range(kills):
        victim = subprocess.Popen(
            command(out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        before = len(list(Path(out).rglob("*.safetensors")))
        while time.monotonic() < deadline and victim.poll() is None:
            if list(Path(out).rglob("manifest.json")):
                break
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 6))
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        assert len(list(Path(out).rglob("*.safetensors"))) >= before
    return run(out)[0]


def test_kill_9_loses_at_most_the_stacks_in_training(undisturbed, tmp_path):
    folder = kill_and_resume(tmp_path / "runs", kills=2)
    assert exported(folder) == undisturbed[2]
    assert not list(folder.rglob("*.part"))


@pytest.mark.slow
def test_kill_9_at_ten_random_moments(undisturbed, tmp_path):
    folder = kill_and_resume(tmp_path / "runs", kills=10)
    assert exported(folder) == undisturbed[2]


def test_a_killed_worker_is_one_sentence_and_loses_nothing_finished(undisturbed, tmp_path):
    out = tmp_path / "runs"
    running = subprocess.Popen(
        command(out, "resources.stack=1"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    while running.poll() is None and not list(out.rglob("*.safetensors")):
        time.sleep(0.05)
    os.kill(children(running.pid)[-1], signal.SIGKILL)
    stderr = running.communicate(timeout=60)[1].decode()
    assert running.returncode == 1
    assert "a training process was killed" in stderr.strip().splitlines()[-1]
    assert list(out.rglob("*.safetensors"))
    assert exported(run(out)[0]) == undisturbed[2]


def children(pid):
    """Training processes of a run: its spawned children that hold the images."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
            line = status.with_name("cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == pid and b"spawn_main" in line:
            found.append(int(status.parent.name))
    return found


class BreaksOff(LocalPlace):
    """A place whose executor writes figures, as a cluster's driver does, and fails."""

    name = "breaks off"

    def executor(self, workers, watch):
        self.watch = watch
        return self

    def run(self, job, stacks, on_result, on_progress):
        self.watch.figures({"waiting": 1, "running": 1, "done": 0, "failed": 0, "speeds": {}})
        assert list(self.out.rglob(FIGURES))
        raise RuntimeError("the cluster burnt down")


def test_figures_of_a_training_that_broke_off_are_forgotten(tmp_path, monkeypatch):
    place = BreaksOff("cpu")
    place.out = tmp_path
    monkeypatch.setitem(PLACES, "local", lambda *_: contextlib.nullcontext(place))
    study = load_study("digits_bn_vs_nobn", ["models=2"])
    with pytest.raises(RuntimeError, match="burnt down"):
        run_study(study, Options(out=tmp_path), Console(file=io.StringIO()))
    assert list(tmp_path.rglob("manifest.json"))
    assert not list(tmp_path.rglob(FIGURES))
