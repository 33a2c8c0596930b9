"""The small table at the end of a run: rich on a terminal, plain text elsewhere."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.analysis.findings import GROUPS, CellFindings, Contrast, Estimate, Findings
from engine.analysis.wording import (
    DASH,
    full,
    half_width,
    jackknifed,
    number,
    on_outliers,
    percent,
    refusals,
)
from engine.membership import odd_one_out

if TYPE_CHECKING:
    from rich.console import Console

Row = tuple[str, ...]


def print_summary(findings: Findings, console: "Console | None" = None) -> None:
    """Print the answer, a row for each mix, group and arm, and the paired differences."""
    from rich.console import Console

    console = console or Console()
    for head, rows in tables(findings):
        if console.is_terminal:
            _print_rich(head, rows, console)
        else:
            console.print(plain(head, rows), highlight=False, markup=False, soft_wrap=True)
    for line in footer(findings):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def tables(findings: Findings) -> list[tuple[Row, list[Row]]]:
    """(head, rows) of the two tables: cells, and paired differences where arms are compared."""
    alpha = max(findings.alphas, default=None)
    rate = () if alpha is None else (f"TPR at {percent(alpha)}",)
    head = ("mix", "samples", "arm", "IN", "OUT", "test", "AUC", *rate)
    rows = [
        _cell_row(findings, findings.cell(mix.name, arm), group, alpha)
        for mix in findings.mixes
        for group in (GROUPS if mix.outliers else GROUPS[:1])
        for arm in findings.arms
    ]
    found = [(head, rows)]
    if findings.contrasts:
        found.append((_DIFFERENCE_HEAD, _difference_rows(findings)))
    return found


_TEXT = ("mix", "samples", "arm", "difference")
_DIFFERENCE_HEAD = ("mix", "samples", "difference", "AUC, points", "IN", "test")
_SHORT = {"all": "all", "clean": "clean", "outlier": "outliers"}


def _cell_row(findings: Findings, cell: CellFindings, group: str, alpha: float | None) -> Row:
    rates, attack = cell.rates, cell.attack("online", group)
    row = [
        cell.mix,
        _SHORT[group],
        cell.arm,
        number(rates[f"{group}_in_accuracy"].value, 3),
        number(rates[f"{group}_out_accuracy"].value, 3),
        number(rates["test_accuracy"].value, 3) if group == "all" else "",
        DASH if attack is None else _beside(attack.auc),
    ]
    if alpha is not None:
        rate = None if attack is None else attack.tpr[findings.alphas.index(alpha)].tpr
        row.append(DASH if rate is None else _beside(rate))
    return tuple(row)


def _beside(estimate: Estimate) -> str:
    return f"{number(estimate.value, 3)} {half_width(estimate, 3)}".strip()


def _difference_rows(findings: Findings) -> list[Row]:
    rows = []
    for contrast in findings.contrasts:
        for group in GROUPS:
            if f"auc/online/{group}" in contrast.differences:
                rows.append(_difference_row(contrast, group))
    return rows


def _difference_row(contrast: Contrast, group: str) -> Row:
    auc = contrast.differences[f"auc/online/{group}"]
    inside = contrast.differences[f"{group}_in_accuracy"]
    test = contrast.differences["test_accuracy"]
    return (
        contrast.mix,
        _SHORT[group],
        f"{contrast.left} − {contrast.right}",
        full(auc, 1, 100, signed=True),
        _points(inside),
        _points(test) if group == "all" else "",
    )


def _points(estimate: Estimate) -> str:
    value = number(100 * estimate.value, 1, signed=True)
    return f"{value} {half_width(estimate, 1, 100)}".strip()


def footer(findings: Findings) -> list[str]:
    """What the numbers are, why some are missing, and the answer last."""
    lines = [
        "IN, OUT, test: accuracy on samples trained on, left out, never used; AUC and TPR: online "
        f"LiRA, {findings.variance.replace('_', ' ')} variance; query mode: "
        f"{findings.query_mode.replace('_', ' ')}",
        f"± and brackets: {percent(findings.level)} intervals, {jackknifed(findings)}",
    ]
    refused = {
        rate.refused
        for cell in findings.cells
        for attack in cell.attacks
        for rate in attack.tpr
        if rate.refused and rate.alpha == max(findings.alphas)
    }
    where = {reason: _where(findings, cells) for reason, cells in refusals(findings.cells).items()}
    reasons = set(where) | refused
    reasons |= {
        estimate.reason
        for contrast in findings.contrasts
        for name, estimate in contrast.differences.items()
        if name.startswith("auc/online") and estimate.reason
    }
    lines += [f"{DASH} {reason}{where.get(reason, '')}" for reason in sorted(reasons)]
    lines += [
        f"{len(cell.diverged)} of {cell.models} models of {cell.mix}/{cell.arm} diverged"
        for cell in findings.cells
        if cell.diverged
    ]
    lines += [
        f"{len(cell.untrained)} of {cell.models} models of {cell.mix}/{cell.arm} never left chance "
        f"and spoil the comparison: lower arms.{cell.arm}.lr or train longer"
        for cell in findings.cells
        if cell.untrained
    ]
    odd = odd_one_out(findings.design, findings.models)
    last = (odd, findings.headline, on_outliers(findings), findings.answer)
    return [*lines, *filter(None, last)]


def _where(findings: Findings, cells: Sequence[CellFindings]) -> str:
    """Which cells, in brackets; empty where it is all of them."""
    named = ", ".join(f"{cell.mix}/{cell.arm}" for cell in cells)
    return "" if len(cells) == len(findings.cells) else f" ({named})"


def plain(head: Row, rows: Sequence[Row]) -> str:
    """Columns two spaces apart; text left, numbers right.

    >>> print(plain(("arm", "AUC"), [("bn", "0.7"), ("nobn", "0.65")]))
    arm    AUC
    bn     0.7
    nobn  0.65
    """
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [
            cell.ljust(width) if head[i] in _TEXT else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _print_rich(head: Row, rows: Sequence[Row], console: "Console") -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in head:
        table.add_column(name, justify="left" if name in _TEXT else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table, highlight=False)
