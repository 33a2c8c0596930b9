"""The report's tables as HTML: numbers aligned, intervals beneath, a note for every dash."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from engine.analysis.findings import (
    GROUPS,
    CellFindings,
    ClaimRow,
    Contrast,
    Estimate,
    Findings,
    Measure,
    RateAt,
)
from engine.analysis.wording import DASH, NAMES, counted, half_width, interval, number, percent


@dataclass
class Notes:
    """Reasons why numbers or intervals are missing, lettered in order of appearance."""

    prefix: str
    reasons: list[str] = field(default_factory=list)

    def mark(self, reason: str) -> str:
        """A superscript that points to the reason."""
        if not reason:
            return ""
        if reason not in self.reasons:
            self.reasons.append(reason)
        index = self.reasons.index(reason)
        name = f"{self.prefix}-{index + 1}"
        return f'<sup><a href="#{name}">{_letter(index)}</a></sup>'

    def html(self) -> str:
        """The list of reasons."""
        items = (
            f'<div id="{self.prefix}-{i + 1}"><sup>{_letter(i)}</sup> {escape(reason)}</div>'
            for i, reason in enumerate(self.reasons)
        )
        return f'<div class="notes">{"".join(items)}</div>' if self.reasons else ""


def _letter(index: int) -> str:
    return chr(ord("a") + index % 26) * (index // 26 + 1)


def _row_tag(first: bool) -> str:
    return '<tr class="first">' if first else "<tr>"


def table(
    head: Sequence[str], rows: Sequence[str], caption: str, numeric: int | Sequence[int]
) -> str:
    """A table that scrolls sideways on a narrow page; `numeric`: which columns are numbers, or
    from which one on.
    """
    if isinstance(numeric, int):
        numeric = range(numeric, len(head))
    cells = "".join(
        f'<th class="{"n" if i in numeric else ""}" scope="col">{name}</th>'
        for i, name in enumerate(head)
    )
    return (
        f'<p class="quiet">{caption}</p><div class="scroll"><table class="wide">'
        f"<thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def arm_name(findings: Findings, arm: str) -> str:
    """An arm's name beside a dot of its colour."""
    index = findings.arms.index(arm) % 6
    return f'<span class="dot" style="background:var(--arm-{index})"></span>{escape(arm)}'


def value(
    notes: Notes, estimate: Estimate | None, digits: int, scale: float = 1, signed: bool = False
) -> str:
    """A table cell: the number, its interval beneath, a mark where something is missing."""
    if estimate is None:
        return '<td class="n"></td>'
    shown = number(estimate.value * scale, digits, signed)
    bounds = half_width(estimate, digits, scale)
    beneath = f'<span class="ci">{bounds}</span>' if bounds else ""
    return f'<td class="n">{shown}{notes.mark(estimate.reason)}{beneath}</td>'


def cells(findings: Findings) -> str:
    """Accuracy and loss beside every AUC: a row for each mix, group and arm."""
    notes = Notes("cells")
    head = ["mix", "samples", "arm"]
    head += ["accuracy<br>IN", "accuracy<br>OUT", "accuracy<br>test"]
    head += ["loss<br>IN", "loss<br>OUT", "loss<br>test", "AUC<br>online", "AUC<br>offline"]
    head += [f"TPR at<br>{percent(a)} FPR" for a in findings.alphas]
    rows = []
    for mix in findings.mixes:
        for group in GROUPS if mix.outliers else GROUPS[:1]:
            for i, arm in enumerate(findings.arms):
                cell = findings.cell(mix.name, arm)
                first = not i and group == GROUPS[0]
                lead = f'<th scope="row">{escape(mix.name) if first else ""}</th>'
                lead += f"<td class='t'>{'' if i else _group(findings, mix.name, group)}</td>"
                lead += f"<td class='t'>{arm_name(findings, arm)}</td>"
                rest = _cell_row(notes, findings, cell, group)
                rows.append(f"{_row_tag(first)}{lead}{rest}</tr>")
    caption = (
        "Means over models. IN: trained on by the model, OUT: left out of its training, both with "
        "the label trained on; test: never used. TPR: online LiRA, with the FPR it was read at, or "
        f"what it lies between. ± is half the width of the {percent(findings.level)} interval."
    )
    return table(head, rows, caption, 3) + notes.html()


def _group(findings: Findings, mix: str, group: str) -> str:
    facts = findings.mix(mix)
    count = {"all": facts.samples, "outlier": facts.outliers}
    count["clean"] = facts.samples - facts.outliers
    return f'{NAMES[group]}<span class="ci">{count[group]:,}</span>'


def _cell_row(notes: Notes, findings: Findings, cell: CellFindings, group: str) -> str:
    rates = cell.rates
    whole = group == "all"
    parts = [
        value(notes, rates[f"{group}_in_accuracy"], 3),
        value(notes, rates[f"{group}_out_accuracy"], 3),
        value(notes, rates["test_accuracy"] if whole else None, 3),
        value(notes, rates[f"{group}_in_loss"], 3),
        value(notes, rates[f"{group}_out_loss"], 3),
        value(notes, rates["test_loss"] if whole else None, 3),
    ]
    for mode in ("online", "offline"):
        attack = cell.attack(mode, group)
        if attack is None:
            parts.append(f'<td class="n">{DASH}{notes.mark(cell.refusals[mode])}</td>')
        else:
            parts.append(value(notes, attack.auc, 3))
    attack = cell.attack("online", group)
    for i in range(len(findings.alphas)):
        if attack is None:
            parts.append(f'<td class="n">{DASH}{notes.mark(cell.refused)}</td>')
        else:
            parts.append(_rate(notes, attack.tpr[i]))
    return "".join(parts)


def _rate(notes: Notes, rate: RateAt) -> str:
    """A TPR with its half width and the false-positive rate it was read at, or what encloses it."""
    if rate.refused:
        beneath = ""
        if rate.bound is not None:
            beneath = f"{number(rate.bound[0], 3)}–{number(rate.bound[1], 3)}"
    else:
        realised = f"at {100 * rate.realised_fpr:.2g} %"
        beneath = "<br>".join(part for part in (half_width(rate.tpr, 3), realised) if part)
    shown = number(rate.tpr.value, 3)
    mark = notes.mark(rate.tpr.reason)
    return f'<td class="n">{shown}{mark}<span class="ci">{beneath}</span></td>'


def contrasts(findings: Findings) -> str:
    """Paired differences, and the comparison where training accuracies are closest."""
    if not findings.contrasts:
        return ""
    notes = Notes("contrasts")
    columns = _contrast_columns(findings)
    rows = []
    for i, contrast in enumerate(findings.contrasts):
        first = not i or findings.contrasts[i - 1].mix != contrast.mix
        lead = f'<th scope="row">{escape(contrast.mix) if first else ""}</th>'
        lead += f"<td class='t'>{_pair(findings, contrast)}</td>"
        numbers = "".join(
            value(notes, contrast.differences.get(name), digits, scale, signed=True)
            for name, _, digits, scale in columns
        )
        rows.append(f"{_row_tag(first)}{lead}{numbers}</tr>")
    head = ["mix", "first minus second", *(label for _, label, _, _ in columns)]
    caption = (
        "Paired differences, model by model (same masks, seeds and samples), in points: hundredths "
        "of AUC, TPR or accuracy; loss in nats. ± is half the width of the "
        f"{percent(findings.level)} interval."
    )
    return table(head, rows, caption, 2) + notes.html() + _matched(findings)


def _contrast_columns(findings: Findings) -> list[tuple[str, str, int, float]]:
    outliers = any(mix.outliers for mix in findings.mixes)
    groups = GROUPS if outliers else GROUPS[:1]
    columns = [(f"auc/online/{group}", f"AUC<br>{NAMES[group]}", 1, 100.0) for group in groups]
    columns += [
        (f"tpr@{a}/online/all", f"TPR at<br>{percent(a)} FPR", 1, 100.0) for a in findings.alphas
    ]
    columns.append(("clean_in_accuracy", "accuracy<br>clean IN", 1, 100.0))
    columns.append(("test_accuracy", "accuracy<br>test", 1, 100.0))
    if outliers:
        columns.append(("outlier_gap", "outliers<br>IN − OUT", 1, 100.0))
    columns.append(("test_loss", "loss<br>test", 3, 1.0))
    return columns


def _pair(findings: Findings, contrast: Contrast) -> str:
    return f"{arm_name(findings, contrast.left)}<br>− {arm_name(findings, contrast.right)}"


def _matched(findings: Findings) -> str:
    known = [contrast for contrast in findings.contrasts if contrast.matched is not None]
    if not known:
        reasons = sorted({contrast.unmatched for contrast in findings.contrasts})
        return (
            '<p class="quiet">No comparison at equal training accuracy: '
            f"{escape('; '.join(reasons))}.</p>"
        )
    notes = Notes("matched")
    rows = []
    for contrast in known:
        matched = contrast.matched
        assert matched is not None
        rows.append(
            f'<tr><th scope="row">{escape(contrast.mix)}</th>'
            f"<td class='t'>{_pair(findings, contrast)}</td>"
            f'<td class="n">{matched.epochs[0]} and {matched.epochs[1]}</td>'
            f'<td class="n">{number(matched.accuracy[0], 3)} and '
            f"{number(matched.accuracy[1], 3)}</td>"
            f"{value(notes, matched.auc, 1, 100, signed=True)}</tr>"
        )
    caption = (
        "At the kept epochs where clean training accuracies (of the probe set) are closest: the "
        "arm that ends lower stays at its last epoch."
    )
    head = ["mix", "first minus second", "epochs", "clean IN accuracy", "AUC, points"]
    return table(head, rows, caption, 2) + notes.html()


def claims(findings: Findings) -> str:
    """What the run says of each claim, and why."""
    headline = f"<p>{escape(findings.headline)}</p>"
    if not findings.claims:
        return headline
    rows = []
    for i, row in enumerate(findings.claims):
        first = not i or findings.claims[i - 1].claim != row.claim
        rows.append(_claim_rows(row, first))
    head = ["claim", "mix", "arms", "measured", "estimate", "interval", "claimed", "verdict"]
    numeric = (4, 5)
    caption = (
        f"Held: the {percent(findings.level)} interval of every deciding number lies wholly on the "
        "claimed side; not held: one wholly on the other; where a number is the same in all groups "
        "of models, a sign test over the groups must agree. Otherwise the row is not decidable "
        "here. Grey rows stand beside and decide nothing. "
        "The claims are this project’s reading of arXiv 2605.24420’s abstract."
    )
    return headline + table(head, rows, caption, numeric)


def _claim_rows(row: ClaimRow, first: bool) -> str:
    lines = [(m, True) for m in row.measures] + [(m, False) for m in row.beside]
    span = f' rowspan="{len(lines)}"'
    name = f"<b>{row.claim}</b> {escape(row.statement)}" if first else ""
    parts = []
    for i, (measure, decides) in enumerate(lines):
        lead = tail = ""
        if not i:
            lead = (
                f'<th scope="row" class="claim"{span}>{name}</th><td{span}>{escape(row.mix)}</td>'
                f'<td class="t"{span}>{escape(row.subject)}</td>'
            )
            tail = f"<td{span}>{_verdict(row)}</td>"
        cls = "" if decides else "quiet"
        estimate, bounds = measured(measure)
        parts.append(
            f"{_row_tag(first and not i)}{lead}<td class='{cls}'>{escape(measure.what)}</td>"
            f"<td class='n {cls}'>{estimate}</td><td class='n {cls}'>{bounds}</td>"
            f"<td class='t'>{_threshold(measure) if decides else ''}</td>{tail}</tr>"
        )
    return "".join(parts)


def measured(measure: Measure) -> tuple[str, str]:
    """A claim's number in its unit, and its interval."""
    estimate, signed = measure.estimate, measure.threshold == 0 or measure.unit == "points"
    digits, scale, unit = {
        "points": (1, 100.0, " points"),
        "epochs": (2, 1.0, " epochs"),
        "share": (1, 100.0, " %"),
    }[measure.unit]
    value = number(estimate.value * scale, digits, signed)
    bounds = interval(estimate, digits, scale, signed, measure.threshold)
    return (value if value == DASH else value + unit, bounds or DASH)


def _threshold(measure: Measure) -> str:
    side = "above" if measure.upward else "below"
    scale = 1 if measure.unit == "epochs" else 100
    unit = {"points": "", "epochs": "", "share": " %"}[measure.unit]
    return f"{side} {measure.threshold * scale:g}{unit}"


def _verdict(row: ClaimRow) -> str:
    cls = "verdict open" if row.verdict == "not decidable here" else "verdict"
    text = f'<span class="{cls}">{row.verdict}</span>'
    if row.verdict == "not decidable here":
        text += f'<span class="ci">{escape(row.why)}</span>'
        if row.models_needed:
            text += (
                f'<span class="ci">a fresh study would take about {row.models_needed:,} models an '
                "arm, fixed beforehand, and a new seed</span>"
            )
        elif row.p_value == row.p_value:
            text += '<span class="ci">no feasible number of models would decide</span>'
    elif not row.after_holm:
        text += '<span class="ci">not after Holm’s correction</span>'
    return text


EXCLUDED = {
    "target_not_finite": "with a target’s score that is not finite",
    "no_in": "without IN models",
    "no_out": "without OUT models",
    "one_in": "with one IN model",
    "one_out": "with one OUT model",
    "score_not_finite": "with an attack score that is not finite",
}


def exclusions(findings: Findings) -> str:
    """Diverged models, excluded samples and shadow counts, cell by cell."""
    rows = []
    for cell in findings.cells:
        reasons = ", ".join(
            f"{count:,} {EXCLUDED.get(name, name)}" for name, count in cell.excluded.items()
        )
        undefined = sum(histogram.undefined for histogram in cell.memorization.values())
        sides = [
            "{} / {} / {}".format(*cell.counts[side]) if side in cell.counts else DASH
            for side in ("in", "out")
        ]
        diverged = counted(len(cell.diverged), "model") if cell.diverged else "none"
        rows.append(
            f'<tr><th scope="row">{escape(cell.mix)}</th>'
            f'<td class="t">{arm_name(findings, cell.arm)}</td>'
            f"<td>{diverged}</td><td>{reasons or 'none'} of {cell.entries:,}</td>"
            f'<td class="n">{sides[0]}</td><td class="n">{sides[1]}</td>'
            f'<td class="n">{undefined:,}</td></tr>'
        )
    head = ["mix", "arm", "diverged", "excluded entries (target × sample)", "IN models"]
    head += ["OUT models", "no memorization score"]
    caption = (
        "Shadow models behind a sample's score, smallest / median / largest over samples and "
        "targets, after leaving out the target and its complement. Samples without a memorization "
        "score lack models on a side."
    )
    return table(head, rows, caption, 4)
