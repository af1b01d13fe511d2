"""Report pages, taken apart."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")

_PROBE = """<script>addEventListener("load", () => setTimeout(() => parent.postMessage({
  width: innerWidth, content: document.documentElement.scrollWidth,
  figures: [...document.querySelectorAll("figure > svg")].map(svg => {
    const frame = svg.viewBox.baseVal;
    return [...svg.querySelectorAll(":scope > text, .key")].every(part => {
      const box = part.getBBox(), place = part.getCTM(), own = svg.getCTM();
      const left = (place.e - own.e) / own.a + box.x, right = left + box.width;
      return left > frame.x - 3 && right < frame.x + frame.width + 3;
    });
  }),
  loaded: performance.getEntriesByType("resource").map(one => one.name),
}, "*")))</script>"""
_WRAPPER = """<!doctype html><iframe src="page.html" width="1280" height="900"></iframe>
<iframe src="page.html" width="390" height="844"></iframe>
<script>const seen = []; addEventListener("message", event => {
  seen.push(event.data); document.documentElement.dataset.seen = JSON.stringify(seen); })</script>"""


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects what they say."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.external: list[str] = []
        self.titles: list[str] = []  # of sections
        self.tables = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.external += [value for name, value in attributes if name in ("src", "href") and value]
        self.tables += tag == "table"
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        pass

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.titles.append(data)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_page(html: str) -> Page:
    """Well-formed, and complete by itself."""
    page = Page(html)
    assert page.open == []
    assert all(link.startswith("#") for link in page.external)
    for loads in ("url(", "@import", "fetch(", "XMLHttpRequest", "http://", "https://"):
        assert loads not in html, loads
    assert len(html.encode()) < 5_000_000
    return page


def figures_of(html: str) -> list[str]:
    """The SVG of each figure."""
    return re.findall(r"<figure>(<svg.*?</svg>)</figure>", html, re.DOTALL)


def look_at(html: str, folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """What a browser sees at 1280 and at 390 pixels, and what it complains about."""
    assert CHROMIUM is not None
    (folder / "page.html").write_text(html.replace("</body>", f"{_PROBE}</body>"))
    (folder / "both.html").write_text(_WRAPPER)
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--enable-logging=stderr")
    done = subprocess.run(
        [
            CHROMIUM,
            *options,
            f"--user-data-dir={folder / 'profile'}",
            "--window-size=1400,1000",
            "--virtual-time-budget=20000",
            "--dump-dom",
            (folder / "both.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found is not None, done.stderr[-2000:]
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(found[1].replace("&quot;", '"')), complaints
