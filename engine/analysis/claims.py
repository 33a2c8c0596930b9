"""What a run says of the source's claims: held, not held, or not decidable here.

A claim is held where the interval of every measure lies wholly on the claimed side, not held where
one lies wholly on the other, and otherwise not decidable here, with the number of models that a
fresh study would take if the estimates stay what they are: with another seed and that number fixed
beforehand, since adding models until an interval leaves its threshold decides too often. Where a
measure is the same in all groups of models, an interval of no width says nothing: a sign test over
the groups decides. No claim is decided by arms with models that never left chance.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from scipy import stats

from engine.analysis.findings import CellFindings, ClaimRow, Contrast, Measure, MixFacts, Verdict
from engine.analysis.wording import at_chance, percent
from engine.study import Arm, Study

STATEMENTS = {
    "C0": "Batch norm trains faster and tests better.",
    "C1": "Batch norm memorizes outliers faster and more.",
    "C3": "Batch norm raises the AUC of LiRA by the claimed number of points.",
    "C4": "Batch norm raises the AUC of LiRA on clean data too.",
    "C5": "In most batch-norm layers the median |γ/σ| exceeds 1.",
}
CLAIMED_POINTS = {0.01: 3.0, 0.05: 4.0}
"""C3's claimed AUC difference in points, by the mix's share of outliers."""
MOST_MODELS = 100_000


@dataclass(frozen=True, kw_only=True)
class Ruling:
    """The outcome of a row's measures."""

    verdict: Verdict
    why: str
    p_value: float
    models_needed: int | None


def decide(measures: Sequence[Measure], models: int, level: float) -> Ruling:
    """Judge a row by its measures; `models` is what each arm had."""
    missing = next((m for m in measures if not m.estimate.interval.given), None)
    if missing is not None:
        why = f"{missing.what}: {missing.estimate.reason}"
        return Ruling(verdict="not decidable here", why=why, p_value=math.nan, models_needed=None)
    sides = [side(measure) for measure in measures]
    p_value = max(_p_value(measure) for measure in measures)
    if all(s == 1 for s in sides):
        return Ruling(verdict="held", why="", p_value=p_value, models_needed=None)
    if any(s == -1 for s in sides):
        contrary = [m.what for m, s in zip(measures, sides, strict=True) if s == -1]
        why = "the interval lies on the other side: " + "; ".join(contrary)
        lowest = min(_p_value(m) for m, s in zip(measures, sides, strict=True) if s == -1)
        return Ruling(
            verdict="not held",
            why=why,
            p_value=min(1.0, lowest * len(measures)),
            models_needed=None,
        )
    open_ones = [m for m, s in zip(measures, sides, strict=True) if s == 0]
    needs = [models_needed(m, models, level) for m in open_ones]
    why = "; ".join(_why_open(measure) for measure in open_ones)
    known = [n for n in needs if n is not None]
    needed = max(known) if len(known) == len(needs) else None
    return Ruling(verdict="not decidable here", why=why, p_value=p_value, models_needed=needed)


def _why_open(measure: Measure) -> str:
    if measure.estimate.standard_error == 0:
        groups = measure.estimate.degrees + 1
        return f"{measure.what}: the same in all {groups} groups of models, too few to tell"
    return f"the interval contains the claim's threshold: {measure.what}"


def side(measure: Measure) -> int:
    """1: the interval lies on the claimed side of the threshold; -1: on the other; 0: on both.

    0 too where the interval has no width and a sign test does not reject.
    """
    interval = measure.estimate.interval
    if measure.estimate.standard_error == 0 and _p_value(measure) > 1 - interval.level:
        return 0
    above, below = interval.low > measure.threshold, interval.high < measure.threshold
    if not measure.upward:
        above, below = below, above
    return 1 if above else -1 if below else 0


def models_needed(measure: Measure, models: int, level: float) -> int | None:
    """Models an arm at which the interval would leave the threshold, if the estimate stays.

    The standard error shrinks with the root of the number of deletion groups, the t quantile with
    their count. None: more than MOST_MODELS.

    >>> from attacks.types import Interval
    >>> from engine.analysis.findings import Estimate
    >>> wide = Interval(low=-1, high=3, level=0.95, method="")
    >>> estimate = Estimate(value=1.0, interval=wide, standard_error=1.0, degrees=15)
    >>> models_needed(Measure(what="x", estimate=estimate, threshold=0.0), 32, 0.95)
    128
    """
    estimate = measure.estimate
    distance = abs(estimate.value - measure.threshold)
    groups = estimate.degrees + 1
    per_group = models / groups

    def open_at(count: int) -> bool:
        if estimate.standard_error == 0:
            return distance == 0 or _sign_test(count) > 1 - level
        half = float(stats.t.ppf((1 + level) / 2, count - 1)) * estimate.standard_error
        return half * math.sqrt(groups / count) >= distance

    low, high = groups, groups
    while open_at(high):
        low, high = high, 2 * high
        if high * per_group > MOST_MODELS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if open_at(middle) else (low, middle)
    needed = math.ceil(high * per_group)
    return needed if models == groups else needed + needed % 2


def _sign_test(groups: int) -> float:
    """Two-sided p-value of so many groups that all lie on one side."""
    return float(2.0 ** (1 - groups))


def _p_value(measure: Measure) -> float:
    """Two-sided t test of the threshold; a sign test where nothing varies between groups."""
    estimate = measure.estimate
    away = abs(estimate.value - measure.threshold)
    if estimate.standard_error == 0:
        return _sign_test(estimate.degrees + 1) if away else 1.0
    return float(2 * stats.t.sf(away / estimate.standard_error, estimate.degrees))


def holm(rows: Sequence[ClaimRow], level: float) -> tuple[ClaimRow, ...]:
    """Mark the decided rows that stay decided when all rows are tested together (Holm 1979)."""
    decidable = sorted(
        (row.p_value, i) for i, row in enumerate(rows) if not math.isnan(row.p_value)
    )
    kept, alpha = set(), 1 - level
    for rank, (p_value, i) in enumerate(decidable):
        if p_value > alpha / (len(decidable) - rank):
            break
        kept.add(i)
    decided = ("held", "not held")
    return tuple(
        replace(row, after_holm=i in kept and row.verdict in decided) for i, row in enumerate(rows)
    )


def judge(
    study: Study,
    mixes: Sequence[MixFacts],
    cells: Sequence[CellFindings],
    contrasts: Sequence[Contrast],
) -> tuple[ClaimRow, ...]:
    """A row for every claim, mix and pair of arms with and without batch norm."""
    by_name = {mix.name: mix for mix in mixes}
    rows = []
    for contrast in contrasts:
        left, right = study.arms[contrast.left], study.arms[contrast.right]
        if _plain_batch(left) and _without(right) and left.net == right.net:
            rows += _contrast_rows(study, by_name[contrast.mix], contrast)
    for cell in cells:
        if _plain_batch(study.arms[cell.arm]):
            rows.append(_layers_row(study, by_name[cell.mix], cell))
    rows.sort(key=lambda row: (row.claim, [mix.name for mix in mixes].index(row.mix)))
    return holm(_unspoilt(rows, cells), study.attacks.level)


def _unspoilt(rows: Sequence[ClaimRow], cells: Sequence[CellFindings]) -> list[ClaimRow]:
    """The rows, with those of arms that hold models at chance left open."""
    stuck = {(cell.mix, cell.arm): cell for cell in cells if cell.untrained}
    return [_left_open(row, stuck) for row in rows]


def _left_open(row: ClaimRow, stuck: Mapping[tuple[str, str], CellFindings]) -> ClaimRow:
    found = [stuck[row.mix, arm] for arm in row.arms if (row.mix, arm) in stuck]
    if not found:
        return row
    return replace(
        row,
        verdict="not decidable here",
        why=at_chance(found),
        p_value=math.nan,
        models_needed=None,
    )


def _plain_batch(arm: Arm) -> bool:
    return arm.norm == "batch" and arm.penalty is None and not arm.freeze_gamma


def _without(arm: Arm) -> bool:
    return arm.norm in ("none", "fixup")


def _contrast_rows(study: Study, mix: MixFacts, contrast: Contrast) -> list[ClaimRow]:
    def measured(name: str, what: str, **options: object) -> Measure:
        estimate = contrast.differences[name]
        return Measure(what=what, estimate=estimate, threshold=0.0, **options)  # type: ignore[arg-type]

    faster = "epochs until a clean sample fits"
    rows: dict[str, tuple[list[Measure], list[Measure]]] = {
        "C0": (
            [
                measured("clean_unfit", faster, upward=False, unit="epochs"),
                measured("test_accuracy", "test accuracy"),
            ],
            [],
        )
    }
    auc = measured("auc/online/all", "AUC, all samples")
    if mix.outliers:
        slower = "epochs until an outlier fits"
        rows["C1"] = (
            [
                measured("outlier_unfit", slower, upward=False, unit="epochs"),
                measured("outlier_gap", "outliers, accuracy IN − OUT"),
            ],
            [],
        )
        beside = [
            measured("auc/online/outlier", "AUC, outliers"),
            measured("relative_auc/online/all", "AUC, relative", unit="share"),
        ]
        claimed = next((p for s, p in CLAIMED_POINTS.items() if abs(s - mix.share) < 1e-3), None)
        if claimed is None:
            rows["C3"] = ([], [auc, *beside])
        else:
            rows["C3"] = ([replace(auc, threshold=claimed / 100)], beside)
    else:
        relative = measured("relative_auc/online/all", "AUC, relative", unit="share")
        rows["C4"] = ([auc], [relative])
    arms = (contrast.left, contrast.right)
    net = study.arms[contrast.left].net
    return [
        _row(study, claim, mix, net, arms, measures, beside, contrast.models)
        for claim, (measures, beside) in rows.items()
    ]


def _layers_row(study: Study, mix: MixFacts, cell: CellFindings) -> ClaimRow:
    what = "share of layers, last epoch, running σ"
    measure = Measure(what=what, estimate=cell.rates["gamma_share"], threshold=0.5, unit="share")
    net, models = study.arms[cell.arm].net, cell.models - len(cell.diverged)
    return _row(study, "C5", mix, net, (cell.arm,), [measure], [], models)


def _row(
    study: Study,
    claim: str,
    mix: MixFacts,
    net: str,
    arms: tuple[str, ...],
    measures: Sequence[Measure],
    beside: Sequence[Measure],
    models: int,
) -> ClaimRow:
    if measures:
        ruling = decide(measures, models, study.attacks.level)
    else:
        ruling = Ruling(
            verdict="not decidable here",
            why=f"the source has a number for 1 and 5 % of outliers, not for {percent(mix.share)}",
            p_value=math.nan,
            models_needed=None,
        )
    return ClaimRow(
        claim=claim,
        statement=STATEMENTS[claim],
        mix=mix.name,
        kind=mix.kind,
        share=mix.share,
        net=net,
        arms=arms,
        measures=tuple(measures),
        beside=tuple(beside),
        verdict=ruling.verdict,
        why=ruling.why,
        p_value=ruling.p_value,
        models_needed=ruling.models_needed,
    )
