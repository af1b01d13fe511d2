"""What vLLM has counted, and what the router has, for benchmarks/real_vllm.py."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen


class Router(NamedTuple):
    url: str
    admin_url: str


def get(url: str) -> bytes:
    with urlopen(url, timeout=30) as answer:
        return bytes(answer.read())


class Book(NamedTuple):
    """Of one server, or of all."""

    requests: int
    prompt_tokens: int
    output_tokens: int

    def __sub__(self, other: Book) -> Book:
        return Book(*(mine - its for mine, its in zip(self, other, strict=True)))


EMPTY = Book(0, 0, 0)


def total(books: Sequence[Book]) -> Book:
    return Book(*map(sum, zip(EMPTY, *books, strict=True)))


def samples(text: str, name: str) -> Iterator[tuple[str, int]]:
    """Labels and values of a metric."""
    for labels, value in re.findall(rf"^{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE):
        yield labels, int(float(value))


def servers_books(servers: Sequence[str]) -> list[Book]:
    names = ("request_success", "prompt_tokens", "generation_tokens")
    texts = [get(f"{server}/metrics").decode() for server in servers]
    return [
        Book(*(sum(value for _, value in samples(text, f"vllm:{name}_total")) for name in names))
        for text in texts
    ]


def routers_books(made: Router, servers: Sequence[str]) -> list[Book]:
    text = get(f"{made.url}/metrics").decode()

    def count(name: str, *labels: str) -> int:
        found = samples(text, f"pointsman_{name}_total")
        return sum(value for its, value in found if all(label in its for label in labels))

    return [
        Book(
            count("requests", f'replica="{server}"', 'code="200"'),
            count("tokens", f'replica="{server}"', 'kind="prompt"'),
            count("tokens", f'replica="{server}"', 'kind="output"'),
        )
        for server in servers
    ]


def recorded_book(path: Path) -> Book:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    prompt, output = (sum(line[f"num_{kind}_tokens"] for line in lines) for kind in ("prefill", "decode"))
    return Book(sum(line["outcome"] == "completed" for line in lines), prompt, output)


def open_items(made: Router) -> dict[str, float]:
    """What the router believes to be under way."""
    last = json.loads(get(f"{made.admin_url}/admin/decisions?last=1"))["last"]
    names = ("outstanding", "waiting", "pending_prefill_tokens", "context_tokens")
    return {name: sum(replica[name] for replica in last["seen"]["replicas"]) for name in names}


class Since:
    """Both books, from now on."""

    def __init__(self, made: Router, servers: Sequence[str]) -> None:
        self._made, self._servers = made, servers
        self._theirs, self._ours = self._read()

    def _read(self) -> tuple[list[Book], list[Book]]:
        return servers_books(self._servers), routers_books(self._made, self._servers)

    def changes(self) -> tuple[list[Book], list[Book]]:
        theirs, ours = self._read()
        return (
            [new - old for new, old in zip(theirs, self._theirs, strict=True)],
            [new - old for new, old in zip(ours, self._ours, strict=True)],
        )
