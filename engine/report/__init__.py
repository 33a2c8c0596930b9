"""One self-contained page that says what a run found, and its figures as SVG files.

The page leads with the answer, then the claims, then what a reader needs to trust them. It opens
offline: style and figures are in the file.
"""

import re
import shutil
from collections.abc import Mapping
from html import escape
from pathlib import Path

from engine import files
from engine.analysis.findings import Findings
from engine.analysis.wording import on_outliers
from engine.report import tables
from engine.report.figures import ARM_INKS, GRID, INK, MUTED, PAPER, Drawing, draw_all
from engine.report.text import care, context, facts, legend, reading
from engine.store import Run

INKS: Mapping[str, str] = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--line",
    PAPER: "--paper",
    **{ink: f"--arm-{i}" for i, ink in enumerate(ARM_INKS)},
}


def write_report(run: Run, findings: Findings) -> Path:
    """Write report.html and figures/*.svg into the run directory; the path of the page.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    drawings = draw_all(findings)
    folder = run.path / "figures"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for drawing in drawings:
        files.write_text(folder / f"{drawing.name}.svg", drawing.svg)
    page = run.path / "report.html"
    files.write_text(page, render(findings, drawings))
    return page


def render(findings: Findings, drawings: tuple[Drawing, ...]) -> str:
    """The whole page."""
    style = (Path(__file__).parent / "report.css").read_text()
    by_name = {drawing.name: drawing for drawing in drawings}

    def shown(*names: str) -> str:
        return "".join(_figure(by_name[name]) for name in names if name in by_name)

    learning = tuple(name for name in by_name if name.startswith("learning_"))
    body = [
        f"<h1>{escape(findings.question)}</h1>",
        f'<p class="answer">{escape(findings.answer)}</p>',
        f'<p class="beside">{escape(on_outliers(findings))}</p>',
        f'<p class="quiet">{escape(context(findings))}</p>',
        legend(findings),
        shown("differences"),
        _section("Read with care", care(findings)),
        _section("Claims", tables.claims(findings)),
        _section("ROC", shown("roc")),
        _section("Attack, accuracy and loss side by side", tables.cells(findings)),
        _section("Arms compared", tables.contrasts(findings)),
        _section("Learning, epoch by epoch", shown(*learning)),
        _section("Memorization", shown("memorization")),
        _section("γ/σ", shown("gamma_sigma")),
        _section("Left out", tables.exclusions(findings)),
        _section("Run", facts(findings)),
        _section("How to read this", reading(findings)),
    ]
    main = re.sub(r"(\d) %", "\\1\N{NO-BREAK SPACE}%", "".join(body))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(findings.name)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{main}\n</main>\n</body>\n</html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{content}\n</section>\n" if content else ""


def _figure(drawing: Drawing) -> str:
    label = escape(f"{drawing.title}. {drawing.caption}", quote=True)
    svg = themed(drawing).replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    return (
        f'<figure>\n<div class="scroll">{svg}</div>\n'
        f"<figcaption>{escape(drawing.caption)}</figcaption>\n</figure>\n"
    )


def themed(drawing: Drawing) -> str:
    """The SVG with its inks as the page's variables and ids that no other figure has."""
    svg = drawing.svg
    for ink, variable in INKS.items():
        svg = svg.replace(ink, f"var({variable}, {ink})")
    svg = re.sub(r'\bid="', f'id="{drawing.name}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{drawing.name}-", svg)
    return re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
