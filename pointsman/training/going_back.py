"""Back to the best policy, where training leads away from it.

PPO does not stop at the top of a hill: with steps too large for what is left to gain, the score falls for the
rest of the run, slowly and at a small KL. So each evaluation is compared with the best one. Where several in
a row are behind it by more than the noise of an evaluation, the trainer takes the best weights back and goes
on with smaller steps. The noise is that of the difference, seed by seed: what seeds have in common cancels.
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
    evaluations: int = Field(default=3, ge=1, description="behind the best, in a row, before going back")
    least: float = Field(default=0.004, ge=0, description="behind by less than this is not behind [score]")
    deviations: float = Field(default=2.0, ge=0, description="nor by less than so many standard errors")
    factor: float = Field(default=0.5, gt=0, lt=1, description="of the learning rate, each time")
    lowest: float = Field(default=0.1, gt=0, le=1, description="of the learning rate, in all")


@dataclass
class _State:
    factor: float = 1.0  # of the learning rate
    times: int = 0
    in_a_row: int = 0
    best_update: int = 0
    best_score: float | None = None
    best_blocks: list[float] = field(default_factory=list)


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
        state, blocks = self.state, _blocks(metrics)
        if state.best_score is None or score > state.best_score:
            state.best_score, state.best_blocks, state.best_update = score, blocks, update
            state.in_a_row = 0
            return True, []
        behind = state.best_score - score
        noise = max(self.spec.least, self.spec.deviations * _standard_error(blocks, state.best_blocks))
        state.in_a_row = state.in_a_row + 1 if behind > noise else 0
        if state.in_a_row < self.spec.evaluations:
            return False, []
        state.in_a_row = 0
        state.times += 1
        before = state.factor
        state.factor = max(before * self.spec.factor, self.spec.lowest)
        why = (
            f"back to the weights of update {state.best_update}: {self.spec.evaluations} evaluations in a "
            f"row were behind its score of {state.best_score:.4g}, the last by {behind:.2g} (noise {noise:.2g})"
        )
        return False, [Event(update, "lr factor", why, before, state.factor)]

    def metrics(self) -> dict[str, float]:
        return {"lr_factor": self.state.factor, "times_back": float(self.state.times)}

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = _State(**state)


def _blocks(metrics: Mapping[str, float]) -> list[float]:
    names = (f"eval_block{k}_return" for k in range(len(metrics)))
    return [metrics[name] for name in names if name in metrics]


def _standard_error(blocks: list[float], best: list[float]) -> float:
    """Of the mean difference of two evaluations on the same seeds."""
    if len(blocks) < 2 or len(blocks) != len(best):
        return 0.0
    differences = np.subtract(blocks, best)
    return float(differences.std(ddof=1) / math.sqrt(len(blocks)))
