"""One self-contained page that says what a run found, and its figures as SVG files.

The page leads with the answer, then the claims, then what a reader needs to trust them. It opens
offline: style and figures are in the file.
"""

import shutil
from html import escape
from pathlib import Path

from engine import files
from engine.analysis.findings import Findings
from engine.analysis.wording import on_outliers
from engine.report import tables
from engine.report.figures import Drawing, draw_all
from engine.report.page import figure, section, shell
from engine.report.text import care, context, facts, legend, reading
from engine.store import Run


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
    by_name = {drawing.name: drawing for drawing in drawings}

    def shown(*names: str) -> str:
        return "".join(figure(by_name[name]) for name in names if name in by_name)

    learning = tuple(name for name in by_name if name.startswith("learning_"))
    body = [
        f"<h1>{escape(findings.question)}</h1>",
        f'<p class="answer">{escape(findings.answer)}</p>',
        f'<p class="beside">{escape(on_outliers(findings))}</p>',
        f'<p class="quiet">{escape(context(findings))}</p>',
        legend(findings),
        shown("differences"),
        section("Read with care", care(findings)),
        section("Claims", tables.claims(findings)),
        section("ROC", shown("roc")),
        section("Attack, accuracy and loss side by side", tables.cells(findings)),
        section("Arms compared", tables.contrasts(findings)),
        section("Learning, epoch by epoch", shown(*learning)),
        section("Memorization", shown("memorization")),
        section("γ/σ", shown("gamma_sigma")),
        section("Left out", tables.exclusions(findings)),
        section("Run", facts(findings)),
        section("How to read this", reading(findings)),
    ]
    return shell(findings.name, "".join(body))
