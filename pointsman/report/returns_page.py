"""Pages where policies are judged by returns, which is every problem but routing.

What the report of a run shows of it, and the files of `pointsman evaluate --out` and `compare --out`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pointsman.evaluation.bootstrap import LEVEL, Ratio
from pointsman.evaluation.problem import make_judge
from pointsman.evaluation.returns import Returns, play_all
from pointsman.experiments.scenarios import REPORT_SEEDS
from pointsman.inference.checkpoint import Checkpoint, load_checkpoint
from pointsman.plain import provenance
from pointsman.report.appraisal import BETTER, UNCLEAR, WORSE, Appraisal, Verdict
from pointsman.report.comparison import DIRECTIONS
from pointsman.report.figure import Bar, Figure, Ladder, linear_axis, row_axis
from pointsman.report.page import Section, escape, folded, page, paragraphs, table, unbroken, write_report
from pointsman.report.plots import ROW_HEIGHT, styles
from pointsman.report.returns import ReturnsReport, signed, with_interval
from pointsman.report.tables import does, listed, seed_range
from pointsman.routing.sources import BEST

BLOCK_COLOUR = "#3f7fd0"


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
    policies |= {one: one for one in judge.rivals}
    seeds = REPORT_SEEDS[: num_seeds or judge.num_episodes]
    started = time.perf_counter()
    returns = play_all(judge, policies, judge.baseline, seeds, lambda done: advance(done / len(policies)))
    command = f"pointsman evaluate {run} --seeds {len(seeds)}"
    report = ReturnsReport(
        returns, judge.headers, section, command, time.perf_counter() - started, policy=name
    )
    return Appraisal(
        verdict_of(name, report.gains, judge.baseline, seeds),
        [_section(report)],
        report.results(),
        report.notes(),
        command,
    )


def write_returns(report: ReturnsReport, folder: Path) -> None:
    write_report(folder, report.results(), report.markdown(), returns_html(report))


def returns_html(report: ReturnsReport) -> str:
    kind = report.env["kind"]
    lead = f"<p><code>{unbroken(report.command)}</code></p>" + paragraphs([*report.notes(), _version()])
    title = f"Policies for {kind}" if report.policy is None else f"{report.policy} on {kind}"
    return page(title, answer_of(report).html() + lead, [_section(report), _settings(report)])


def answer_of(report: ReturnsReport) -> Verdict:
    """Whether the policy to judge is better; without one, which of all to take."""
    returns = report.returns
    if report.policy is None:
        return _choice(returns)
    baseline = returns.baseline if returns.baseline in report.gains else next(iter(report.gains))
    return verdict_of(report.policy, report.gains, baseline, returns.seeds)


def _choice(returns: Returns) -> Verdict:
    best = max(returns.names, key=lambda name: returns.means[name].ratio)
    gains = {other: returns.gain(best, other) for other in returns.names if other != best}
    sentence = f"{best} returns most: {with_interval(returns.means[best])}"
    if best != returns.baseline:
        sentence += f", {with_interval(gains[returns.baseline], '+')} against {returns.baseline}"
    if any(math.isnan(gain.low) for gain in gains.values()):
        return Verdict(UNCLEAR, f"{sentence}.", ["One episode cannot tell how sure that is."])
    alike = [other for other, gain in gains.items() if gain.low <= 0]
    details = [f"Just as good, within the interval: {listed(alike)}."] if alike else []
    return Verdict(UNCLEAR if alike else BETTER, f"{sentence}.", details)


def verdict_of(name: str, gains: Mapping[str, Ratio], baseline: str, seeds: Sequence[int]) -> Verdict:
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


def _section(report: ReturnsReport) -> Section:
    rows = [
        [
            escape(row.policy),
            f"<strong>{row.mean}</strong>" if row.is_best else row.mean,
            row.worst_block,
            f'<span class="{DIRECTIONS[row.direction]}">{row.gain}</span>',
            *row.shown,
        ]
        for row in report.rows()
    ]
    body = table(["policy", *map(escape, report.columns)], rows)
    title = "Policies" if report.policy is None else "Against other policies"
    return Section(title, body, [_gains(report), _blocks(report.returns)], is_paired=True)


def _gains(report: ReturnsReport) -> Figure:
    bars, looks = [], styles(list(report.gains))
    for row, (other, gain) in enumerate(report.gains.items()):
        text = f"{other}: {with_interval(gain, '+')}"
        interval = (gain.low, gain.high) if math.isfinite(gain.low) else None
        bars.append(Bar(row, 0.0, gain.ratio, looks[other][0], text, interval))
    ends = [end for gain in report.gains.values() for end in (gain.ratio, gain.low, gain.high)]
    against = report.returns.baseline if report.policy is None else "the policy named"
    x = linear_axis(f"return of an episode, more than {against}", [0.0, *filter(math.isfinite, ends)])
    rows = row_axis(list(report.gains))
    return Figure("Gain in return", x, rows, bars, height=8 + ROW_HEIGHT * len(bars))


def _blocks(returns: Returns) -> Figure:
    """How far the mean of a few episodes can be trusted, and whether a policy falls apart on some."""
    ladders = []
    for row, name in enumerate(returns.names):
        values = sorted(returns.blocks(name))
        texts = [f"{name}: {signed(value)}" for value in values]
        ladders.append(Ladder("a block", row, values, texts, BLOCK_COLOUR))
    x = linear_axis("mean return of a block", [value for one in ladders for value in one.values])
    size = len(returns.seeds) // returns.num_blocks
    note = f"A dot is the mean of {size} episodes in a row."
    rows = row_axis(returns.names)
    return Figure("Blocks of episodes", x, rows, ladders, height=8 + ROW_HEIGHT * len(ladders), note=note)


def _settings(report: ReturnsReport) -> Section:
    text = yaml.safe_dump({"env": dict(report.env)}, sort_keys=False)
    return Section("Settings", folded("The problem, in full", f"<pre>{escape(text)}</pre>"))


def _version() -> str:
    about = provenance()
    revision = f", revision {about['git_revision'][:12]}" if about["git_revision"] else ""
    return f"pointsman {about['pointsman']}{revision}"
