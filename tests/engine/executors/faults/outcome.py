"""Run a scenario in a process of its own and look at what it left."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

from drive import REAL, Drive
from fake import FakeTrain

from engine import store
from engine.executors.base import timed_run
from engine.store import open_run

HERE = Path(__file__).parent


def command(scenario: str, folder: Path, *more: str) -> list[str]:
    return [sys.executable, str(HERE / "scenarios.py"), scenario, str(folder), *more]


def environment(**changed: str) -> dict[str, str]:
    """Of a user without any Ray settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return {**kept, "PYTHONPATH": os.getcwd(), "PYTHONWARNINGS": "default", **changed}


def act(scenario: str, folder: Path, *more: str, limit: float = 240.0) -> dict:
    """The facts that a scenario reports."""
    done = subprocess.run(
        command(scenario, folder, *more),
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def contents(run: store.Run) -> dict[str, str]:
    """Every array of every model by hash: what `engine export` would hand over."""
    found = {}
    for mix in run.study.mixes:
        for arm in run.study.arms:
            for name, values in run.load(mix, arm).arrays.items():
                for model, value in enumerate(values):
                    digest = hashlib.sha256(value.tobytes()).hexdigest()
                    found[f"{mix}/{arm}/{model}/{name}"] = f"{value.dtype}{value.shape}{digest}"
    return found


def pretended(folder: Path, **how) -> dict[str, str]:
    """What an undisturbed run with FakeTrain leaves, computed without any executor."""
    drive = Drive(folder, *how.pop("overrides", ()))
    train = FakeTrain(marks=str(drive.marks), **how)
    store.write_results(drive.run, [train.result(drive.job, ref) for ref in drive.run.refs()])
    return contents(drive.run)


def real(folder: Path, *overrides: str) -> dict[str, str]:
    """What an undisturbed run leaves, trained in this process in stacks of another size."""
    drive = Drive(folder, *(overrides or REAL), size=4)
    for stack in drive.stacks:
        store.write_results(drive.run, timed_run(drive.job, stack, lambda done: None))
    return contents(drive.run)


def left(folder: Path) -> dict[str, str]:
    """What a scenario left in its run directory."""
    return contents(open_run(folder / "run"))
