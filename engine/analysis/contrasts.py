"""One arm minus another, paired by model: differences, and the comparison at equal accuracy.

M models, E kept epochs.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from engine.analysis.cells import Analysed, analyse_cell
from engine.analysis.findings import Contrast, Matched
from engine.analysis.replicates import Replicated, undefined
from engine.analysis.wording import all_diverged
from engine.store import Run
from engine.study import Study

Ints = npt.NDArray[np.int64]
Pair = tuple[str, str]


def contrast(
    run: Run,
    mix: str,
    arms: Pair,
    analysed: Mapping[tuple[str, str], Analysed],
    groups: Sequence[str],
) -> Contrast:
    """Subtract the second arm of `arms` from the first, over the models that both trained."""
    study, level = run.study, run.study.attacks.level
    left, right = (analysed[mix, arm] for arm in arms)
    common = np.intersect1d(left.models, right.models)
    gone = [arm for arm in arms if not len(analysed[mix, arm].models)]
    nobody = all_diverged(*gone) if gone else "no model trained to the end in both arms"
    if not len(common) or len(common) < len(left.models):
        left = analyse_cell(study, run.load(mix, arms[0]), common, nobody)
    if not len(common) or len(common) < len(right.models):
        right = analyse_cell(study, run.load(mix, arms[1]), common, nobody)
    first, second = numbers(study, left, groups), numbers(study, right, groups)
    found = {name: first[name] - second[name] for name in first}
    for group in groups:
        name = f"auc/online/{group}"
        found[f"relative_{name}"] = first[name].relative_to(second[name])
    matched, unmatched = _matched(run, mix, arms, (left, right), common, nobody)
    return Contrast(
        mix=mix,
        left=arms[0],
        right=arms[1],
        differences={name: number.estimate(level) for name, number in found.items()},
        models=len(common),
        matched=matched,
        unmatched=unmatched,
    )


def numbers(study: Study, found: Analysed, groups: Sequence[str]) -> dict[str, Replicated]:
    """Every number of a cell that can be subtracted, by name (see findings.Contrast)."""
    named = dict(found.measures.rates)
    for mode, scores in found.scores.items():
        for group in groups:
            tprs = [f"tpr@{alpha}/{mode}/{group}" for alpha in study.attacks.fpr]
            if scores.refused:
                missing = undefined(scores.refused)
                named |= dict.fromkeys([f"auc/{mode}/{group}", *tprs], missing)
                continue
            attacked = scores.groups[group]
            named[f"auc/{mode}/{group}"] = attacked.auc
            named |= dict(zip(tprs, attacked.tpr_A, strict=False))
    return named


def _matched(
    run: Run, mix: str, arms: Pair, found: tuple[Analysed, Analysed], models: Ints, nobody: str
) -> tuple[Matched | None, str]:
    """The AUC difference where clean training accuracies are closest.

    The arm with the lower final accuracy stays at its last epoch; the other one goes back to the
    kept epoch (or its last) whose accuracy is closest.
    """
    study = run.study
    kept = (*study.query.keep_epochs, study.train.epochs)
    curves = [side.measures.curves.get("accuracy/clean_in") for side in found]
    if len(kept) == 1:
        return None, "no scores were kept at earlier epochs (query.keep_epochs)"
    if not len(models):
        return None, nobody
    if curves[0] is None or curves[1] is None:
        return None, "there are no epoch curves of clean training accuracy"
    reached = [{epoch: float(c.value_E[epoch - 1]) for epoch in kept} for c in curves if c]
    ahead = int(reached[1][kept[-1]] > reached[0][kept[-1]])
    goal = reached[1 - ahead][kept[-1]]
    epochs = [kept[-1], kept[-1]]
    epochs[ahead] = min(kept, key=lambda epoch: abs(reached[ahead][epoch] - goal))
    sides = list(found)
    if epochs[ahead] != kept[-1]:
        cell = run.load(mix, arms[ahead])
        phi = cell.arrays["kept_phi_ENQ"][:, kept.index(epochs[ahead])]
        sides[ahead] = analyse_cell(study, cell, models, "", phi)
    for side in sides:
        if side.scores["online"].refused:
            return None, side.scores["online"].refused
    aucs = [side.scores["online"].groups["all"].auc for side in sides]
    return (
        Matched(
            epochs=(epochs[0], epochs[1]),
            accuracy=(reached[0][epochs[0]], reached[1][epochs[1]]),
            auc=(aucs[0] - aucs[1]).estimate(study.attacks.level),
        ),
        "",
    )
