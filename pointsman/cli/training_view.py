"""What a training run looks like while it runs: a live table on a terminal, else a line an evaluation.

Both go to stderr. Interventions and alerts are lines in both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
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
        for line in warm_start(metrics):
            say(line)

    def first_evaluation(self, metrics: dict[str, float]) -> None:
        say(f"before training: {scores(metrics)}")

    def row(self, row: Row) -> None:
        if "eval_score" in row:
            say(evaluation_line(row))

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
        for line in warm_start(metrics):
            self._live.console.print(line, markup=False, highlight=False)

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
        parts = (progress_bar(row), Text(speed(row)), learning_table(row))
        return Group(Text(self._title), *parts, evaluation_table(self._evaluations, self._best))


def progress_bar(row: Row) -> Table:
    bar = Table.grid(padding=(0, 2))
    done = row.get("fraction_done", 0.0)
    bar.add_row(
        Text(f"update {row['update']:.0f}, {row.get('timesteps', 0.0):,.0f} decisions"),
        ProgressBar(total=1.0, completed=done, width=30),
        Text(f"{done:.0%}, {_left(row)} left"),
    )
    return bar


def evaluation_table(evaluations: Iterable[Row], best: Row | None) -> RenderableType:
    """The rows given, the best, and the rivals that were evaluated beside it."""
    if best is None:
        return Text("no evaluation yet")
    headers = ["score", "baseline", "return", "worst block"]
    keys = ["eval_score", "eval_baseline_score", "eval_mean_return", "eval_min_block_return"]
    table = plain_table("evaluation", *headers, right=headers)
    shown = list(evaluations)
    for row in shown if best in shown else [*shown, best]:
        mark = " (best)" if row is best else ""
        table.add_row(f"update {row['update']:.0f}{mark}", *(_number(row.get(key)) for key in keys))
    for name, rival_return in rivals(best).items():
        table.add_row(name, "", "", _number(rival_return), "")
    return table


def learning_table(row: Row) -> Table:
    """Is it learning: what it earns, how sure it is, how far it moves, how well the critic foresees."""
    columns = {
        "return": "mean_ep_return",
        "entropy": "entropy_frac",
        "KL": "approx_kl_mean",
        "clipped": "clip_frac",
        "explained": "explained_variance",
        "held": "noop_frac",
        "temperature": "temperature",
        "learning rate": "lr",
    }
    table = plain_table(*columns, right=list(columns))
    table.add_row(*(_number(row.get(name)) for name in columns.values()))
    return table


def evaluation_line(row: Row) -> str:
    """All that matters on one line, for logs."""
    return (
        f"update {row['update']:.0f}  {row.get('fraction_done', 0.0):.0%}  {scores(row)}  "
        f"entropy {_number(row.get('entropy_frac'))}  KL {_number(row.get('approx_kl_mean'))}  {speed(row)}"
    )


def opening(config: TrainConfig, folder: Path, update: int) -> str:
    run = config.run
    length = f"{run.minutes:g} min" if run.minutes is not None else f"{run.steps:,} decisions"
    taken_up = f", from update {update}" if update else ""
    if run.start_from is not None and not update:
        taken_up = f", learning on from {run.start_from}"
    envs = f"{run.workers} × {run.num_envs // run.workers} environments"
    return f"training in {folder}: {length}, {envs}{taken_up}"


def earnings(headroom: Headroom) -> list[str]:
    """What heuristics earn, and what speaks against learning from it."""
    rates = ", ".join(f"{one.name} {_number(one.per_second)}" for one in headroom.earned)
    return [f"reward per second: {rates}", *(f"warning: {text}" for text in headroom.warnings)]


def warm_start(metrics: dict[str, float]) -> list[str]:
    from pointsman.training.warm_start import doubt

    lines = [f"warm start: {', '.join(f'{name} {_number(value)}' for name, value in metrics.items())}"]
    said = doubt(metrics)
    return [*lines, f"note: {said}"] if said else lines


def rivals(row: Row) -> dict[str, float]:
    """Returns of the heuristics that were evaluated beside the policy."""
    from pointsman.training.logs import rival_of

    found = {rival_of(name): value for name, value in row.items()}
    return {name: value for name, value in found.items() if name is not None}


def scores(row: Row) -> str:
    if "eval_score" not in row:
        return "no score"
    baseline = row.get("eval_baseline_score")
    beside = "" if baseline is None else f" (baseline {_number(baseline)})"
    return f"score {_number(row['eval_score'])}{beside}"


def speed(row: Row) -> str:
    parts = {text: row[name] for name, text in PARTS.items() if name in row}
    total_s = sum(parts.values()) or 1.0
    shares = ", ".join(f"{text} {seconds / total_s:.0%}" for text, seconds in parts.items())
    return f"{row.get('steps_per_s', 0.0):,.0f} decisions/s ({shares})"


def _left(row: Row) -> str:
    done = max(row.get("fraction_done", 0.0), 1e-9)
    left_s = row.get("elapsed_s", 0.0) * max(0.0, 1.0 - done) / done
    return f"{int(left_s // 60)}:{int(left_s % 60):02d}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
