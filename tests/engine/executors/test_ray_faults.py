"""Real faults, minutes together: `pytest -m slow tests/engine/executors/test_ray_faults.py`.

With RECORD=1 every fault leaves a row in bench/results/ray_faults.csv; docs/ray.md quotes them.
"""

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "faults"))
import outcome
import table
from drive import fashion

from engine.data import beton

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
pytestmark = [pytest.mark.slow, needs_ray]


def record(fault, facts, equal):
    """With RECORD=1: a row for this fault, in place of its last one."""
    if os.environ.get("RECORD"):
        table.write(fault, facts, equal)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return outcome.pretended(tmp_path_factory.mktemp("fake"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return outcome.real(tmp_path_factory.mktemp("real"))


@pytest.mark.parametrize(
    "scenario",
    [
        "kill_worker",
        "remove_node",
        "kill_node",
        "kill_raylet",
        "freeze_node",
        "freeze_worker",
        "join_node",
        "lost_board",
        "out_of_memory",
    ],
)
def test_after_a_fault_every_byte_is_there(tmp_path, undisturbed, scenario):
    facts = outcome.act(scenario, tmp_path)
    assert facts["failure"] is None
    if scenario == "join_node":
        assert facts["workers"] == 2
    if scenario == "freeze_worker":
        assert facts["seconds"] < 100
    if scenario in ("kill_node", "kill_raylet", "freeze_node"):
        assert facts["retrained"] >= 1
        assert any("node" in said or "sign of life" in said for said in facts["said"])
    equal = outcome.left(tmp_path) == undisturbed
    record(scenario, facts, equal)
    assert equal


@pytest.fixture
def groups():
    if not os.access("/sys/fs/cgroup/memory", os.W_OK):
        pytest.skip("limiting memory needs root and control groups of version 1")


@pytest.mark.parametrize("scenario", ["host_memory", "kernel_memory"])
def test_a_host_out_of_memory_halves_the_stacks(tmp_path, undisturbed, groups, scenario):
    facts = outcome.act(scenario, tmp_path)
    assert facts["failure"] is None
    assert (facts["stacks"], facts["done"]) == (3, 6)
    reasons = [said.split(": ", 1)[1] for said in facts["said"]]
    if scenario == "host_memory":
        assert (facts["killed_by_kernel"], reasons) == (0, ["out of memory on its node"] * 3)
    else:
        assert (facts["killed_by_kernel"], reasons) == (6, ["its worker process was killed"] * 6)
    equal = outcome.left(tmp_path) == undisturbed
    record(scenario, facts, equal)
    assert equal


def test_a_model_that_fits_nowhere_is_reported_with_what_to_do(tmp_path, groups):
    facts = outcome.act("too_large_models", tmp_path)
    assert (facts["models_done"], facts["failed"], facts["killed_by_kernel"]) == (0, 3, 0)
    first, what = facts["failure"].split(": ", 1)
    assert first == "3 models could not be trained, first flip5/bn model 1 (flip5/bn model 1"
    assert what.startswith("out of memory on its node: let its node train fewer at once (resou")


def test_a_result_that_died_with_its_node_is_trained_again(tmp_path):
    expected = outcome.pretended(tmp_path / "plain", ballast_mb=1)
    facts = outcome.act("lost_result", tmp_path / "struck")
    assert facts["failure"] is None
    assert any(said.endswith(": its result was lost") for said in facts["said"]), facts["said"]
    equal = outcome.left(tmp_path / "struck") == expected
    record("lost_result", facts, equal)
    assert equal


def test_lost_data_of_the_study_are_put_into_the_object_store_again(tmp_path):
    expected = outcome.pretended(tmp_path / "plain", ballast_mb=20)
    facts = outcome.act("lost_data", tmp_path / "struck")
    assert facts["failure"] is None
    assert any("the study's data did not arrive" in said for said in facts["said"])
    equal = outcome.left(tmp_path / "struck") == expected
    record("lost_data", facts, equal)
    assert equal


def test_results_lost_on_the_disk_of_the_object_store_are_trained_again(tmp_path):
    expected = outcome.pretended(tmp_path / "plain", ballast_mb=20)
    facts = outcome.act("lost_spill", tmp_path / "struck")
    assert facts["failure"] is None
    assert any("no result arrived from" in said for said in facts["said"])
    assert not any("killed" in said for said in facts["said"])
    equal = outcome.left(tmp_path / "struck") == expected
    record("lost_spill", facts, equal)
    assert equal


@pytest.mark.parametrize("scenario", ["plain", "two_nodes", "kill_worker", "kill_node"])
def test_real_training_gives_the_bytes_of_one_process(tmp_path, trained, scenario):
    facts = outcome.act(scenario, tmp_path, "real", limit=600)
    assert facts["failure"] is None
    if scenario.startswith("kill"):
        assert facts["retrained"] == 1
    equal = outcome.left(tmp_path) == trained
    record(f"{scenario}, real training", facts, equal)
    assert equal


def test_two_nodes_give_the_bytes_of_one_process_on_fashion_mnist(tmp_path, real_data, monkeypatch):
    path = real_data("fashion_mnist")
    monkeypatch.setenv("FASHION", str(path))
    facts = outcome.act("fashion_two_nodes", tmp_path / "nodes", "real", limit=600)
    assert facts["failure"] is None
    equal = outcome.left(tmp_path / "nodes") == outcome.real(tmp_path / "one", *fashion(path))
    record("fashion_two_nodes, real training", facts, equal)
    assert equal


def test_nodes_with_more_memory_train_larger_stacks(tmp_path, undisturbed):
    facts = outcome.act("uneven_nodes", tmp_path)
    assert facts["failure"] is None
    assert max(facts["small"]) <= 3 < max(facts["large"])
    assert facts["again"] == 0
    equal = outcome.left(tmp_path) == undisturbed
    record("uneven_nodes", facts, equal)
    assert equal


needs_ffcv = pytest.mark.skipif(not beton.installed(), reason="FFCV is not installed (setup.sh)")


@needs_ffcv
def test_nodes_read_the_images_from_their_own_copies_of_the_beton(tmp_path, real_data, monkeypatch):
    path = real_data("fashion_mnist")
    monkeypatch.setenv("FASHION", str(path))
    facts = outcome.act("own_copies", tmp_path / "nodes", "real", limit=600)
    assert facts["failure"] is None
    assert facts["workers"] == 2
    assert facts["tables"] == [1, 1]
    assert facts["put"] < facts["images"] / 5
    equal = outcome.left(tmp_path / "nodes") == outcome.real(tmp_path / "one", *fashion(path))
    record("own_copies, real training", facts, equal)
    assert equal


@needs_ffcv
def test_a_node_without_its_copy_of_the_beton_keeps_off(tmp_path, real_data, monkeypatch):
    path = real_data("fashion_mnist")
    monkeypatch.setenv("FASHION", str(path))
    facts = outcome.act("one_copy", tmp_path / "nodes", "real", limit=600)
    assert facts["failure"] is None
    assert facts["tables"] == [1, 0]
    (said,) = {text.split(": ", 1)[1] for text in facts["said"]}
    assert "cannot join in: it has no copy of" in said
    assert str(tmp_path / "nodes" / "two") in said
    equal = outcome.left(tmp_path / "nodes") == outcome.real(tmp_path / "one", *fashion(path))
    record("one_copy, real training", facts, equal)
    assert equal


@needs_ffcv
def test_nodes_with_another_beton_are_not_used(tmp_path, real_data, monkeypatch):
    monkeypatch.setenv("FASHION", str(real_data("fashion_mnist")))
    facts = outcome.act("altered_copies", tmp_path, "real", limit=600)
    assert "no node can go on with this run" in facts["failure"]
    assert "beton is not the driver's" in facts["failure"]
    assert facts["models_done"] == 0


def test_workers_killed_at_random_moments(tmp_path, undisturbed):
    facts = outcome.act("kill_workers", tmp_path, limit=900)
    assert facts["failure"] is None
    assert facts["retrained"] >= 10
    assert facts["trainings"] <= facts["stacks"] + 20
    equal = all(outcome.left(tmp_path / str(number)) == undisturbed for number in range(20))
    record("kill_workers", facts, equal)
    assert equal


def test_one_raising_model_is_reported_and_all_others_are_kept(tmp_path, undisturbed):
    facts = outcome.act("raising_model", tmp_path)
    assert "model 5" in facts["failure"]
    assert (facts["models_done"], facts["failed"]) == (21, 3)
    again = outcome.act("plain", tmp_path)
    assert again["stacks"] <= 3
    equal = outcome.left(tmp_path) == undisturbed
    record("raising_model", again, equal)
    assert equal


def test_a_model_that_raises_in_real_training_costs_no_other_model(tmp_path, trained):
    facts = outcome.act("raising_model", tmp_path, "real", limit=600)
    assert "model 5" in facts["failure"]
    assert "IndexError: cross_entropy got a label outside 0 to 9" in facts["failure"]
    assert (facts["models_done"], facts["failed"]) == (21, 3)
    again = outcome.act("plain", tmp_path, "real", limit=600)
    assert again["failure"] is None
    assert again["models_done"] == 3
    equal = outcome.left(tmp_path) == trained
    record("raising_model, real training", again, equal)
    assert equal


def test_machines_of_another_kind_are_not_used(tmp_path):
    facts = outcome.act("refusing_nodes", tmp_path)
    assert "isa is AVX2" in facts["failure"]
    assert "--out" in facts["failure"]
    assert facts["models_done"] == 0


def test_arrays_of_another_size_are_not_stored(tmp_path):
    facts = outcome.act("wrong_arrays", tmp_path)
    assert "phi_NQ has shape" in facts["failure"]
    assert not list((tmp_path / "run").rglob("*.safetensors"))


@pytest.mark.parametrize("training", ["pretended", "real"])
def test_one_diverging_model_is_marked_and_its_stack_untouched(tmp_path, request, training):
    before = request.getfixturevalue("trained" if training == "real" else "undisturbed")
    facts = outcome.act("diverging_model", tmp_path, training, limit=600)
    assert facts["failure"] is None
    assert sum("model 5 diverged" in said for said in facts["said"]) == 3
    now = outcome.left(tmp_path)
    changed = {name for name in now if now[name] != before[name]}
    assert {name.split("/")[2] for name in changed} == {"5"}
    assert {"phi_NQ", "diverged"} <= {name.rsplit("/", 1)[1] for name in changed}
    run = outcome.open_run(tmp_path / "run")
    cells = [run.load(mix, arm) for mix in run.study.mixes for arm in run.study.arms]
    assert all(np.flatnonzero(cell.arrays["diverged"]).tolist() == [5] for cell in cells)
    assert all(np.isnan(cell.arrays["phi_NQ"][5]).all() for cell in cells)
    record("diverging_model" + ", real training" * (training == "real"), facts, True)


def test_a_starved_object_store_spills_and_goes_on(tmp_path):
    overrides = ("query.views=18",)
    expected = outcome.pretended(tmp_path / "plain", overrides=overrides, ballast_mb=20)
    facts = outcome.act("starved_store", tmp_path / "starved")
    assert facts["failure"] is None
    assert "Spilled" in facts["stats"]
    equal = outcome.left(tmp_path / "starved") == expected
    record("starved_store", facts, equal)
    assert equal


def test_a_full_disk_stops_the_driver_cleanly_and_the_run_resumes(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)], check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        facts = outcome.act("full_disk", tmp_path)
        assert "No space left" in facts["failure"]
        assert not list(folder.rglob("*.part"))
        subprocess.run(["mount", "-o", "remount,size=200m", str(folder)], check=True)
        again = outcome.act("full_disk", tmp_path)
        assert again["failure"] is None
        assert again["stacks"] < facts["stacks"]
        expected = outcome.pretended(tmp_path / "plain", ballast_mb=1)
        equal = outcome.left(tmp_path) == expected
        record("full_disk", again, equal)
        assert equal
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_corrupted_shard_file_is_set_aside_and_trained_again(tmp_path, undisturbed):
    outcome.act("plain", tmp_path)
    victim = sorted((tmp_path / "run").rglob("*.safetensors"))[1]
    data = bytearray(victim.read_bytes())
    data[-100] ^= 1
    victim.write_bytes(data)
    again = outcome.act("plain", tmp_path)
    assert again["stacks"] == 1
    assert victim.with_name(victim.name + ".rejected").is_file()
    equal = outcome.left(tmp_path) == undisturbed
    record("corrupted_shard", again, equal)
    assert equal


def test_a_driver_whose_own_raylet_is_killed_says_so_and_resumes(tmp_path, undisturbed):
    facts = outcome.act("own_raylet", tmp_path)
    assert facts["failure"].startswith("Ray on this machine died: finished models are kept; run")
    assert facts["models_done"] >= 6
    again = outcome.act("plain", tmp_path)
    assert again["failure"] is None
    assert again["stacks"] == facts["stacks"] - facts["done"]
    equal = outcome.left(tmp_path) == undisturbed
    record("own_raylet", again, equal)
    assert equal


def test_a_killed_driver_resumes(tmp_path, undisturbed):
    for _ in range(2):
        process = subprocess.Popen(
            outcome.command("long", tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=outcome.environment(),
        )
        for line in process.stdout:
            if line.startswith("stored 2"):
                break
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    begun = time.monotonic()
    facts = outcome.act("plain", tmp_path)
    assert facts["failure"] is None
    assert facts["stacks"] <= 12 - 4
    equal = outcome.left(tmp_path) == undisturbed
    facts.update(recovered=time.monotonic() - begun)
    record("kill_driver", facts, equal)
    assert equal


def test_two_shards_share_a_gpu(tmp_path, undisturbed):
    facts = outcome.act("shared_gpu", tmp_path)
    assert facts["failure"] is None
    assert facts["workers"] == 2
    assert outcome.left(tmp_path) == undisturbed


def test_a_cluster_of_another_version_is_refused(tmp_path):
    said = outcome.act("other_version", tmp_path)["failure"]
    assert "runs other versions: install the cluster's Ray and Python here" in said
    assert "2.59.0" in said
    assert len(said.splitlines()) == 1


def test_prometheus_reads_the_drivers_figures(tmp_path):
    read = outcome.act("metrics", tmp_path)["read"]
    text = "\n".join(read)
    for words in ('state="running"', "models_left", "models_per_hour{", "shards_retrained"):
        assert words in text


def test_cluster_files_are_what_ray_accepts():
    import yaml
    from ray.autoscaler._private.util import prepare_config, validate_config
    from ray.runtime_env import RuntimeEnv

    folder = Path(__file__).parents[3] / "configs" / "ray"
    config = yaml.safe_load((folder / "autoscaling.yaml").read_text())
    validate_config(prepare_config(config))
    runtime = yaml.safe_load((folder / "runtime_env.yaml").read_text())
    assert set(runtime) <= RuntimeEnv.known_fields
    job = yaml.safe_load((folder / "kuberay.yaml").read_text())
    assert (job["kind"], job["apiVersion"]) == ("RayJob", "ray.io/v1")
    check = ["bash", "-n", str(folder / "slurm.sh")]
    assert subprocess.run(check, check=False).returncode == 0
