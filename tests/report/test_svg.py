from __future__ import annotations

import math
import re
import struct
import zlib
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pointsman.report.figure import (
    Band,
    Bar,
    Cell,
    Dots,
    Figure,
    Flags,
    Ladder,
    Level,
    Line,
    Map,
    linear_axis,
    row_axis,
)
from pointsman.report.png import ZOOM, file_name, to_png, write_figures
from pointsman.report.svg import MARGIN, WIDTH, inline, standalone

SVG = "{http://www.w3.org/2000/svg}"
X = linear_axis("time, s", [0.0, 10.0], low=0.0, high=10.0)
Y = linear_axis("share, %", [0.0, 10.0], low=0.0, high=10.0)


def lines() -> Figure:
    marks = [
        Level(5.0, "P50"),
        Band("band <&>", [0, 10], [1, 1], [2, 3], "#123456"),
        Line("long name of a policy", [0, 5, 10], [0, math.nan, 10], "#00f"),
        *(Line(f"policy-{number}", [0, 10], [number, number], "#f00", "2 3") for number in range(9)),
        Flags("alerts", [4.0], ["update 4: too far"], "#f00"),
    ]
    return Figure("Title <&>", X, Y, marks, note="A note. " * 20)


def others() -> list[Figure]:
    cells = [Cell((0.0, 5.0), 0, 0.2, "first"), Cell((5.0, 10.0), 1, 1.0, "second")]
    rows = row_axis(["a", "b"])
    return [
        Figure("Bars", X, rows, [Bar(0, 1.0, 4.0, "#f00", "four", (3.0, 5.0))]),
        Figure("Ladders", X, rows, [Ladder("one", 0, [1, 2], ["P50", "P99"], "#f00")]),
        Figure("Map", X, rows, [Map(cells, "#00f", "0", "9 requests")]),
    ]


@pytest.mark.parametrize("figure", [lines(), *others()], ids=lambda figure: figure.title)
def test_figures_have_title_units_and_a_plot(figure: Figure) -> None:
    root = ElementTree.fromstring(standalone(figure))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert texts[0] == figure.title
    assert figure.x.title in texts
    assert all(text in texts for _, text in figure.x.ticks)
    assert figure.y.title in texts or figure.y.title == ""
    (plot,) = (element for element in root.iter(f"{SVG}svg") if element.get("class") == "plot")
    assert len(plot) > 1
    assert "var(" not in standalone(figure), "it brings its own colours"
    ElementTree.fromstring(inline(figure))


def test_the_legend_is_above_the_plot_and_within_the_figure() -> None:
    root = ElementTree.fromstring(standalone(lines()))
    (plot,) = (element for element in root.iter(f"{SVG}svg") if element.get("class") == "plot")
    keys = [element for element in root.iter(f"{SVG}g") if element.get("class") == "key"]
    assert [key.get("data-series") for key in keys][:2] == ["band <&>", "long name of a policy"]
    assert len(keys) == 12, "a key for every name, none for levels"
    for key in keys:
        found = re.match(r"translate\((\S+) (\S+)\)", key.get("transform", ""))
        assert found is not None
        assert 0 <= float(found[1]) < WIDTH - 40
        assert float(found[2]) + 6 < float(plot.get("y", "0"))


def test_long_names_leave_room_for_the_figure() -> None:
    name = "a-policy-with-a-name-" + 5 * "that-never-ends-"
    rows = row_axis([name, "b"])
    figure = Figure(10 * "A long title ", X, rows, [Ladder(name, 0, [1, 2], ["P50", "P99"], "#f00")])
    root = ElementTree.fromstring(standalone(figure))
    (plot,) = (element for element in root.iter(f"{SVG}svg") if element.get("class") == "plot")
    assert float(plot.get("width", "0")) > WIDTH / 2
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert sum(text.startswith("a-policy") and text.endswith("…") for text in texts) == 2
    titles = [element for element in root.iter(f"{SVG}text") if element.get("class") == "title"]
    assert len(titles) > 1 and " ".join(title.text or "" for title in titles) == figure.title.strip()


def test_lines_are_where_their_values_are() -> None:
    root = ElementTree.fromstring(standalone(lines()))
    (plot,) = (element for element in root.iter(f"{SVG}svg") if element.get("class") == "plot")
    (line,) = (one for one in plot.iter(f"{SVG}path") if one.get("data-series") == "long name of a policy")
    points = [tuple(map(float, pair.split())) for pair in line.get("d", "")[1:].split("L")]
    width, height = float(plot.get("width", "0")), float(plot.get("height", "0"))
    assert points == [pytest.approx((0.0, height), abs=0.06), pytest.approx((width, 0.0), abs=0.06)], "no NaN"


def test_marks_on_the_edges_are_drawn_whole_and_those_beyond_not_at_all() -> None:
    marks = [
        Line("line", [0, 5, 10], [0, 5, 12], "#00f", has_dots=True),
        Dots("dots", [0, 10, 11], [0, 10, 5], ["first", "last", "beyond"], "#00f"),
        Flags("alerts", [0.0, 12.0], ["update 0", "update 12"], "#f00"),
    ]
    root = ElementTree.fromstring(standalone(Figure("Edges", X, Y, marks)))
    plot, points = (one for one in root.iter(f"{SVG}svg") if one.get("class") in ("plot", "points"))
    assert not list(plot.iter(f"{SVG}circle")), "the plot is cut off at its edges"
    assert points.get("overflow") == "visible"
    assert [points.get(name) for name in ("x", "y", "width", "height")] == [
        plot.get(name) for name in ("x", "y", "width", "height")
    ]
    groups = [(one.get("data-series"), len(list(one.iter(f"{SVG}circle")))) for one in points]
    assert groups == [("line", 2), ("dots", 2), ("alerts", 0)]
    titles = [one.text for one in points.iter(f"{SVG}title")]
    assert titles == ["first", "last", "update 0"]


def test_cells_touch() -> None:
    figure = others()[2]
    boxes = re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"[^>]*><title>', standalone(figure))
    (x, width), (following, _) = (tuple(map(float, box)) for box in boxes)
    assert x + width == pytest.approx(following, abs=1e-9)


def pixels(png: bytes) -> tuple[int, int, bytes]:
    """Width, height, and the raw rows of a PNG, checksums checked."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, data, size = 8, b"", (0, 0)
    while at < len(png):
        (length,) = struct.unpack_from(">I", png, at)
        kind, body = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", png, at + 8 + length)[0] == zlib.crc32(kind + body)
        if kind == b"IHDR":
            size = struct.unpack_from(">II", body)
        data += body if kind == b"IDAT" else b""
        at += 12 + length
    return *size, zlib.decompress(data)


def test_pictures_have_text_without_any_font_of_the_system() -> None:
    figure = Figure("A", X, Y, [])
    plain, titled = (to_png(standalone(one)) for one in (figure, Figure("Latency −34 % [×2]", X, Y, [])))
    width, height, rows = pixels(titled)
    assert (width, height) == (ZOOM * (WIDTH + 2 * MARGIN), pixels(plain)[1])
    assert height > ZOOM * figure.height
    assert rows != pixels(plain)[2], "the title is drawn"


def test_every_figure_becomes_two_files(tmp_path: Path) -> None:
    written = write_figures(tmp_path, {file_name(one.title): one for one in others()})
    assert [path.name for path in written] == [
        f"{name}.{kind}" for name in ("bars", "ladders", "map") for kind in ("svg", "png")
    ]
    for path in written:
        if path.suffix == ".svg":
            ElementTree.parse(path)
        else:
            pixels(path.read_bytes())
    assert file_name("End-to-end latency, P99 [s]") == "end-to-end-latency-p99-s"
