"""The figures of a driver, read back by `engine status` from the run directory alone."""

import io
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "faults"))
import pytest
from drive import Drive
from rich.console import Console

from engine.executors.ray_snapshot import Snapshot, WorkerSpeed
from engine.status import FIGURES, print_status, write_figures
from engine.store import open_run

SHOWN = Snapshot(
    waiting=5,
    running=2,
    done=3,
    retrained=1,
    seconds_left=600.0,
    speeds={"n1/7": WorkerSpeed(models=4, seconds=10.0)},
    reasons=("flip5/bn models 2-3: its node was lost",),
)


@pytest.fixture
def path(tmp_path):
    path = Drive(tmp_path).run.path
    write_figures(path, SHOWN.to_json())
    return path


def said(path):
    text = io.StringIO()
    print_status(open_run(path), Console(file=text, width=200))
    return text.getvalue()


def test_status_shows_shards_speed_time_left_and_reasons(path):
    text = said(path)
    for words in (
        "5 waiting, 2 running, 3 done, 0 failed",
        "10 min",
        "worker n1/7: 1,440 models/hour",
        "its node was lost",
    ):
        assert words in text


@pytest.mark.parametrize("damage", ["old", "cut", "foreign", "finished"])
def test_status_says_nothing_of_figures_that_are_old_or_unreadable(path, damage):
    file = path / FIGURES
    figures = json.loads(file.read_text())
    if damage == "old":
        file.write_text(json.dumps({**figures, "written": figures["written"] - 3600}))
    elif damage == "cut":
        file.write_text(file.read_text()[:40])
    elif damage == "foreign":
        file.write_text("[1, 2]")
    else:
        file.write_text(json.dumps({**figures, "waiting": 0, "running": 0}))
    assert "training now" not in said(path)
