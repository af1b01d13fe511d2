"""Back to the best policy, where training leads away from it.

PPO does not stop at the top of a hill: with steps too large for what is left to gain, the score falls for the
rest of the run, slowly and at a small KL. So the mean of the last few evaluations is compared with the best
one. Where it is behind by more than noise, the trainer takes the best weights back and goes on with smaller
steps. The noise is how much one evaluation differs from the next, seed by seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from pydantic import Field

from pointsman.spec import Spec
from pointsman.training.exploration import Event


class GoingBackSpec(Spec):
    evaluations: int = Field(default=3, ge=1, description="whose mean is compared with the best")
    least: float = Field(default=0.004, ge=0, description="behind by less than this is not behind [score]")
    deviations: float = Field(
        default=4.0,
        ge=0,
        description="nor by less than so many standard errors; the best of many noisy scores is a lucky one",
    )
    factor: float = Field(default=0.5, gt=0, lt=1, description="of the learning rate, each time")
    lowest: float = Field(default=0.1, gt=0, le=1, description="of the learning rate, in all")


@dataclass
class _State:
    factor: float = 1.0  # of the learning rate
    times: int = 0
    best_update: int = 0
    best_score: float | None = None
    recent: list[float] = field(default_factory=list)  # scores, since the best or the last time back
    blocks: list[float] = field(default_factory=list)  # returns of the last evaluation, seed by seed
    variances: list[float] = field(default_factory=list)  # of their differences to those before


class GoingBack:
    """`after_evaluation` says what to do; whoever asks keeps the weights."""

    def __init__(self, spec: GoingBackSpec | None) -> None:
        self.spec = spec
        self.state = _State()

    @property
    def factor(self) -> float:
        return self.state.factor

    def after_evaluation(self, update: int, metrics: Mapping[str, float]) -> tuple[bool, list[Event]]:
        """(whether this is the best so far, what to tell if the best is to be taken back)."""
        score = metrics.get("eval_score", math.nan)
        if self.spec is None or not math.isfinite(score):
            return False, []
        state = self.state
        self._measure_noise(metrics)
        if state.best_score is None or score > state.best_score:
            state.best_score, state.best_update, state.recent = score, update, []
            return True, []
        state.recent = [*state.recent, score][-self.spec.evaluations :]
        if len(state.recent) < self.spec.evaluations:
            return False, []
        behind = state.best_score - sum(state.recent) / len(state.recent)
        noise = max(self.spec.least, self.spec.deviations * self._standard_error())
        if behind <= noise:
            return False, []
        before = state.factor
        state.factor = max(before * self.spec.factor, self.spec.lowest)
        state.times += 1
        why = (
            f"back to the weights of update {state.best_update}: the last {len(state.recent)} evaluations "
            f"were behind its score of {state.best_score:.4g} by {behind:.2g} (noise: {noise:.2g})"
        )
        state.recent = []
        return False, [Event(update, "lr factor", why, before, state.factor)]

    def _measure_noise(self, metrics: Mapping[str, float]) -> None:
        state, names = self.state, (f"eval_block{k}_return" for k in range(len(metrics)))
        blocks = [metrics[name] for name in names if name in metrics]
        if len(blocks) > 1 and len(blocks) == len(state.blocks):
            state.variances.append(float(np.var(np.subtract(blocks, state.blocks), ddof=1)))
        state.blocks = blocks

    def _standard_error(self) -> float:
        """The noise of the difference between the best evaluation and the mean of the last few."""
        state = self.state
        if not state.variances:
            return 0.0
        of_one = float(np.mean(state.variances)) / 2 / len(state.blocks)
        return math.sqrt(of_one * (1.0 + 1.0 / len(state.recent)))

    def metrics(self) -> dict[str, float]:
        return {"lr_factor": self.state.factor, "times_back": float(self.state.times)}

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = _State(**state)
