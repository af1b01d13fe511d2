"""What documentation, docstrings and comments refer to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = sorted((ROOT / "pointsman").rglob("*.py"))
NOT_FOR_READERS = re.compile(
    r"DESIGN\.md|STYLE\.md|REQUIREMENTS|requirement [A-Z]\d|\bthe seeds (did|of this)"
)


def mentioned(text: str) -> set[str]:
    """Source files and pages that are named, with or without folders."""
    return set(re.findall(r"(?<![\w./*-])(?:[\w-]+/)*[\w-]+\.(?:py|md)(?![\w(])", text))


def is_there(name: str) -> bool:
    return any(
        path.is_file()
        for folder in ("pointsman", "tests", "benchmarks", "docs", "")
        for path in (ROOT / folder).glob(name if "/" in name or not folder else f"**/{name}")
    )


def local_links(page: Path) -> list[str]:
    return [
        target.partition("#")[0]
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
        if not target.startswith(("http", "#"))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert [link for link in local_links(page) if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("path", [*PAGES[:2], *SOURCES], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert [name for name in sorted(mentioned(text)) if not is_there(name)] == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_refers_to_what_readers_do_not_have(path: Path) -> None:
    assert NOT_FOR_READERS.search(path.read_text(encoding="utf-8")) is None


def test_a_wrong_name_is_noticed() -> None:
    assert mentioned("see simulator/memory.py, jit.py and [a](docs/b.md)") == {
        "simulator/memory.py",
        "jit.py",
        "docs/b.md",
    }
    assert not is_there("simulator/memory.py")
    assert is_there("compiled/memory.py")
    assert is_there("jit.py")
