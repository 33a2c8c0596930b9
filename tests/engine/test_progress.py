"""The figures of the progress line."""

import io

import pytest
from rich.console import Console

from engine import progress


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_time_left_does_not_take_starting_up_for_training(clock):
    shown = progress.TrainingProgress(Console(file=io.StringIO()), [4, 4], epochs=10)
    clock[0] += 60  # workers start; both report their first epoch
    shown.epoch(0, 1)
    shown.epoch(1, 1)
    assert shown.text() == "0/8 models · 8/80 epochs · 48 models/hour · 9 min left"
    for done in range(2, 8):  # ten seconds an epoch
        clock[0] += 10
        shown.epoch(0, done)
        shown.epoch(1, done)
    assert "56/80 epochs" in shown.text()
    assert shown.text().endswith(" · 28 s left")


def test_models_are_counted_when_stored_and_epochs_never_go_back(clock):
    out = io.StringIO()
    shown = progress.TrainingProgress(Console(file=out, width=200), [2], epochs=2)
    clock[0] += 1
    shown.epoch(0, 2)
    shown.epoch(0, 1)
    shown.models(2)
    assert "2/2 models · 4/4 epochs" in out.getvalue()


def test_a_clusters_shards_and_workers_are_on_the_same_line(clock):
    shown = progress.TrainingProgress(Console(file=io.StringIO()), [4, 4], epochs=10)
    figures = {"waiting": 1, "running": 2, "done": 3, "failed": 0, "speeds": {"a1/7": 410.4}}
    shown.figures(figures)
    words = (
        "0/8 models · 0/80 epochs · shards: 1 waiting, 2 running, 3 done, 0 failed · a1/7 410/hour"
    )
    assert shown.text() == words


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_terminal_shows_all_figures_however_narrow_it_is(clock, width):
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    with progress.TrainingProgress(console, [4, 4], epochs=10) as shown:
        speeds = {"a1b2c3/77": 410.4, "d4e5f6/88": 395.0}
        figures = {"waiting": 1, "running": 2, "done": 3, "failed": 0, "speeds": speeds}
        clock[0] += 1
        shown.epoch(0, 5)
        shown.figures(figures)
    said = out.getvalue()
    for word in ("training", "━", *shown.text().split()):
        assert word in said
    assert "…" not in said
