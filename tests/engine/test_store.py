"""The run directory: atomic, checksummed, resumable, growing, honest about damage."""

import json
import os

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from engine import files, store
from engine.membership import keep_mask
from engine.outliers import sample_table
from engine.plan import ModelRef, ModelResult
from engine.studyfile import load_study

SAMPLES = 12


def declare(folder, models=4, digest="abc"):
    study = load_study("digits_bn_vs_nobn", [f"models={models}"])
    labels = np.arange(SAMPLES, dtype=np.int64) % 10
    samples = {n: sample_table(mix, 0, labels, 10) for n, mix in study.mixes.items()}
    mask = keep_mask(study.membership, 0, models, np.zeros(SAMPLES, dtype=np.int64))
    folder.mkdir(parents=True, exist_ok=True)
    manifest = {"format": store.FORMAT, "digest": digest, "shards": {}}
    return store.declare(folder, study, dict.fromkeys(samples, mask), samples, manifest)


def result(mix, arm, model_id):
    arrays = {
        "phi_NQ": np.full((SAMPLES, 1), model_id, dtype=np.float32),
        "correct_N": np.arange(SAMPLES) % (model_id + 2) == 0,
    }
    return ModelResult(ref=ModelRef(mix=mix, arm=arm, model_id=model_id), arrays=arrays)


def fill(run, arm="bn", ids=(0, 1, 2, 3)):
    mix = next(iter(run.study.mixes))
    return mix, store.write_results(run, [result(mix, arm, m) for m in ids])


def test_results_come_back_in_model_order_from_any_shards(tmp_path):
    run = declare(tmp_path / "run")
    fill(run, ids=(3, 0))
    mix, _ = fill(run, ids=(2, 1))
    assert [p.name for p in sorted((run.path / "shards" / mix / "bn").glob("*.safetensors"))] == [
        "00000-00000.safetensors",
        "00001-00002.safetensors",
        "00003-00003.safetensors",
    ]
    cell = store.open_run(run.path).load(mix, "bn")
    assert (cell.arrays["phi_NQ"][:, 0, 0] == [0, 1, 2, 3]).all()
    assert cell.arrays["correct_N"].dtype == np.bool_
    assert cell.keep_MN.shape == (4, SAMPLES)
    assert (cell.samples.kind_N > 0).sum() == round(0.05 * SAMPLES)


def test_a_stack_may_hold_several_arms(tmp_path):
    run = declare(tmp_path / "run")
    mix = next(iter(run.study.mixes))
    mixed = [result(mix, arm, m) for m in (1, 0) for arm in ("nobn", "bn")]
    assert len(store.write_results(run, mixed)) == 2
    assert len(run.scan().rows) == 4


def test_missing_models_are_counted_in_the_error(tmp_path):
    run = declare(tmp_path / "run")
    mix, _ = fill(run, ids=(0, 1, 3))
    with pytest.raises(ValueError, match="1 of 4 models"):
        run.load(mix, "bn")


def truncate(path):
    path.write_bytes(path.read_bytes()[:-5])


def flip_bit(path):
    raw = bytearray(path.read_bytes())
    raw[-9] ^= 1
    path.write_bytes(raw)


def lose_checksum(path):
    path.with_suffix(".json").unlink()


def no_safetensors(path):
    path.write_bytes(b"nonsense")
    summary = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps(summary | {"sha256": files.sha256(path)}))


def make_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "truncated or altered"),
        (flip_bit, "truncated or altered"),
        (lose_checksum, "checksum file is missing"),
        (no_safetensors, "no safetensors"),
        (make_folder, "cannot be read"),
    ],
)
def test_damage_is_noticed_named_and_set_aside(tmp_path, damage, reason):
    run = declare(tmp_path / "run")
    mix, (path,) = fill(run)
    damage(path)
    shards = run.scan()
    assert not shards.rows
    (bad,) = shards.rejected
    assert bad.path == path
    assert reason in bad.reason
    store.clean(run.path, shards.rejected)
    assert not run.scan().rejected
    assert path.with_name(path.name + ".rejected").exists()
    fill(run)
    assert len(run.load(mix, "bn").arrays["phi_NQ"]) == 4


def test_shards_of_another_study_arm_or_name_are_foreign(tmp_path):
    run, other = declare(tmp_path / "run"), declare(tmp_path / "other", digest="def")
    mix, (path,) = fill(other)
    target = run.path / "shards" / mix / "bn"
    target.mkdir(parents=True)
    for part in (path, path.with_suffix(".json")):
        (target / part.name).write_bytes(part.read_bytes())
    assert "another study" in run.scan().rejected[0].reason
    mix, (mine,) = fill(run, arm="nobn")
    swapped = run.path / "shards" / mix / "bn_penalty"
    swapped.mkdir()
    for part in (mine, mine.with_suffix(".json")):
        (swapped / part.name).write_bytes(part.read_bytes())
    rejected = {bad.path.parent.name for bad in run.scan().rejected}
    assert rejected == {"bn", "bn_penalty"}


def test_a_copy_under_another_name_is_set_aside(tmp_path):
    run = declare(tmp_path / "run")
    _, (path,) = fill(run, ids=(0, 1))
    for part in (path, path.with_suffix(".json")):
        copy = part.with_name(part.name.replace("00000-00001", "00002-00003"))
        copy.write_bytes(part.read_bytes())
    (bad,) = run.scan().rejected
    assert bad.path.name == "00002-00003.safetensors"
    assert "a copy of 00000-00001.safetensors" in bad.reason
    assert len(run.scan().rows) == 2


def test_a_shard_has_the_same_bytes_every_time(tmp_path):
    written = [fill(declare(tmp_path / f"run{i}"))[1][0].read_bytes() for i in range(8)]
    assert len(set(written)) == 1


def test_shards_that_name_themselves_key_by_key_still_count(tmp_path):
    run = declare(tmp_path / "run")
    mix, (path,) = fill(run)
    names = {"digest": run.digest, "mix": mix, "arm": "bn", "models": "[0, 1, 2, 3]"}
    summary = json.loads(path.with_suffix(".json").read_text())

    def accepted(**changes):
        path.write_bytes(save(load_file(path), metadata=names | changes))
        path.with_suffix(".json").write_text(json.dumps(summary | {"sha256": files.sha256(path)}))
        return len(run.scan().rows)

    assert accepted() == 4
    assert accepted(arm="nobn") == 0


def test_a_run_grows_and_shrinks_without_losing_models(tmp_path):
    run = declare(tmp_path / "run", models=4)
    mix, _ = fill(run)
    grown = declare(run.path, models=6)
    assert len(np.load(run.path / "mixes" / mix / "keep.npy")) == 6
    assert len([ref for ref in grown.refs() if ref not in grown.scan().rows]) == 14
    small = declare(run.path, models=2)
    assert small.load(mix, "bn").keep_MN.shape == (2, SAMPLES)
    assert len(np.load(run.path / "mixes" / mix / "keep.npy")) == 6


def test_a_mask_of_another_study_stops_the_run(tmp_path):
    run = declare(tmp_path / "run")
    mix = next(iter(run.study.mixes))
    keep = run.path / "mixes" / mix / "keep.npy"
    np.save(keep, ~np.load(keep))
    (run.path / "manifest.json").unlink()  # with its checksums
    with pytest.raises(ValueError, match="not this study's keep mask"):
        declare(run.path)


def inverted(file):
    if file.suffix == ".npy":
        np.save(file, ~np.load(file))
    else:
        with np.load(file) as table:
            arrays = dict(table)
        np.savez(file, **(arrays | {"kind_N": 1 - arrays["kind_N"]}))


def pickled(file):
    with open(file, "wb") as stream:
        np.save(stream, np.array([{}]), allow_pickle=True)


DAMAGES = {
    "deleted": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "junk": lambda file: file.write_bytes(b"no arrays at all"),
    "pickle": pickled,
    "altered": inverted,
}


@pytest.mark.parametrize("name", store.MEMBERSHIP)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("manifest", ["manifest", "no manifest"])
def test_damaged_masks_and_tables_are_refused_then_written_anew(tmp_path, name, damage, manifest):
    run = declare(tmp_path / "run")
    mix = next(iter(run.study.mixes))
    file = run.path / "mixes" / mix / name
    before = file.read_bytes()
    DAMAGES[damage](file)
    with pytest.raises(ValueError, match=f"{name}' is missing or damaged: run the study again"):
        run.membership(mix)
    if manifest == "no manifest":
        (run.path / "manifest.json").unlink()
        if damage == "altered":
            with pytest.raises(ValueError, match="not this study's"):
                declare(run.path)
            return
    again = declare(run.path)
    again.membership(mix)
    if name == store.KEEP:  # a zip holds the time
        assert file.read_bytes() == before
    aside = file.with_name(f"{name}.rejected")
    assert aside.exists() == (damage != "deleted")


def test_files_set_aside_keep_their_names(tmp_path):
    for text in ("one", "two"):
        (tmp_path / "shard").write_text(text)
        store.set_aside(tmp_path / "shard")
    assert (tmp_path / "shard.rejected").read_text() == "one"
    assert (tmp_path / "shard.rejected-2").read_text() == "two"


def test_a_failed_write_leaves_the_old_file_and_no_debris(tmp_path):
    path = tmp_path / "file"
    files.write_text(path, "old")

    def explode(stream):
        stream.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        files.write_atomic(path, explode)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_files_written_together_are_there_together(tmp_path, monkeypatch):
    first, second = tmp_path / "a", tmp_path / "b"

    def explode(stream):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        files.write_together({first: lambda stream: stream.write(b"1"), second: explode})
    assert os.listdir(tmp_path) == []

    renamed = []
    monkeypatch.setattr(type(first), "replace", lambda part, path: renamed.append(path))
    files.write_together(dict.fromkeys((first, second), lambda stream: None))
    assert renamed == [second, first]


def test_a_second_process_is_refused(tmp_path):
    run = declare(tmp_path / "run")
    with (
        store.locked(run.path),
        pytest.raises(RuntimeError, match="another process"),
        store.locked(run.path),
    ):
        pass


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}'])
def test_a_damaged_manifest_is_one_sentence(tmp_path, content):
    run = declare(tmp_path / "run")
    (run.path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match="is damaged: delete it and run the study again"):
        store.open_run(run.path)


def test_a_damaged_study_file_is_named_and_written_anew(tmp_path):
    run = declare(tmp_path / "run")
    file = run.path / "study.toml"
    whole = file.read_text()
    file.write_text(whole[:40])
    with pytest.raises(ValueError, match=r"study\.toml' is damaged"):
        store.open_run(run.path)
    declare(run.path)
    assert file.read_text() == whole


def test_an_edited_study_file_is_not_taken_for_what_was_run(tmp_path):
    run = declare(tmp_path / "run")
    file = run.path / "study.toml"
    whole = file.read_text()
    edited = whole.replace("lr = 0.", "lr = 1.")
    assert edited != whole
    file.write_text(edited)
    with pytest.raises(ValueError, match="was edited: run the study again"):
        store.open_run(run.path)
    declare(run.path)
    assert store.open_run(run.path).study == run.study


def test_other_folders_and_newer_formats_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no run directory"):
        store.open_run(tmp_path)
    run = declare(tmp_path / "run")
    manifest = json.loads((run.path / "manifest.json").read_text())
    store.write_manifest(run.path, manifest | {"format": 99})
    with pytest.raises(ValueError, match="format 99"):
        store.open_run(run.path)


def test_left_over_temporary_files_are_cleaned(tmp_path):
    run = declare(tmp_path / "run")
    part = run.path / "mixes" / ".keep.npy.123.part"
    part.write_bytes(b"half")
    store.clean(run.path, ())
    assert not part.exists()
