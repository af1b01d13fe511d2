"""What documentation, docstrings and comments refer to is there."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = sorted((ROOT / "pointsman").rglob("*.py"))
NOT_FOR_READERS = re.compile(
    r"DESIGN\.md|STYLE\.md|REQUIREMENTS|requirement [A-Z]\d|\bthe seeds (did|of this)"
)


def mentioned(text: str) -> set[str]:
    """Source files that are named, with or without folders."""
    return set(re.findall(r"(?<![\w./*-])(?:[\w-]+/)*[\w-]+\.py(?![\w(])", text))


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


def test_links_lead_somewhere() -> None:
    wrong = [
        (page.name, link) for page in PAGES for link in local_links(page) if not (page.parent / link).exists()
    ]
    assert wrong == []


def test_files_that_are_named_exist() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in [*PAGES[:2], *SOURCES]}
    wrong = [
        (path.name, name) for path, text in texts.items() for name in mentioned(text) if not is_there(name)
    ]
    assert wrong == []


def test_functions_of_the_walks_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)`\s+`([\w.]+)`", page)
    assert len(named) > 30

    def defines(file: str, name: str) -> bool:
        source = (ROOT / "pointsman" / file).read_text(encoding="utf-8")
        return all(re.search(rf"\b(def|class) {part}\b", source) for part in name.split("."))

    assert [one for one in named if not defines(*one)] == []
    assert not defines("simulator/run.py", "walk")


def test_nothing_refers_to_what_readers_do_not_have() -> None:
    assert [path for path in SOURCES if NOT_FOR_READERS.search(path.read_text(encoding="utf-8"))] == []


def test_docstrings_are_sentences() -> None:
    """At least they do not begin in the middle of one."""
    begins = re.compile(r'"""(Beside|By|For what|In what|Of|On what|That|Those|Whom|With|Without) ')
    assert [path for path in SOURCES if begins.search(path.read_text(encoding="utf-8"))] == []


def test_a_class_name_is_defined_once() -> None:
    names = Counter(
        name
        for path in SOURCES
        for name in re.findall(r"^class (\w+)", path.read_text("utf-8"), re.MULTILINE)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_a_wrong_name_is_noticed() -> None:
    assert mentioned("see simulator/memory.py, jit.py and [a](docs/b.md)") == {
        "simulator/memory.py",
        "jit.py",
    }
    assert not is_there("simulator/memory.py")
    assert is_there("compiled/memory.py")
    assert is_there("jit.py")
