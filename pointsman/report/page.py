"""One self-contained HTML page: text, tables and figures, light and dark, for phones and paper, too.

The pages are made of six small pieces, which f-strings say more shortly than a template language would.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from pointsman.files import write_files
from pointsman.plain import to_json
from pointsman.report.figure import Figure
from pointsman.report.svg import inline


@dataclass(frozen=True)
class Section:
    """`body` is HTML; figures are shown below it in columns, as many as fit, or in pairs."""

    title: str
    body: str = ""
    figures: Sequence[Figure] = field(default=())
    more: Sequence[Figure] = field(default=())  # folded away
    more_title: str = "More"
    is_paired: bool = False


def write_report(folder: Path, results: Any, markdown: str, html: str) -> None:
    """The three files of every report."""
    texts = {"results.json": to_json(results, indent=1) + "\n", "table.md": markdown, "report.html": html}
    write_files(folder, texts)


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """`lead` is HTML."""
    has_contents = len(sections) > 2
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title>\n<style>{_asset('page.css')}</style>\n</head>\n<body>\n<main>",
            f"<h1>{escape(title)}</h1>\n{lead}",
            _contents(sections) if has_contents else "",
            *(_section(index, section) for index, section in enumerate(sections)),
            '</main>\n<div id="values" role="status"></div>',
            f"<script>{_asset('page.js')}</script>\n</body>\n</html>\n",
        )
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int] = ()) -> str:
    """Cells are HTML. Columns in `words` hold text rather than numbers."""
    head = "".join(
        f'<th scope="col"{" class=words" if column in words else ""}>{cell}</th>'
        for column, cell in enumerate(header)
    )
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>'
        + "".join(_cell(cell, column in words) for column, cell in enumerate(row) if column > 0)
        + "</tr>\n"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def folded(title: str, body: str) -> str:
    """HTML that opens with a click."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def paragraphs(lines: Sequence[str], style: str = "") -> str:
    """Lines of plain text."""
    opening = f'<p class="{style}">' if style else "<p>"
    return "".join(f"{opening}{unbroken(line)}</p>" for line in lines)


def escape(text: str) -> str:
    return html.escape(text)


# Browsers break lines within `--set`, between a number and its unit, and within an interval. A span keeps
# each of them whole; characters that do not break would come along with what a reader copies.
_UNIT, _INTERVAL = r" (?:%|(?:ms|s|min|h)\b)", r" \[[^]]{1,30}\]"
_WHOLE = re.compile(rf"(?<![\w-])--[a-z][\w-]*|[+−]?\d[\d.,]*(?:{_UNIT}(?:{_INTERVAL})?|{_INTERVAL})")


def unbroken(text: str) -> str:
    """The same for running text and commands, with what belongs together on one line."""
    return _WHOLE.sub(r'<span class="whole">\g<0></span>', escape(text))


def _cell(cell: str, is_text: bool) -> str:
    return f'<td class="words">{cell}</td>' if is_text else f"<td>{cell}</td>"


def _contents(sections: Sequence[Section]) -> str:
    links = " ".join(f'<a href="#s{i}">{escape(section.title)}</a>' for i, section in enumerate(sections))
    return f"<nav>{links}</nav>"


def _section(index: int, section: Section) -> str:
    grids = [_grid(figures, section.is_paired) for figures in (section.figures, section.more)]
    more = folded(section.more_title, grids[1]) if section.more else ""
    parts = (f"<h2>{escape(section.title)}</h2>", section.body, grids[0], more)
    return "\n".join((f'<section id="s{index}">', *filter(None, parts), "</section>"))


def _grid(figures: Sequence[Figure], is_paired: bool) -> str:
    boxes = "".join(f"<figure>{inline(figure)}</figure>\n" for figure in figures)
    style = "figures pairs" if is_paired else "figures"
    return f'<div class="{style}">{boxes}</div>' if boxes else ""


def _asset(name: str) -> str:
    return resources.files("pointsman.report").joinpath(name).read_text("utf-8")
