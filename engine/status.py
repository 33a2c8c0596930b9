"""What `engine status` says of a run directory."""

import json
import shlex
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engine import files
from engine.progress import clock
from engine.store import Run

FIGURES = "progress.json"
FRESH_SECONDS = 60.0


def print_status(run: Run, console: Console) -> None:
    """A table of finished models per mix and arm, damaged shards, and what to do next."""
    shards = run.scan()
    wanted = set(run.refs())
    finished = Counter((ref.mix, ref.arm) for ref in shards.rows if ref in wanted)
    table = Table("mix", "arm", "finished", "missing")
    for mix in run.study.mixes:
        for arm in run.study.arms:
            done = finished[mix, arm]
            table.add_row(mix, arm, str(done), str(run.study.models - done))
    console.print(f"{run.study.name} {run.digest}: {run.study.question}", highlight=False)
    console.print(table)
    _print_figures(run.path, console)
    for bad in shards.rejected:
        console.print(f"damaged: {bad.path}: {bad.reason}", highlight=False, soft_wrap=True)
    damaged = _damaged_mixes(run)
    for sentence in damaged:
        console.print(f"damaged: {sentence}", highlight=False, soft_wrap=True)
    missing = len(wanted) - finished.total()
    if missing or shards.rejected or damaged:
        out = run.path.parent
        console.print(
            f"to finish: engine run --study {shlex.quote(str(run.path / 'study.toml'))} "
            f"--out {shlex.quote(str(out))}",
            highlight=False,
            soft_wrap=True,
        )
    else:
        console.print(f"finished; report: {run.path / 'report.html'}", soft_wrap=True)


def _damaged_mixes(run: Run) -> list[str]:
    sentences = []
    for mix in run.study.mixes:
        try:
            run.membership(mix)
        except ValueError as error:
            sentences.append(str(error))
    return sentences


def write_figures(path: Path, figures: Mapping[str, Any]) -> None:
    """Keep the driver's latest figures beside the run, for `engine status` anywhere."""
    stamped = {"written": time.time(), **figures}
    files.write_text(path / FIGURES, json.dumps(stamped, indent=2) + "\n")


def forget_figures(path: Path) -> None:
    """Training broke off: what was written last holds no more."""
    (path / FIGURES).unlink(missing_ok=True)


def _print_figures(path: Path, console: Console) -> None:
    """What a driver said last, if it wrote lately; an unreadable file says nothing."""
    try:
        figures = json.loads((path / FIGURES).read_text())
        age = time.time() - figures["written"]
        shards = ", ".join(f"{figures[s]} {s}" for s in ("waiting", "running", "done", "failed"))
        speeds, reasons = dict(figures["speeds"]), list(figures["reasons"])
        left = figures["seconds_left"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if age > FRESH_SECONDS or not figures["waiting"] + figures["running"]:
        return
    console.print(f"training now, {age:.0f} s ago: shards: {shards}", highlight=False)
    if left is not None:
        console.print(f"time left: about {clock(left)}", highlight=False)
    for worker, rate in speeds.items():
        console.print(f"worker {worker}: {rate:,.0f} models/hour", highlight=False)
    for reason in reasons:
        console.print(reason, highlight=False, markup=False, soft_wrap=True)
