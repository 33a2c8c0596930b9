"""The table that `engine attack` prints: a row for each matrix, attack and group."""

from rich.console import Console
from rich.table import Table

from attacks.types import Interval
from engine.attack import Attacked


def print_attacked(attacked: Attacked, console: Console) -> None:
    """Mean AUC over targets with its interval, targets, excluded samples; then what was written."""
    table = Table(box=None, pad_edge=False)
    for name in ("scores", "attack", "samples"):
        table.add_column(name, no_wrap=True)
    for name in ("AUC", "95 % interval", "targets", "excluded"):
        table.add_column(name, no_wrap=True, justify="right")
    reasons: dict[str, None] = {}
    for row in attacked.summaries:
        if row.interval.reason:
            reasons[row.interval.reason] = None
        table.add_row(
            row.source,
            row.attack,
            row.group,
            f"{row.auc:.4f}",
            _interval(row.interval),
            str(row.targets),
            str(row.excluded),
        )
    console.print(table)
    for reason in reasons:
        console.print(f"– {reason}", highlight=False)
    for path in attacked.written:
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    if not attacked.written:
        console.print("nothing written: --out DIR keeps rows and scores", highlight=False)


def _interval(interval: Interval) -> str:
    return f"{interval.low:.4f} to {interval.high:.4f}" if interval.given else "–"
