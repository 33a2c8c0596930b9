"""The driver's figures for other programs: Ray metrics for Prometheus, a log for TensorBoard."""

import importlib
import os
import time
from collections.abc import Iterator
from typing import Any, Protocol

from engine.executors.ray_snapshot import Snapshot

FIGURES = {
    "shards": "Shards by state: waiting, running, done, failed.",
    "shards_retrained": "Shards trained again after a fault.",
    "models_done": "Models finished by this driver.",
    "models_left": "Models still to be trained.",
    "seconds_left": "Time left, estimated from finished shards.",
    "models_per_hour": "Speed of each worker while it trains.",
}
LABELS = {"shards": "state", "models_per_hour": "worker"}
FOLDER = "SHADOW_TENSORBOARD"
"""The environment variable that names the folder of the TensorBoard log."""


class Display(Protocol):
    """Shows snapshots somewhere."""

    def show(self, shown: Snapshot) -> None:
        """Show the latest figures."""


def displays() -> list[Display]:
    """What this driver's figures go to.

    Raises:
        RuntimeError: a TensorBoard log is asked for and cannot be written.
    """
    folder = os.environ.get(FOLDER, "")
    return [Metrics(), *([TensorBoard(folder)] if folder else [])]


def figures(shown: Snapshot) -> Iterator[tuple[str, str, float]]:
    """Name, label and value of every figure; the label is empty where LABELS has none.

    >>> shown = Snapshot(waiting=3, running=2, done=1, models_done=4, models_left=20)
    >>> list(figures(shown))[-2:]
    [('models_done', '', 4), ('models_left', '', 20)]
    """
    for state in ("waiting", "running", "done", "failed"):
        yield "shards", state, getattr(shown, state)
    yield "shards_retrained", "", shown.retrained
    yield "models_done", "", shown.models_done
    yield "models_left", "", shown.models_left
    if shown.seconds_left is not None:
        yield "seconds_left", "", shown.seconds_left
    for worker, speed in shown.speeds.items():
        yield "models_per_hour", worker, speed.models_per_hour


class Metrics:
    """Gauges that Ray's agent of the driver's node serves on its metrics port."""

    def __init__(self) -> None:
        made: Any = importlib.import_module("ray.util.metrics")
        self._gauges = {
            name: made.Gauge(
                f"shadow_engine_{name}",
                description=text,
                tag_keys=(LABELS[name],) if name in LABELS else (),
            )
            for name, text in FIGURES.items()
        }

    def show(self, shown: Snapshot) -> None:
        """Set every gauge."""
        for name, label, value in figures(shown):
            self._gauges[name].set(value, tags={LABELS[name]: label} if label else {})


class TensorBoard:
    """The same figures as scalars over the seconds since the start.

    Raises:
        RuntimeError: TensorBoard is not installed.
    """

    def __init__(self, folder: str) -> None:
        try:
            module: Any = importlib.import_module("torch.utils.tensorboard")
        except ImportError:
            raise RuntimeError(
                f"{FOLDER} is set, but TensorBoard is not installed: pip install tensorboard, or "
                f"unset {FOLDER}"
            ) from None
        self._writer, self._start = module.SummaryWriter(folder), time.monotonic()

    def show(self, shown: Snapshot) -> None:
        """Write every scalar."""
        step = int(time.monotonic() - self._start)
        for name, label, value in figures(shown):
            tag = f"{name}/{label}" if label else name
            self._writer.add_scalar(f"shadow_engine/{tag}", value, step)
        self._writer.flush()
