"""What the pages of reports and attacks share: one self-contained HTML file, figures inside."""

import re
from collections.abc import Mapping
from html import escape
from pathlib import Path

from engine.report.figures import ARM_INKS, GRID, INK, MUTED, PAPER, Drawing

INKS: Mapping[str, str] = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--line",
    PAPER: "--paper",
    **{ink: f"--arm-{i}" for i, ink in enumerate(ARM_INKS)},
}


def shell(title: str, body: str) -> str:
    """The whole file around the content of its main part; it opens offline."""
    style = (Path(__file__).parent / "report.css").read_text()
    main = re.sub(r"(\d) %", "\\1\N{NO-BREAK SPACE}%", body)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{main}\n</main>\n</body>\n</html>\n"
    )


def section(title: str, content: str) -> str:
    """A titled part of the page; nothing where there is no content."""
    return f"<section>\n<h2>{title}</h2>\n{content}\n</section>\n" if content else ""


NARROW = 5 * 72
"""Points; figures up to so wide are not stretched over the page."""


def figure(drawing: Drawing) -> str:
    """A figure with its caption; the SVG is in the page."""
    width = re.search(r'<svg [^>]*?width="([\d.]+)pt"', drawing.svg)
    small = ' class="small"' if width and float(width.group(1)) <= NARROW else ""
    label = escape(f"{drawing.title}. {drawing.caption}", quote=True)
    svg = themed(drawing).replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    return (
        f'<figure{small}>\n<div class="scroll">{svg}</div>\n'
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
