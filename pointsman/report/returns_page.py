"""How a run is judged for its report where policies are judged by returns: every problem but routing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pointsman.evaluation.bootstrap import LEVEL, Ratio
from pointsman.evaluation.returns import NUM_EPISODES, play_all
from pointsman.evaluation.scenarios import REPORT_SEEDS
from pointsman.policies.checkpoint import Checkpoint, load_checkpoint
from pointsman.policies.sources import BEST
from pointsman.report.appraisal import BETTER, UNCLEAR, WORSE, Appraisal, Verdict
from pointsman.report.comparison import DIRECTIONS
from pointsman.report.figure import Bar, Figure, linear_axis, row_axis
from pointsman.report.page import Section, escape, table
from pointsman.report.plots import ROW_HEIGHT, style
from pointsman.report.returns import ReturnsReport, with_interval
from pointsman.report.tables import does, listed, seed_range
from pointsman.training.problems import make_judge


def appraise(
    section: Mapping[str, Any],
    run: Path,
    num_seeds: int | None,
    num_threads: int,
    advance: Callable[[float], None],
) -> Appraisal:
    """An `Appraise`, against all heuristics of the problem. Judges have threads of their own."""
    judge = make_judge(section)
    name = run.resolve().name
    policies: dict[str, str | Checkpoint] = {name: load_checkpoint(run / BEST, "RUN")}
    policies |= {one: one for one in judge.heuristics}
    seeds = REPORT_SEEDS[: num_seeds or NUM_EPISODES]
    started = time.perf_counter()
    returns = play_all(judge, policies, judge.baseline, seeds, lambda done: advance(done / len(policies)))
    command = f"pointsman evaluate {run} --seeds {len(seeds)}"
    report = ReturnsReport(
        returns, judge.headers, section, command, time.perf_counter() - started, policy=name
    )
    gains = {other: returns.gain(name, other) for other in judge.heuristics}
    return Appraisal(
        verdict_of(name, gains, judge.baseline, seeds),
        [_section(report, gains)],
        report.results(),
        report.notes(),
        command,
    )


def verdict_of(name: str, gains: Mapping[str, Ratio], baseline: str, seeds: range) -> Verdict:
    """`gains`: what it earned more than each of the others."""
    main = gains[baseline]
    if main.low > 0:
        tone, word = BETTER, "beats"
    elif main.high < 0:
        tone, word = WORSE, "is worse than"
    else:
        tone, word = UNCLEAR, "is not clearly better than"
    sentence = f"{name} {word} {baseline}: {with_interval(main, '+')} in return."
    beaten_by = [other for other, gain in gains.items() if gain.high < 0 and other != baseline]
    if tone == BETTER and beaten_by:
        tone, sentence = UNCLEAR, f"{sentence} But {listed(beaten_by)} {does(beaten_by)} better."
    groups: dict[str, list[str]] = {}
    for other, gain in gains.items():
        if other != baseline:
            key = (
                "better than"
                if gain.low > 0
                else "worse than"
                if gain.high < 0
                else "no clear difference from"
            )
            groups.setdefault(key, []).append(f"{other} ({with_interval(gain, '+')})")
    details = (
        [f"Also: {'; '.join(f'{key} {listed(names)}' for key, names in groups.items())}."] if groups else []
    )
    details.append(
        f"On {len(seeds)} episodes (seeds {seed_range(seeds)}) that nothing was trained or selected on; in "
        f"brackets {LEVEL * 100:.0f} % intervals."
    )
    return Verdict(tone, sentence, details)


def _section(report: ReturnsReport, gains: Mapping[str, Ratio]) -> Section:
    rows = [
        [
            escape(row.policy),
            f"<strong>{row.mean}</strong>" if row.is_best else row.mean,
            row.worst_block,
            f'<span class="{DIRECTIONS[row.direction]}">{row.gain}</span>',
            *row.shares,
        ]
        for row in report.rows()
    ]
    bars = [
        Bar(
            row,
            0.0,
            gain.ratio,
            style(other)[0],
            f"{other}: {with_interval(gain, '+')}",
            (gain.low, gain.high),
        )
        for row, (other, gain) in enumerate(gains.items())
    ]
    ends = [end for gain in gains.values() for end in (gain.ratio, gain.low, gain.high)]
    x = linear_axis("return of an episode, more than the policy named", [0.0, *ends])
    figure = Figure("Gain in return", x, row_axis(list(gains)), bars, height=8 + ROW_HEIGHT * len(bars))
    body = table(["policy", *map(escape, report.columns)], rows)
    return Section("Against other policies", body, [figure])
