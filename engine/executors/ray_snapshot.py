"""What a driver says of its progress, to people and to other programs. Imports no Ray."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class WorkerSpeed:
    """Models one worker finished and the seconds it took."""

    models: int
    seconds: float

    @property
    def models_per_hour(self) -> float:
        """The rate while training."""
        return 3600 * self.models / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Shards by state, models, time left, speed of each worker, and what went wrong."""

    waiting: int
    running: int
    done: int
    failed: int = 0
    retrained: int = 0
    models_done: int = 0
    models_left: int = 0
    seconds_left: float | None = None
    speeds: Mapping[str, WorkerSpeed] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values, with each worker's models an hour."""
        plain = dataclasses.asdict(self)
        plain["reasons"] = list(self.reasons[-20:])
        plain["speeds"] = {name: s.models_per_hour for name, s in sorted(self.speeds.items())}
        return plain
