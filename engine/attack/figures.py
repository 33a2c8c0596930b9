"""Figures of attacks: ROC curves attack by attack and side by side, memorization.

Arms have the report's colours; attacks have their own, and a dashed line where they are offline.
"""

from collections.abc import Sequence

import numpy as np

from attacks.memorization import memorization
from engine.analysis.findings import Histogram, Roc
from engine.analysis.measures import memorization_bins
from engine.analysis.wording import NAMES, percent
from engine.attack.groups import kinds
from engine.attack.result import Result
from engine.attack.sources import Source
from engine.report.figures import (
    ARM_INKS,
    INK,
    LINES,
    MUTED,
    Drawing,
    histogram_axes,
    label_outside,
    legend,
    new_figure,
    panel_grid,
    roc_axes,
    to_svg,
)

LABELS = {
    "loss": "loss",
    "calibrated": "calibrated loss",
    "attack_p": "attack P",
    "attack_r": "attack R",
    "lira_online": "LiRA online",
    "lira_offline": "LiRA offline",
    "rmia_online": "RMIA online",
    "rmia_offline": "RMIA offline",
    "quantile": "quantile",
}
ATTACK_INKS = {
    "lira": ARM_INKS[0],
    "rmia": ARM_INKS[1],
    "calibrated": ARM_INKS[2],
    "attack_r": ARM_INKS[3],
    "attack_p": ARM_INKS[4],
    "loss": ARM_INKS[5],
    "quantile": INK,
}
MOST_BANDS = 3
"""So many curves of a panel that their bands can be told apart."""
WIDEST = 34
"""Letters of a legend that fit above a single panel; a longer one stands beside it."""
GROUP_NAMES = {**NAMES, "flipped": "flipped labels", "ood": "ood images"}

Style = tuple[str, object]
Panel = tuple[str, list[tuple[Roc, str, object]]]


def draw_all(result: Result) -> tuple[Drawing, ...]:
    """Every figure that the result can fill.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    return (*side_by_side(result), *by_attack(result), *memorized(result))


def attack_style(name: str) -> Style:
    """The colour and the line of an attack."""
    family = name if name in ATTACK_INKS else name.partition("_")[0]
    return ATTACK_INKS[family], LINES["out"] if name.endswith("offline") else LINES["in"]


def arm_style(place: int) -> Style:
    """The colour and the line of the arm at a place; after six arms the lines change."""
    lines = tuple(LINES.values())
    return ARM_INKS[place % len(ARM_INKS)], lines[place // len(ARM_INKS) % len(lines)]


def arms(result: Result) -> list[str]:
    """The arms of all mixes, in their order: an arm's place gives its colour."""
    return list(dict.fromkeys(source.arm for source in result.sources))


def side_by_side(result: Result) -> list[Drawing]:
    """All attacks in one panel, a panel for each score matrix: which attack is strongest?"""
    if len(result.attacks) < 2:
        return []
    panels: list[Panel] = []
    for source in result.sources:
        curves = []
        for name in result.attacks:
            mean = result.mean(source.name, name, "all")
            if mean is not None and mean.roc is not None:
                curves.append((mean.roc, *attack_style(name)))
        if curves:
            panels.append((source.name, curves))
    entries = []
    for name in result.attacks:
        ink, line = attack_style(name)
        entries.append((LABELS[name], {"color": ink, "linestyle": line, "linewidth": 2}))
    words = "Every attack on the same models and all samples: mean ROC curves over target models"
    return _drawn(result, panels, entries, "roc", "Attacks side by side", words)


def by_attack(result: Result) -> list[Drawing]:
    """For each mix and group of samples a panel an attack, arms by colour, with bands.

    A single attack has one figure a mix, with a panel for each group.
    """
    everywhere = arms(result)
    drawings = []
    for mix, sources in result.mixes().items():
        entries = []
        for source in sources:
            ink, line = arm_style(everywhere.index(source.arm))
            entries.append((source.arm, {"color": ink, "linestyle": line, "linewidth": 2.4}))
        groups = list(dict.fromkeys(g for s in sources for g in ("all", *kinds(s))))
        together = [groups] if len(result.attacks) == 1 else [[group] for group in groups]
        for few in together:
            panels = _panels(result, sources, few, everywhere)
            about = LABELS[result.attacks[0]] if len(few) > 1 else _named(few[0])
            about = f"mix {mix}, {about}" if mix else about
            suffix = few[0] if len(result.attacks) > 1 else result.attacks[0]
            file = "_".join(filter(None, ("roc", mix.replace("/", "-"), suffix)))
            words = f"{about[0].upper()}{about[1:]}: mean ROC curves over target models"
            drawings += _drawn(result, panels, entries, file, f"ROC, {about}", words)
    return drawings


def _panels(
    result: Result, sources: Sequence[Source], groups: Sequence[str], everywhere: Sequence[str]
) -> list[Panel]:
    """A panel for each attack, or for each group where there are several; arms by colour."""
    panels: list[Panel] = []
    for group in groups:
        for name in result.attacks:
            curves = []
            for source in sources:
                mean = result.mean(source.name, name, group)
                if mean is not None and mean.roc is not None:
                    curves.append((mean.roc, *arm_style(everywhere.index(source.arm))))
            if curves:
                panels.append((LABELS[name] if len(groups) == 1 else _named(group), curves))
    return panels


def _named(group: str) -> str:
    return GROUP_NAMES.get(group, group)


def _drawn(
    result: Result,
    panels: Sequence[Panel],
    entries: Sequence[tuple[str, dict[str, object]]],
    name: str,
    title: str,
    words: str,
) -> list[Drawing]:
    if not panels:
        return []
    bands = max(len(curves) for _, curves in panels) <= MOST_BANDS
    beside = len(panels) == 1 and sum(len(label) + 4 for label, _ in entries) > WIDEST
    figure, axes = new_figure(6.4, 4.2) if beside else panel_grid(len(panels), 0.95)
    for axis, (panel, curves) in zip(axes.flat, panels, strict=False):
        roc_axes(axis, panel, curves, bands)
    label_outside(axes, len(panels), "false-positive rate", "true-positive rate")
    guess = ("guessing", {"color": MUTED, "linewidth": 1, "linestyle": LINES["test"]})
    legend(figure, [*entries, guess], beside)
    caption = f"{words}, both axes logarithmic. "
    given = any(
        np.isfinite(curve.low_A[:-1]).any() for _, curves in panels for curve, _, _ in curves
    )
    if given and bands:
        caption += f"Bands: pointwise {percent(result.settings.level)} jackknife intervals. "
    elif given:
        caption += (
            "Bands are in the figures with fewer curves; of curves that coincide the later ones "
            "are thinner. "
        )
    else:
        caption += "No bands: they need every model as a target, and three groups of models. "
    caption += (
        "A curve starts at 1 / (non-members of a target), below which no rate can be told from "
        "zero, or where it finds its first members. It shows what a threshold reaches: flat where "
        "many scores tie, while AUC counts ties half."
    )
    return [Drawing(name=name, title=title, caption=caption, svg=to_svg(figure))]


def memorized(result: Result) -> list[Drawing]:
    """Histograms of memorization scores where it is known which predictions are correct."""
    everywhere = arms(result)
    panels = []
    for mix, sources in result.mixes().items():
        known = [source for source in sources if source.correct_MN is not None]
        for group in dict.fromkeys(g for s in known for g in kinds(s) or ("all",)):
            shown = []
            for source in known:
                histogram = _histogram(source, group)
                if histogram is not None:
                    shown.append((histogram, arm_style(everywhere.index(source.arm))[0]))
            about = _named(group)
            if shown:
                panels.append((f"{mix}: {about}" if mix else about, shown))
    if not panels:
        return []
    figure, axes = panel_grid(len(panels), 0.85)
    for axis, (panel, shown) in zip(axes.flat, panels, strict=False):
        histogram_axes(axis, panel, shown)
    label_outside(axes, len(panels), "memorization score", "share of samples")
    mean = ("mean", {"color": MUTED, "linewidth": 1, "linestyle": LINES["test"]})
    inks = [(arm, {"color": arm_style(i)[0], "linewidth": 2.4}) for i, arm in enumerate(everywhere)]
    legend(figure, [*inks, mean])
    caption = (
        "Memorization score of a sample: the share of models trained on it that predict its label, "
        "minus the share of models not trained on it that do. Samples without models on either "
        "side are left out."
    )
    svg = to_svg(figure)
    return [Drawing(name="memorization", title="Memorization", caption=caption, svg=svg)]


def _histogram(source: Source, group: str) -> Histogram | None:
    assert source.correct_MN is not None
    chosen_N = kinds(source).get(group, np.ones(source.matrix.samples, dtype=bool))
    keep_Mn = source.matrix.keep_MN[np.ix_(source.models, chosen_N)]
    scores = memorization(source.correct_MN[np.ix_(source.models, chosen_N)], keep_Mn).score_N
    known = scores[np.isfinite(scores)]
    if not known.size:
        return None
    fewer = np.minimum(keep_Mn.sum(0), (~keep_Mn).sum(0))
    edges = memorization_bins(int(np.median(fewer)))
    return Histogram(
        edges_B=edges,
        share_B=np.histogram(known, edges)[0] / known.size,
        samples=int(scores.size),
        undefined=int(scores.size - known.size),
        mean=float(known.mean()),
    )
