"""Numbers and findings in words: one way to write each, for the report and the terminal."""

import math
from collections.abc import Iterable

from attacks.types import Interval
from engine.analysis.findings import (
    MOST_GROUPS,
    RATE,
    CellFindings,
    Contrast,
    Estimate,
    Findings,
    MixFacts,
)
from engine.study import Study

GUESSING = 0.5
"""The AUC of an attack that knows nothing."""
DASH = "–"
MINUS = "\N{MINUS SIGN}"

NAMES = {
    "all": "all samples",
    "clean": "clean samples",
    "outlier": "outliers",
    "clean_in": "clean, trained on (IN)",
    "clean_out": "clean, left out (OUT)",
    "outlier_in": "outliers, trained on (IN)",
    "outlier_out": "outliers, left out (OUT)",
    "population": "test images",
}


def number(value: float, digits: int, signed: bool = False) -> str:
    """Fixed digits with a true minus sign; a dash for NaN.

    >>> number(-0.0004, 2), number(0.5, 1, signed=True), number(float("nan"), 3)
    ('0.00', '+0.5', '–')
    """
    if not math.isfinite(value):
        return DASH
    text = f"{value:+.{digits}f}" if signed else f"{value:.{digits}f}"
    if float(text) == 0:
        text = f"{0:.{digits}f}"
    return text.replace("-", MINUS)


def end(value: float, digits: int, signed: bool = False, against: float = 0) -> str:
    """An interval's end, with the digits it takes to see on which side of `against` it lies.

    >>> end(0.031, 1, signed=True), end(-0.0004, 1, signed=True), end(3.02, 1, against=3)
    ('+0.03', '−0.0004', '3.02')
    >>> end(0.0, 1), end(3.26, 1), end(1e-17, 1)
    ('0.0', '3.3', '0.0')
    """

    def side(at: float) -> int:
        return (at > against) - (at < against)

    telling = (d for d in range(digits, digits + 6) if side(round(value, d)) == side(value))
    return number(value, next(telling, digits), signed)


def interval(
    estimate: Estimate, digits: int, scale: float = 1, signed: bool = False, against: float = 0
) -> str:
    """ "low to high" of what is possible, or an empty string where there is no interval.

    against: the threshold that the ends are read against.
    """
    if not estimate.interval.given:
        return ""
    ends = (end(at * scale, digits, signed, against * scale) for at in estimate.ends)
    return " to ".join(ends)


def rate_interval(found: Interval, digits: int, scale: float = 1, against: float = 0) -> str:
    """`interval` for the interval of a rate."""
    estimate = Estimate(value=math.nan, interval=found, possible=RATE)
    return interval(estimate, digits, scale, against=against)


def half_width(estimate: Estimate, digits: int, scale: float = 1) -> str:
    """Half the width of a symmetric interval, as "±0.003"; empty where there is none."""
    if not estimate.interval.given:
        return ""
    return "±" + number((estimate.interval.high - estimate.interval.low) / 2 * scale, digits)


def full(
    estimate: Estimate, digits: int, scale: float = 1, signed: bool = False, against: float = 0
) -> str:
    """Value and interval on one line."""
    value = number(estimate.value * scale, digits, signed)
    bounds = interval(estimate, digits, scale, signed, against)
    return f"{value} [{bounds}]" if bounds else value


def percent(rate: float) -> str:
    """A rate as the shortest exact percentage.

    >>> percent(0.001), percent(0.05), percent(0.95)
    ('0.1 %', '5 %', '95 %')
    """
    return f"{100 * rate:.6g} %"


def counted(count: int, one: str, many: str = "") -> str:
    """
    >>> counted(1, "model"), counted(1200, "model")
    ('1 model', '1,200 models')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"


NORMS = {
    "batch": "batch norm",
    "none": "no norm",
    "group": "group norm",
    "fixup": "Fixup, no norm",
    "affine": "a scale and shift a channel, no norm",
}


def arm_in_words(study: Study, name: str) -> str:
    """What an arm is: net, norm, and what differs from the study's recipe."""
    arm = study.arms[name]
    parts = [f"{arm.net} with {NORMS.get(arm.norm, arm.norm)}"]
    if arm.freeze_gamma:
        parts.append("γ frozen at 1")
    if arm.penalty is not None:
        parts.append(f"γ/σ penalty ({arm.penalty.form}, λ = {arm.penalty.lambda_:g})")
    if arm.lr is not None:
        parts.append(f"learning rate {arm.lr:g}")
    if arm.weight_decay is not None:
        parts.append(f"weight decay {arm.weight_decay:g}")
    return ", ".join(parts)


def mix_in_words(study: Study, facts: MixFacts) -> str:
    """What a mix is: its outliers, counted."""
    if not facts.outliers:
        return f"{facts.samples:,} samples, no outliers"
    counts = f"{facts.outliers:,} of {facts.samples:,} samples"
    if facts.kind == "flipped":
        return f"{counts} carry a wrong label"
    source = study.mixes[facts.name].source
    return f"{counts} replaced by images of {source} with random labels"


def recipe(study: Study) -> str:
    """How every arm is trained."""
    train = study.train
    parts = [
        f"{counted(train.epochs, 'epoch')} of SGD, batch {train.batch}, learning rate "
        f"{train.lr:g} ({train.schedule.replace('_', ' ')}), momentum {train.momentum:g}, weight "
        f"decay {train.weight_decay:g}"
    ]
    parts += ["Nesterov"] if train.nesterov else []
    parts += [f"warm-up {counted_of(train.warmup)}"] if train.warmup else []
    parts += [f"crops padded by {train.crop}"] if train.crop else []
    parts += ["flips"] if train.flip else []
    parts += [f"cutout {train.cutout}"] if train.cutout else []
    if not (train.crop or train.flip or train.cutout):
        parts.append("no augmentation")
    return ", ".join([*parts, train.precision])


def counted_of(epochs: float) -> str:
    """Epochs that need not be whole.

    >>> counted_of(1.0), counted_of(2.5)
    ('1 epoch', '2.5 epochs')
    """
    return f"{epochs:g} epoch" + ("" if epochs == 1 else "s")


def jackknifed(findings: Findings) -> str:
    """How the intervals come about."""
    if findings.design != "paired":
        return "leaving out one group of models at a time (jackknife, t)"
    if findings.models > 2 * MOST_GROUPS:
        return f"leaving out {MOST_GROUPS} groups of pairs of models in turn (jackknife, t)"
    return "leaving out one pair of models at a time (jackknife, t)"


def main_pair(findings: Findings) -> Contrast | None:
    """The contrast that answers: the first one, on the mix with the largest share of outliers."""
    if not findings.contrasts:
        return None
    first = (findings.contrasts[0].left, findings.contrasts[0].right)
    rivals = [c for c in findings.contrasts if (c.left, c.right) == first]
    return max(rivals, key=lambda c: findings.mix(c.mix).share)


def all_diverged(*arms: str) -> str:
    """
    >>> all_diverged("bn"), all_diverged("bn", "nobn")
    ('every model of bn diverged', 'every model of bn and of nobn diverged')
    """
    return f"every model of {' and of '.join(arms)} diverged"


def refusals(cells: Iterable[CellFindings]) -> dict[str, list[CellFindings]]:
    """The cells that the online attack was refused on, by reason."""
    found: dict[str, list[CellFindings]] = {}
    for cell in cells:
        if cell.refused:
            found.setdefault(cell.refused, []).append(cell)
    return found


def at_chance(cells: Iterable[CellFindings]) -> str:
    """Which arms hold models that never left chance, and spoil what is said of them; or nothing."""
    found = " and ".join(
        f"{len(cell.untrained)} of {cell.models} models of {cell.arm}"
        for cell in cells
        if cell.untrained
    )
    return found and f"{found} never left chance"


def beats_guessing(estimate: Estimate | None) -> bool:
    """Whether the whole interval of an AUC lies above that of guessing."""
    return estimate is not None and estimate.interval.low > GUESSING


def answer(findings: Findings) -> str:
    """The run's answer in one plain sentence, numbers and interval included.

    It names a direction where the difference's interval has one, no model stayed at chance and at
    least one arm is attacked better than by guessing.
    """
    contrast = main_pair(findings)
    if contrast is None:
        return _single(findings)
    cells = _compared(findings, contrast)
    refused = [
        f"the attack on {' and on '.join(cell.arm for cell in found)} was refused: {reason}"
        for reason, found in refusals(cells).items()
    ]
    if refused:
        return f"This run cannot say who leaks more, as {'; '.join(refused)}."
    difference = contrast.differences["auc/online/all"]
    found = [cell.attack("online", "all") for cell in cells]
    aucs = [None if f is None else f.auc for f in found]
    levels = [number(math.nan if auc is None else auc.value, 3) for auc in aucs]
    points = f"{number(100 * difference.value, 1, signed=True)} points"
    beside = f"AUC {levels[0]} against {levels[1]}; {counted(contrast.models, 'model')} an arm"
    if not difference.interval.given:
        return (
            f"{contrast.left} minus {contrast.right} is {points} of AUC on mix {contrast.mix} "
            f"({beside}), without an interval: {difference.reason}."
        )
    bounds = interval(difference, 1, 100, signed=True)
    spoilt = at_chance(cells)
    if spoilt:
        lead = f"This run cannot say who leaks more, as {spoilt}"
    elif not any(beats_guessing(auc) for auc in aucs):
        lead = f"The attack beats guessing neither with {contrast.left} nor with {contrast.right}"
    else:
        lead = _direction(difference, contrast)
    return (
        f"{lead}: the paired difference in AUC on mix {contrast.mix} "
        f"is {points} ({percent(findings.level)} interval {bounds}; {beside})."
    )


def _compared(findings: Findings, contrast: Contrast) -> list[CellFindings]:
    return [findings.cell(contrast.mix, arm) for arm in (contrast.left, contrast.right)]


def on_outliers(findings: Findings) -> str:
    """What the compared arms did with the outliers, in one sentence.

    Empty where there are none, or where models that never left chance spoil the comparison.
    """
    contrast = main_pair(findings)
    if contrast is None or not findings.mix(contrast.mix).outliers:
        return ""
    cells = _compared(findings, contrast)
    gap = contrast.differences["outlier_gap"]
    inside = [cell.rates["outlier_in_accuracy"].value for cell in cells]
    if math.isnan(gap.value) or at_chance(cells):
        return ""
    bounds = interval(gap, 1, 100, signed=True)
    told = f"{percent(findings.level)} interval {bounds}" if bounds else gap.reason
    return (
        f"Of the outliers it trained on, {contrast.left} predicts {number(100 * inside[0], 0)} % "
        f"with the label it was shown, {contrast.right} {number(100 * inside[1], 0)} %; counting "
        "only what training on them adds (IN − OUT accuracy), the difference is "
        f"{number(100 * gap.value, 1, signed=True)} points ({told})."
    )


def _direction(difference: Estimate, contrast: Contrast) -> str:
    members = "members are {} to tell from non-members with " + contrast.left
    rival = f"than with {contrast.right}"
    if difference.interval.low > 0:
        sentence = f"{members.format('easier')} {rival}"
    elif difference.interval.high < 0:
        sentence = f"{members.format('harder')} {rival}"
    else:
        sentence = f"whether {members.format('easier')} {rival} stays open"
    return sentence[0].upper() + sentence[1:]


def _single(findings: Findings) -> str:
    cell = findings.cells[-1]
    attack = cell.attack("online", "all")
    if attack is None:
        return f"This run cannot say how much {cell.arm} leaks: {cell.refused}."
    told = f"an AUC of {full(attack.auc, 3, against=GUESSING)} on mix {cell.mix}"
    spoilt = at_chance([cell])
    if spoilt:
        return f"This run cannot say how much {cell.arm} leaks, as {spoilt}: {told}."
    if attack.auc.interval.given and not beats_guessing(attack.auc):
        return f"LiRA does not beat guessing on members of {cell.arm}: {told}."
    return f"LiRA tells members of {cell.arm} from non-members with {told}."


def headline(findings: Findings) -> str:
    """How many claim rows are held, not held and open, with Holm's correction."""
    verdicts = [row.verdict for row in findings.claims]
    if not verdicts:
        return "No claim is tested: the run compares no arms with and without batch norm."
    decided = [row for row in findings.claims if row.verdict != "not decidable here"]
    counts = (
        f"Of {counted(len(verdicts), 'claim row')}, {verdicts.count('held')} held, "
        f"{verdicts.count('not held')} not held and {len(verdicts) - len(decided)} not "
        "decidable here."
    )
    if not decided:
        return counts
    stay = sum(row.after_holm for row in decided)
    share = "all" if stay == len(decided) else f"{stay} of the {len(decided)}"
    return f"{counts} Testing all rows together (Holm), {share} decided stay decided."
