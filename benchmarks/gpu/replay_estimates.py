"""The router's estimates of its servers' speed, replayed on measured requests: the error over time.

    python benchmarks/gpu/replay_estimates.py 0.8_r1_least-outstanding.csv 0.8_r1_default.csv \
        --truth 8101=7.03e-3,34.1e-6,59.4e-6 8102=9.98e-3,69.2e-6,97.4e-6 --out docs/results/estimates-gpu.svg

A file is a block of real requests: arrived_at, first_token_at, completed_at, prompt_tokens, output_tokens
and the `server`. The router's books are told of each in the order of time, from nothing on. Only the first
and the last token have a time; the steps in between are found from all streams of a server together, which
share them: as many a second as fit best what every stream got between its first and its last token. The
truth is a line fitted to the servers' own counters: a step, a prompt token, a stream. The error is that of
a typical step, 64 streams and 256 prompt tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pointsman.report.figure import Figure, Level, Line, linear_axis
from pointsman.report.svg import standalone
from pointsman.report.tables import markdown
from pointsman.routing.books import Books
from pointsman.routing.calibration import typical_step_s

Floats = NDArray[np.float64]

AFTER = (25, 50, 100, 200)
SHOWN_ERROR = 60.0
BIN_S, SMOOTHNESS = 0.1, 0.05
COLOURS = ("#1f77d0", "#d9822b", "#18794e")
SENT, TOKEN, FINISHED = range(3)


class StepClock:
    """How many steps a server has made by when."""

    def __init__(self, run: pl.DataFrame) -> None:
        first, last = (run[name].to_numpy() for name in ("first_token_at", "completed_at"))
        self._edges = np.arange(0.0, last.max() + 2 * BIN_S, BIN_S)
        low, high = self._edges[:-1], self._edges[1:]
        inside_s = np.clip(np.minimum(last[:, None], high) - np.maximum(first[:, None], low), 0, None)
        num_bins = len(low)
        smooth = SMOOTHNESS * (np.eye(num_bins) - np.eye(num_bins, k=1))[:-1]
        table = np.vstack([inside_s, smooth])
        steps = np.concatenate([run["output_tokens"].to_numpy() - 1.0, np.zeros(num_bins - 1)])
        rate = np.maximum(np.linalg.lstsq(table, steps, rcond=None)[0], 1.0)
        self._steps = np.concatenate([[0.0], np.cumsum(rate * BIN_S)])

    def token_times(self, first: float, last: float, count: int) -> Floats:
        begin, end = np.interp([first, last], self._edges, self._steps)
        times: Floats = np.interp(np.linspace(begin, end, count), self._steps, self._edges)
        times[0], times[-1] = first, last
        return times


def replay(run: pl.DataFrame, truth: dict[str, float]) -> dict[str, Floats]:
    """By server, the error of its typical step after each request that it has finished."""
    books = Books(now=0.0)
    slots = {server: books.add(server) for server in truth}
    events: list[tuple[float, int, int]] = []
    rows = run.sort("arrived_at").to_dicts()
    clocks = {server: StepClock(run.filter(pl.col("server").cast(pl.String) == server)) for server in truth}
    for number, row in enumerate(rows):
        first, last, count = row["first_token_at"], row["completed_at"], row["output_tokens"]
        events.append((row["arrived_at"], SENT, number))
        times = clocks[str(row["server"])].token_times(first, last, count)
        events += [(float(at), TOKEN, number) for at in times]
        events.append((last, FINISHED, number))
    tickets, has_begun = [0] * len(rows), [False] * len(rows)
    errors: dict[str, list[float]] = {server: [] for server in truth}
    for at, kind, number in sorted(events):
        row = rows[number]
        server = str(row["server"])
        if kind == SENT:
            tickets[number] = books.sent(slots[server], row["prompt_tokens"], at)
        elif kind == FINISHED:
            books.finished(tickets[number], at, row["prompt_tokens"], row["output_tokens"])
            step_s = typical_step_s(books.replica_signals(slots[server]))
            errors[server].append(abs(step_s / truth[server] - 1.0))
        elif has_begun[number]:
            books.tokens(tickets[number], 1, at)
        else:
            books.first_token(tickets[number], at)
            has_begun[number] = True
    return {server: np.array(found) for server, found in errors.items()}


def typical(text: str) -> tuple[str, float]:
    server, _, figures = text.partition("=")
    step_s, prompt_s, stream_s = map(float, figures.split(","))
    speeds = {
        "step_floor_s": step_s + stream_s,
        "decode_s_per_token": stream_s,
        "prefill_s_per_token": prompt_s,
    }
    return server, typical_step_s(speeds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("blocks", nargs="+", type=Path)
    parser.add_argument("--truth", nargs="+", required=True, metavar="SERVER=STEP,PROMPT,STREAM")
    parser.add_argument("--out", type=Path, default=None, help="figure of the last block")
    asked = parser.parse_args()
    truth = dict(map(typical, asked.truth))
    rows = []
    for path in asked.blocks:
        errors = replay(pl.read_csv(path), truth)
        for server, found in errors.items():
            cells = [f"{100 * found[number - 1]:.1f}" for number in AFTER]
            rows.append(
                [path.stem, server, str(len(found)), *cells, f"{100 * found[AFTER[-1] - 1 :].max():.1f}"]
            )
    header = ["block", "server", "served", *(f"error after {number}, %" for number in AFTER)]
    print(markdown([*header, "largest from then on"], rows))
    if asked.out is not None:
        lines = [
            Line(server, np.arange(1, len(found) + 1), np.minimum(100 * found, SHOWN_ERROR), COLOURS[k])
            for k, (server, found) in enumerate(errors.items())
        ]
        most = max(len(found) for found in errors.values())
        x = linear_axis("requests that the server has served", [], low=0.0, high=float(most))
        y = linear_axis("error of a typical step, %", [], "%", low=0.0, high=SHOWN_ERROR)
        asked.out.write_text(standalone(Figure(asked.blocks[-1].stem, x, y, [*lines, Level(10.0, "10 %")])))


if __name__ == "__main__":
    main()
