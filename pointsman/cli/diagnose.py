"""`pointsman diagnose`: what went wrong in a training run, since when, why, and which knobs to turn."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pointsman.cli.console import print_json, say, stdout
from pointsman.cli.lists import plain_table
from pointsman.cli.options import AsJson
from pointsman.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from pointsman.diagnosis.curves import RunLog
    from pointsman.diagnosis.findings import Diagnosis, Finding

COLOURS = {"bad": "red", "warning": "yellow", "note": "cyan"}
WATCH_EVERY_S = 2.0
NUM_LAST_ROWS = 20  # to tell a run that has stopped from a slow one
LABEL_WIDTH = 9


def diagnose(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run directory, a CSV, or TensorBoard event files.")
    ],
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on while the run does; tell every new finding once.")
    ] = False,
    own_map: Annotated[
        list[str] | None,
        typer.Option("--map", metavar="OURS=THEIRS", help="What the log calls a column, e.g. entropy=H."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read the curves of a training run and say what went wrong, the worst first.

    Each finding comes with its evidence, since when it holds, the likely cause, what to check and which knobs
    to turn. Logs of Stable-Baselines3, CleanRL and RLlib are known by their columns; for others, --map says
    what a column is called. A healthy run gets a clean bill with margins; what could not be judged is named,
    and where that is almost everything, the verdict is "unclear". A file with several seeds is judged seed by
    seed, the worst first.

    Example: pointsman diagnose runs/first
    """
    from pointsman.diagnosis.findings import diagnose as find
    from pointsman.diagnosis.readers import read_runs

    names = _names(own_map or [])
    if watch:
        _watch(run, names, as_json)
        return
    logs = read_runs(run, names)
    if len(logs) == 1:
        diagnosis = find(logs[0])
        if as_json:
            print_json(diagnosis.to_dict())
        else:
            _print(diagnosis, logs[0])
        return
    judged = sorted(((find(log), log) for log in logs), key=lambda one: one[0].rank)
    if as_json:
        print_json({"runs": [diagnosis.to_dict() for diagnosis, _ in judged]})
    else:
        _print_all(run, judged)


def _names(pairs: Sequence[str]) -> dict[str, str]:
    names = {}
    for pair in pairs:
        ours, separator, theirs = pair.partition("=")
        if not separator or not ours or not theirs:
            raise InputError("--map", pair, "is not OURS=THEIRS", "for example --map entropy=policy_entropy")
        names[ours] = theirs
    return names


def _watch(run: Path, names: dict[str, str], as_json: bool) -> None:
    """Until the run ends; a log that does not say when, until Ctrl-C."""
    from pointsman.cli.watch import how_it_ended
    from pointsman.diagnosis.live import LogWatch
    from pointsman.plain import to_json

    if not run.expanduser().exists():
        raise InputError("RUN", str(run), "no such file or directory", "name the log of a run")
    watch = LogWatch(run, names)
    say(f"watching {run}; Ctrl-C ends it")
    while True:
        log = watch.read()
        for finding in watch.news(log):
            if as_json:
                sys.stdout.write(to_json(finding.to_dict(), indent=None) + "\n")
                sys.stdout.flush()
            else:
                _print_finding(stdout(), finding)
        ended = how_it_ended(run, log.last_rows(NUM_LAST_ROWS)) if log is not None and log.is_ours else None
        if ended:
            say(ended)
            return
        time.sleep(WATCH_EVERY_S)


def _print_all(run: Path, judged: Sequence[tuple[Diagnosis, RunLog]]) -> None:
    """Which of several runs in one file are how bad, then each."""
    from rich.markup import escape

    words: dict[str, list[str]] = {}
    for diagnosis, log in judged:
        words.setdefault(diagnosis.worst, []).append(log.source.rpartition(", ")[2])
    console = stdout()
    console.print(f"[bold]{escape(str(run))}[/bold] holds {len(judged)} runs", soft_wrap=True)
    for word, runs in words.items():
        console.print(f"  {word}: {', '.join(runs)}", markup=False, soft_wrap=True)
    for diagnosis, log in judged:
        console.print()
        _print(diagnosis, log)


def _print(diagnosis: Diagnosis, log: RunLog) -> None:
    from rich.markup import escape

    console = stdout()
    unit = "updates" if log.x_name == "update" else "rows"
    where = f"[bold]{escape(diagnosis.source)}[/bold]: {diagnosis.kind}, {diagnosis.num_rows} {unit}"
    console.print(where, soft_wrap=True)
    for note in diagnosis.notes:
        console.print(f"[dim]{escape(note)}[/dim]", soft_wrap=True)
    if diagnosis.verdict != "wrong":
        colour = "green" if diagnosis.is_clean else "yellow"
        word = f"[{colour} bold]{diagnosis.verdict:<{LABEL_WIDTH}}[/{colour} bold]"
        console.print(f"\n{word}{diagnosis.verdict_text}", soft_wrap=True)
    for finding in diagnosis.findings:
        _print_finding(console, finding)
    if diagnosis.verdict != "wrong" and diagnosis.margins:
        console.print()
        table = plain_table("how far from trouble", "is", "trouble at", right=["is", "trouble at"])
        for margin in diagnosis.margins:
            side = ">" if margin.trouble == "above" else "<"
            table.add_row(margin.what, f"{margin.value:.3g}", f"{side} {margin.limit:.3g}")
        console.print(table)
    if diagnosis.not_judged:
        console.print()
        why: dict[str, list[str]] = {}
        for one in diagnosis.not_judged:
            why.setdefault(one.why, []).append(one.name)
        console.print(f"could not be judged, by {len(diagnosis.not_judged)} of {diagnosis.num_rules} rules")
        for reason, rules in why.items():
            console.print(f"  {', '.join(rules)}: {reason}", markup=False)


def _print_finding(console: Console, finding: Finding) -> None:
    from rich.table import Table
    from rich.text import Text

    began = "from the start" if finding.began_at is None else f"since {finding.x_name} {finding.began_at:,g}"
    colour = COLOURS[finding.severity]
    console.print(
        f"\n[{colour} bold]{finding.severity:<{LABEL_WIDTH}}[/{colour} bold][bold]{finding.title}[/bold] "
        f"[dim]{began}[/dim]"
    )
    knobs = "; ".join(
        f"{knob.name}: {knob.turn}" + (f" ({knob.key})" if knob.key else "") for knob in finding.knobs
    )
    parts = {
        "": finding.evidence,
        finding.column: finding.sparkline,
        "with it": "; ".join(f"{one.title}: {one.evidence}" for one in finding.symptoms),
        "cause": finding.cause,
        "check": finding.check,
        "turn": knobs,
    }
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=LABEL_WIDTH - 2)
    grid.add_column(overflow="fold")
    for label, text in parts.items():
        if text:
            is_line = label == finding.column
            body = Text(f"{text}  {label}") if is_line else Text(text)
            grid.add_row(Text("" if is_line else label, style="dim"), body)
    console.print(grid)
