"""The figures of README and docs: each has a source, and benchmarks/results.py tells when one has changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from simulator.factories import load_benchmark

ROOT = Path(__file__).parents[1]
documented = load_benchmark("documented")  # before `results`, which imports it
results = load_benchmark("results")

# Tables with numbers that nobody measured: by their page and the beginning of their header.
NOT_MEASURED = {
    ("jobs.md", "| policy | starts"): "published by others",
    ("jobs.md", "| trace | `submitted_at`"): "columns of other people's logs",
    ("jobs.md", "| term |"): "definitions",
    ("prefix-caching.md", "| heuristic | rule"): "default parameters",
    ("prefix-caching.md", "| scenario | traffic"): "what scenarios are made of",
    ("diagnosis.md", "| finding"): "thresholds",
    ("configuration.md", "| key | meaning"): "keys and their defaults",
    ("deploying.md", "| check | asks"): "limits of the checks",
    ("emulator.md", "| | |"): "what is real",
    ("emulator.md", "| kind | what happens"): "faults",
    ("envoy.md", "| of the endpoint picker"): "the protocol",
    ("envoy.md", "| `request_body_mode`"): "what modes there are",
    ("live.md", "| metric | from"): "how it is done",
    ("live.md", "| | |"): "how training goes",
    ("own-traffic.md", "| | |"): "parts of a trace",
    ("chaos.md", "| fault | what the server does"): "definitions",
    ("serving.md", "| signal | from"): "what is known from where",
    ("serving.md", "| | |"): "what happens when",
    ("several-routers.md", "| | |"): "what happens when",
    ("simulator.md", "| kind | what it is"): "names",
    ("training.md", "| file | what"): "files of a run",
}


def unsourced(name: str, text: str) -> list[str]:
    """Headers of tables with figures outside of every block."""
    outside = documented.BLOCK.sub("", text)
    return [
        table[0]
        for table in documented.tables(outside)
        if re.search(r"\d", re.sub(r"`[^`]*`", "", "".join(table[2:])))
        and not any(name == page and table[0].startswith(header) for page, header in NOT_MEASURED)
    ]


def test_every_table_with_figures_has_a_source() -> None:
    known = {
        name: one.page for source in results.read_sources().values() for name, one in source.tables.items()
    }
    found = {
        name: str(page.relative_to(ROOT))
        for page in documented.pages()
        for name in documented.blocks(page.read_text())
    }
    assert found == known
    assert {
        page.name: lost for page in documented.pages() if (lost := unsourced(page.name, page.read_text()))
    } == {}


def test_a_figure_without_a_source_is_found() -> None:
    page = "| policy | TTFT |\n|---|--:|\n| random | 0.3 |\n"
    assert unsourced("new.md", page) == ["| policy | TTFT |"]
    assert unsourced("new.md", f"<!-- figures: new -->\n{page}\n<!-- end of figures -->\n") == []


def test_every_block_says_how_when_and_from_what_it_was_made() -> None:
    for source in results.read_sources().values():
        program, script, *_ = source.command.split()
        assert program == "pointsman" or (ROOT / script).is_file(), source.command
        for name, one in source.tables.items():
            last = documented.blocks((ROOT / one.page).read_text())[name].splitlines()[-1]
            made = documented.MADE.match(last)
            assert made is not None, f"{one.page}, {name}: {last}"
            assert made["command"] == results.shown_command(source), name
            assert made["seeds"] == source.seeds, name


OLD = """\
## steady-chat

| policy | TTFT mean | within SLO |
|---|--:|--:|
| random | 0.343 (+46 % [44, 49]) | 98.2 % |
| sjf | 0.527 ± 0.003 | 1,213 |
"""


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (("[44, 49]", "[45, 50]"), []),
        (
            ("+46 % [44, 49]", "+52 % [50, 54]"),
            ["differs: steady-chat, random: TTFT mean: 0.343; 46 [44, 49] -> 0.343; 52 [50, 54]"],
        ),
        (
            ("0.527 ± 0.003", "0.540 ± 0.003"),
            ["differs: steady-chat, sjf: TTFT mean: 0.527 [0.52112, 0.53288] -> 0.54 [0.53412, 0.54588]"],
        ),
        (
            ("98.2 %", "49.1 %"),
            ["changed, without an interval: 1 of 4, most steady-chat, random: within SLO: 98.2 -> 49.1"],
        ),
        (
            ("| sjf |", "| fifo |"),
            [
                "gone: 2 of 4, first steady-chat, sjf: TTFT mean",
                "new: 2 of 4, first steady-chat, fifo: TTFT mean",
            ],
        ),
    ],
)
def test_figures_differ_when_their_intervals_do_not_meet(change: tuple[str, str], lines: list[str]) -> None:
    assert documented.differences(OLD, OLD.replace(*change)) == lines


def test_a_block_is_rewritten_in_place() -> None:
    first, second = (f"<!-- figures: {one} -->\n{one} old\n<!-- end of figures -->\n" for one in "ab")
    page = f"before\n{first}after\n{second}"
    changed = documented.replaced(page, "a", "new\n")
    assert changed == page.replace("a old", "new")
    assert documented.blocks(changed) == {"a": "new", "b": "b old"}


def test_tables_are_taken_from_what_a_command_gives() -> None:
    text = f"words\n\n{OLD}\n## other\n\n| a |\n|---|\n| 1 |\n"
    assert results.Table("x.md", section="other").taken_from(text) == "| a |\n|---|\n| 1 |"
    assert results.Table("x.md", table=1).taken_from(text) == "| a |\n|---|\n| 1 |"
    assert results.Table("x.md", start="## other").taken_from(text).startswith("## other\n\n| a |")
    assert results.Table("x.md").is_by_hand and not results.Table("x.md", table=0).is_by_hand
