"""What a page shows of an evaluation, verdict first; and the files of `pointsman evaluate --out`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pointsman.evaluation.compare import Comparison
from pointsman.report.comparison import (
    CURVE_TITLES,
    DIRECTIONS,
    change_figures,
    headline_html,
    hit_figures,
    latency_figures,
)
from pointsman.report.evaluation import Change, EvaluationReport
from pointsman.report.figure import Figure
from pointsman.report.page import Section, escape, folded, page, paragraphs, table, write_report
from pointsman.report.plots import PERCENTILES, percentile_figure
from pointsman.report.tables import HEADERS, label, number, samples_text

ANY_OTHER = "the policy named"


def write_evaluation(report: EvaluationReport, folder: Path) -> None:
    write_report(folder, report.results(), report.markdown(), evaluation_html(report))


def evaluation_html(report: EvaluationReport) -> str:
    count = len(report.comparisons)
    where = report.comparisons[0].name if count == 1 else f"{count} scenarios"
    lead = report.verdict.html() + report.base.lead(ANY_OTHER)
    return page(f"{report.policy} on {where}", lead, evaluation_sections(report))


def evaluation_sections(report: EvaluationReport) -> list[Section]:
    return [
        _against(report),
        _percentiles(report),
        _latencies(report),
        *_hits(report),
        Section("Every metric", "".join(_metrics(report, one) for one in report.comparisons)),
    ]


def _against(report: EvaluationReport) -> Section:
    """The comparison table: against each of the others, and scenario by scenario against the first."""
    headers = [HEADERS[metric] for metric in report.base.headlines]
    body = f"<p>{escape(report.policy)}, changed against each of the others"
    if len(report.comparisons) == 1:
        (one,) = report.comparisons
        body = f"<p>{escape(one.what)}</p>{headline_html(one)}{body}:</p>"
    else:
        body += "; geometric means over all scenarios:</p>"
    body += table(["against", *headers], _rows(report.summary_rows()))
    if len(report.comparisons) > 1:
        body += f"<p>Against {escape(report.against[0])}, scenario by scenario:</p>"
        body += table(["scenario", *headers], _rows(report.scenario_rows()))
    ratios = {
        metric: {
            label(report.comparisons[0], other): row[metric] for other, row in report.geometric_means.items()
        }
        for metric in report.base.headlines
    }
    return Section("Against today's policies", body, change_figures(ratios, ANY_OTHER))


def _percentiles(report: EvaluationReport) -> Section:
    shown = (report.policy, report.against[0])
    figures = []
    for latency, (title, x_title) in CURVE_TITLES.items():
        values = {
            one.name: {policy: _seconds(one, policy, latency) for policy in shown}
            for one in report.comparisons
        }
        figures.append(percentile_figure(values, f"{title}, percentiles", x_title))
    header = ["", *(f"{name} {part.upper()}" for name in ("TTFT", "e2e") for part in PERCENTILES)]
    tables = []
    for one in report.comparisons:
        rows = [
            [escape(label(one, policy)), *(number(v) for c in CURVE_TITLES for v in _seconds(one, policy, c))]
            for policy in one.names
        ]
        tables.append(f"<h3>{escape(one.name)}</h3>{table(header, rows)}")
    means = f"<p>Means over {escape(samples_text(report.comparisons))}, in seconds.</p>"
    body = means + folded("All policies, as tables", "".join(tables))
    return Section("Percentiles by scenario", body, figures, is_paired=True)


def _seconds(one: Comparison, policy: str, latency: str) -> list[float]:
    return [one.mean(policy, f"{latency}_{part}_s") for part in PERCENTILES]


def _latencies(report: EvaluationReport) -> Section:
    """Latencies by scenario: the first is shown, the others are folded away."""
    is_one = len(report.comparisons) == 1
    figures: list[list[Figure]] = [
        latency_figures(one, report.policy, "" if is_one else f"{one.name}: ") for one in report.comparisons
    ]
    how_to_read = (
        "How many requests take longer than a given time; both axes are logarithmic, so that the slowest 1 % "
        "takes as much room as the rest. Lower left is better."
    )
    more = [figure for pair in figures[1:] for figure in pair]
    folded_away = f"{len(more) // 2} more scenarios"
    return Section("Latency", paragraphs([how_to_read]), figures[0], more, folded_away, is_paired=True)


def _hits(report: EvaluationReport) -> list[Section]:
    """Where prompts share prefixes: the policy beside the first of the others, replica by replica."""
    figures = [
        figure
        for one in report.comparisons
        for figure in hit_figures(one, [report.policy, report.against[0]], f"{one.name}, ")
    ]
    text = "How much of the prompts each replica had cached over time, on the first seed. Empty: none began."
    return [Section("Prefix caches", paragraphs([text]), figures, is_paired=True)] if figures else []


def _metrics(report: EvaluationReport, one: Comparison) -> str:
    header = [one.name, report.policy, *(f"against {label(one, other)}" for other in report.against)]
    rows = [[name, value, *_cells(changes)] for name, value, changes in report.metric_rows(one)]
    return folded(f"{one.name}: {one.what}", table([escape(cell) for cell in header], rows))


def _rows(rows: Sequence[tuple[str, Sequence[Change]]]) -> list[list[str]]:
    return [[escape(name), *_cells(changes)] for name, changes in rows]


def _cells(changes: Sequence[Change]) -> list[str]:
    return [f'<span class="{DIRECTIONS[one.direction]}">{one.text}</span>' for one in changes]
