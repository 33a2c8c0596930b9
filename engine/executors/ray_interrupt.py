"""SIGINT and SIGTERM while Ray lives: the first stops in order, the second at once."""

import os
import signal
import socket
import sys
import threading
import time
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)

PATIENCE = 10.0
"""Seconds that the main thread has to stop in order."""


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


class Deadline:
    """Ends the process where the main thread cannot, so that a signal always does.

    It may sit in a call of Ray that never returns, a frozen service for one, and Python runs no
    handler meanwhile. A thread hears of signals, too: some seconds after the first, and at once
    after the second, it ends the process. Results are renamed into place when they are whole.
    """

    def __enter__(self) -> "Deadline":
        self._heard, self._told = socket.socketpair()
        self._told.setblocking(False)
        number = self._told.fileno()
        self._before = signal.set_wakeup_fd(number, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._before)
        self._told.close()

    def _watch(self) -> None:
        first, end = 0, 0.0
        with self._heard:
            while True:
                self._heard.settimeout(max(0.01, end - time.monotonic()) if first else None)
                try:
                    numbers = self._heard.recv(64)
                except TimeoutError:
                    _end(first, f"Ray did not answer for {PATIENCE:.0f} s: ended without it")
                if not numbers:
                    return
                for number in numbers:
                    if number in SIGNALS and first:
                        _end(number, "ended at once")
                    if number in SIGNALS:
                        first, end = number, time.monotonic() + PATIENCE


def _end(number: int, sentence: str) -> NoReturn:
    os.write(2, f"{sentence}; finished models are kept\n".encode())
    os._exit(128 + number)
