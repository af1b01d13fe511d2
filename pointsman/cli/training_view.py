"""What a training run looks like while it runs: a live table on a terminal, else a line an evaluation.

Both go to stderr. Interventions and alerts are lines in both.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pointsman.cli.console import say
from pointsman.cli.lists import plain_table

if TYPE_CHECKING:
    from pointsman.training.config import TrainConfig
    from pointsman.training.exploration import Event
    from pointsman.training.headroom import Headroom
    from pointsman.training.logs import Row
    from pointsman.training.runs import Show
    from pointsman.training.safety import Alert

NUM_EVALUATIONS = 6  # shown
_RIVAL = re.compile(r"eval_(?!mean_|(?:min_|max_)?block)(.+)_return")
PARTS = {"time/env_s": "environment", "time/inference_s": "inference", "time/update_s": "update"}


@contextmanager
def view() -> Iterator[Show]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield LineView()
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        yield LiveView(live)


class LineView:
    """For logs: the start, every evaluation, all news."""

    def begin(self, config: TrainConfig, folder: Path, update: int) -> None:
        say(opening(config, folder, update))

    def headroom(self, headroom: Headroom) -> None:
        for line in earnings(headroom):
            say(line)

    def prepared(self, metrics: dict[str, float]) -> None:
        say(warm_start(metrics))

    def first_evaluation(self, metrics: dict[str, float]) -> None:
        say(f"before training: {scores(metrics)}")

    def row(self, row: Row) -> None:
        if "eval_score" in row:
            say(
                f"update {row['update']:.0f}  {row['fraction_done']:.0%}  {scores(row)}  "
                f"entropy {row['entropy_frac']:.2f}  KL {row['approx_kl_mean']:.4f}  {speed(row)}"
            )

    def news(self, news: Event | Alert) -> None:
        say(str(news))


class LiveView:
    """For terminals: all of it, redrawn in place."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._title = ""
        self._evaluations: deque[Row] = deque(maxlen=NUM_EVALUATIONS)
        self._best: Row | None = None

    def begin(self, config: TrainConfig, folder: Path, update: int) -> None:
        self._title = opening(config, folder, update)
        self._live.update(Text(self._title))

    def headroom(self, headroom: Headroom) -> None:
        for line in earnings(headroom):
            self._live.console.print(line, markup=False, highlight=False)

    def prepared(self, metrics: dict[str, float]) -> None:
        self._live.console.print(warm_start(metrics), markup=False, highlight=False)

    def first_evaluation(self, metrics: dict[str, float]) -> None:
        self._live.console.print(f"before training: {scores(metrics)}", markup=False, highlight=False)

    def row(self, row: Row) -> None:
        if "eval_score" in row:
            self._evaluations.append(row)
            if self._best is None or row["eval_score"] > self._best["eval_score"]:
                self._best = row
        self._live.update(self._draw(row))

    def news(self, news: Event | Alert) -> None:
        self._live.console.print(str(news), markup=False, highlight=False)

    def _draw(self, row: Row) -> RenderableType:
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            Text(f"update {row['update']:.0f}, {row['timesteps']:,.0f} decisions"),
            ProgressBar(total=1.0, completed=row["fraction_done"], width=30),
            Text(f"{row['fraction_done']:.0%}, {_left(row)} left"),
        )
        return Group(Text(self._title), bar, Text(speed(row)), learning_table(row), self._evaluation_table())

    def _evaluation_table(self) -> RenderableType:
        if self._best is None:
            return Text("no evaluation yet")
        headers = ["score", "baseline", "return", "worst block"]
        keys = ["eval_score", "eval_baseline_score", "eval_mean_return", "eval_min_block_return"]
        table = plain_table("evaluation", *headers, right=headers)
        for row in self._evaluations:
            mark = " (best)" if row is self._best else ""
            table.add_row(f"update {row['update']:.0f}{mark}", *(_number(row.get(key)) for key in keys))
        if self._best not in self._evaluations:
            cells = (_number(self._best.get(key)) for key in keys)
            table.add_row(f"update {self._best['update']:.0f} (best)", *cells)
        for name, rival_return in rivals(self._best).items():
            table.add_row(name, "", "", _number(rival_return), "")
        return table


def learning_table(row: Row) -> Table:
    """Is it learning: what it earns, how sure it is, how far it moves, how well the critic foresees."""
    columns = {
        "return": row.get("mean_ep_return"),
        "entropy": row["entropy_frac"],
        "KL": row["approx_kl_mean"],
        "clipped": row["clip_frac"],
        "explained": row["explained_variance"],
        "held": row["noop_frac"],
        "temperature": row["temperature"],
        "learning rate": row["lr"],
    }
    table = plain_table(*columns, right=list(columns))
    table.add_row(*(_number(value) for value in columns.values()))
    return table


def opening(config: TrainConfig, folder: Path, update: int) -> str:
    run = config.run
    length = f"{run.minutes:g} min" if run.minutes is not None else f"{run.steps:,} decisions"
    taken_up = f", from update {update}" if update else ""
    envs = f"{run.workers} × {run.num_envs // run.workers} environments"
    return f"training in {folder}: {length}, {envs}{taken_up}"


def earnings(headroom: Headroom) -> list[str]:
    """What heuristics earn, and what speaks against learning from it."""
    rates = ", ".join(f"{one.name} {_number(one.per_second)}" for one in headroom.earned)
    return [f"reward per second: {rates}", *(f"warning: {text}" for text in headroom.warnings)]


def warm_start(metrics: dict[str, float]) -> str:
    return f"warm start: {', '.join(f'{name} {_number(value)}' for name, value in metrics.items())}"


def rivals(row: Row) -> dict[str, float]:
    """Returns of the heuristics that were evaluated beside the policy."""
    found = {_RIVAL.fullmatch(name): value for name, value in row.items()}
    return {match[1]: value for match, value in found.items() if match}


def scores(row: Row) -> str:
    if "eval_score" not in row:
        return "no score"
    baseline = row.get("eval_baseline_score")
    beside = "" if baseline is None else f" (baseline {_number(baseline)})"
    return f"score {_number(row['eval_score'])}{beside}"


def speed(row: Row) -> str:
    total_s = sum(row[name] for name in PARTS)
    shares = ", ".join(f"{text} {row[name] / total_s:.0%}" for name, text in PARTS.items())
    return f"{row['steps_per_s']:,.0f} decisions/s ({shares})"


def _left(row: Row) -> str:
    done = max(row["fraction_done"], 1e-9)
    left_s = row["elapsed_s"] * (1.0 - done) / done
    return f"{int(left_s // 60)}:{int(left_s % 60):02d}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
