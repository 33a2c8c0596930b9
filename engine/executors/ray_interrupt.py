"""SIGINT and SIGTERM while Ray lives: the first stops in order, the second at once."""

import os
import signal
import sys
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Handlers that only set a flag: Ray's own would turn every exit into code 1."""

    def __init__(self) -> None:
        self._seen = 0

    def __enter__(self) -> "Interrupts":
        self._before: dict[int, Any] = {n: signal.signal(n, self._handle) for n in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise what was asked for meanwhile."""
        if self._seen == signal.SIGINT:
            raise KeyboardInterrupt
        if self._seen:
            raise SystemExit(128 + self._seen)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._seen:
            os._exit(128 + number)
        self._seen = number
        print("stopping: finished models are kept (again to stop at once)", file=sys.stderr)
