"""What a policy looks at: features whose loss changes its choices, and attention where it has any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pointsman.evaluation.explain import (
    Importance,
    Network,
    RecordedDecisions,
    features_of,
    groups_of,
    importances,
    record_in,
)
from pointsman.evaluation.problem import make_env
from pointsman.inference.checkpoint import Checkpoint
from pointsman.report.figure import Axis, Bar, Cell, Figure, Map, linear_axis, row_axis
from pointsman.report.page import Section, paragraphs
from pointsman.report.plots import ROW_HEIGHT

NUM_ENVS, NUM_DECISIONS = 32, 1024
NUM_SHOWN = 14
COLOUR = "#00897b"
ATTENTION = (
    "Attention: what each entity (row) looks at (columns), entities in the order in which the policy prefers "
    "them, means over decisions."
)


def looks_section(
    env_section: dict[str, Any], checkpoint: Checkpoint, advance: Callable[[float], None]
) -> Section:
    """From decisions of the policy in the environments it was trained in; `advance` gets 1 in all."""
    env = make_env(env_section, NUM_ENVS)
    decisions = record_in(env, checkpoint, NUM_DECISIONS)
    network = Network(checkpoint)
    found = [
        importances(network, decisions, parts, advance=lambda share: advance(share / 2))
        for parts in (groups_of(checkpoint.space), features_of(checkpoint.space))
    ]
    lines = [
        f"{len(decisions):,} decisions in the environments of the run. A feature, or a group of them, is "
        "given the values of other decisions; shown is how many decisions then turn out differently. "
        "Features that say nearly the same share the credit: groups tell more."
    ]
    titles = ("Groups of features", "Single features")
    figures = [_bars(title, rows[:NUM_SHOWN]) for title, rows in zip(titles, found, strict=True)]
    if checkpoint.network.kind.startswith("attention"):
        heads = _attention(checkpoint, decisions)
        figures += heads
        lines.append(
            ATTENTION if heads else "Its attention can be shown where pointsman[train] is installed."
        )
    return Section("What the policy looks at", paragraphs(lines), figures)


def _bars(title: str, rows: Sequence[Importance]) -> Figure:
    bars = [
        Bar(index, 0.0, 100 * one.changed, COLOUR, f"{one.name}: {100 * one.changed:.1f} % change")
        for index, one in enumerate(rows)
    ]
    x = linear_axis("decisions that change, %", [bar.end for bar in bars], " %", low=0.0)
    return Figure(title, x, row_axis([one.name for one in rows]), bars, height=8 + ROW_HEIGHT * len(rows))


def _attention(checkpoint: Checkpoint, decisions: RecordedDecisions) -> list[Figure]:
    """A map a head; none without PyTorch."""
    try:
        from pointsman.training.attention import attention_by_preference
    except ImportError:
        return []
    weights = attention_by_preference(checkpoint, decisions)
    assert weights is not None
    return [_head(index, part) for index, part in enumerate(weights)]


def _head(head: int, weights: NDArray[np.float64]) -> Figure:
    """`weights` [n, n], rows sum to 1."""
    highest = float(weights.max())
    names = [f"{index + 1}." for index in range(len(weights))]
    cells = [
        Cell((column - 0.5, column + 0.5), row, float(value) / highest, f"{100 * value:.0f} %")
        for (row, column), value in np.ndenumerate(weights)
    ]
    marks = [Map(cells, "#8e5bd0", "0", f"{100 * highest:.0f} % of the attention")]
    first, last = -0.5, len(names) - 0.5
    ticks = [(float(index), name) for index, name in enumerate(names)]
    x = Axis("looked at, by preference", first, last, ticks)
    y = Axis("looking, by preference", last, first, ticks)
    return Figure(f"Attention, head {head + 1}", x, y, marks, height=24 * len(names))
