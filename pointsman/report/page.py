"""One self-contained HTML page: text, tables and figures, plotly inlined once, light and dark.

Figures are drawn when they come into view, so that a page with many opens at once. Each section has one
legend above its figures; a click hides a policy in all of them.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources

from pointsman.report.plots import Figure, style

_DASHES = {"dot": "2 4", "dash": "7 4", "solid": "none"}


@dataclass(frozen=True)
class Section:
    """`body` is HTML; figures are shown below it in columns, as many as fit."""

    title: str
    body: str
    legend: Sequence[str] = ()
    figures: Sequence[Figure] = field(default=())


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """`lead` is HTML."""
    from plotly.offline import get_plotlyjs  # 5 MB, and only a report needs it

    figures: list[Figure] = []
    parts = [_section(index, section, figures) for index, section in enumerate(sections)]
    has_contents = len(sections) > 2
    data = json.dumps(figures, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title>\n<style>{_asset('page.css')}</style>\n</head>\n<body>\n<main>",
            f"<h1>{escape(title)}</h1>\n{lead}",
            _contents(sections) if has_contents else "",
            *parts,
            f'</main>\n<script type="application/json" id="figures">{data}</script>',
            f"<script>{get_plotlyjs()}</script>\n<script>{_asset('page.js')}</script>\n</body>\n</html>\n",
        )
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML."""
    head = "".join(f'<th scope="col">{cell}</th>' for cell in header)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>\n'
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def escape(text: str) -> str:
    return html.escape(text)


def _contents(sections: Sequence[Section]) -> str:
    links = " ".join(f'<a href="#s{i}">{escape(section.title)}</a>' for i, section in enumerate(sections))
    return f"<nav>{links}</nav>"


def _section(index: int, section: Section, figures: list[Figure]) -> str:
    boxes = []
    for figure in section.figures:
        height = figure["layout"]["height"]
        name = escape(figure["layout"]["title"]["text"])
        style_text = f"min-height:{height}px"
        boxes.append(
            f'<div class="figure" role="img" aria-label="{name}" data-figure="{len(figures)}" '
            f'style="{style_text}"></div>'
        )
        figures.append(figure)
    items = "".join(map(_legend_item, section.legend))
    legend = f'<div class="legend">{items}</div>' if items else ""
    grid = f'<div class="figures">{"".join(boxes)}</div>' if boxes else ""
    title = escape(section.title)
    return f'<section id="s{index}">\n<h2>{title}</h2>\n{section.body}\n{legend}\n{grid}\n</section>'


def _legend_item(policy: str) -> str:
    colour, dash = style(policy)
    line = f'stroke="{colour}" stroke-width="3" stroke-dasharray="{_DASHES[dash]}"'
    swatch = f'<svg width="26" height="8" aria-hidden="true"><path d="M0 4H26" {line}/></svg>'
    name = escape(policy)
    return f'<button type="button" aria-pressed="true" data-policy="{name}">{swatch}{name}</button>'


def _asset(name: str) -> str:
    return resources.files("pointsman.report").joinpath(name).read_text("utf-8")
