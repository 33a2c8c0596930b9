"""Figures of what the models did while they trained: learning curves, memorization, gamma/sigma."""

from typing import Any

import numpy as np

from engine.analysis.findings import CellFindings, Findings, MixFacts
from engine.analysis.wording import NAMES, percent
from engine.report.figures import (
    INK,
    LINES,
    MUTED,
    Drawing,
    arm_entries,
    arm_ink,
    histogram_axes,
    label_outside,
    legend,
    new_figure,
    panel_grid,
    plot_curve,
    title,
    to_svg,
)

Axes = Any

LAYER_PANELS = (
    ("ratio_EL", "median |γ/σ|"),
    ("gamma_EL", "median |γ|"),
    ("sigma_EL", "median σ (running)"),
    ("weight_norm_EL", "|w|"),
)


def learning(findings: Findings) -> list[Drawing]:
    """Accuracy and loss per epoch, clean and outlier, IN and OUT: a figure for each mix."""
    drawings = []
    for mix in findings.mixes:
        cells = [findings.cell(mix.name, arm) for arm in findings.arms]
        if any(cell.curves for cell in cells):
            drawings.append(_learning(findings, mix, cells))
    return drawings


def _learning(findings: Findings, mix: MixFacts, cells: list[CellFindings]) -> Drawing:
    kinds = ("clean", "outlier") if mix.outliers else ("clean",)
    figure, axes = new_figure(8, 5.6 if mix.outliers else 3.1, len(kinds), 2)
    for row, kind in zip(axes, kinds, strict=True):
        for axis, what in zip(row, ("accuracy", "loss"), strict=True):
            for cell in cells:
                ink = arm_ink(findings, cell.arm)
                for group, line in (
                    (f"{kind}_in", LINES["in"]),
                    (f"{kind}_out", LINES["out"]),
                    ("population", LINES["test"]),
                ):
                    curve = cell.curves.get(f"{what}/{group}")
                    if curve is not None and (kind == "clean" or group != "population"):
                        plot_curve(axis, curve, ink, line, 1 if what == "accuracy" else None)
            named = "clean samples" if kind == "clean" else "outliers"
            title(axis, f"{mix.name}: {what}, {named}")
            _epochs(axis, findings.epochs)
            if what == "accuracy":
                axis.set_ylim(-0.02, 1.03)
            else:
                axis.set_ylim(bottom=0)
    for axis in axes[-1]:
        axis.set_xlabel("epoch")
    lines = [
        ("trained on (IN)", {"color": INK, "linestyle": LINES["in"]}),
        ("left out (OUT)", {"color": INK, "linestyle": LINES["out"]}),
        ("test images", {"color": INK, "linestyle": LINES["test"]}),
    ]
    legend(figure, [*arm_entries(findings, findings.arms), *lines])
    probes = "clean samples and test images drawn by seed"
    if mix.outliers:
        probes = "all outliers, as many clean samples, and test images"
    caption = (
        f"Mean over models, eval mode, of the label trained on, on the probe set ({probes}). "
        f"Bands: pointwise {percent(findings.level)} intervals."
    )
    if mix.outliers:
        caption += " An outlier learnt only where it was trained on is memorized."
    return Drawing(
        name=f"learning_{mix.name}",
        title=f"Learning, mix {mix.name}",
        caption=caption,
        svg=to_svg(figure),
    )


def _epochs(axis: Axes, epochs: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_xlim(min(1, epochs - 0.5), max(epochs, 1.5))
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def memorization(findings: Findings) -> list[Drawing]:
    """Histograms of memorization scores, clean samples and outliers apart, arms by colour."""
    panels = []
    for mix in findings.mixes:
        for kind in ("clean", "outlier"):
            cells = [c for c in findings.cells if c.mix == mix.name and kind in c.memorization]
            if cells:
                panels.append((f"{mix.name}: {NAMES[kind]}", kind, cells))
    if not panels:
        return []
    figure, axes = panel_grid(len(panels), 0.85)
    for axis, (name, kind, cells) in zip(axes.flat, panels, strict=False):
        shown = [(cell.memorization[kind], arm_ink(findings, cell.arm)) for cell in cells]
        histogram_axes(axis, name, shown)
    label_outside(axes, len(panels), "memorization score", "share of samples")
    mean = ("mean", {"color": MUTED, "linewidth": 1, "linestyle": LINES["test"]})
    legend(figure, [*arm_entries(findings, findings.arms), mean])
    caption = (
        "Memorization score of a sample: the share of models trained on it that predict its label, "
        "minus the share of models not trained on it that do. 0: predicted alike either way; 1: "
        "only if trained on."
    )
    drawing = Drawing(
        name="memorization", title="Memorization", caption=caption, svg=to_svg(figure)
    )
    return [drawing]


def layers(findings: Findings) -> list[Drawing]:
    """gamma/sigma, gamma, sigma and |w| of batch-norm layers over training, a row for each mix."""
    rows = [
        (mix, [c for c in findings.cells if c.mix == mix.name and c.layers is not None])
        for mix in findings.mixes
    ]
    rows = [(mix, cells) for mix, cells in rows if cells]
    if not rows:
        return []
    figure, axes = new_figure(8.6, 0.5 + 2.1 * len(rows), len(rows), len(LAYER_PANELS))
    for line, (mix, cells) in zip(axes, rows, strict=True):
        for axis, (name, label) in zip(line, LAYER_PANELS, strict=True):
            for cell in cells:
                values_EL = getattr(cell.layers, name)
                epochs, ink = np.arange(1, len(values_EL) + 1), arm_ink(findings, cell.arm)
                axis.plot(epochs, values_EL, color=ink, linewidth=0.8, alpha=0.55)
                axis.plot(epochs, np.median(values_EL, axis=1), color=ink, linewidth=2)
            title(axis, f"{mix.name}: {label}")
            axis.set_ylim(bottom=0)
            _epochs(axis, findings.epochs)
        line[0].axhline(1, color=MUTED, linewidth=0.9, linestyle=LINES["out"])
    for axis in axes[-1]:
        axis.set_xlabel("epoch")
    arms = [a for a in findings.arms if any(c.arm == a for _, cells in rows for c in cells)]
    kinds = [
        ("one layer", {"color": MUTED, "linewidth": 0.8}),
        ("median layer", {"color": MUTED, "linewidth": 2}),
    ]
    legend(figure, [*arm_entries(findings, arms), *kinds])
    caption = (
        "Batch-norm layers over training: medians over channels, means over models. γ/σ depends on "
        "the scale of the weights, to which the network's output is blind: read it beside γ, σ and "
        "|w|. Dashed: |γ/σ| = 1."
    )
    drawing = Drawing(
        name="gamma_sigma", title="γ/σ over training", caption=caption, svg=to_svg(figure)
    )
    return [drawing]
