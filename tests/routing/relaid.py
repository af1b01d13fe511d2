"""Books that are laid out anew at every moment at which they can be while another process reads them.

NUMBA_DISABLE_JIT=1 python relaid.py      # prints what the reader made of it: "moment a b", a line each
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[2])]

from pointsman.routing import sharing  # noqa: E402
from pointsman.routing.books import Books  # noqa: E402
from pointsman.routing.core import Request  # noqa: E402
from pointsman.routing.decider import Decider  # noqa: E402
from pointsman.routing.sharing import SharedBooks  # noqa: E402
from pointsman.routing.signals import NUM_SIGNALS, OUTSTANDING  # noqa: E402

# Of the other process, in both layouts: whoever mixes them up gets another number.
OUTSTANDING_OF = {"a": 1.0, "b": 1000.0}
NUM_LOOKS = len(OUTSTANDING_OF)  # at the columns of a book
ALWAYS = -1


def relaid(moment: int, folder: Path) -> tuple[float, float]:
    """What a process sees outstanding on a and b if the other's book changes at the n-th look at a column."""
    ours = Books(0.0, SharedBooks(folder / f"books {moment}", 2), 0)
    for name in "ab":
        ours.add(name)
    theirs = SharedBooks(folder / f"books {moment}", 2)
    layouts = alternating()
    lay_out(theirs, next(layouts))
    decider = Decider(ours, "least-outstanding")
    look_up, num_looks = sharing.column_of, 0

    def column_of(*arguments: Any) -> int:
        nonlocal num_looks
        if moment in (num_looks, ALWAYS):
            lay_out(theirs, next(layouts))
        num_looks += 1
        return int(look_up(*arguments))

    sharing.column_of = column_of
    try:
        decider.decide(Request(10, arrived_at=1.0), 1, 1.0)
    finally:
        sharing.column_of = look_up
    first, second = decider._merged[OUTSTANDING].tolist()
    return first, second


def alternating() -> Iterator[str]:
    while True:
        yield from ("ab", "ba")


def lay_out(books: SharedBooks, names: str) -> None:
    signals = np.zeros((NUM_SIGNALS, 2))
    signals[OUTSTANDING] = [OUTSTANDING_OF[name] for name in names]
    books.place(1, names, signals)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for moment in (ALWAYS, *range(NUM_LOOKS)):
            sys.stdout.write(f"{moment} {relaid(moment, Path(folder))}\n")
