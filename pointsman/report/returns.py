"""Policies judged by returns, as a table and as plain results; evaluation/returns.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pointsman.evaluation.bootstrap import LEVEL, METHOD, MIN_SEEDS, NUM_RESAMPLES, Ratio
from pointsman.evaluation.returns import Returns
from pointsman.plain import provenance
from pointsman.report.tables import markdown, number, percent


@dataclass(frozen=True)
class ReturnsRow:
    policy: str
    mean: str
    worst_block: str
    gain: str  # empty where it is compared with itself
    direction: int  # of the gain: -1 better, 1 worse, 0 if the interval holds no change
    shown: tuple[str, ...]  # of the metrics beside the return
    is_best: bool


@dataclass(frozen=True)
class ReturnsReport:
    """`policy` is the one to judge, against all others; without one, all are compared with the baseline."""

    returns: Returns
    headers: Mapping[str, str]  # metrics to show beside the return
    env: Mapping[str, Any]  # the section of the configuration
    command: str
    wall_s: float
    policy: str | None = None

    @property
    def columns(self) -> list[str]:
        gain = f"more than {self.returns.baseline}" if self.policy is None else f"{self.policy} has more"
        return ["return", "worst block", gain, *self.headers.values()]

    def rows(self) -> list[ReturnsRow]:
        best = max(self.returns.names, key=lambda name: self.returns.means[name].ratio)
        return [self._row(name, name == best) for name in self.returns.names]

    def _row(self, name: str, is_best: bool) -> ReturnsRow:
        gain = self.gains.get(name)
        table = self.returns.metrics[name]
        return ReturnsRow(
            name,
            with_interval(self.returns.means[name]),
            signed(self.returns.blocks(name).min()),
            "" if gain is None else with_interval(gain, "+"),
            0 if gain is None else (gain.high < 0) - (gain.low > 0),  # comparisons with NaN are false
            tuple(_shown(metric, float(table[metric].mean())) for metric in self.headers),
            is_best,
        )

    def _gain(self, name: str) -> Ratio | None:
        if name == (self.policy or self.returns.baseline):
            return None
        if self.policy is None:
            return self.returns.gain(name, self.returns.baseline)
        return self.returns.gain(self.policy, name)

    @cached_property
    def gains(self) -> dict[str, Ratio]:
        """What each earns over the baseline; or the policy to judge, over each of the others."""
        found = {name: self._gain(name) for name in self.returns.names}
        return {name: gain for name, gain in found.items() if gain is not None}

    def notes(self) -> list[str]:
        seeds = self.returns.seeds
        lines = [
            f"Mean returns over {len(seeds)} episodes (seeds {seeds[0]}–{seeds[-1]}), the same for every "
            f"policy, with {LEVEL * 100:.0f} % intervals ({METHOD}); number of blocks: "
            f"{self.returns.num_blocks}."
        ]
        if len(seeds) < MIN_SEEDS:
            lines.append(f"Fewer than {MIN_SEEDS} seeds: read the intervals as too narrow, or raise --seeds.")
        return lines

    def results(self) -> dict[str, Any]:
        policies = {}
        for name, metrics in self.returns.metrics.items():
            gain, blocks = self.gains.get(name), self.returns.blocks(name)
            policies[name] = {
                "return": plain_estimate(self.returns.means[name]),
                "worst_block": blocks.min(),
                "best_block": blocks.max(),
                "blocks": blocks,
                "gain": None if gain is None else plain_estimate(gain),
                "means": {metric: values.mean() for metric, values in metrics.items()},
                "metrics": metrics,
            }
        return {
            **provenance(),
            "command": self.command,
            "env": self.env,
            "seeds": self.returns.seeds,
            "baseline": self.returns.baseline,
            "policy": self.policy,
            "interval": {"level": LEVEL, "method": METHOD, "resamples": NUM_RESAMPLES},
            "policies": policies,
            "timings": {"wall_s": self.wall_s},
        }

    def markdown(self) -> str:
        cells = [
            [
                f"**{row.policy}**" if row.is_best else row.policy,
                row.mean,
                row.worst_block,
                row.gain,
                *row.shown,
            ]
            for row in self.rows()
        ]
        parts = [f"`{self.command}`", *self.notes(), markdown(["policy", *self.columns], cells)]
        return "\n\n".join(parts) + "\n"


def _shown(metric: str, mean: float) -> str:
    return f"{number(mean)} s" if metric.endswith("_s") else percent(mean)


def plain_estimate(estimate: Ratio) -> dict[str, float]:
    return {"mean": estimate.ratio, "low": estimate.low, "high": estimate.high}


def with_interval(estimate: Ratio, plus: str = "") -> str:
    """`0.761 [0.745, 0.776]`"""
    text = signed(estimate.ratio, plus)
    if math.isnan(estimate.low):
        return text
    return f"{text} [{signed(estimate.low)}, {signed(estimate.high)}]"


def signed(value: float, plus: str = "") -> str:
    """Three decimals; `plus` stands before what is above 0."""
    text = f"{value:.3f}".replace("-", "−")
    return plus + text if value > 0 and float(f"{value:.3f}") else text
