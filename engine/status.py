"""What `engine status` says of a run directory."""

from collections import Counter

from rich.console import Console
from rich.table import Table

from engine.store import Run


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
    for bad in shards.rejected:
        console.print(f"damaged: {bad.path}: {bad.reason}", highlight=False, soft_wrap=True)
    missing = len(wanted) - finished.total()
    if missing or shards.rejected:
        out = run.path.parent
        console.print(
            f"to finish: engine run --study {run.path / 'study.toml'} --out {out}",
            highlight=False,
            soft_wrap=True,
        )
    else:
        console.print(f"finished; report: {run.path / 'report.html'}", soft_wrap=True)
