"""The report's words: what the numbers are over, cautions, run facts, a glossary."""

import math
from collections.abc import Mapping
from html import escape
from typing import Any

from engine.analysis.findings import GROUPS, Contrast, Findings
from engine.analysis.wording import (
    NAMES,
    arm_in_words,
    counted,
    full,
    jackknifed,
    main_pair,
    mix_in_words,
    number,
    percent,
    recipe,
    refusals,
)
from engine.membership import odd_one_out

FITTED = 0.99
"""Clean training accuracy from which on a net counts as trained to memorize."""
UNEQUAL = 0.05
"""A difference in test accuracy that makes arms unequal for a fair comparison."""


def context(findings: Findings) -> str:
    """What the answer's numbers are over, in one line."""
    masks = {
        "paired": "paired masks; each target is scored without itself and its complement",
        "balanced": "balanced masks; each target is scored without itself and one opposite model",
        "bernoulli": "independent masks; each target is scored without itself",
    }[findings.design]
    return (
        f"LiRA, online, {findings.variance.replace('_', ' ')} variance; "
        f"{counted(findings.models, 'shadow model')} an arm, {masks}; networks queried in "
        f"{findings.query_mode.replace('_', ' ')} mode. Intervals: {percent(findings.level)}, "
        f"{jackknifed(findings)}."
    )


def legend(findings: Findings) -> str:
    """What the arms and the mixes are; the arms' dots carry their colours in all figures."""
    arms = "".join(
        f'<dt><span class="dot" style="background:var(--arm-{i % 6})"></span>{escape(arm)}</dt>'
        f"<dd>{escape(arm_in_words(findings.study, arm))}</dd>"
        for i, arm in enumerate(findings.arms)
    )
    mixes = "".join(
        f"<dt>mix {escape(mix.name)}</dt><dd>{escape(mix_in_words(findings.study, mix))}</dd>"
        for mix in findings.mixes
    )
    return f"<dl>{arms}{mixes}</dl>"


def care(findings: Findings) -> str:
    """What a careful reader should know before trusting the answer."""
    items = [*_care_models(findings), *_care_training(findings), *_care_attack(findings)]
    return f'<ul class="care quiet">{"".join(f"<li>{escape(item)}</li>" for item in items)}</ul>'


def _care_models(findings: Findings) -> list[str]:
    odd = odd_one_out(findings.design, findings.models)
    items = [f"{odd[0].upper()}{odd[1:]}."] if odd else []
    for cell in findings.cells:
        if cell.diverged:
            items.append(
                f"{len(cell.diverged)} of {counted(cell.models, 'model')} of arm {cell.arm} "
                f"diverged on mix {cell.mix}: they are left out of that arm, and of both arms "
                "where arms are compared."
            )
        if cell.untrained:
            items.append(
                f"{len(cell.untrained)} of {counted(cell.models, 'model')} of arm {cell.arm} on "
                f"mix {cell.mix} never left chance, even on the samples they trained on: they are "
                "part of all numbers and spoil the comparison, so no claim is decided by them; "
                f"lower arms.{cell.arm}.lr or train longer."
            )
    for reason, cells in sorted(refusals(findings.cells).items()):
        named = ", ".join(f"{cell.mix}/{cell.arm}" for cell in cells)
        items.append(f"The attack was refused on {named}: {reason}.")
    return items


def _care_training(findings: Findings) -> list[str]:
    items: list[str] = []
    pair = main_pair(findings)
    if pair is None:
        return items
    fitted = findings.cell(pair.mix, pair.left).rates["clean_in_accuracy"].value
    if fitted < FITTED:
        items.append(
            f"Arm {pair.left} reaches {number(100 * fitted, 1)} % accuracy on the clean samples it "
            f"trained on, below the {percent(FITTED)} of a net trained until it memorizes."
        )
    gap = pair.differences["test_accuracy"].value
    if abs(gap) > UNEQUAL:
        items.append(
            f"Test accuracies differ by {number(100 * abs(gap), 1)} points between {pair.left} and "
            f"{pair.right}: part of the difference in AUC may follow from that ({_matched(pair)})."
        )
    return items


def _matched(pair: Contrast) -> str:
    if pair.matched is None:
        return "this run kept no scores to compare at equal training accuracy"
    points = full(pair.matched.auc, 1, 100, signed=True)
    return f"at the closest training accuracies it is {points} points"


def _care_attack(findings: Findings) -> list[str]:
    items = []
    if findings.query_mode != "eval":
        items.append(
            "Networks were queried with the statistics of the query batch, which leaks the batch "
            "through batch norm: not comparable with eval mode."
        )
    refused: dict[float, set[str]] = {}
    for cell in findings.cells:
        for attack in cell.attacks:
            for rate in attack.tpr:
                if rate.refused:
                    refused.setdefault(rate.alpha, set()).add(attack.group)
    for alpha, groups in sorted(refused.items()):
        named = " or ".join(", ".join(NAMES[g] for g in GROUPS if g in groups).rsplit(", ", 1))
        items.append(
            f"TPR at {percent(alpha)} FPR is not given for {named}: a target has fewer than "
            f"{math.ceil(1 / alpha):,} non-members there."
        )
    items.append(
        "The intervals cover another draw of masks and seeds, not another data set or recipe."
    )
    return items


def facts(findings: Findings) -> str:
    """Versions, hardware, seeds, digest, query mode, loader and numeric plan."""
    manifest = findings.manifest
    data, numerics = _map(manifest, "data"), _map(manifest, "numerics")
    left_out = data.get("left_out") or []
    rows = {
        "study": f"{findings.name}, digest {findings.digest}",
        "models": f"{findings.models} an arm, {findings.design} masks",
        "recipe": recipe(findings.study),
        "seed": manifest.get("seed"),
        "data": _data(data),
        "left out of the pool": counted(len(left_out), "sample") if left_out else "none",
        "data digest": data.get("digest"),
        "loader": data.get("loader"),
        "query mode": findings.query_mode,
        "started": manifest.get("started"),
        "executor": manifest.get("executor"),
        "hardware": _pairs(_map(manifest, "hardware")),
        "arithmetic": f"{numerics.get('device', '')} {numerics.get('isa', '')}".strip(),
        "versions": _pairs(_map(manifest, "versions")),
        "implementations": _implementations(_map(numerics, "kernels")),
    }
    items = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(str(told))}</dd>"
        for name, told in rows.items()
        if told not in (None, "")
    )
    return f"<dl>{items}</dl>"


def _map(facts_: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = facts_.get(name)
    return found if isinstance(found, Mapping) else {}


def _pairs(facts_: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {told}" for name, told in facts_.items())


def _implementations(plan: Mapping[str, Any]) -> str:
    """The numeric plan by implementation: "cpu: conv2d, linear; reference: global_avg_pool".

    >>> _implementations({"a:cpu:float32": "cpu", "a_backward:cpu:float32": "cpu", "isa": "X"})
    'cpu: a'
    >>> _implementations({"a:cpu:float32": "cpu", "a_backward:cpu:float32": "reference"})
    'cpu: a; reference: a backward'
    """
    ops = {name.split(":")[0]: str(told) for name, told in plan.items() if ":" in name}
    grouped: dict[str, list[str]] = {}
    for op, told in ops.items():
        forward = op.removesuffix("_backward")
        if forward == op or ops.get(forward) != told:
            named = op if forward == op else f"{forward} backward"
            grouped.setdefault(told, []).append(named)
    return "; ".join(f"{told}: {', '.join(names)}" for told, names in grouped.items())


def _data(data: Mapping[str, Any]) -> str:
    if not data:
        return ""
    size = "×".join(str(n) for n in data.get("image", ()))
    return (
        f"{data.get('name')}: {data.get('pool', 0):,} samples in the pool, "
        f"{data.get('population', 0):,} test images, {data.get('classes')} classes, {size}"
    )


GLOSSARY = {
    "AUC": "the chance that the attack scores a random member above a random non-member; 0.5 is "
    "guessing. A point is a hundredth.",
    "TPR at an FPR": "the share of members found while at most that share of non-members is "
    "accused. Not given where the non-members are too few to show such a rate.",
    "online, offline": "the attack with, and without, shadow models trained on the sample.",
    "mix": "the training pool with its share of outliers: samples with a wrong label (flipped) or "
    "images of another set (ood), the same in all models.",
    "arm": "one way to train; arms share masks, seeds and samples, so differences are paired.",
    "IN, OUT": "samples the model trained on, and pool samples it did not.",
    "memorization score": "share of models trained on the sample that predict its label, minus the "
    "share of models not trained on it that do.",
    "epochs until a sample fits": "how many epochs a sample that the model trained on stays "
    "misclassified, on average over the probe set; at most all of them.",
    "not decidable here": "the interval holds the claim's threshold; or it has no width, as the "
    "number is the same in all groups of models, and they are too few for a sign test to tell; or "
    "there is no interval, or models stayed at chance: the reason stands beside the verdict. The "
    "number of models there is for a fresh study, with a new seed and that number fixed before it "
    "starts: adding models to this run until a claim is decided would decide too often.",
}


def reading(findings: Findings) -> str:
    """A short glossary."""
    del findings
    items = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in GLOSSARY.items())
    return f"<dl>{items}</dl>"
