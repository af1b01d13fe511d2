"""One policy against each of several others, as rows that any table can show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pointsman.evaluation.bootstrap import Ratio
from pointsman.evaluation.compare import COST, Comparison, geometric_mean
from pointsman.report.appraisal import Verdict
from pointsman.report.comparison import ComparisonReport
from pointsman.report.tables import change, direction, label, markdown, metric_text
from pointsman.report.verdict import verdict_of

# All that a policy is judged by, as rows of a table.
METRICS: Mapping[str, str] = {
    **{
        f"{latency}_{statistic}_s": f"{name} {statistic if statistic == 'mean' else statistic.upper()}"
        for latency, name in (("ttft", "TTFT"), ("e2e", "e2e"))
        for statistic in ("mean", "p50", "p90", "p95", "p99")
    },
    "tpot_mean_s": "TPOT mean",
    "tbt_p99_s": "TBT P99",
    "queueing_p99_s": "queueing P99",
    "slo_excess_mean_s": "beyond SLO",
    "requests_per_s": "requests/s",
    "tokens_per_s": "tokens/s",
    "goodput_per_s": "goodput/s",
    "good_share": "within SLO",
    "imbalance_cv": "imbalance CV",
    "hit_share": "prompt cached",
    "work_peak": "most work in a minute",
    "preemptions": "preemptions",
    "held_share": "held",
    COST: "cost",
}
_MORE_IS_BETTER = ("requests_per_s", "tokens_per_s", "goodput_per_s", "good_share", "hit_share")


@dataclass(frozen=True)
class Change:
    """How a metric differs between the policy and another."""

    text: str
    direction: int  # -1 better, 1 worse, 0 if the interval holds no change


@dataclass(frozen=True)
class EvaluationReport:
    """Comparisons whose first policy is the one to judge."""

    base: ComparisonReport

    @property
    def comparisons(self) -> Sequence[Comparison]:
        return self.base.comparisons

    @property
    def policy(self) -> str:
        return self.comparisons[0].names[0]

    @property
    def against(self) -> list[str]:
        return self.comparisons[0].names[1:]

    @property
    def metrics(self) -> list[str]:
        """What all comparisons have: prefix caches, for example, only where prompts share prefixes."""
        return [name for name in METRICS if all(name in one.metrics[self.policy] for one in self.comparisons)]

    @cached_property
    def geometric_means(self) -> dict[str, dict[str, Ratio]]:
        """Ratios over all comparisons, by other policy and metric."""
        names = self.metrics
        return {
            other: dict(zip(names, geometric_mean(self.comparisons, names, self.policy, other), strict=True))
            for other in self.against
        }

    @cached_property
    def verdict(self) -> Verdict:
        return verdict_of(self)

    def results(self) -> dict[str, Any]:
        """What a comparison has, and the policy's ratio to each of the others."""
        return self.base.results() | {
            "policy": self.policy,
            "verdict": vars(self.verdict),
            "against": {
                other: {one.name: _plain(one.ratios_between(self.policy, other)) for one in self.comparisons}
                for other in self.against
            },
            "geometric_mean_against": {other: _plain(row) for other, row in self.geometric_means.items()},
        }

    def metric_rows(self, one: Comparison) -> list[tuple[str, str, list[Change]]]:
        """Header, value, and the change against each other policy, metric by metric."""
        ratios = [one.ratios_between(self.policy, other) for other in self.against]
        return [
            (METRICS[name], metric_text(one, self.policy, name), [_change(row[name], name) for row in ratios])
            for name in self.metrics
        ]

    def scenario_rows(self) -> list[tuple[str, list[Change]]]:
        """The changes of the headlines against the first other policy, scenario by scenario."""
        rows = []
        for one in self.comparisons:
            ratios = one.ratios_between(self.policy, self.against[0])
            rows.append((one.name, [_change(ratios[name], name) for name in self.base.headlines]))
        return rows

    def summary_rows(self) -> list[tuple[str, list[Change]]]:
        """The changes of the headlines over all scenarios, other policy by other policy."""
        return [
            (label(self.comparisons[0], other), [_change(row[name], name) for name in self.base.headlines])
            for other, row in self.geometric_means.items()
        ]

    def markdown(self) -> str:
        parts = [f"# {self.policy}", *self.base.told(self.verdict)]
        headers = [METRICS[name] for name in self.base.headlines]
        if len(self.comparisons) > 1:
            tables = (
                ("Against each policy over all scenarios: geometric mean", "against", self.summary_rows()),
                (f"Against {self.against[0]} in each scenario", "scenario", self.scenario_rows()),
            )
            for title, first, rows in tables:
                cells = [[name, *(one.text for one in changes)] for name, changes in rows]
                parts.append(f"## {title}\n\n{markdown([first, *headers], cells)}")
        for one in self.comparisons:
            cells = [
                [name, value, *(cell.text for cell in row)] for name, value, row in self.metric_rows(one)
            ]
            header = ["metric", self.policy, *(f"against {label(one, other)}" for other in self.against)]
            parts.append(f"## {self.policy} on {one.name}\n\n{markdown(header, cells)}")
        return "\n\n".join([*parts, self.base.markdown()])


def _plain(ratios: Mapping[str, Ratio]) -> dict[str, dict[str, float]]:
    return {name: vars(ratio) for name, ratio in ratios.items()}


def _change(ratio: Ratio, metric: str) -> Change:
    sign = -1 if metric in _MORE_IS_BETTER else 1
    return Change(change(ratio), sign * direction(ratio))
