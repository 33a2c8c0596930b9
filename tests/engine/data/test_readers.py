import errno
import functools
import hashlib
import http.server
import mmap
import os
import pickle
import subprocess
import sys
import threading
from unittest import mock

import numpy as np
import pytest
import sets_on_disk as sets
from PIL import Image

from engine.data import readers
from engine.data.arrays import load
from engine.study import Data


def read(name, path="", offline=True, **fields):
    return load(Data(name=name, path=str(path), **fields), offline=offline, seed=0)


class Trap:
    """Unpickling it leaves a mark."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    ("name", "folder"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")]
)
def test_torchvisions_idx_files_hold_the_same_images(tmp_path, real_data, name, folder, zipped):
    arrays = sets.split(real_data(name), 200, 100)
    sets.save_idx(tmp_path, folder, arrays, zipped)
    dataset = read(name, tmp_path)
    assert sets.same(dataset.train.images_NHWC, arrays["train_images"])
    assert sets.same(dataset.test.labels_N, arrays["test_labels"])


def test_older_pickled_copies_of_mnist_are_never_opened(tmp_path, real_data):
    sets.save_idx(tmp_path, "MNIST", sets.split(real_data("mnist"), 200, 100))
    older = tmp_path / "MNIST" / "processed"
    older.mkdir()
    for name in ("training.pt", "test.pt"):
        (older / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    read("mnist", tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_a_damaged_idx_file_is_named(tmp_path, real_data):
    raw = sets.save_idx(tmp_path, "MNIST", sets.split(real_data("mnist"), 200, 100))
    file = raw / "t10k-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="t10k-images-idx3-ubyte is damaged"):
        read("mnist", tmp_path)
    file.write_bytes(b"")
    with pytest.raises(ValueError, match="t10k-images-idx3-ubyte is damaged"):
        read("mnist", tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match=r"there is no file .*t10k-images-idx3-ubyte"):
        read("mnist", tmp_path)
    with pytest.raises(ValueError, match=r"there is no folder .*absent"):
        read("mnist", tmp_path / "absent")


def cifar_archive(root, arrays):
    """CIFAR-10 as torchvision lays it out; its files' names and MD5s."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    train = [(f"data_batch_{i}", slice(40 * i - 40, 40 * i)) for i in range(1, 6)]
    sums = {}
    for name, rows in [*train, ("test_batch", None)]:
        part = "test" if rows is None else "train"
        images = arrays[f"{part}_images"][rows or slice(None)]
        labels = arrays[f"{part}_labels"][rows or slice(None)]
        entry = {"data": images.transpose(0, 3, 1, 2).reshape(len(images), -1), "labels": [*labels]}
        (folder / name).write_bytes(pickle.dumps(entry))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    for file in folder.iterdir():
        sums[file.name] = hashlib.md5(file.read_bytes()).hexdigest()
    return sums


def test_cifar_is_opened_only_where_torchvisions_md5s_agree(tmp_path, real_data, monkeypatch):
    from torchvision.datasets import CIFAR10

    arrays = sets.split(real_data("cifar10"), 200, 200)
    sums = cifar_archive(tmp_path, arrays)
    with pytest.raises(ValueError, match="does not hold cifar10 as torchvision lays it out, whole"):
        read("cifar10", tmp_path)
    train = [[name, sums[name]] for name in sorted(sums) if name.startswith("data")]
    monkeypatch.setattr(CIFAR10, "train_list", train)
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": sums["batches.meta"]})
    dataset = read("cifar10", tmp_path)
    assert sets.same(dataset.train.images_NHWC, arrays["train_images"])
    assert sets.same(dataset.test.labels_N, arrays["test_labels"])
    trap = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    trap.write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(ValueError, match="whole and unaltered"):
        read("cifar10", tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_large_arrays_of_an_npz_are_mapped_where_it_is_not_compressed(tmp_path, monkeypatch):
    arrays = sets.small(test_images=np.asfortranarray(sets.small()["test_images"]))
    np.savez_compressed(tmp_path / "packed.npz", **arrays)
    for file in (sets.saved(tmp_path, arrays), tmp_path / "packed.npz"):
        for free, mapped in ((1000, "set.npz"), (10**9, "neither")):
            monkeypatch.setattr(readers, "available_memory", lambda free=free: free)
            raw = readers.npz(file)
            assert isinstance(raw["train_images"], np.memmap) == (file.name == mapped)
            assert not isinstance(raw["train_labels"], np.memmap)
            assert not isinstance(raw["test_images"], np.memmap)
            for key, values in arrays.items():
                np.testing.assert_array_equal(raw[key], values)


@pytest.mark.parametrize("free", [0, 10**9])
def test_npz_files_that_are_none_are_named(tmp_path, monkeypatch, free):
    monkeypatch.setattr(readers, "available_memory", lambda: free)
    trap = sets.small()
    trap["train_labels"] = np.array([Trap(tmp_path / "sprung")] * 6, dtype=object)
    file = tmp_path / "trap.npz"
    np.savez(file, allow_pickle=True, **trap)
    with pytest.raises(ValueError, match=r"trap\.npz cannot be read as \.npz: Object arrays"):
        read("npz", file)
    assert not (tmp_path / "sprung").exists()
    arrays = sets.small()
    del arrays["test_labels"]
    with pytest.raises(ValueError, match=r"part\.npz lacks test_labels \(expected: train_images"):
        read("npz", sets.saved(tmp_path, arrays, "part.npz"))
    whole = sets.saved(tmp_path, sets.small(), "whole.npz").read_bytes()
    np.save(tmp_path / "array.npy", np.zeros(3))
    for content in (whole[:-40], b"", b"PK", b"text", (tmp_path / "array.npy").read_bytes()):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"trap\.npz cannot be read as \.npz"):
            read("npz", file)
    altered = bytearray(whole)
    altered[whole.index(sets.small()["test_images"].tobytes()) + 9] ^= 1
    file.write_bytes(altered)
    with pytest.raises(ValueError, match=r"trap\.npz cannot be read as \.npz"):
        read("npz", file)
    with pytest.raises(ValueError, match=r"there is no file .*absent\.npz"):
        read("npz", tmp_path / "absent.npz")


def class_folders(root, arrays, names="ab"):
    for part in ("train", "test"):
        for row, (image, label) in enumerate(
            zip(arrays[f"{part}_images"], arrays[f"{part}_labels"], strict=True)
        ):
            folder = root / part / names[label]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image if image.shape[2] == 3 else image[..., 0]).save(
                folder / f"{row:03d}.png"
            )
    return root


def by_class(arrays, part):
    return arrays[f"{part}_images"][np.argsort(arrays[f"{part}_labels"], kind="stable")]


@pytest.mark.parametrize("free", [0, 10**9])
@pytest.mark.parametrize("channels", [1, 3])
def test_class_folders_hold_the_same_images(tmp_path, channels, monkeypatch, free):
    monkeypatch.setattr(readers, "available_memory", lambda: free)
    arrays = sets.small()
    arrays |= {key: arrays[key][..., :channels] for key in ("train_images", "test_images")}
    class_folders(tmp_path, arrays)
    (tmp_path / "train" / "a" / "notes.txt").write_text("not an image")
    (tmp_path / "train" / ".hidden").mkdir()
    dataset = read("folder", tmp_path)
    assert sets.same(dataset.train.images_NHWC, by_class(arrays, "train"))
    assert sets.same(dataset.test.images_NHWC, by_class(arrays, "test"))
    assert dataset.train.labels_N.tolist() == [0, 0, 0, 1, 1, 1]


def test_one_coloured_image_makes_the_set_rgb(tmp_path):
    arrays = sets.small()
    grey = {key: arrays[key][..., :1] for key in ("train_images", "test_images")}
    class_folders(tmp_path, arrays | grey)
    Image.fromarray(arrays["test_images"][0]).save(tmp_path / "test" / "a" / "000.png")
    dataset = read("folder", tmp_path)
    expected = np.repeat(by_class(arrays | grey, "train"), 3, axis=3)
    assert sets.same(dataset.train.images_NHWC, expected)
    assert sets.same(dataset.test.images_NHWC[0], arrays["test_images"][0])


def test_many_pictures_lie_in_a_file_without_a_name(tmp_path, monkeypatch):
    class_folders(tmp_path / "set", sets.small())
    for free, kept in ((0, True), (10**9, False)):
        monkeypatch.setattr(readers, "available_memory", lambda free=free: free)
        raw = readers.class_folders(tmp_path / "set", tmp_path / "cache")
        base = raw["train_images"]
        while isinstance(base, np.ndarray):
            base = base.base
        assert isinstance(getattr(base, "obj", None), mmap.mmap) == kept
        assert list((tmp_path / "cache").iterdir()) == []
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(readers, "available_memory", lambda: 0)
    monkeypatch.setattr(readers.os, "posix_fallocate", mock.Mock(side_effect=full))
    with pytest.raises(OSError, match="No space left"):
        readers.class_folders(tmp_path / "set", tmp_path / "cache")


def test_unfit_folders_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"there is no folder .*train of class folders"):
        read("folder", tmp_path)
    (tmp_path / "train").mkdir()
    (tmp_path / "test").mkdir()
    with pytest.raises(ValueError, match="train has no class folders"):
        read("folder", tmp_path)
    class_folders(tmp_path, sets.small())
    (tmp_path / "train" / "c").mkdir()
    with pytest.raises(ValueError, match="class 'c' is in only one of train and test"):
        read("folder", tmp_path)
    (tmp_path / "test" / "c").mkdir()
    Image.new("RGB", (5, 3)).save(tmp_path / "test" / "c" / "0.png")
    with pytest.raises(ValueError, match=r"train/c holds no image \(looked for \.png, "):
        read("folder", tmp_path)
    file = tmp_path / "train" / "c" / "0.png"
    Image.new("RGB", (7, 7)).save(file)
    with pytest.raises(ValueError, match="must all have one size, found 3 x 5, 7 x 7"):
        read("folder", tmp_path)
    Image.new("I;16", (5, 3)).save(file)
    with pytest.raises(ValueError, match=r"0\.png has mode I;16: expected 8-bit grey or colour"):
        read("folder", tmp_path)
    Image.new("RGB", (5, 3)).save(file)
    for content in (b"\x89PNG\r\n\x1a\n", file.read_bytes()[:-25]):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"0\.png cannot be read as an image"):
            read("folder", tmp_path)


class Downloads:
    """Stands for a torchvision set: lays out MNIST where it is told to, or breaks halfway."""

    def __init__(self, arrays, fail=False):
        self.arrays, self.fail, self.calls = arrays, fail, 0

    def __call__(self, root, *, train, download):
        self.calls += 1
        assert download
        raw = sets.save_idx(root, "MNIST", self.arrays)
        if self.fail:
            (raw / "train-images-idx3-ubyte").unlink()
            raise RuntimeError("the host is away")


def test_a_set_is_downloaded_once_and_whole(tmp_path, real_data, monkeypatch):
    arrays = sets.split(real_data("mnist"), 200, 100)
    broken, working = Downloads(arrays, fail=True), Downloads(arrays)
    with pytest.raises(ValueError, match=r"mnist is not in .* and --offline forbids to download"):
        read("mnist", cache=str(tmp_path))
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(readers, "_torchvision_class", lambda name: broken)
    with pytest.raises(ValueError, match=r"mnist could not be downloaded into .* \(the host is aw"):
        read("mnist", cache=str(tmp_path), offline=False)
    monkeypatch.setattr(readers, "_torchvision_class", lambda name: working)
    for offline in (False, False, True):
        dataset = read("mnist", cache=str(tmp_path), offline=offline)
        assert sets.same(dataset.train.images_NHWC, arrays["train_images"])
    assert (broken.calls, working.calls) == (1, 1)


def test_processes_that_race_for_a_download_all_get_it_whole(tmp_path, real_data):
    sets.saved(tmp_path, sets.split(real_data("mnist"), 200, 100))
    code = (
        "import sys, time, numpy as np, sets_on_disk as sets; from engine.data import readers\n"
        "from pathlib import Path; from test_readers import Downloads\n"
        "folder = Path(sys.argv[1]); arrays = dict(np.load(folder / 'set.npz'))\n"
        "class Slow(Downloads):\n"
        "    def __call__(self, root, **how):\n"
        "        super().__call__(root, **how); time.sleep(1)\n"
        "        (folder / str(time.time())).touch()\n"
        "readers._torchvision_class = lambda name: Slow(arrays)\n"
        "root = readers.downloaded('mnist', folder, offline=False, instead='')\n"
        "assert np.array_equal(readers.torchvision_set('mnist', root)['test_images'],"
        " arrays['test_images'])\n"
    )
    here = os.path.dirname(__file__)
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=here) for _ in range(3)
    ]
    assert [process.wait(60) for process in started] == [0, 0, 0]
    assert len([name for name in os.listdir(tmp_path) if name[0].isdigit()]) == 1


def test_a_download_that_cannot_be_stored_is_named(tmp_path):
    (tmp_path / "torchvision").write_text("a file in the way")
    with pytest.raises(ValueError, match="mnist could not be downloaded into"):
        read("mnist", cache=str(tmp_path), offline=False)


@pytest.fixture
def host(tmp_path_factory, monkeypatch):
    """A folder that is served over HTTP on this machine, and its address."""
    folder = tmp_path_factory.mktemp("host")
    handler = functools.partial(QuietHandler, directory=str(folder))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_torchvision_downloads_and_checks(tmp_path, real_data, monkeypatch, host):
    from torchvision.datasets import MNIST

    folder, address = host
    arrays = sets.split(real_data("mnist"), 200, 100)
    raw = sets.save_idx(folder, "x", arrays, zipped=True)
    files = [(f.name, hashlib.md5(f.read_bytes()).hexdigest()) for f in sorted(raw.iterdir())]
    monkeypatch.setattr(MNIST, "mirrors", [address + "x/raw/"])
    monkeypatch.setattr(MNIST, "resources", files)
    dataset = read("mnist", cache=str(tmp_path), offline=False)
    assert sets.same(dataset.train.images_NHWC, arrays["train_images"])
    assert sets.same(dataset.test.labels_N, arrays["test_labels"])


def test_a_download_that_is_not_what_it_should_be_is_refused(tmp_path, monkeypatch, host):
    from torchvision.datasets import CIFAR10

    folder, address = host
    (folder / "cifar.tar.gz").write_bytes(b"something else")
    monkeypatch.setattr(CIFAR10, "url", address + "cifar.tar.gz")
    with pytest.raises(
        ValueError, match=r"cifar10 could not be downloaded into .*: set data\.path"
    ):
        read("cifar10", cache=str(tmp_path), offline=False)
    monkeypatch.setattr(CIFAR10, "url", address + "gone.tar.gz")
    with pytest.raises(ValueError, match=r"cifar10 could not be downloaded into .* 404"):
        read("cifar10", cache=str(tmp_path), offline=False)
    assert not (tmp_path / "torchvision" / "cifar10").exists()
