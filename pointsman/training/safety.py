"""Watches the numbers of a run: counts what looks wrong, says so once, stops before hours are wasted.

What it can see from the log alone; limits on latency and queues are the environment's (envs/limits.py), which
ends such an episode with a penalty: those are counted here. A stopped run keeps its last good checkpoint.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import Field

from pointsman.plain import in_percent
from pointsman.spec import Spec
from pointsman.training.buffers import ENDED


class SafetySpec(Spec):
    max_kl: float = Field(
        default=1.0, gt=0, description="KL of an update; a policy that jumps further is lost [nats]"
    )
    min_entropy_frac: float = Field(
        default=0.005,
        ge=0,
        lt=1,
        description="of the entropy of uniform actions; below it nothing is explored",
    )
    entropy_until: float = Field(
        default=0.5, ge=0, le=1, description="fraction of the run in which that low an entropy is an alert"
    )
    max_behind: float | None = Field(
        default=None, gt=0, description="eval_score may be this far below its baseline; null: any"
    )
    patience: int = Field(default=5, ge=1, description="updates or evaluations in a row that raise an alert")
    stop: bool = Field(default=False, description="alerts end the run (what is not finite always does)")


class Alert(NamedTuple):
    update: int
    name: str
    text: str

    def __str__(self) -> str:
        return f"update {self.update}: {self.text}"


class SafetyError(RuntimeError):
    """The run is not worth going on with."""


class Monitor:
    """`check` takes the row of every update. Its state is plain JSON."""

    def __init__(self, spec: SafetySpec) -> None:
        self.spec = spec
        self.in_a_row: Counter[str] = Counter()
        self.total: Counter[str] = Counter()

    def check(self, row: Mapping[str, float], fraction_done: float) -> list[Alert]:
        """New alerts; raises `SafetyError` where going on makes no sense."""
        update = int(row["update"])
        bad = [
            name
            for name in ("pg_loss", "v_loss", "grad_norm", "entropy")
            if not math.isfinite(row.get(name, 0.0))
        ]
        if bad:
            raise SafetyError(f"update {update}: {', '.join(bad)} not finite; the run has diverged")
        if row.get("invalid_frac", 0.0) > 0:
            raise SafetyError(
                f"update {update}: {in_percent(row['invalid_frac'], 2)} of the actions were illegal: "
                "a mask is wrong"
            )
        alerts = self._early_ends(row, update)
        for name, is_wrong, text in self._findings(row, fraction_done):
            self.in_a_row[name] = self.in_a_row[name] + 1 if is_wrong else 0
            self.total[name] += is_wrong
            if self.in_a_row[name] == self.spec.patience:
                alerts.append(Alert(update, name, text))
        if alerts and self.spec.stop:
            raise SafetyError(str(alerts[0]))
        return alerts

    def _early_ends(self, row: Mapping[str, float], update: int) -> list[Alert]:
        """Episodes that the environment ended: all are counted, and the first of each kind is said."""
        alerts = []
        for column, count in row.items():
            limit = column.removeprefix(ENDED)
            if limit == column or count == 0:
                continue
            if self.total[limit] == 0:
                text = f"{count:.0f} episodes were ended early, beyond env.limits.{limit}"
                alerts.append(Alert(update, limit, text))
            self.total[limit] += int(count)
        return alerts

    def _findings(self, row: Mapping[str, float], fraction_done: float) -> list[tuple[str, bool, str]]:
        spec = self.spec
        kl, entropy = row["approx_kl_max"], row["entropy_frac"]
        found = [
            (
                "kl",
                kl > spec.max_kl,
                f"the KL of an update was {kl:.2g}, limit {spec.max_kl:.2g}: lower ppo.learning_rate",
            ),
            (
                "entropy",
                entropy < spec.min_entropy_frac and fraction_done < spec.entropy_until,
                f"entropy is {in_percent(entropy, 2)} of the maximum, early in the run: "
                "raise exploration.entropy_coef",
            ),
        ]
        if spec.max_behind is not None and "eval_score" in row and "eval_baseline_score" in row:
            behind = row["eval_baseline_score"] - row["eval_score"]
            text = f"eval_score is {behind:.3g} below its baseline, limit {spec.max_behind:.3g}"
            found.append(("behind", behind > spec.max_behind, text))
        return found

    def metrics(self) -> dict[str, float]:
        return {f"safety/{name}": float(count) for name, count in sorted(self.total.items())}

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": dict(self.in_a_row), "total": dict(self.total)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.in_a_row, self.total = Counter(state["in_a_row"]), Counter(state["total"])
