"""One set of figures for Prometheus and TensorBoard, with stand-ins for both libraries."""

import sys
from types import SimpleNamespace

import pytest

from engine.executors import ray_metrics
from engine.executors.ray_metrics import FIGURES, LABELS, Metrics, TensorBoard, displays, figures
from engine.executors.ray_snapshot import Snapshot, WorkerSpeed

SHOWN = Snapshot(
    waiting=5,
    running=2,
    done=3,
    retrained=1,
    models_done=6,
    models_left=14,
    seconds_left=600.0,
    speeds={"n1/7": WorkerSpeed(models=4, seconds=10.0)},
)


@pytest.fixture
def gauges(monkeypatch):
    """What Ray's gauges were set to, by name and tags."""
    found = {}

    class Gauge:
        def __init__(self, name, description, tag_keys):
            self.name, self.tag_keys = name, tag_keys

        def set(self, value, tags):
            assert set(tags) == set(self.tag_keys)
            found[self.name, *tags.values()] = value

    monkeypatch.setitem(sys.modules, "ray.util.metrics", SimpleNamespace(Gauge=Gauge))
    return found


@pytest.fixture
def scalars(monkeypatch):
    """What was written to TensorBoard, by folder and tag."""
    found = {}

    class SummaryWriter:
        def __init__(self, folder):
            self.folder = folder

        def add_scalar(self, tag, value, step):
            assert step >= 0
            found[self.folder, tag] = value

        def flush(self):
            found["flushed"] = True

    stand_in = SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    return found


def test_every_figure_is_described_and_labelled_as_declared():
    shown = list(figures(SHOWN))
    assert {name for name, _, _ in shown} == set(FIGURES)
    assert all(bool(label) == (name in LABELS) for name, label, _ in shown)
    assert ("models_per_hour", "n1/7", 1440.0) in shown
    assert "seconds_left" not in {
        name for name, _, _ in figures(Snapshot(waiting=1, running=0, done=0))
    }


def test_prometheus_and_tensorboard_get_the_same_figures(gauges, scalars, monkeypatch):
    monkeypatch.setenv(ray_metrics.FOLDER, "/logs")
    for display in displays():
        display.show(SHOWN)
    assert scalars.pop("flushed")
    assert gauges["shadow_engine_shards", "waiting"] == 5
    by_tag = {
        ("/logs", "shadow_engine/" + "/".join(k).removeprefix("shadow_engine_")): v
        for k, v in gauges.items()
    }
    assert scalars == by_tag
    assert len(scalars) == 9


def test_a_log_is_written_only_where_asked_for(gauges, monkeypatch):
    monkeypatch.delenv(ray_metrics.FOLDER, raising=False)
    assert [type(display) for display in displays()] == [Metrics]


def test_a_missing_tensorboard_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(RuntimeError, match="pip install tensorboard, or unset SHADOW_TENSORBOARD"):
        TensorBoard("/logs")
