"""attacks.html: what the attacks found, on one self-contained page."""

import math
from html import escape

from engine.analysis.wording import DASH, GUESSING, counted, number, percent, rate_interval
from engine.attack.figures import LABELS, arm_style, arms
from engine.attack.means import Mean, Rate
from engine.attack.result import Result
from engine.attack.settings import USES
from engine.report.figures import ARM_INKS, Drawing
from engine.report.page import figure, section, shell
from engine.report.tables import table

DESIGNS = {
    "paired": "paired masks: each target is scored without itself and its complement",
    "balanced": "balanced masks: each target is scored without itself and one opposite model",
    "bernoulli": "independent masks: each target is scored without itself",
    "mixed": "mixed masks: each target is scored by the rule that fits its row",
}


def render(result: Result, drawings: tuple[Drawing, ...]) -> str:
    """The whole page."""
    by_name = {drawing.name: drawing for drawing in drawings}
    curves = [drawing for name, drawing in by_name.items() if name not in ("roc", "memorization")]
    body = [
        f"<h1>Attacks on {escape(result.path.name)}</h1>",
        f'<p class="answer">{escape(_answer(result))}</p>',
        f'<p class="quiet">{escape(_context(result))}</p>',
        _arms(result),
        figure(by_name["roc"]) if "roc" in by_name else "",
        section("Read with care", _care(result)),
        section("ROC curves", "".join(figure(drawing) for drawing in curves)),
        section("Memorization", figure(by_name["memorization"]))
        if "memorization" in by_name
        else "",
        section("Means over targets", _table(result)),
        section("Run", _facts(result)),
    ]
    return shell(f"Attacks on {result.path.name}", "".join(body))


def _answer(result: Result) -> str:
    """The strongest attack on all samples, by AUC."""
    known = [m for m in result.means if m.group == "all" and not math.isnan(m.auc)]
    if not known:
        return "No attack has a member and a non-member to tell apart."
    highest = max(known, key=lambda row: row.auc)
    telling = [row for row in known if row.auc > GUESSING and not row.interval.low <= GUESSING]
    if not telling:
        return (
            f"No attack here tells members from non-members: the highest AUC is {_auc(highest)}, "
            f"{LABELS[highest.attack]}."
        )
    best = max(telling, key=lambda row: row.auc)
    on = f" on {best.source}" if len(result.sources) > 1 else ""
    name = LABELS[best.attack][0].upper() + LABELS[best.attack][1:]
    most = "tells members apart: AUC "
    if best is highest and len(known) > 1:
        most = "has the highest AUC: "
    told = f"{name}{on} {most}{_auc(best)}"
    rates = [
        f"{_tpr(rate)} of members found at {percent(rate.alpha)} FPR"
        for rate in best.rates
        if not rate.refused
    ]
    return f"{told}; {'; '.join(rates)}." if rates else f"{told}."


def _auc(row: Mean) -> str:
    bounds = rate_interval(row.interval, 3, against=GUESSING)
    return number(row.auc, 3) + (f" [{bounds}]" if bounds else "")


def _tpr(rate: Rate) -> str:
    return DASH if rate.refused else f"{number(100 * rate.tpr, 2)} %"


def _context(result: Result) -> str:
    first = result.sources[0]
    matrices = counted(len(result.sources), "score matrix", "score matrices")
    designs = sorted({DESIGNS[design] for design in result.designs.values()})
    modes = sorted({source.query_mode.replace("_", " ") for source in result.sources})
    models = sorted({len(source.models) for source in result.sources})
    return (
        f"{matrices}; {' or '.join(map(str, models))} models on "
        f"{counted(first.matrix.samples, 'sample')} under "
        f"{counted(first.matrix.queries, 'query', 'queries')}; {'; '.join(designs)}. Query mode: "
        f"{', '.join(modes)}. Intervals: {percent(result.settings.level)} delete-a-group jackknife "
        "over models, given these samples."
    )


def _arms(result: Result) -> str:
    """The arms' colours; nothing where there is one."""
    named = arms(result)
    if len(named) < 2:
        return ""
    items = "".join(
        f'<dt><span class="dot" style="background:var(--arm-{i % len(ARM_INKS)},'
        f' {arm_style(i)[0]})"></span>{escape(arm)}</dt><dd>{escape(_where(result, arm))}</dd>'
        for i, arm in enumerate(named)
    )
    return f"<dl>{items}</dl>"


def _where(result: Result, arm: str) -> str:
    mixes = [source.mix for source in result.sources if source.arm == arm and source.mix]
    return f"mix {', '.join(mixes)}" if mixes else ""


def _care(result: Result) -> str:
    reasons = {row.interval.reason: None for row in result.means if row.interval.reason}
    items = [f"No interval: {reason}." for reason in reasons]
    refused: dict[str, list[str]] = {}
    for row in result.means:
        for rate in row.rates:
            if rate.refused:
                where = f"{row.source}, {row.group}" if row.source else row.group
                told = (
                    f"TPR at {percent(rate.alpha)} FPR is not given where there are {rate.refused}"
                )
                refused.setdefault(told, []).append(where)
    for told, places in refused.items():
        distinct = list(dict.fromkeys(places))
        more = f" and {len(distinct) - 4} more" if len(distinct) > 4 else ""
        items.append(f"{told}: {'; '.join(distinct[:4])}{more}.")
    for source in result.sources:
        gone = source.matrix.models - len(source.models)
        if gone:
            items.append(
                f"{counted(gone, 'model')} of {source.name} diverged: neither targets nor shadows."
            )
    if any(source.query_mode == "unknown" for source in result.sources):
        items.append(
            "It is not known whether the networks were queried in eval mode: scores made with the "
            "statistics of the query batch leak the batch through batch norm."
        )
    if result.settings.variance == "tf_fixed":
        items.append("Variance tf_fixed is there to compare with published tables only.")
    items.append("The intervals cover another draw of masks and seeds, not another data set.")
    return f'<ul class="care quiet">{"".join(f"<li>{escape(item)}</li>" for item in items)}</ul>'


def _table(result: Result) -> str:
    head = ["scores", "attack", "samples", "AUC"]
    head += [f"TPR at<br>{percent(alpha)} FPR" for alpha in result.settings.fpr]
    head += ["targets", "non-<br>members", "excluded"]
    lines = []
    for row in result.means:
        where = escape(row.source).replace("/", "/<wbr>")
        estimates = [(number(row.auc, 4), rate_interval(row.interval, 4, against=GUESSING))]
        estimates += [(_tpr(rate), rate_interval(rate.interval, 2, 100)) for rate in row.rates]
        cells = f'<td>{where}</td><td class="t">{LABELS[row.attack]}</td>'
        cells += f'<td class="t">{escape(row.group)}<span class="ci">{row.samples:,}</span></td>'
        cells += "".join(
            f'<td class="n">{value}<span class="ci">{bounds}</span></td>'
            for value, bounds in estimates
        )
        counts = (row.over, f"{row.non_members:,}", f"{row.excluded:,}")
        cells += "".join(f'<td class="n">{text}</td>' for text in counts)
        first = ' class="first"' if row.group == "all" else ""
        lines.append(f"<tr{first}>{cells}</tr>")
    caption = (
        f"Below the samples their number, below the means their {percent(result.settings.level)} "
        "intervals; non-members: the fewest."
    )
    return table(head, lines, caption, 3)


def _facts(result: Result) -> str:
    rows = {
        "scores": str(result.path),
        "statistic": "logit-scaled confidence φ, higher for members",
        "attacks": ", ".join(result.attacks),
    }
    keys = dict.fromkeys(key for name in result.attacks for key in USES[name])
    if keys:
        rows["settings"] = ", ".join(f"{key}={getattr(result.settings, key)}" for key in keys)
    items = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in rows.items())
    return f"<dl>{items}</dl>"
