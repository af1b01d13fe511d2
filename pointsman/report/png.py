"""Figures as pictures: SVG for print, PNG at three times its size for slides and papers that take no SVG."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import resvg_py

from pointsman.files import replace_file
from pointsman.report.figure import Figure
from pointsman.report.svg import standalone

ZOOM = 3
# Comes with the package, cut to Latin letters (Apache-2.0): pictures look the same where there are no fonts.
FONT = "roboto.ttf"


def to_png(svg: str) -> bytes:
    with resources.as_file(resources.files("pointsman.report").joinpath(FONT)) as font:
        return bytes(
            resvg_py.svg_to_bytes(
                svg_string=svg,
                zoom=ZOOM,
                skip_system_fonts=True,
                font_files=[str(font)],
                font_family="Roboto",
                sans_serif_family="Roboto",
            )
        )


def write_figures(folder: Path, figures: Mapping[str, Figure]) -> list[Path]:
    """`<name>.svg` and `<name>.png` of each."""
    written = []
    for name, figure in figures.items():
        svg = standalone(figure)
        for path, data in ((f"{name}.svg", svg.encode()), (f"{name}.png", to_png(svg))):
            replace_file(folder / path, data)
            written.append(folder / path)
    return written


def file_name(title: str) -> str:
    """`End-to-end latency, P99` -> `end-to-end-latency-p99`"""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
