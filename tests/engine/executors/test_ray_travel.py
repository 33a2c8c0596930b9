"""What a worker does before it imports anything of this package; no Ray needed."""

import pickle
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.executors import ray_travel

SAY = "from engine.executors.ray_travel import sources; print(*sources())"


@pytest.fixture
def copy(tmp_path):
    """The sources in another folder."""
    for name in ray_travel.PACKAGES:
        found = Path(find_spec(name).origin).parent
        shutil.copytree(found, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def said_in(folder):
    done = subprocess.run(
        [sys.executable, "-c", SAY], capture_output=True, text=True, check=True, cwd=folder
    )
    return tuple(done.stdout.split())


def test_the_same_sources_elsewhere_have_the_same_digest(copy):
    ours, folder = ray_travel.sources()
    assert said_in(copy) == (ours, str(copy))
    assert folder == str(Path(find_spec("engine").origin).parents[1])
    with open(copy / "kernels" / "sgd" / "cpu.py", "a") as file:
        file.write("# changed\n")
    assert said_in(copy)[0] != ours


def test_a_file_more_or_renamed_is_another_digest(copy):
    ours, _ = ray_travel.sources()
    (copy / "attacks" / "more.py").touch()
    more, _ = said_in(copy)
    (copy / "attacks" / "more.py").rename(copy / "attacks" / "other.py")
    assert len({ours, more, said_in(copy)[0]}) == 3


@pytest.fixture
def worker(monkeypatch):
    """This process as a fresh worker of node n1."""
    context = SimpleNamespace(get_node_id=lambda: "n1")
    stand_in = SimpleNamespace(get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    monkeypatch.setattr(ray_travel, "_same", [])
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_other_sources_are_refused_before_anything_is_unpickled(worker):
    agreed = ("another digest", "/driver", None)
    answer = ray_travel.launch(agreed, "engine.nothing:task", [b"no pickle"])
    assert answer["node"] == "n1"
    assert answer["refused"].startswith("its workers import engine, kernels and attacks from ")
    assert "the driver in /driver" in answer["refused"]
    agreed = ("another digest", ray_travel.sources()[1], None)
    answer = ray_travel.launch(agreed, "engine.nothing:task", [b"no pickle"])
    assert "if they were changed meanwhile, run the same command again" in answer["refused"]


def test_a_missing_module_is_a_fault_of_the_node(worker):
    agreed = tuple(ray_travel.ticket(own_path=False))
    answer = ray_travel.launch(agreed, "engine.nothing:task", [])
    assert answer["node"] == "n1"
    assert "No module named 'engine.nothing'" in answer["refused"]
    assert "install" in answer["refused"]


def test_a_worker_of_our_own_cluster_imports_as_the_driver_does(worker):
    agreed = ray_travel.ticket(own_path=True)
    sys.path.insert(0, "/another/checkout")
    assert ray_travel.launch(tuple(agreed), "builtins:sum", [pickle.dumps([1, 2])]) == 3
    assert sys.path == agreed.path
