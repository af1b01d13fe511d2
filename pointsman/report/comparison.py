"""The files of `pointsman compare --out`: results.json, table.md, report.html."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pointsman.evaluation.bootstrap import LEVEL, METHOD, MIN_SEEDS, NUM_RESAMPLES, Ratio
from pointsman.evaluation.compare import CURVES, Comparison, geometric_means
from pointsman.experiments.objective import TOLERANCE, Objective
from pointsman.experiments.own import replayed
from pointsman.plain import in_percent, provenance
from pointsman.report.appraisal import Verdict
from pointsman.report.choice import choice_of
from pointsman.report.figure import Figure
from pointsman.report.page import Section, escape, folded, page, paragraphs, table, unbroken, write_report
from pointsman.report.plots import change_figure, hits_figure, survival_figure
from pointsman.report.tables import (
    HEADERS,
    MORE,
    ORACLE_NOTE,
    TableCell,
    change,
    direction,
    has_oracle,
    headline_rows,
    label,
    markdown,
    metric_text,
    replica_names,
    samples_text,
)

CURVE_TITLES = {
    "ttft": ("Time to first token", "time to first token, s"),
    "e2e": ("End-to-end latency", "arrival to last token, s"),
}
DIRECTIONS = {-1: "better", 0: "", 1: "worse"}


@dataclass(frozen=True)
class ComparisonReport:
    """One or several comparisons with the same seeds and baseline, and how they were made."""

    comparisons: Sequence[Comparison]
    command: str
    wall_s: float
    objective: Objective | None = None
    warnings: Sequence[str] = ()

    @property
    def baseline(self) -> str:
        return self.comparisons[0].baseline

    @property
    def seeds(self) -> tuple[int, ...]:
        return self.comparisons[0].seeds

    @property
    def num_samples(self) -> int:
        """Seeds, or blocks of a trace, that every mean is over, at least."""
        return min(one.num_samples for one in self.comparisons)

    @property
    def headlines(self) -> tuple[str, ...]:
        return self.comparisons[0].headlines

    @cached_property
    def summary(self) -> dict[str, dict[str, Ratio]]:
        """Geometric means by metric and policy; empty for a single comparison."""
        if len(self.comparisons) < 2:
            return {}
        return {metric: geometric_means(self.comparisons, metric) for metric in self.headlines}

    @cached_property
    def choice(self) -> tuple[str, Verdict]:
        """The best policy, and why."""
        if len(self.comparisons) == 1:
            (one,) = self.comparisons
            ratios = {
                name: {metric: row[metric] for metric in self.headlines} for name, row in one.ratios.items()
            }
        else:
            names = next(iter(self.summary.values()))
            ratios = {name: {metric: row[name] for metric, row in self.summary.items()} for name in names}
        return choice_of(self.comparisons, ratios, self.objective)

    def results(self) -> dict[str, Any]:
        best, verdict = self.choice
        summary = {
            policy: {metric: vars(row[policy]) for metric, row in self.summary.items()}
            for policy in next(iter(self.summary.values()), {})
        }
        return {
            **provenance(),
            "command": self.command,
            "best": best,
            "verdict": vars(verdict),
            "warnings": self.warnings,
            "seeds": self.seeds,
            "baseline": self.baseline,
            "objective": self.objective.model_dump(mode="json") if self.objective else None,
            "interval": {"level": LEVEL, "method": METHOD, "resamples": NUM_RESAMPLES},
            "comparisons": [_results(one) for one in self.comparisons],
            "geometric_mean_ratios": summary,
            "timings": {"wall_s": self.wall_s},
        }

    def write(self, folder: Path) -> None:
        write_report(folder, self.results(), self.markdown(), self.html())

    def notes(self, against: str | None = None) -> list[str]:
        """How to read the tables; `against` says what changes are measured against."""
        lines = [
            f"Times in seconds, means over {samples_text(self.comparisons)}; every policy serves the same "
            f"arrivals. Change against {against or self.baseline}"
            + (f" with its {LEVEL * 100:.0f} % interval ({METHOD})." if self.num_samples > 1 else ".")
        ]
        if self.num_samples < MIN_SEEDS:
            more = "use a longer trace" if self._is_trace else "raise --seeds"
            lines.append(
                f"Fewer than {MIN_SEEDS} of them: read the intervals as too narrow, or {more}."
                if self.num_samples > 1
                else f"One run has no intervals, and may be luck: {more}."
            )
        if self.objective is not None:
            lines.append(f"Cost of a request: {self.objective.formula}.")
            lines += self._kept(self.comparisons[0].names[0]) if against is not None else []
        if has_oracle(self.comparisons):
            lines.append(ORACLE_NOTE)
        return lines

    @property
    def _is_trace(self) -> bool:
        return any(replayed(one.configs[0]) is not None for one in self.comparisons)

    def _kept(self, policy: str) -> list[str]:
        """Whether a policy keeps the objective's limits, limit by limit; nothing of those not measured."""
        assert self.objective is not None
        lines = []
        for limit in self.objective.limits:
            name, beyond = f"{limit.metric}_s", []
            other = policy if limit.seconds is not None else limit.policy
            for one in (one for one in self.comparisons if other in one.names):
                share = math.expm1(limit.breach(one.mean(policy, name), one.mean(other, name)))
                if share > TOLERANCE:
                    beyond.append(f"{one.name} (+{in_percent(share, 1)})")
            if any(other in one.names for one in self.comparisons):
                lines.append(f"{limit.text}: {'beyond it in ' + ', '.join(beyond) if beyond else 'kept'}.")
        return lines

    def markdown(self) -> str:
        _, verdict = self.choice
        parts = ["\n\n".join([f"`{self.command}`", *self.told(verdict), *self.notes()])]
        if len(self.comparisons) > 1:
            header, rows = summary_table(self)
            parts.append(f"## All scenarios\n\nGeometric mean of the ratios.\n\n{markdown(header, rows)}")
        for one in self.comparisons:
            header = ["policy", *(HEADERS[metric] for metric in one.headlines), HEADERS["good_share"]]
            rows = [
                [row.label, *(_markdown_cell(cell) for cell in row.cells), row.good_share]
                for row in headline_rows(one)
            ]
            parts.append(f"## {one.name}\n\n{one.what}\n\n{markdown(header, rows)}")
            parts.append(markdown(*_more(one)))
        return "\n\n".join(parts) + "\n"

    def html(self) -> str:
        sections = [_section(one) for one in self.comparisons]
        title = f"Routing policies on {self.comparisons[0].name}"
        if len(self.comparisons) > 1:
            title = f"Routing policies on {len(self.comparisons)} scenarios"
            sections.insert(0, _summary_section(self))
        _, verdict = self.choice
        return page(title, verdict.html() + self.lead(), sections)

    def told(self, verdict: Verdict) -> list[str]:
        """What comes first, for people: the verdict, and what to be warned of."""
        return [*verdict.lines, *(f"Warning: {text}." for text in self.warnings)]

    def lead(self, against: str | None = None) -> str:
        """HTML: how the numbers came about."""
        about = provenance()
        version = f"pointsman {about['pointsman']}"
        if about["git_revision"]:
            version += f", revision {about['git_revision'][:12]}"
        command = f"<p><code>{unbroken(self.command)}</code></p>"
        warned = paragraphs([f"Warning: {text}." for text in self.warnings], "warning")
        return warned + command + paragraphs(self.notes(against)) + paragraphs([version], "soft")


def _results(one: Comparison) -> dict[str, Any]:
    return {
        "name": one.name,
        "what": one.what,
        "setting": vars(one.setting) | {"load": one.setting.load} if one.setting else None,
        "num_blocks": one.num_blocks,
        "num_replays": one.num_replays,
        "policies": [policy.model_dump(mode="json") for policy in one.policies],
        "configs": [config.model_dump(mode="json", exclude={"policy"}) for config in one.configs],
        "metrics": one.metrics,
        "ratios": {
            policy: {metric: vars(ratio) for metric, ratio in row.items()}
            for policy, row in one.ratios.items()
        },
        "hits_over_time": {policy: hits.plain() for policy, hits in one.hits.items()},
        "survival": {
            policy: {
                curve: dict(
                    zip(("seconds", "share_above"), one.curves[policy][curve].survival(), strict=True)
                )
                for curve in CURVES
            }
            for policy in one.names
        },
    }


def summary_table(report: ComparisonReport) -> tuple[list[str], list[list[str]]]:
    """Header and rows of text: each policy's geometric mean change over all scenarios."""
    summary = report.summary
    header = ["policy", *(HEADERS[metric] for metric in report.headlines)]
    rows = []
    for policy in summary[report.headlines[0]]:
        texts = [
            "baseline" if policy == report.baseline else change(summary[metric][policy])
            for metric in report.headlines
        ]
        rows.append([label(report.comparisons[0], policy), *texts])
    return header, rows


def _more(one: Comparison) -> tuple[list[str], list[list[str]]]:
    """Header and rows of what the headlines leave out; on live servers not all of it can be measured."""
    metrics = [metric for metric in MORE if metric in one.metrics[one.baseline]]
    rows = [
        [label(one, policy), *(metric_text(one, policy, metric) for metric in metrics)]
        for policy in one.names
    ]
    return ["policy", *(HEADERS[metric] for metric in metrics)], rows


def _markdown_cell(cell: TableCell) -> str:
    value = f"**{cell.value}**" if cell.is_best else cell.value
    return f"{value} ({cell.change})" if cell.change else value


def _html_cell(cell: TableCell) -> str:
    value = f"<strong>{cell.value}</strong>" if cell.is_best else cell.value
    text = cell.change or "baseline"
    return f'{value}<span class="change {DIRECTIONS[cell.direction]}">{text}</span>'


def _section(one: Comparison) -> Section:
    ratios = {
        metric: {policy: one.ratios[policy][metric] for policy in one.names if policy != one.baseline}
        for metric in one.headlines
    }
    body = f"<p>{escape(one.what)}</p>{headline_html(one)}"
    figures = [*latency_figures(one, one.baseline), *change_figures(ratios, one.baseline)]
    return Section(one.name, body, figures, hit_figures(one, one.names), "Prefix caches")


def headline_html(one: Comparison) -> str:
    """The table of a comparison, and more of it folded away."""
    header = ["policy", *(HEADERS[metric] for metric in one.headlines), HEADERS["good_share"]]
    rows = [
        [escape(row.label), *(_html_cell(cell) for cell in row.cells), row.good_share]
        for row in headline_rows(one)
    ]
    return table(header, rows) + folded("More metrics", table(*_more(one)))


def latency_figures(one: Comparison, thick: str, prefix: str = "") -> list[Figure]:
    """How many requests take longer than any time, the tail included; `thick` is the line to look at."""
    figures = []
    for curve in CURVES:
        title, x_title = CURVE_TITLES[curve]
        curves = {policy: one.curves[policy][curve].survival() for policy in one.names}
        figures.append(survival_figure(curves, thick, f"{prefix}{title}", x_title))
    return figures


def hit_figures(one: Comparison, policies: Sequence[str], prefix: str = "") -> list[Figure]:
    """How much each replica had cached over the first run of each policy, where prompts share prefixes."""
    names = replica_names(one.configs[0].cluster)
    return [
        hits_figure(one.hits[policy], names, f"{prefix}{policy}: prompt tokens cached, by replica")
        for policy in policies
        if policy in one.hits
    ]


def change_figures(ratios: Mapping[str, Mapping[str, Ratio]], baseline: str) -> list[Figure]:
    return [change_figure(row, baseline, HEADERS[metric]) for metric, row in ratios.items() if row]


def _summary_section(report: ComparisonReport) -> Section:
    summary = report.summary
    rows = []
    for policy in summary[report.headlines[0]]:
        cells = []
        for metric in report.headlines:
            ratio = summary[metric][policy]
            text = "baseline" if policy == report.baseline else change(ratio)
            cells.append(f'<span class="{DIRECTIONS[direction(ratio)]}">{text}</span>')
        rows.append([escape(label(report.comparisons[0], policy)), *cells])
    body = "<p>Geometric mean of the ratios over all scenarios.</p>"
    body += table(["policy", *(HEADERS[metric] for metric in report.headlines)], rows)
    others = {
        metric: {policy: ratio for policy, ratio in row.items() if policy != report.baseline}
        for metric, row in summary.items()
    }
    return Section("All scenarios", body, figures=change_figures(others, report.baseline))
