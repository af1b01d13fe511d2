"""Draws who imports whom into docs/architecture.md, from the imports in the code.

Run: python benchmarks/architecture_picture.py            writes the picture
     python benchmarks/architecture_picture.py --check    says whether it is up to date; `make lint` runs this

Imports count wherever they stand, in functions and for types as well. An arrow is left out where others lead
the same way.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from house_counts import HERE, imports

PAGE = HERE / "docs" / "architecture.md"
BEGIN, END = "<!-- picture: made by benchmarks/architecture_picture.py -->\n", "<!-- end of the picture -->\n"
BASE = ("errors", "files", "plain", "spec")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = before + BEGIN + picture(folders(HERE)) + END + after
    if is_check and wanted != text:
        print(f"{PAGE}: the picture is out of date; run: python benchmarks/architecture_picture.py")
        return 1
    if not is_check:
        PAGE.write_text(wanted, encoding="utf-8")
    return 0


def folders(checkout: Path) -> dict[str, set[str]]:
    """Folder -> those it imports. Modules beside the folders that everyone may use are one, `base`."""
    sources = {path: path.read_text(encoding="utf-8") for path in (checkout / "pointsman").rglob("*.py")}
    found: dict[str, set[str]] = {"base": set()}
    for name, targets in imports(checkout, sources).items():
        if name != "__main__":
            node = "base" if name in BASE else name
            found.setdefault(node, set()).update("base" if one in BASE else one for one in targets)
    return {node: targets - {node} for node, targets in found.items()}


def picture(graph: dict[str, set[str]]) -> str:
    lines = ["```mermaid", "flowchart TD", f'  base["{", ".join(BASE)}"]']
    for node in sorted(graph):
        lines += [f"  {node} --> {target}" for target in sorted(direct(graph, node))]
    num_arrows = sum(len(targets) for targets in graph.values())
    number = (
        f"{len(graph)} boxes, {num_arrows} pairs of them import; what follows from other arrows is left out."
    )
    return "\n".join([*lines, "```", "", number, ""])


def direct(graph: dict[str, set[str]], node: str) -> set[str]:
    """What it imports and does not reach through another import."""
    return {one for one in graph[node] if not any(reaches(graph, via, one) for via in graph[node] - {one})}


def reaches(graph: dict[str, set[str]], start: str, goal: str) -> bool:
    return start == goal or any(reaches(graph, one, goal) for one in graph.get(start, ()))


if __name__ == "__main__":
    sys.exit(main())
