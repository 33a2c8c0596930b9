"""The live progress of a run: one updating line on a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

MOST_NAMED = 4
"""Workers whose speeds are shown one by one."""

PLAIN_SECONDS = 10.0
"""Seconds between plain lines when the output is no terminal."""


class TrainingProgress:
    """Models, epochs, models an hour and time left, fed by the executor's callbacks."""

    def __init__(self, console: Console, stack_sizes: list[int], epochs: int) -> None:
        self._console, self._sizes, self._epochs = console, stack_sizes, epochs
        self._epochs_done = [0] * len(stack_sizes)
        self._finished = 0
        self._start = self._last_line = time.monotonic()
        self._first: tuple[float, int] | None = None
        self._figures: Mapping[str, Any] = {}
        self._live = Progress(
            TextColumn("training", table_column=Column(min_width=8)),
            BarColumn(bar_width=20, table_column=Column(min_width=20)),
            TextColumn("{task.fields[text]}", table_column=Column(ratio=1)),  # in several lines
            console=console,
            expand=True,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._live.add_task("training", total=self._total, text="starting")

    def __enter__(self) -> "TrainingProgress":
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def epoch(self, stack: int, done: int) -> None:
        """A stack has finished `done` epochs."""
        self._epochs_done[stack] = max(done, self._epochs_done[stack])
        if self._first is None:
            self._first = time.monotonic(), self._done
        self._show()

    def models(self, count: int) -> None:
        """`count` more models are finished and stored."""
        self._finished += count
        self._show(force=self._finished == sum(self._sizes))

    def figures(self, figures: Mapping[str, Any]) -> None:
        """What a cluster's driver reports beside: shards by state, models/hour of each worker."""
        self._figures = figures
        self._show()

    def say(self, sentence: str) -> None:
        """Print a sentence above the line of figures."""
        self._console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    @property
    def _total(self) -> int:
        return sum(self._sizes) * self._epochs

    @property
    def _done(self) -> int:
        return sum(n * e for n, e in zip(self._sizes, self._epochs_done, strict=True))

    def _rate(self) -> float:
        """Epochs of one model a second, starting up left out once that is the smaller part."""
        now, since, before = time.monotonic(), self._start, 0
        if self._first is not None and now - self._first[0] >= self._first[0] - self._start:
            since, before = self._first
        return (self._done - before) / max(now - since, 1e-9)

    def text(self) -> str:
        """The figures, in words."""
        done = self._done
        parts = [f"{self._finished}/{sum(self._sizes)} models", f"{done}/{self._total} epochs"]
        if done:
            rate = self._rate()
            parts.append(f"{3600 * rate / self._epochs:,.0f} models/hour")
            parts.append(f"{clock((self._total - done) / rate)} left")
        if self._figures:
            states = ("waiting", "running", "done", "failed")
            counts = ", ".join(f"{self._figures[state]} {state}" for state in states)
            parts += [f"shards: {counts}", *_workers(self._figures["speeds"])]
        return " · ".join(parts)

    def _show(self, force: bool = False) -> None:
        self._live.update(self._task, completed=self._done, text=self.text())
        now = time.monotonic()
        if not self._console.is_terminal and (force or now - self._last_line > PLAIN_SECONDS):
            self._last_line = now
            self._console.print(f"training: {self.text()}", highlight=False)


def _workers(speeds: Mapping[str, float]) -> list[str]:
    """A few workers by name; of more, the slowest and the fastest.

    >>> _workers({"a1/7": 410.0, "b2/9": 395.5})
    ['a1/7 410/hour', 'b2/9 396/hour']
    >>> _workers({str(i): 400.0 + i for i in range(64)})
    ['64 workers, 400/hour (0) to 463/hour (63)']
    """
    if len(speeds) <= MOST_NAMED:
        return [f"{worker} {rate:,.0f}/hour" for worker, rate in speeds.items()]
    slow, fast = min(speeds, key=lambda w: speeds[w]), max(speeds, key=lambda w: speeds[w])
    ends = " to ".join(f"{speeds[w]:,.0f}/hour ({w})" for w in (slow, fast))
    return [f"{len(speeds)} workers, {ends}"]


def clock(seconds: float) -> str:
    """A duration in words.

    >>> clock(42), clock(600), clock(7200), clock(300000), clock(4e8)
    ('42 s', '10 min', '2.0 h', '3.5 days', '13 years')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    if seconds < 365 * 86400:
        return f"{seconds / 86400:.1f} days"
    return f"{seconds / 86400 / 365.25:.0f} years"


def size(count: float) -> str:
    """Bytes in words.

    >>> size(3e6), size(5e9)
    ('3 MB', '4.7 GiB')
    """
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{max(1, round(count / 1e6))} MB"
