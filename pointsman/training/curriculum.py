"""Easier tasks first: stages of difficulty, reached by time or earned by evaluations.

What can be made harder is the environment's to say; routing knows load, replica count, hardware mix and how
strict the reward is (envs/episodes.py). Evaluations stay as hard as they are, so a score says how far the
policy is and not which stage it is in. Where a run stands is one number, saved with it. With a stage, all
environments begin new episodes: it holds from the update that announces it on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from pointsman.envs.entity import EntityEnv
from pointsman.errors import InputError
from pointsman.spec import Spec
from pointsman.training.exploration import Event

STAGES = "curriculum.stages"


class StageSpec(Spec):
    """Begins when one of its two conditions holds, whichever comes first."""

    difficulty: dict[str, Any] = Field(
        min_length=1, description="for the environment; keys not named stay as in the stage before"
    )
    from_fraction: float | None = Field(
        default=None, ge=0, le=1, description="when this fraction of the run is done"
    )
    from_metrics: dict[str, float] = Field(
        default={},
        description="when each of these metrics of the last evaluation is at least as high: eval_score: 0.1",
    )


class CurriculumSpec(Spec):
    stages: tuple[StageSpec, ...] = Field(min_length=1, description="one after another; the first at once")

    @model_validator(mode="after")
    def _all_begin(self) -> Self:
        latest = 0.0
        for index, stage in enumerate(self.stages):
            has_condition = stage.from_fraction is not None or bool(stage.from_metrics)
            where = f"{STAGES}.{index}"
            if index == 0 and has_condition:
                raise InputError(where, "from_…", "the first stage begins at once", "leave it out")
            if index > 0 and not has_condition:
                raise InputError(where, None, "never begins", "give it from_fraction or from_metrics")
            if stage.from_fraction is not None and stage.from_fraction < latest:
                problem = f"begins before an earlier stage ({latest:g})"
                raise InputError(f"{where}.from_fraction", stage.from_fraction, problem, "sort the stages")
            latest = stage.from_fraction if stage.from_fraction is not None else latest
        return self


class Curriculum:
    """Where the run stands. Stages are never left again for an easier one."""

    def __init__(self, spec: CurriculumSpec) -> None:
        self.spec = spec
        self.index = self.before = -1  # of the stage that holds, and of the one that held before

    def check(self, env: EntityEnv) -> None:
        """Try every stage on an environment, so that a bad one is an error now and not in an hour."""
        for index in range(len(self.spec.stages)):
            env.set_difficulty(self._difficulty(index))
        env.set_difficulty({})

    def stage(self, fraction_done: float, eval_metrics: Mapping[str, float]) -> dict[str, Any] | None:
        """The difficulty to set now, complete; None: as it is."""
        self._check_metrics(eval_metrics)
        before = self.index
        while self.index + 1 < len(self.spec.stages) and self._is_due(fraction_done, eval_metrics):
            self.index += 1
        if self.index == before:
            return None
        self.before = before
        return self._difficulty(self.index)

    def announced(self, update: int) -> Event:
        """The stage that has just begun, for the news; stages are counted from 1."""
        difficulty = ", ".join(f"{key} {value}" for key, value in self._difficulty(self.index).items())
        why = f"of {len(self.spec.stages)}: {difficulty}; all episodes began anew"
        return Event(update, "curriculum stage", why, self.before + 1, self.index + 1)

    def _difficulty(self, index: int) -> dict[str, Any]:
        return {
            key: value for stage in self.spec.stages[: index + 1] for key, value in stage.difficulty.items()
        }

    def _is_due(self, fraction_done: float, eval_metrics: Mapping[str, float]) -> bool:
        following = self.spec.stages[self.index + 1]
        if self.index < 0:
            return True
        if following.from_fraction is not None and fraction_done >= following.from_fraction:
            return True
        wanted = following.from_metrics
        return bool(wanted and eval_metrics) and all(
            eval_metrics[name] >= least for name, least in wanted.items()
        )

    def _check_metrics(self, eval_metrics: Mapping[str, float]) -> None:
        """A stage that can never begin is an error at the first evaluation, not when it would be due."""
        for index, stage in enumerate(self.spec.stages):
            for name in stage.from_metrics:
                if eval_metrics and name not in eval_metrics:
                    where, known = f"{STAGES}.{index}.from_metrics", ", ".join(sorted(eval_metrics))
                    raise InputError(where, name, "no metric of the evaluation", f"there are: {known}")
