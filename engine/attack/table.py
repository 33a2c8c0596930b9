"""The table that `engine attack` prints: a row for each matrix, attack and group."""

import contextlib
import sys
import warnings
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from engine.analysis.wording import DASH, GUESSING, number, percent, rate_interval
from engine.attack import Attacked
from engine.attack.means import Mean, Rate
from engine.attack.output import names


def print_attacked(attacked: Attacked, console: Console) -> None:
    """Mean AUC and TPR over targets with the AUC's interval; then why not, and what was written."""
    table = Table(box=None, pad_edge=False)
    for name in ("scores", "attack", "samples"):
        table.add_column(name, no_wrap=True)
    first = attacked.means[0]
    alphas = [rate.alpha for rate in first.rates]
    rates = [f"TPR at {percent(alpha)}" for alpha in alphas]
    level = percent(first.interval.level)
    for name in ("AUC", f"{level} interval", *rates, "targets", "excluded"):
        table.add_column(name, no_wrap=True, justify="right")
    reasons: dict[str, None] = {}
    for row in attacked.means:
        reasons |= dict.fromkeys(_reasons(row))
        table.add_row(
            row.source,
            row.attack,
            row.group,
            number(row.auc, 4),
            rate_interval(row.interval, 4, against=GUESSING) or DASH,
            *(_rate(rate) for rate in row.rates),
            row.over,
            str(row.excluded),
        )
    console.print(table)
    for reason in reasons:
        console.print(f"{DASH} {reason}", highlight=False)
    for text in names(attacked.written):
        console.print(f"wrote {text}", highlight=False, soft_wrap=True)
    if not attacked.written:
        console.print("nothing written: --out DIR keeps rows and scores", highlight=False)


@contextlib.contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Warnings become lines on stderr, each once, without the code they come from."""
    told: set[str] = set()

    def tell(message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in told:
            told.add(str(message))
            print(f"warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = tell
        yield


def _reasons(row: Mean) -> list[str]:
    told = [f"no interval: {row.interval.reason}"] if row.interval.reason else []
    told += [
        f"TPR at {percent(rate.alpha)} FPR is not given: {rate.refused}"
        for rate in row.rates
        if rate.refused
    ]
    return told


def _rate(rate: Rate) -> str:
    return DASH if rate.refused else f"{number(100 * rate.tpr, 2)} %"
