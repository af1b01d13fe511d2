"""The measured tables of README and docs: where they stand, what they say, and whether new figures differ.

Each stands between two comments, with a line below it that says how, when and from which code it was made:

    <!-- figures: NAME -->
    …
    *`COMMAND`; SEEDS; DATE, revision REVISION.*
    <!-- end of figures -->

For benchmarks/results.py, which knows the commands, and for the tests.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
END = "<!-- end of figures -->"
BLOCK = re.compile(rf"<!-- figures: (\S+) -->\n(.*?)\n?{END}", re.DOTALL)
MADE = re.compile(
    r"^\*`(?P<command>.+)`; (?P<seeds>.+); (?P<date>\d{4}-\d\d-\d\d), revision (?P<revision>\w+).*\*$"
)
NORMAL_95 = 1.96
_NUMBER = r"[+−-]?\d[\d,]*(?:\.\d+)?"
_FIGURE = re.compile(rf"({_NUMBER})(?: %)?(?: ± ({_NUMBER})| \[({_NUMBER}), ({_NUMBER})\])?")


class Figure(NamedTuple):
    """A number, with the interval of 95 % if it has one."""

    value: float
    low: float | None = None
    high: float | None = None

    def differs_from(self, other: Figure) -> bool:
        """By more than their intervals; without them, nobody can tell."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return False
        return self.low > other.high or other.low > self.high


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text: str) -> dict[str, str]:
    """What stands between the comments, by name."""
    return dict(BLOCK.findall(text))


def replaced(text: str, name: str, block: str) -> str:
    """The page with another block of this name, all else as it was."""
    start = f"<!-- figures: {name} -->\n"
    before, _, rest = text.partition(start)
    _, end, after = rest.partition(END)
    assert start in text and end, name
    return f"{before}{start}{block.strip()}\n{end}{after}"


def tables(text: str) -> list[list[str]]:
    """The lines of every table."""
    found: list[list[str]] = []
    is_inside = False
    for line in text.splitlines():
        if line.startswith("|"):
            if not is_inside:
                found.append([])
            found[-1].append(line)
        is_inside = line.startswith("|")
    return found


def cells(line: str) -> list[str]:
    return [cell.strip(" *") for cell in line.strip().strip("|").split("|")]


def figures(text: str) -> dict[str, list[Figure]]:
    """Of every cell that has some: `heading, row, column` -> its figures.

    Columns of figures are aligned to the right; where none is, the first column names the row.
    """
    found: dict[str, list[Figure]] = {}
    for heading, table in _with_headings(text):
        header, alignment, *rows = map(cells, table)
        is_label = [not one.endswith(":") for one in alignment]
        if all(is_label):
            is_label = [True] + [False] * (len(header) - 1)
        seen: Counter[str] = Counter()
        for row in rows:
            label = ", ".join(cell for cell, named in zip(row, is_label, strict=True) if named and cell)
            seen[label] += 1
            where = ", ".join(part for part in (heading, label) if part)
            where += f" ({seen[label]})" if seen[label] > 1 else ""
            for cell, column, named in zip(row, header, is_label, strict=True):
                numbers = parse(cell)
                if numbers and not named:
                    found[f"{where}: {column}"] = numbers
    return found


def _with_headings(text: str) -> Iterator[tuple[str, list[str]]]:
    for part in re.split(r"^#+ ", f"\n{text}", flags=re.MULTILINE):
        heading, _, body = part.partition("\n")
        for table in tables(body):
            yield heading.strip(), table


def parse(cell: str) -> list[Figure]:
    """`0.343 (+46 % [44, 49])`: 0.343, and 46 between 44 and 49. After ± stands a standard error."""
    found = []
    for value, error, low, high in _FIGURE.findall(cell):
        number = _float(value)
        if error:
            half = NORMAL_95 * _float(error)
            found.append(Figure(number, number - half, number + half))
        elif low:
            found.append(Figure(number, _float(low), _float(high)))
        else:
            found.append(Figure(number))
    return found


def _float(text: str) -> float:
    return float(text.replace("−", "-").replace(",", ""))


def differences(old: str, new: str) -> list[str]:
    """A line for each figure that differs by more than its interval, and one for all of any other kind."""
    before, after = figures(old), figures(new)
    lines = []
    for word, some, others in (("gone", before, after), ("new", after, before)):
        lost = [where for where in some if where not in others]
        if lost:
            lines.append(f"{word}: {len(lost)} of {len(some)}, first {lost[0]}")
    changes: dict[str, float] = {}
    for where in before.keys() & after.keys():
        then, now = before[where], after[where]
        if any(one.differs_from(other) for one, other in zip(now, then, strict=False)):
            lines.append(f"differs: {where}: {_text(then)} -> {_text(now)}")
        elif then != now and all(one.low is None for one in (*then, *now)):
            pairs = zip(then, now, strict=False)
            changes[where] = max(abs(b.value - a.value) / max(abs(a.value), 1e-9) for a, b in pairs)
    if changes:
        most = max(changes, key=changes.__getitem__)
        lines.append(
            f"changed, without an interval: {len(changes)} of {len(before)}, "
            f"most {most}: {_text(before[most])} -> {_text(after[most])}"
        )
    return sorted(lines)


def _text(numbers: list[Figure]) -> str:
    return "; ".join(
        f"{one.value:g}" + (f" [{one.low:g}, {one.high:g}]" if one.low is not None else "") for one in numbers
    )
