"""`pointsman watch`: a run as it goes, from another terminal, or after it is over."""

from __future__ import annotations

import csv
import itertools
import math
import shlex
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from pointsman.cli.console import stdout
from pointsman.cli.lists import plain_table
from pointsman.cli.training_view import (
    NUM_EVALUATIONS,
    evaluation_line,
    evaluation_table,
    learning_table,
    progress_bar,
    speed,
)

if TYPE_CHECKING:
    from rich.table import Table

    from pointsman.training.logs import Row

POLL_S = 0.5
QUIET_S = 60.0  # without a new row a run counts as stopped; longer where its rows come more slowly
START_S = 300.0  # before the first row there is more to do: compiling, warm start, the first evaluation
NUM_NEWS = 5
WIDTH = 60  # of a sparkline
CURVES = {
    "mean_ep_return": "return",
    "eval_score": "score",
    "entropy_frac": "entropy",
    "approx_kl_mean": "KL",
}


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory of `pointsman train`.")],
) -> None:
    """Follow a run: progress, speed, evaluations, curves and alerts, until it ends or you press Ctrl-C.

    If the output is no terminal, it prints a line for each evaluation and each alert.

    Example: pointsman watch runs/quick-1
    """
    from pointsman.report.record import require_run

    folder = require_run(run, may_be_empty=True)
    console = stdout()
    tail = Tail(folder / "progress.csv")
    with ExitStack() as stack:
        live = (
            stack.enter_context(Live(console=console, refresh_per_second=4)) if console.is_terminal else None
        )
        num_said = 0
        is_new = tail.read()
        if live is None and not is_new:
            console.print(
                f"waiting for the first update in {folder}; Ctrl-C ends it", markup=False, soft_wrap=True
            )
        while True:
            ended = how_it_ended(folder, tail.rows)
            if live is not None:
                live.update(draw(folder, tail.rows))
            elif is_new or ended:
                lines = spoken(folder, tail.rows)
                for line in lines[num_said:]:
                    console.print(line, markup=False, soft_wrap=True)
                num_said = len(lines)
            if ended:
                break
            time.sleep(POLL_S)
            is_new = tail.read()
    console.print(ended, markup=False, soft_wrap=True)


class Tail:
    """The rows of a CSV file that grows by a row at a time, and is replaced when it gets a new column."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        self._header = b""
        self._offset = 0

    def read(self) -> bool:
        """Take up what is new; whether there was anything."""
        if not self.path.exists():
            return False
        with self.path.open("rb") as file:
            header = file.readline()
            if not header.endswith(b"\n"):
                return False
            if header != self._header:
                self._header, self._offset, self.rows = header, len(header), []
            file.seek(self._offset)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]  # the rest is being written
        self._offset += len(text)
        names = _cells(self._header)[0]
        self.rows += [_row(names, cells) for cells in _cells(text)]
        return bool(text)


def _cells(text: bytes) -> list[list[str]]:
    return list(csv.reader(text.decode("utf-8", errors="replace").splitlines()))


def _row(names: Sequence[str], cells: Sequence[str]) -> Row:
    """What is there and finite; every row has an update."""
    row: dict[str, float] = {"update": 0.0}
    for name, cell in zip(names, cells, strict=False):
        try:
            value = float(cell)
        except ValueError:
            continue
        if math.isfinite(value):
            row[name] = value
    return row


def how_it_ended(folder: Path, rows: Sequence[Row]) -> str | None:
    """A line that says so; None while it goes on."""
    from pointsman.diagnosis.readers import read_facts
    from pointsman.report.record import is_over

    resume = shlex.join(["pointsman", "train", "--resume", str(folder)])
    stopped = read_facts(folder).stopped if (folder / "stopped.json").exists() else {}
    if stopped:
        return f"stopped by itself: {stopped.get('why', 'for no known reason')}; to go on: {resume}"
    if rows and is_over(folder, rows[-1]):
        report = shlex.join(["pointsman", "report", str(folder)])
        return f"finished after update {rows[-1]['update']:.0f}; next: {report}"
    quiet_s = time.time() - _last_change(folder)
    if rows:
        times = [row["elapsed_s"] for row in rows[-20:] if "elapsed_s" in row]
        longest_s = max((later - sooner for sooner, later in itertools.pairwise(times)), default=0.0)
        limit_s = max(QUIET_S, 5 * longest_s)
    else:
        limit_s = START_S
    if quiet_s < limit_s:
        return None
    at = f"after update {rows[-1]['update']:.0f}" if rows else "before its first update"
    return f"nothing new for {_duration(quiet_s)}, the run stopped {at}; to go on: {resume}"


def _last_change(folder: Path) -> float:
    paths = [folder, *(folder / name for name in ("progress.csv", "config.yaml", "evaluation.json"))]
    return max(path.stat().st_mtime for path in paths if path.exists())


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def spoken(folder: Path, rows: Sequence[Row]) -> list[str]:
    """Evaluations and news, in the order of updates; it only ever grows at its end."""
    from pointsman.report.record import read_news
    from pointsman.training.logs import update_of

    last = rows[-1]["update"] if rows else 0.0
    lines = [(row["update"], 0, evaluation_line(row)) for row in rows if "eval_score" in row]
    lines += [(float(update_of(line)), 1, line) for line in read_news(folder) if update_of(line) <= last]
    return [line for _, _, line in sorted(lines, key=lambda item: item[:2])]


def draw(folder: Path, rows: Sequence[Row]) -> RenderableType:
    from pointsman.report.record import read_news

    if not rows:
        return Text(f"{folder}: no update yet")
    last = rows[-1]
    evaluations = [row for row in rows if "eval_score" in row]
    best = max(evaluations, key=lambda row: row["eval_score"], default=None)
    parts: list[RenderableType] = [
        Text(str(folder)),
        progress_bar(last),
        Text(speed(last)),
        learning_table(last),
        curve_table(rows),
        evaluation_table(evaluations[-NUM_EVALUATIONS:], best),
    ]
    return Group(*parts, *(Text(line) for line in read_news(folder)[-NUM_NEWS:]))


def curve_table(rows: Sequence[Row]) -> Table:
    """The whole run, each point the median of some updates."""
    import numpy as np

    from pointsman.diagnosis.findings import sparkline

    columns = ("lowest", "highest", "last")
    table = plain_table("curve", *columns, "", right=columns)
    for name, text in CURVES.items():
        values = [row[name] for row in rows if name in row]
        if values:
            figures = (f"{value:.4g}" for value in (min(values), max(values), values[-1]))
            table.add_row(text, *figures, sparkline(np.array(values), WIDTH))
    return table
