"""Back to the best policy, where training leads away from it.

PPO does not stop at the top of a hill: with steps too large for what is left to gain, the score falls for the
rest of the run, slowly and at a small KL. So the mean of the last few evaluations is compared with the best
one. Where it is behind by more than noise, the trainer takes the best weights back and goes on with smaller
steps. The noise is how far an evaluation lies off the line through its neighbours, which a steady fall does
not change, and a sudden one only once. (What the returns of a few seeds say is too little: limits on tails
are in the score, and tails are the noisiest part of it.)
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

MEDIAN_TO_DEVIATION = 1.4826  # of the absolute values of normal noise


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
    scores: list[float] = field(default_factory=list)  # of all evaluations


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
        state.scores.append(score)
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

    def _standard_error(self) -> float:
        """The noise of the difference between the best evaluation and the mean of the last few."""
        bends = np.abs(np.diff(self.state.scores, n=2))  # their variance is six times that of a score
        if not len(bends):
            return 0.0
        of_one = MEDIAN_TO_DEVIATION * float(np.median(bends)) / math.sqrt(6.0)
        return of_one * math.sqrt(1.0 + 1.0 / len(self.state.recent))

    def metrics(self) -> dict[str, float]:
        return {"lr_factor": self.state.factor, "times_back": float(self.state.times)}

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = _State(**state)
