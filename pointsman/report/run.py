"""The report of a training run: is it better, what went wrong, how it learned, how to do it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from pointsman.diagnosis.findings import Diagnosis
from pointsman.plain import counted, provenance
from pointsman.report.appraisal import Appraisal
from pointsman.report.curves import (
    PALETTE,
    exploration_figures,
    learning_figures,
    reward_figures,
    time_figures,
    time_parts,
)
from pointsman.report.figure import Bar, Figure, linear_axis, row_axis, short
from pointsman.report.findings import findings_section
from pointsman.report.page import Section, escape, folded, page, paragraphs, table
from pointsman.report.plots import ROW_HEIGHT
from pointsman.report.png import file_name
from pointsman.report.record import RunRecord
from pointsman.report.tables import percent

NO_BASELINE = "the baseline"


@dataclass(frozen=True)
class RunReport:
    title: str
    lead: str  # HTML
    sections: Sequence[Section]

    def html(self) -> str:
        return page(self.title, self.lead, self.sections)

    def figures(self) -> dict[str, Figure]:
        """All of them, by a name for a file."""
        named: dict[str, Figure] = {}
        for section in self.sections:
            for figure in (*section.figures, *section.more):
                name = file_name(figure.title)
                while name in named:
                    name += "-more"
                named[name] = figure
        return named


def baseline_of(record: RunRecord) -> str:
    """What the score is compared with."""
    return str(record.log.facts.headroom.get("baseline") or NO_BASELINE)


def build_report(
    record: RunRecord,
    appraisal: Appraisal,
    diagnosis: Diagnosis | None,
    looks: Section | None,
    command: str,
    warnings: Sequence[str] = (),
) -> RunReport:
    """Sections that a run has nothing for say so, or are left out."""
    sections = [
        findings_section(diagnosis),
        *appraisal.sections,
        _learning(record),
        Section("Exploration", figures=exploration_figures(record)),
        _reward(record),
        *([looks] if looks is not None else []),
        _time(record),
        _reproduction(record, appraisal, command),
    ]
    sections = [one for one in sections if one.body or one.figures]
    lead = appraisal.verdict.html() + paragraphs([f"Warning: {text}." for text in warnings], "warning")
    lead += paragraphs(_facts(record))
    if record.problems:
        lead += f"<p>Not in this report: {escape('; '.join(record.problems))}.</p>"
    return RunReport(f"Run {record.name}", lead, sections)


def _facts(record: RunRecord) -> list[str]:
    if not record.num_updates:
        return []
    parts = [counted(round(record.updates[-1]), "update")]
    for name, text in (("timesteps", "{:,.0f} decisions"), ("elapsed_s", "{:,.0f} s")):
        if record.has(name):
            parts.append(text.format(np.nanmax(record.column(name))))
    lines = [f"Trained for {', '.join(parts)}."]
    stopped = record.log.facts.stopped
    if stopped:
        lines.append(f"The run stopped by itself: {stopped.get('why', 'for no known reason')}.")
    elif not record.is_over:
        lines.append("The run has not reached its end.")
    return lines


def _learning(record: RunRecord) -> Section:
    figures = learning_figures(record, baseline_of(record)) if record.num_updates else []
    if record.has("eval_score"):
        lines = ["Scores are measured on selection seeds, which choose the best checkpoint."]
    else:
        lines = ["No evaluation was made yet: there is no curve of the score."]
    counts = {name: int(np.nansum(record.column(name))) for name in ("interventions", "alerts")}
    said = (counted(counts["interventions"], "intervention"), counted(counts["alerts"], "alert"))
    lines.append(f"{said[0]} in exploration, {said[1]}.")
    body = paragraphs(lines)
    if record.news:
        news = escape("\n".join(record.news))
        body += folded(
            "What was changed on the way, and why: stages of a curriculum, too", f"<pre>{news}</pre>"
        )
    return Section("Learning", body, figures)


def _reward(record: RunRecord) -> Section:
    """Its terms, its distribution, and whether there was anything to gain."""
    body, figures = _headroom(record.log.facts.headroom)
    return Section("Reward", body, [*(reward_figures(record) if record.num_updates else []), *figures])


def _headroom(headroom: Mapping[str, Any]) -> tuple[str, list[Figure]]:
    """How far the baseline is from the ceiling of the reward, looked at before training."""
    try:
        earned, gains = headroom["earned"], headroom["gains"]
        rows = [
            [
                escape(one["name"]),
                short(one["per_second"]),
                *(short(one["quantiles"][part]) for part in ("p01", "p10", "p50", "p90", "p99")),
                percent(one["zero_frac"]),
                percent(one["flat_frac"]),
            ]
            for one in earned
        ]
        shares = {name: 100 * gain["share"] for name, gain in gains.items()}
        best = {name: gain["best"] for name, gain in gains.items()}
    except (KeyError, TypeError):
        return paragraphs(["Headroom of the reward was not looked at before training."]), []
    header = ["heuristic", "reward/s", *(f"P{part}" for part in (1, 10, 50, 90, 99)), "exactly 0", "clipped"]
    body = paragraphs(["Before training, heuristics played: what they earn, and a decision's raw reward."])
    body += table(header, rows) + paragraphs([f"Warning: {text}." for text in headroom.get("warnings", ())])
    bars = [
        Bar(row, 0.0, shares[name], PALETTE[2], f"{name}: {shares[name]:.0f} %, by {best[name]}")
        for row, name in enumerate(shares)
    ]
    x = linear_axis("of the way from the worst to the best heuristic, %", [0.0], low=0.0, high=100.0)
    figure = Figure(
        f"Headroom above {headroom.get('baseline', NO_BASELINE)}",
        x,
        row_axis(list(shares)),
        bars,
        height=8 + ROW_HEIGHT * len(bars),
        note="0 %: the baseline already earns as much as any heuristic.",
    )
    return body, [figure]


def _time(record: RunRecord) -> Section:
    parts = {name: float(np.nansum(values)) for name, values in time_parts(record).items()}
    total_s = sum(parts.values())
    if total_s <= 0:
        return Section("Time")
    split = ", ".join(f"{name} {percent(seconds / total_s)}" for name, seconds in parts.items())
    return Section("Time", paragraphs([f"Of {total_s:,.0f} s: {split}."]), time_figures(record))


def _reproduction(record: RunRecord, appraisal: Appraisal, command: str) -> Section:
    sessions = [one for one in record.meta.get("sessions", ()) if isinstance(one, Mapping)]
    commands = [str(one.get("command") or "") for one in sessions]
    rows = [
        ["seed", str(record.meta.get("seed", "?"))],
        ["workers", str(record.meta.get("workers", "?"))],
        ["configuration", f"sha256 {record.digest}" if record.digest else "?"],
    ]
    for one in sessions:
        versions = ", ".join(f"{key} {one[key]}" for key in ("pointsman", "python", "torch") if key in one)
        rows.append(
            [f"from update {one.get('from_update', '?')}", f"{one.get('started_at', '?')}, {versions}"]
        )
        rows.append(["git revision", str(one.get("git_revision"))])
    about = provenance()
    rows.append(["this report", f"pointsman {about['pointsman']}, git revision {about['git_revision']}"])
    text = "\n".join(filter(None, [*commands, command, appraisal.command]))
    body = f"<pre>{escape(text)}</pre>"
    body += table(["", ""], [[escape(name), escape(value)] for name, value in rows], words=(1,))
    body += paragraphs(appraisal.notes)
    if record.config:
        plain = yaml.safe_dump(record.config, sort_keys=False, allow_unicode=True)
        body += folded("The whole configuration", f"<pre>{escape(plain)}</pre>")
    return Section("How to reproduce it", body)
