"""What goes where: results to stdout, everything said on the way to stderr.

Progress shows on a terminal only. Warnings and what was logged are one line each, and each is said once.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from pointsman.errors import PointsmanWarning

if TYPE_CHECKING:
    from pointsman.report.appraisal import Verdict

TABLE_WIDTH = 100  # where stdout is no terminal
_SIMULATOR, _TRAINING = "once, for about 30 s", "the network's gradients, once, for about 15 s"
_SLOW_TO_COMPILE = {
    "pointsman.simulator.run.run": _SIMULATOR,
    "pointsman.jobs.rollout.play_all": _SIMULATOR,
    "pointsman.emulator.kernels.advance_to": _SIMULATOR,
    "pointsman.routing.deciding.decide": _SIMULATOR,
    "pointsman.training.pooled_gradients.run_gradients": _TRAINING,
}

Advance = Callable[[float], None]


def stdout() -> Console:
    width = None if sys.stdout.isatty() else TABLE_WIDTH
    return Console(width=width, highlight=False)


def say(line: str) -> None:
    """One line on stderr, however long."""
    Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)


def say_written(folder: Path) -> None:
    say(f"wrote {folder / 'report.html'}, and results.json and table.md beside it")


def print_verdict(console: Console, verdict: Verdict) -> None:
    colour = {"better": "green", "worse": "red"}.get(verdict.tone, "yellow")
    sentence, *details = (escape(line.replace("\N{NO-BREAK SPACE}", " ")) for line in verdict.lines)
    console.print(f"[bold {colour}]{sentence}[/bold {colour}]")
    for line in details:
        console.print(line)
    console.print()


def print_json(value: Any) -> None:
    from pointsman.plain import to_json

    sys.stdout.write(to_json(value) + "\n")


@contextmanager
def notices_as_lines() -> Iterator[None]:
    """Warnings, and what the package logs (how a file was understood), go to stderr."""
    said: set[str] = set()
    show_other = warnings.showwarning

    def say_once(line: str) -> None:
        if line not in said:
            said.add(line)
            say(line)

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if not issubclass(category, PointsmanWarning):
            show_other(message, category, *where, **more)
        else:
            say_once(f"warning: {message}")

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say_once(record.getMessage())

    log, handler = logging.getLogger("pointsman"), Handler()
    level_before = log.level
    with warnings.catch_warnings():
        warnings.simplefilter("always", PointsmanWarning)
        warnings.showwarning = show
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        try:
            yield
        finally:
            log.removeHandler(handler)
            log.setLevel(level_before)


@contextmanager
def warnings_noted() -> Iterator[list[str]]:
    """What is warned about meanwhile, each once: results carry it along to whoever reads them elsewhere."""
    noted: list[str] = []
    show = warnings.showwarning

    def note(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, PointsmanWarning) and str(message) not in noted:
            noted.append(str(message))
        show(message, category, *where, **more)

    warnings.showwarning = note
    try:
        yield noted
    finally:
        warnings.showwarning = show


@contextmanager
def progress(what: str, total: float) -> Iterator[Advance]:
    """A bar that vanishes when done; the callable takes what was done since its last call."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(compact=True),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


@contextmanager
def compilation_announced() -> Iterator[None]:
    """Says so when something large has to be compiled: half a minute of silence would look like a hang.

    It listens to the compiler, so that bad input is refused before anything is compiled.
    """
    from numba.core import event

    class Announcer(event.Listener):
        def on_start(self, event: Any) -> None:
            compiled = event.data["dispatcher"]
            what = _SLOW_TO_COMPILE.get(f"{compiled.__module__}.{compiled.__name__}")
            if what is not None:
                say(f"compiling {what}…")

        def on_end(self, event: Any) -> None:
            pass

    with event.install_listener("numba:compile", Announcer()):
        try:
            yield
        except KeyboardInterrupt:
            sys.unraisablehook = lambda _: None  # of what llvmlite leaves half built
            raise
