"""What a sweep found: trials best first, whether the best is better, what mattered. Tables, JSON, a page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pointsman.evaluation.mattered import MIN_POINTS, explained_shares
from pointsman.plain import in_percent, provenance
from pointsman.report.appraisal import BETTER, UNCLEAR, WORSE, Verdict, interval
from pointsman.report.curves import PALETTE, POLICY, SOFT
from pointsman.report.figure import (
    Axis,
    Bar,
    Dots,
    Figure,
    Line,
    Mark,
    linear_axis,
    log_axis,
    row_axis,
    short,
)
from pointsman.report.page import Section, escape, folded, page, paragraphs, table, unbroken, write_report
from pointsman.report.plots import ROW_HEIGHT
from pointsman.report.tables import listed, markdown, percent
from pointsman.training.search_space import Range, SearchKey, plain_value
from pointsman.training.sweep import FINISHED_TRIAL, STOPPED, WAITING, Evaluation, Trial, trial_folder

UNCHANGED = "unchanged"
TRAINED, STOPPED_COLOUR = PALETTE[0], PALETTE[1]


@dataclass(frozen=True)
class SweepReport:
    trials: Sequence[Trial]  # the first is the unchanged configuration
    keys: Sequence[SearchKey]
    folder: Path
    command: str
    config: str  # in YAML

    @cached_property
    def ranked(self) -> list[tuple[Trial, Evaluation]]:
        """Trials with a score and their best evaluations, best first."""
        found = [(trial, trial.best) for trial in self.trials]
        scored = [(trial, best) for trial, best in found if best is not None]
        return sorted(scored, key=lambda one: -one[1].score)

    @cached_property
    def shares(self) -> dict[str, float]:
        """What each key explains of the order of the scores; one far below all others would be nearly all of
        their differences. The unchanged configuration may lie outside the ranges."""
        searched = [(trial, best) for trial, best in self.ranked if trial.values]
        columns = {
            key.key: key.columns([trial.values[key.key] for trial, _ in searched])
            for key in self.keys
            if searched
        }
        found = explained_shares(columns, np.arange(len(searched), 0.0, -1.0))
        return dict(sorted(found.items(), key=lambda one: -one[1]))

    @property
    def num_left(self) -> int:
        return sum(trial.status == WAITING for trial in self.trials)

    @cached_property
    def verdict(self) -> Verdict:
        if not self.ranked:
            return Verdict(WORSE, "No trial came as far as an evaluation.")
        winner, best = self.ranked[0]
        base = self.trials[0].best
        scored = f"Trial {winner.number} scores {short(best.score)} ({values_text(winner)})"
        details = self._caveats(winner)
        if base is None:
            return Verdict(UNCLEAR, f"{scored}; the unchanged configuration has no score.", details)
        if not winner.values:
            others = (
                f"No trial of {len(self.ranked) - 1} beats"
                if len(self.ranked) > 1
                else "So far there is only"
            )
            sentence = f"{others} the unchanged configuration, which scores {short(best.score)}."
            return Verdict(WORSE, sentence, details)
        low, high = gain_interval(best, base, len(self.ranked) - 1)
        gain = f"{short(best.score - base.score)}"
        if not np.isfinite(low):
            sentence = f"{scored}, {gain} more than the unchanged configuration."
            return Verdict(UNCLEAR, sentence, details)
        word = "more" if low > 0 else "more, which may be luck,"
        sentence = f"{scored}, {gain} [{short(low)}, {short(high)}] {word} than the unchanged configuration."
        return Verdict(BETTER if low > 0 else UNCLEAR, sentence, details)

    def _caveats(self, winner: Trial) -> list[str]:
        judge = shlex.join(["pointsman", "evaluate", str(trial_folder(self.folder, winner))])
        lines = [
            "Scores are on selection seeds, and the best of many looks better than it is. To judge it on "
            f"report seeds: {judge}"
        ]
        if not any(key.key == "run.seed" for key in self.keys):
            lines.append(
                "Intervals are over blocks of seeds, and allow for having picked the best of all trials. "
                "Each trial is a single training; --search run.seed=0,1,2 shows how much luck is in one."
            )
        if self.num_left:
            lines.append(
                f"{self.num_left} of {len(self.trials)} trials are left; run the same command to continue."
            )
        return lines

    def mattered(self) -> str:
        """A sentence on what each key explains."""
        if not self.shares:
            return f"What mattered cannot be told from fewer than {MIN_POINTS} scores."
        parts = listed([f"{key} explains {percent(share)}" for key, share in self.shares.items()])
        left = max(0.0, 1.0 - sum(self.shares.values()))
        rest = f"{percent(left)} is luck, or what keys do together"
        return f"Of the order of the scores, {parts}; {rest}."

    @property
    def header(self) -> list[str]:
        return ["trial", *(key.key for key in self.keys), "score", "trained", "ended"]

    def rows(self) -> list[list[str]]:
        """Best first, then those without a score."""
        order = [trial for trial, _ in self.ranked]
        order += [trial for trial in self.trials if trial not in order]
        return [self._row(trial) for trial in order]

    def _row(self, trial: Trial) -> list[str]:
        values = [plain_value(trial.values[key.key]) if trial.values else UNCHANGED for key in self.keys]
        score = short(trial.best.score) if trial.best is not None else "–"
        trained = in_percent(1.0 if trial.status == FINISHED_TRIAL else trial.fraction_done)
        ended = f"{trial.status}: {trial.why}" if trial.why else trial.status
        return [str(trial.number), *values, score, trained, ended]

    def results(self) -> dict[str, Any]:
        return {
            "command": self.command,
            **provenance(),
            "verdict": list(self.verdict.lines),
            "is_over": self.num_left == 0,
            "seeds": "selection",
            "explained": self.shares,
            "trials": [
                {
                    "number": trial.number,
                    "run": str(trial_folder(self.folder, trial)),
                    "values": trial.values,
                    "status": trial.status,
                    "why": trial.why,
                    "fraction_done": trial.fraction_done,
                    "score": trial.best.score if trial.best else None,
                    "best_update": trial.best.update if trial.best else None,
                    "evaluations": [one._asdict() for one in trial.evaluations],
                }
                for trial in sorted(self.trials, key=lambda one: -(one.best.score if one.best else -np.inf))
            ],
        }

    def html(self) -> str:
        lead = self.verdict.html() + f"<p><code>{unbroken(self.command)}</code></p>"
        rows = [[escape(cell) for cell in row] for row in self.rows()]
        last = len(self.header) - 1
        trials = table([escape(name) for name in self.header], rows, words=(last,))
        settings = folded("The unchanged configuration, in full", f"<pre>{escape(self.config)}</pre>")
        sections = [
            Section("Trials", trials, [self._curves()] if self.ranked else []),
            Section("What mattered", paragraphs([self.mattered()]), self._mattered_figures()),
            Section("Settings", settings),
        ]
        return page("Which configuration learns best", lead, sections)

    def _curves(self) -> Figure:
        best = self.ranked[0][0]
        marks = [_curve(trial, trial is best) for trial in self.trials if trial is not best]
        marks.append(_curve(best, is_best=True))
        scores = [one.score for trial in self.trials for one in trial.evaluations]
        x = linear_axis("of a trial, %", [0.0, 100.0], low=0.0, high=100.0)
        return Figure("Scores as trials went on", x, linear_axis("score, selection seeds", scores), marks)

    def _mattered_figures(self) -> list[Figure]:
        figures = [self._dots(key) for key in self.keys] if self.ranked else []
        if self.shares:
            bars = [
                Bar(row, 0.0, 100 * share, PALETTE[2], f"{key}: {percent(share)}")
                for row, (key, share) in enumerate(self.shares.items())
            ]
            x = linear_axis("of the order of the scores, %", [0.0], low=0.0, high=100.0)
            height = 8 + ROW_HEIGHT * len(bars)
            figures.insert(0, Figure("What keys explain", x, row_axis(list(self.shares)), bars, height))
        return figures

    def _dots(self, key: SearchKey) -> Figure:
        searched = [(trial, best) for trial, best in self.ranked if trial.values]
        marks: list[Mark] = []
        for name, is_stopped, colour in (
            ("trained", False, TRAINED),
            ("stopped early", True, STOPPED_COLOUR),
        ):
            shown = [one for one in searched if (one[0].status == STOPPED) == is_stopped]
            x = [_place(key, trial.values[key.key]) for trial, _ in shown]
            texts = [f"{name_of(trial)}: {short(best.score)}, {values_text(trial)}" for trial, best in shown]
            if shown:
                marks.append(Dots(name, x, [best.score for _, best in shown], texts, colour))
        y = linear_axis("score, selection seeds", [best.score for _, best in searched])
        return Figure(f"Score by {key.key}", _key_axis(key), y, marks)


def write_sweep(report: SweepReport) -> None:
    text = markdown(report.header, report.rows(), 1) + "\n\n" + report.mattered() + "\n"
    write_report(report.folder, report.results(), text, report.html())


def gain_interval(best: Evaluation, base: Evaluation, num_compared: int) -> tuple[float, float]:
    """What the difference in score is, from blocks of the same seeds; NaN where there are no blocks.

    The best of several is compared: a chance of being wrong is shared between all of them (Bonferroni).
    """
    if len(best.blocks) != len(base.blocks):
        return np.nan, np.nan
    differences = [one - other for one, other in zip(best.blocks, base.blocks, strict=True)]
    low, high = interval(differences, num_compared)
    if not differences:
        return low, high
    # Beside the mean of the blocks, a score has what breaches of limits take.
    shift = best.score - base.score - float(np.mean(differences))
    return low + shift, high + shift


def name_of(trial: Trial) -> str:
    return f"trial {trial.number}"


def values_text(trial: Trial) -> str:
    return ", ".join(f"{key}={plain_value(value)}" for key, value in trial.values.items()) or UNCHANGED


def _curve(trial: Trial, is_best: bool) -> Line:
    x = [100 * one.fraction_done for one in trial.evaluations]
    y = [one.score for one in trial.evaluations]
    if is_best:
        return Line(f"best: {name_of(trial)}", x, y, POLICY, width=2.4, has_dots=True)
    if not trial.values:
        return Line(UNCHANGED, x, y, SOFT, "4 3", width=2.0)
    if trial.status == STOPPED:
        return Line("stopped early", x, y, STOPPED_COLOUR, width=1.2)
    return Line("other trials", x, y, TRAINED, width=1.2)


def _place(key: SearchKey, value: Any) -> float:
    return float(value) if isinstance(key, Range) else float(key.values.index(value))


def _key_axis(key: SearchKey) -> Axis:
    if isinstance(key, Range):
        return (log_axis if key.is_log else linear_axis)(key.key, [key.low, key.high])
    ticks = [(float(index), plain_value(value)) for index, value in enumerate(key.values)]
    return Axis(key.key, -0.5, len(ticks) - 0.5, ticks)
