"""The driver's figures as Ray metrics, for Prometheus: see the names in FIGURES."""

import importlib
from typing import Any

from engine.executors.ray_snapshot import Snapshot

FIGURES = {
    "shadow_engine_shards": "Shards by state: waiting, running, done, failed.",
    "shadow_engine_shards_retrained": "Shards trained again after a fault.",
    "shadow_engine_models_done": "Models finished by this driver.",
    "shadow_engine_models_left": "Models still to be trained.",
    "shadow_engine_seconds_left": "Time left, estimated from finished shards.",
    "shadow_engine_models_per_hour": "Speed of each worker while it trains.",
}
LABELS = {
    "shadow_engine_shards": ("state",),
    "shadow_engine_models_per_hour": ("worker",),
}


class Metrics:
    """Gauges that Ray's agent of the driver's node serves on its metrics port."""

    def __init__(self) -> None:
        made: Any = importlib.import_module("ray.util.metrics")
        self._gauges = {
            name: made.Gauge(name, description=text, tag_keys=LABELS.get(name, ()))
            for name, text in FIGURES.items()
        }

    def show(self, shown: Snapshot) -> None:
        """Set every gauge."""
        for state in ("waiting", "running", "done", "failed"):
            self._set("shards", getattr(shown, state), state=state)
        self._set("shards_retrained", shown.retrained)
        self._set("models_done", shown.models_done)
        self._set("models_left", shown.models_left)
        if shown.seconds_left is not None:
            self._set("seconds_left", shown.seconds_left)
        for worker, speed in shown.speeds.items():
            self._set("models_per_hour", speed.models_per_hour, worker=worker)

    def _set(self, name: str, value: float, **labels: str) -> None:
        self._gauges[f"shadow_engine_{name}"].set(value, tags=labels)
