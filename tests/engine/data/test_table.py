"""Images mapped from a file that every machine makes from its own copy of the beton."""

import collections
import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sets_on_disk as sets

from engine.data import beton, readers, table
from engine.data.arrays import load
from engine.executors.base import Job, timed_run
from engine.executors.local import LocalExecutor
from engine.manifest import numerics
from engine.plan import ModelRef
from engine.prepare import prepare
from engine.study import Data
from engine.studyfile import load_study

SMALL = ["models=4", "train.batch=16", "train.epochs=1"]
OOD = ["mixes.ood.kind=ood", "mixes.ood.share=0.05"]


@pytest.fixture(scope="module")
def both(tmp_path_factory, real_data):
    """A study with an odd pool, a population by draw and OOD images, prepared in both ways."""
    folder = tmp_path_factory.mktemp("both")
    file = sets.saved(folder, sets.split(real_data("fashion_mnist"), 301, 100))
    other = sets.saved(folder, sets.split(real_data("mnist"), 100, 80), "other.npz")
    base = ["data.name=npz", f"data.path={file}", "query.population=40", *SMALL]
    base += [f"data.cache={folder / 'cache'}", *OOD, f"mixes.ood.source={other}"]
    found = {}
    for spread in ("memory", "beton"):
        loader = "resident" if spread == "memory" else "ffcv"
        sets_ = [*base, f"data.spread={spread}", f"data.loader={loader}"]
        study = load_study("digits_bn_vs_nobn", sets_)
        found[spread] = study, prepare(study)
    return found


def job(study, prepared):
    plan = numerics("cpu")["kernels"]
    return Job(study=study, data=prepared.data, device="cpu", kernel_plan=plan)


@sets.with_ffcv
def test_mapped_images_are_those_of_memory_in_another_order(both):
    (_, memory), (_, mapped) = both["memory"], both["beton"]
    assert mapped.digest == memory.digest
    assert {**mapped.facts, "loader": ""} == {**memory.facts, "loader": ""}
    assert mapped.facts["loader"] == "ffcv, mapped"
    assert (mapped.data.mean_C, mapped.data.std_C) == (memory.data.mean_C, memory.data.std_C)
    assert len(memory.data.images_RHWC) == 300 + 15 + 40
    assert len(mapped.data.images_RHWC) == 301 + 100 + 15
    for name, one in memory.data.tables.items():
        other = mapped.data.tables[name]
        images = [p.data.images_RHWC[t.image_N] for p, t in ((memory, one), (mapped, other))]
        np.testing.assert_array_equal(*images)
    asked = [p.data.images_RHWC[p.data.population_rows_Z] for p in (memory, mapped)]
    np.testing.assert_array_equal(*asked)


@sets.with_ffcv
def test_models_come_out_the_same_in_this_process_and_in_workers_that_map(both):
    stack = tuple(ModelRef(mix="ood", arm="bn", model_id=m) for m in (0, 3))
    results = [timed_run(job(*both[spread]), stack, lambda done: None) for spread in both]
    LocalExecutor(1).run(job(*both["beton"]), [stack], results.append, lambda index, done: None)
    for found in results[1:]:
        for one, other in zip(results[0], found, strict=True):
            assert one.arrays.keys() == other.arrays.keys()
            for name, values in one.arrays.items():
                assert values.tobytes() == other.arrays[name].tobytes(), name


@pytest.fixture
def elsewhere(both, tmp_path):
    """The cache of another machine, with a copy of the beton, and what the driver sends there."""
    study, prepared = both["beton"]
    cache = tmp_path / "elsewhere"
    (cache / "betons").mkdir(parents=True)
    known = prepared.data.table
    shutil.copy(Path(study.data.cache) / "betons" / f"{known.beton}.beton", cache / "betons")
    return dataclasses.replace(study.data, cache=str(cache)), known, prepared.data.images_RHWC


@sets.with_ffcv
def test_another_machine_makes_the_table_once_from_its_own_copy(elsewhere, monkeypatch):
    data, known, images = elsewhere
    first = table.opened(known, data)
    np.testing.assert_array_equal(first, images)
    first[:] = 0  # as a careless worker would
    monkeypatch.setattr(beton, "read", lambda *_: pytest.fail("read twice"))
    np.testing.assert_array_equal(table.opened(known, data), images)
    assert not list(Path(data.cache).rglob("*.new"))


@sets.with_ffcv
def test_a_table_that_was_touched_is_made_anew(elsewhere):
    data, known, images = elsewhere
    table.opened(known, data)
    (file,) = Path(data.cache).rglob("*.images")
    file.write_bytes(bytes(images.size))
    np.testing.assert_array_equal(table.opened(known, data), images)


def remove(file):
    file.unlink()


def alter(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


@sets.with_ffcv
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove, "it has no copy of .*beton: copy that file from the driver's machine to every"),
        (alter, "beton is not the driver's .*: copy that file from the driver's machine again"),
    ],
)
def test_a_machine_without_a_copy_or_with_another_one_says_so(elsewhere, damage, words):
    data, known, _ = elsewhere
    damage(next(Path(data.cache).rglob("*.beton")))
    with pytest.raises(ValueError, match=words):
        table.opened(known, data)
    assert not list(Path(data.cache).rglob("*.images"))


@sets.with_ffcv
def test_other_images_under_the_right_name_are_not_used(elsewhere):
    data, known, _ = elsewhere
    with pytest.raises(RuntimeError, match="FFCV reads other images from"):
        table.opened(dataclasses.replace(known, digest="0" * 64), data)


def test_auto_maps_what_is_large_for_this_machine(monkeypatch, tmp_path):
    dataset = load(sets.npz(sets.saved(tmp_path, sets.small())), offline=True, seed=0)
    nbytes = 10 * 3 * 5 * 3
    monkeypatch.setattr(beton, "installed", lambda: True)
    for available, mapped in ((4 * nbytes - 4, True), (4 * nbytes, False)):
        monkeypatch.setattr(readers, "available_memory", lambda free=available: free)
        assert table.wanted(dataset, Data(name="digits")) == mapped
        assert not table.wanted(dataset, Data(name="digits", loader="resident"))
        assert not table.wanted(dataset, Data(name="digits", spread="memory"))
        assert table.wanted(dataset, Data(name="digits", spread="beton"))
    monkeypatch.setattr(beton, "installed", lambda: False)
    assert not table.wanted(dataset, Data(name="digits"))
    with pytest.raises(RuntimeError, match=r"data.spread is 'beton', but FFCV is not installed"):
        table.wanted(dataset, Data(name="digits", spread="beton"))
    with pytest.raises(ValueError, match=r"needs FFCV: set data.loader to 'auto' or 'ffcv'"):
        Data(name="digits", spread="beton", loader="resident")


@sets.with_ffcv
def test_a_set_that_cannot_be_mapped_is_held_in_memory_unless_asked_for(
    tmp_path, monkeypatch, real_data, caplog
):
    file = sets.saved(tmp_path, sets.split(real_data("fashion_mnist"), 200, 100))
    base = ["data.name=npz", f"data.path={file}", f"data.cache={tmp_path}", *SMALL]
    base += ["query.population=100"]
    usage = collections.namedtuple("usage", "free")
    monkeypatch.setattr(table.shutil, "disk_usage", lambda folder: usage(free=10**5))
    monkeypatch.setattr(readers, "LARGE", 0.0)
    prepared = prepare(load_study("digits_bn_vs_nobn", base))
    assert prepared.data.table is None
    assert "GB free, and the images need" in prepared.facts["loader"]
    assert "images are held in memory" in caplog.text
    with pytest.raises(RuntimeError, match=r"data.spread is 'beton', but .* free space or set"):
        prepare(load_study("digits_bn_vs_nobn", [*base, "data.spread=beton"]))


MEASURE = """
import sys, threading, time
from pathlib import Path
from engine.data import readers
from engine.prepare import prepare
from engine.studyfile import load_study

def private():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024

def watch():
    global most
    while True:
        most = max(most, private())
        time.sleep(0.005)

readers.LARGE = 0.0
study = load_study("digits_bn_vs_nobn", sys.argv[1:])
most = before = private()
threading.Thread(target=watch, daemon=True).start()
prepared = prepare(study)
print(most - before, prepared.facts["loader"], prepared.data.images_RHWC.nbytes)
"""


@sets.with_ffcv
def test_a_driver_does_not_hold_what_it_maps(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (40_000, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(len(images)) % 10
    file = sets.saved(
        tmp_path,
        {
            "train_images": images,
            "train_labels": labels,
            "test_images": images[:2000],
            "test_labels": labels[:2000],
        },
    )
    overrides = ["data.name=npz", f"data.path={file}", f"data.cache={tmp_path / 'cache'}", *SMALL]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *overrides, "train.crop=0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    grown, *loader, nbytes = done.stdout.split()
    assert loader == ["ffcv,", "mapped"]
    assert int(nbytes) == 42_000 * 32 * 32 * 3
    assert int(grown) < int(nbytes) / 4, done.stdout
