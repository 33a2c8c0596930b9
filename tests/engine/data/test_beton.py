"""Images through FFCV are the images that went in, whatever befalls file and processes."""

import collections
import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import sets_on_disk as sets
import torch

import kernels
from engine import seeds
from engine.data import beton
from engine.data.arrays import load
from engine.study import Data


@pytest.fixture
def small(tmp_path, real_data):
    """A few real images, their beton's folder within reach, and the dataset as it was loaded."""
    file = sets.saved(tmp_path, sets.split(real_data("fashion_mnist"), 300, 100))
    data = sets.npz(file, cache=str(tmp_path / "cache"), loader="ffcv")
    return data, load(data, offline=True, seed=0)


@pytest.fixture(scope="module")
def first_delivery(tmp_path_factory, real_data):
    """The cache after the images of `small` went through FFCV for the first time."""
    folder = tmp_path_factory.mktemp("first")
    file = sets.saved(folder, sets.split(real_data("fashion_mnist"), 300, 100))
    data = sets.npz(file, cache=str(folder / "cache"), loader="ffcv")
    before = torch.get_num_threads(), dict(os.environ)
    loaded = load(data, offline=True, seed=0)
    dataset, how = beton.through_loader(loaded, data)
    assert how == "ffcv"
    assert dataset.digest() == loaded.digest()
    assert (torch.get_num_threads(), dict(os.environ)) == before
    assert "ffcv" not in sys.modules
    return Path(data.cache)


@pytest.fixture
def written(small, first_delivery):
    """`small` with its beton already in a cache of its own."""
    shutil.copytree(first_delivery, small[0].cache)
    return small


def betons(data):
    return sorted((Path(data.cache) / "betons").glob("*.beton"))


def processes(text):
    """Ids of living processes whose command line holds a text."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if text.encode() in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


def gone(text, seconds=10):
    """Whether all processes with that text in their command line end in time."""
    stop = time.monotonic() + seconds
    while processes(text) and time.monotonic() < stop:
        time.sleep(0.1)
    return not processes(text)


@sets.with_ffcv
@pytest.mark.parametrize("name", ["digits", "fashion_mnist", "cifar10"])
def test_both_loaders_deliver_identical_batches_of_real_images(name, real_data, tmp_path):
    path = "" if name == "digits" else str(real_data(name))
    batches = {}
    for loader in ("ffcv", "resident"):
        data = Data(name=name, path=path, loader=loader, cache=str(tmp_path))
        loaded = load(data, offline=True, seed=0)
        dataset, how = beton.through_loader(loaded, data)
        assert how.startswith(loader)
        assert dataset.digest() == loaded.digest()
        images_RHWC = torch.from_numpy(np.array(dataset.train.images_NHWC))
        order_MN = np.stack([seeds.permutation(seed, len(dataset.train)) for seed in (1, 2, 3)])
        sample_MB = torch.from_numpy(order_MN[:, -65:])
        batches[loader] = kernels.augment(
            images_RHWC,
            sample_MB,
            sample_MB,
            torch.tensor([7, 8, 9]),
            [0.5] * images_RHWC.shape[3],
            [0.25] * images_RHWC.shape[3],
            pad=2,
            flip=True,
            cutout=3,
        )
        assert (dataset.train.labels_N[sample_MB] == loaded.train.labels_N[sample_MB]).all()
    assert torch.equal(batches["ffcv"], batches["resident"])
    assert batches["ffcv"].std() > 0.1


@sets.with_ffcv
def test_a_beton_is_written_once(written, caplog):
    data, loaded = written
    (file,) = betons(data)
    assert file.stem == loaded.digest()
    assert sorted(path.suffix for path in file.parent.iterdir()) == [".beton", ".json", ".lock"]
    stamps = os.stat(file).st_mtime_ns, os.stat(file).st_ino
    dataset, how = beton.through_loader(loaded, data)
    assert how == "ffcv"
    assert dataset.digest() == loaded.digest()
    assert dataset.train.images_NHWC.flags.writeable
    assert (os.stat(file).st_mtime_ns, os.stat(file).st_ino) == stamps
    assert sorted(path.suffix for path in file.parent.iterdir()) == [".beton", ".json", ".lock"]
    assert not caplog.records


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def make_foreign(file):
    """Another file, noted as if it were the right one."""
    file.write_bytes(b"no beton at all")
    note = {"bytes": 15, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    file.with_suffix(".json").write_text(json.dumps(note))


def spoil_the_note(file):
    file.with_suffix(".json").write_text('{"bytes": ')


def lose_the_note(file):
    file.with_suffix(".json").unlink()


def empty(file):
    file.write_bytes(b"")


@sets.with_ffcv
def test_a_damaged_beton_is_noticed_and_written_anew(written, caplog):
    data, loaded = written
    (file,) = betons(data)
    whole = {path: path.read_bytes() for path in (file, file.with_suffix(".json"))}
    for damage in (cut, empty, spoil_the_note):
        damage(file)
        caplog.clear()
        assert not beton.whole(file), damage.__name__
        assert "written anew" in caplog.text, damage.__name__
        for path, content in whole.items():
            path.write_bytes(content)
        assert beton.whole(file)
    for damage in (flip_a_bit, make_foreign, lose_the_note):
        damage(file)
        caplog.clear()
        dataset, how = beton.through_loader(loaded, data)
        assert how == "ffcv", damage.__name__
        assert dataset.digest() == loaded.digest(), damage.__name__
        assert file.read_bytes() == whole[file], damage.__name__
        if damage is not lose_the_note:
            assert "written anew" in caplog.text, damage.__name__


@sets.with_ffcv
def test_images_that_differ_by_one_byte_have_betons_of_their_own(written):
    data, loaded = written
    other = load(data, offline=True, seed=0)
    other.train.images_NHWC[5, 6, 7, 0] ^= 1
    dataset, _ = beton.through_loader(other, data)
    assert dataset.digest() == other.digest() != loaded.digest()
    assert len(betons(data)) == 2


RUN = """
import sys
from engine.data import beton
from engine.data.arrays import load
from engine.study import Data

child = beton._child
def noted(task, *rest):
    with open(sys.argv[2] + ".asked", "a") as stream:
        stream.write(task + "\\n")
    return child(task, *rest)

beton._child = noted
data = Data(name="npz", path=sys.argv[1], cache=sys.argv[2], loader="ffcv")
loaded = load(data, offline=True, seed=0)
dataset, how = beton.through_loader(loaded, data)
assert how == "ffcv" and dataset.digest() == loaded.digest()
"""


def start(data, **environment):
    command = [sys.executable, "-c", RUN, data.path, data.cache]
    return subprocess.Popen(command, env=os.environ | environment)


@sets.with_ffcv
def test_of_runs_that_race_for_the_same_beton_one_writes_and_all_read(small):
    data, _ = small
    racers = [start(data) for _ in range(3)]
    assert [racer.wait(180) for racer in racers] == [0, 0, 0]
    (file,) = betons(data)
    assert not list(file.parent.glob("*.part"))
    asked = Path(data.cache + ".asked").read_text().split()
    assert sorted(asked) == ["read", "read", "write"]


def kill_with_child(run, data, delay):
    """Kill a run that long after its child is there, and see the child go too."""
    stop = time.monotonic() + 60
    while len(processes(data.cache)) < 2 and time.monotonic() < stop:
        time.sleep(0.02)
    time.sleep(delay)
    assert len(processes(data.cache)) >= 2
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert gone(data.cache, 30), "a child outlived its parent"


@sets.with_ffcv
def test_a_run_killed_while_it_writes_leaves_nothing_in_the_way(small):
    data, loaded = small
    for delay in (0.0, 1.0):
        kill_with_child(start(data), data, delay)
        assert not betons(data)
    dataset, how = beton.through_loader(loaded, data)
    assert how == "ffcv"
    assert dataset.digest() == loaded.digest()
    assert not list((Path(data.cache) / "betons").glob("*.part"))


def test_a_child_that_hangs_ends_with_its_parent(small, tmp_path):
    data, _ = small
    (tmp_path / "ffcv.py").write_text("import time; time.sleep(600)")
    kill_with_child(start(data, PYTHONPATH=str(tmp_path)), data, 5.0)


@sets.with_ffcv
def test_a_child_that_takes_too_long_is_ended(small, monkeypatch):
    data, loaded = small
    monkeypatch.setattr(beton, "START_SECONDS", 0.2)
    with pytest.raises(RuntimeError, match=r"data.loader is 'ffcv', but FFCV took over 1 s to wri"):
        beton.through_loader(loaded, data)
    assert gone(data.cache, 1)
    assert not betons(data)
    assert not list((Path(data.cache) / "betons").glob("*.part"))


def test_without_ffcv_auto_is_resident_and_says_why(small, monkeypatch, caplog):
    data, loaded = small
    monkeypatch.setattr(beton, "installed", lambda: False)
    with pytest.raises(RuntimeError, match=r"is 'ffcv', but FFCV is not installed: run setup.sh"):
        beton.through_loader(loaded, data)
    auto = sets.npz(Path(data.path), cache=data.cache, loader="auto")
    with caplog.at_level(logging.WARNING):
        dataset, how = beton.through_loader(loaded, auto)
    assert dataset is loaded
    assert how.startswith("resident: FFCV is not installed")
    assert "FFCV is not installed" in caplog.text


@sets.with_ffcv
def test_a_cache_that_cannot_be_written_is_no_end_to_auto(small, tmp_path):
    data, loaded = small
    (tmp_path / "file").write_text("in the way")
    there = str(tmp_path / "file")
    dataset, how = beton.through_loader(loaded, sets.npz(Path(data.path), cache=there))
    assert dataset is loaded
    assert how.startswith("resident: ")
    assert there in how
    with pytest.raises(RuntimeError, match=r"data.loader is 'ffcv', but .*file"):
        beton.through_loader(loaded, sets.npz(Path(data.path), cache=there, loader="ffcv"))


@sets.with_ffcv
def test_a_full_cache_is_noticed_before_ffcv_would_wait_for_ever(small, tmp_path, monkeypatch):
    data, loaded = small
    usage = collections.namedtuple("usage", "free")
    monkeypatch.setattr(beton.shutil, "disk_usage", lambda folder: usage(free=10**6))
    dataset, how = beton.through_loader(loaded, sets.npz(Path(data.path), cache=str(tmp_path)))
    assert dataset is loaded
    assert "has 1.0 MB free, and the set needs" in how
    assert not list((tmp_path / "betons").glob("*.part"))


def test_resident_touches_no_cache(small):
    data, loaded = small
    resident = sets.npz(Path(data.path), cache=data.cache, loader="resident")
    dataset, how = beton.through_loader(loaded, resident)
    assert dataset is loaded
    assert how == "resident: data.loader asks for it"
    assert not Path(data.cache).exists()
