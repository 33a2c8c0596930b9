"""The figures of a report as SVG text, the same bytes for the same findings.

Every colour is one of a few named inks, so that a page can swap them for a dark theme; an arm has
the same colour in every figure. matplotlib is imported when the first figure is drawn.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.analysis.findings import (
    GROUPS,
    CellFindings,
    Contrast,
    Curve,
    Estimate,
    Findings,
    Histogram,
    Roc,
)
from engine.analysis.wording import NAMES, at_chance, full, percent

ARM_INKS = ("#0072b2", "#d55e00", "#00845a", "#aa3377", "#7a6a00", "#56606b")
"""Told apart with any common colour blindness, on white and (lightened) on black."""
INK, MUTED, GRID, PAPER = "#1c2024", "#616a74", "#dadfe4", "#fefefe"
LEGEND_COLUMNS = 6
LINES = {"in": "-", "out": (0, (4, 2)), "test": (0, (1, 1.4))}

Figure = Any
Axes = Any


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure: its file name, what a reader should see in it, and the SVG."""

    name: str
    title: str
    caption: str
    svg: str


def arm_ink(findings: Findings, arm: str) -> str:
    """The colour of an arm, in all figures."""
    return ARM_INKS[findings.arms.index(arm) % len(ARM_INKS)]


def draw_all(findings: Findings) -> tuple[Drawing, ...]:
    """Every figure that the findings can fill.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    from engine.report import figures_training as training

    makers: tuple[Callable[[Findings], list[Drawing]], ...] = (
        differences,
        roc,
        training.learning,
        training.memorization,
        training.layers,
    )
    return tuple(drawing for maker in makers for drawing in maker(findings))


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    """A figure and its axes (rows, columns) in the report's style; sizes in inches."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure as MatplotlibFigure
    except ModuleNotFoundError:
        raise RuntimeError(
            "the report's figures need matplotlib, which is not installed: "
            "pip install 'shadow-engine[report]', then `engine report` on this run"
        ) from None
    with rc_context(_STYLE):
        figure = MatplotlibFigure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.set_axisbelow(True)
    return figure, axes


def panel_grid(panels: int, ratio: float) -> tuple[Figure, Any]:
    """A figure with room for that many panels, three in a row, of height `ratio` of their width."""
    columns = 2 if panels == 4 else min(panels, 3)
    rows = -(-panels // columns)
    width = 8 if columns > 1 else 4.6
    figure, axes = new_figure(width, 0.4 + rows * width / columns * ratio, rows, columns)
    for axis in axes.flat[panels:]:
        axis.set_visible(False)
    return figure, axes


def label_outside(axes: Any, panels: int, x: str, y: str) -> None:
    """Axis labels at the left of each row and under the lowest panel of each column."""
    columns = axes.shape[1]
    for row in axes:
        row[0].set_ylabel(y)
    for axis in axes.flat[max(0, panels - columns) : panels]:
        axis.set_xlabel(x)


_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "shadow-engine",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.labelsize": 9,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.facecolor": PAPER,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "text.color": INK,
    "figure.facecolor": PAPER,
    "lines.linewidth": 1.6,
}


def to_svg(figure: Figure) -> str:
    """The figure as SVG text, without dates or random names."""
    from matplotlib import rc_context

    stream = io.StringIO()
    with rc_context(_STYLE):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def legend(
    figure: Figure, entries: Sequence[tuple[str, dict[str, Any]]], beside: bool = False
) -> None:
    """One legend in words above the panels, or in one column beside them."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=label, **style) for label, style in entries]
    rows = len(handles) if beside else -(-len(handles) // LEGEND_COLUMNS)
    columns = -(-len(handles) // rows)
    by_column = [handle for start in range(columns) for handle in handles[start::columns]]
    figure.legend(
        handles=by_column,
        loc="outside right center" if beside else "outside upper left",
        ncols=columns,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )


def title(axis: Axes, text: str) -> None:
    """A panel's title, at its left edge."""
    axis.set_title(text, loc="left", fontsize=9.5, fontweight="bold")


def arm_entries(findings: Findings, arms: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Legend entries that name the arms by colour."""
    return [(arm, {"color": arm_ink(findings, arm), "linewidth": 2.4}) for arm in arms]


def plot_curve(axis: Axes, curve: Curve, ink: str, line: Any, most: float | None = None) -> None:
    """A curve over epochs with its band, cut at the natural limits 0 and `most`."""
    epochs = np.arange(1, len(curve.value_E) + 1)
    axis.plot(epochs, curve.value_E, color=ink, linestyle=line)
    if np.isfinite(curve.low_E).any():
        low, high = np.maximum(curve.low_E, 0), curve.high_E
        high = high if most is None else np.minimum(high, most)
        axis.fill_between(epochs, low, high, color=ink, alpha=0.16, linewidth=0)


def differences(findings: Findings) -> list[Drawing]:
    """The paired AUC differences with their intervals, one row each, the numbers at the right."""
    rows: list[tuple[str, Estimate, float]] = []
    for contrast in findings.contrasts:
        rows += _difference_rows(findings, contrast)
    rows = [row for row in rows if np.isfinite(row[1].value)]
    if not rows:
        return []
    figure, axes = new_figure(8, 0.75 + 0.28 * len(rows))
    axis = axes[0, 0]
    for y, (_, estimate, claimed) in enumerate(reversed(rows)):
        if estimate.interval.given:
            bounds = np.multiply(100, estimate.ends)
            axis.plot(bounds, (y, y), color=INK, linewidth=1.6, solid_capstyle="butt")
        filled = INK if estimate.interval.given else PAPER
        axis.plot(100 * estimate.value, y, "o", color=INK, markerfacecolor=filled, markersize=5)
        if np.isfinite(claimed):
            span = (y - 0.32, y + 0.32)
            axis.plot((100 * claimed, 100 * claimed), span, color=MUTED, linewidth=1.4)
        told = full(estimate, 1, 100, signed=True)
        axis.annotate(
            told,
            (1.01, y),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8.5,
            color=INK,
        )
    axis.axvline(0, color=MUTED, linewidth=0.9)
    axis.set_yticks(range(len(rows)), [label for label, _, _ in reversed(rows)])
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.grid(axis="y", visible=False)
    axis.spines["left"].set_visible(False)
    axis.set_xlabel("difference in AUC, points (right of 0: the first arm leaks more)")
    caption = _differences_caption(findings, rows)
    svg = to_svg(figure)
    return [Drawing(name="differences", title="Who leaks more", caption=caption, svg=svg)]


def _differences_caption(findings: Findings, rows: Sequence[tuple[str, Estimate, float]]) -> str:
    caption = (
        f"Paired differences in the AUC of online LiRA with {percent(findings.level)} intervals: "
        "the same masks, seeds and samples in both arms."
    )
    if any(np.isfinite(claimed) for _, _, claimed in rows):
        caption += " Upright bar: the difference that the source claims (C3)."
    if not all(estimate.interval.given for _, estimate, _ in rows):
        caption += " An open dot has no interval."
    compared = {arm for c in findings.contrasts for arm in (c.left, c.right)}
    if at_chance(cell for cell in findings.cells if cell.arm in compared):
        caption += " Models that never left chance spoil some of them: see “Read with care”."
    return caption


def _difference_rows(findings: Findings, contrast: Contrast) -> list[tuple[str, Estimate, float]]:
    """(label, estimate, claimed difference or NaN) for each group of samples."""
    rows = []
    pair = f"{contrast.left} − {contrast.right}"
    claimed = {
        (row.mix, row.subject): row.measures[0].threshold
        for row in findings.claims
        if row.claim == "C3" and row.measures
    }
    for group in GROUPS:
        estimate = contrast.differences.get(f"auc/online/{group}")
        if estimate is not None:
            named = f"{pair}, {contrast.mix}, {NAMES[group]}"
            threshold = claimed.get((contrast.mix, pair), np.nan) if group == "all" else np.nan
            rows.append((named, estimate, threshold))
    return rows


def roc(findings: Findings) -> list[Drawing]:
    """Mean ROC curves on logarithmic axes, a panel for each mix and group, arms by colour."""
    panels = []
    for mix in findings.mixes:
        for group in ("all", "outlier"):
            cells = [findings.cell(mix.name, arm) for arm in findings.arms]
            curves = [(cell, _roc_of(cell, group)) for cell in cells]
            known = [(cell, curve) for cell, curve in curves if curve is not None]
            if known:
                panels.append((f"{mix.name}: {NAMES[group]}", known))
    if not panels:
        return []
    figure, axes = panel_grid(len(panels), 0.95)
    for axis, (name, known) in zip(axes.flat, panels, strict=False):
        _roc_panel(findings, axis, name, known)
    label_outside(axes, len(panels), "false-positive rate", "true-positive rate")
    guess = ("guessing", {"color": MUTED, "linewidth": 1, "linestyle": LINES["test"]})
    legend(figure, [*arm_entries(findings, findings.arms), guess])
    caption = (
        "ROC curves of online LiRA, averaged over target models at each false-positive rate, both "
        f"axes logarithmic. Bands: pointwise {percent(findings.level)} intervals. A curve starts "
        "at 1 / (non-members of a target): below, no rate can be told from zero."
    )
    return [Drawing(name="roc", title="ROC curves", caption=caption, svg=to_svg(figure))]


def _roc_of(cell: CellFindings, group: str) -> Any:
    attack = cell.attack("online", group)
    return None if attack is None else attack.roc


def _roc_panel(findings: Findings, axis: Axes, name: str, known: Sequence[Any]) -> None:
    roc_axes(axis, name, [(curve, arm_ink(findings, cell.arm), "-") for cell, curve in known])


def roc_axes(
    axis: Axes, name: str, curves: Sequence[tuple[Roc, str, Any]], bands: bool = True
) -> None:
    """One panel of ROC curves, each with its ink and line, on logarithmic axes.

    Without bands later curves are thinner, so that those that coincide show beneath each other.
    """
    floor = min(curve.floor for curve, _, _ in curves)
    lowest = min(max(1e-4, 10 ** np.floor(np.log10(floor))), 0.1)
    axis.plot([lowest, 1], [lowest, 1], color=MUTED, linewidth=1, linestyle=LINES["test"])
    widths = np.full(len(curves), 1.6) if bands else np.linspace(3.2, 1.2, len(curves))
    for (curve, ink, line), width in zip(curves, widths.tolist(), strict=True):
        shown = np.isfinite(curve.tpr_A) & (curve.tpr_A > 0)
        rates = curve.fpr_A[shown], curve.tpr_A[shown]
        axis.plot(*rates, color=ink, linestyle=line, linewidth=width)
        band = shown & np.isfinite(curve.low_A)
        if bands and band.any():
            low = np.clip(curve.low_A[band], lowest / 10, 1)
            high = np.clip(curve.high_A[band], lowest / 10, 1)
            axis.fill_between(curve.fpr_A[band], low, high, color=ink, alpha=0.16, linewidth=0)
    title(axis, name)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(lowest, 1)
    axis.set_ylim(lowest, 1.12)
    ticks = 10.0 ** np.arange(np.log10(lowest), 1)
    axis.set_xticks(ticks, [percent(t) for t in ticks])
    axis.set_yticks(ticks, [percent(t) for t in ticks])
    axis.minorticks_off()


def histogram_axes(axis: Axes, name: str, histograms: Sequence[tuple[Histogram, str]]) -> None:
    """One panel of memorization histograms, each with its ink and its mean."""
    for histogram, ink in histograms:
        axis.stairs(histogram.share_B, histogram.edges_B, color=ink, linewidth=1.6)
        axis.axvline(histogram.mean, color=ink, linewidth=1, linestyle=LINES["test"])
    title(axis, name)
    axis.set_xlim(-1.1, 1.1)
    axis.set_xticks([-1, -0.5, 0, 0.5, 1])
    axis.set_ylim(bottom=0)
