"""The one form in which rules see a run, whoever wrote its log: columns by our names, and what else is known.

Letters: U rows, one for each point of the x axis at which anything was logged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

X_NAMES = ("update", "timesteps")  # the x axis: the one that more rows have, of two the one that repeats less
SCORES = (
    "eval_score",
    "eval_mean_return",
    "mean_ep_return",
)  # the first is trusted most
BASELINES = ("eval_baseline_score", "eval_baseline_return")
# Not finite means diverged. Other columns may well be: the variance explained of constant returns, say.
LOSSES = ("pg_loss", "v_loss", "loss", "entropy", "approx_kl_mean", "grad_norm")


class Series(NamedTuple):
    """A column where it was logged, without what is not finite: [K] each."""

    x: Array
    y: Array

    def __len__(self) -> int:
        return len(self.y)

    def tail(self, share: float) -> Array:
        """The last values, at least one."""
        return self.y[-max(1, round(share * len(self.y))) :]

    def head(self, share: float) -> Array:
        return self.y[: max(1, round(share * len(self.y)))]

    def after(self, x: float) -> Series:
        return Series(self.x[self.x > x], self.y[self.x > x])

    def between(self, after: float, until: float) -> Array:
        """Values with after < x <= until."""
        return self.y[(self.x > after) & (self.x <= until)]


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run beside its curves; empty where it is not ours."""

    config: Mapping[str, Any] = field(default_factory=dict)
    headroom: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    schema: Mapping[str, Any] = field(default_factory=dict)
    stopped: Mapping[str, Any] = field(default_factory=dict)

    def has_setting(self, key: str) -> bool:
        *parents, last = key.split(".")
        section = self.setting(".".join(parents)) if parents else self.config
        return isinstance(section, Mapping) and last in section

    def setting(self, key: str) -> Any:
        """A value of the configuration by its dotted key; None where there is none."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


@dataclass(frozen=True)
class RunLog:
    """`columns` [U] by our names, NaN where nothing was logged."""

    source: str
    kind: str  # who wrote it
    columns: Mapping[str, Array]
    facts: RunFacts = RunFacts()
    notes: tuple[str, ...] = ()  # what the reader had to say
    names: Mapping[str, str] = field(default_factory=dict)  # ours -> the log's, where they differ
    broken_at: Mapping[str, int] = field(default_factory=dict)  # columns -> row of the first written NaN
    is_folded: bool = False  # rows are means of decisions that we took ourselves

    @property
    def is_ours(self) -> bool:
        return bool(self.facts.config)

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    @cached_property
    def x_name(self) -> str:
        counts = {}
        for name in X_NAMES:
            if self.has(name):
                seen = self.columns[name][np.isfinite(self.columns[name])]
                counts[name] = (len(seen), len(np.unique(seen)))
        return max(counts, key=lambda name: counts[name]) if counts else "row"

    @cached_property
    def x(self) -> Array:
        x = self.columns.get(self.x_name)
        return np.arange(1.0, self.num_rows + 1) if x is None else x

    def series(self, name: str) -> Series:
        """Empty where there is no such column."""
        y = self.columns.get(name)
        if y is None:
            return Series(np.empty(0), np.empty(0))
        seen = np.isfinite(y) & np.isfinite(self.x)
        return Series(self.x[seen], y[seen])

    def together(self, *names: str) -> list[Series]:
        """Columns where all of them were logged."""
        seen = np.isfinite(self.x)
        for name in names:
            seen = seen & np.isfinite(self.columns.get(name, np.full(self.num_rows, np.nan)))
        return [Series(self.x[seen], self.columns[name][seen]) for name in names if name in self.columns]

    def last_rows(self, count: int) -> list[dict[str, float]]:
        """What was logged in the last rows."""
        rows = range(max(0, self.num_rows - count), self.num_rows)
        values = {name: values for name, values in self.columns.items() if np.isfinite(values).any()}
        return [{name: float(y[i]) for name, y in values.items() if np.isfinite(y[i])} for i in rows]

    def has(self, name: str) -> bool:
        y = self.columns.get(name)
        return y is not None and bool(np.isfinite(y).any())

    def first_of(self, *names: str) -> str | None:
        """The first of these columns that the log has."""
        return next((name for name in names if self.has(name)), None)

    def group(self, prefix: str) -> dict[str, Series]:
        """All columns `<prefix>/<name>`, by name."""
        found = [name for name in self.columns if name.startswith(f"{prefix}/") and self.has(name)]
        return {name.removeprefix(f"{prefix}/"): self.series(name) for name in found}

    @property
    def fraction_done(self) -> float:
        """How much of the run is done; a run that does not tell counts as over."""
        done = self.series("fraction_done")
        return float(done.y[-1]) if len(done) else 1.0

    def label(self, name: str) -> str:
        """What the log itself calls a column."""
        return self.names.get(name, name)

    @property
    def score_name(self) -> str | None:
        """How good the policy is: evaluations if there are any, else what it earned in training."""
        return self.first_of(*SCORES)

    @cached_property
    def score(self) -> Series:
        """The curve with the evaluation before training, where that is known."""
        name = self.score_name
        if name is None:
            return self.series("")
        series = self.series(name)
        first = self.facts.evaluation.get("first") or {}
        value = first.get(name)
        if value is None or not np.isfinite(value) or (len(series) and series.x[0] <= 0):
            return series
        return Series(np.append(0.0, series.x), np.append(float(value), series.y))

    @property
    def baseline(self) -> float | None:
        """The score that the policy has to beat."""
        name = self.first_of(*BASELINES)
        return float(self.series(name).y[-1]) if name is not None else None
