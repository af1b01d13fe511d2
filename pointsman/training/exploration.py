"""How much the policy explores, decided in one place: temperature, entropy coefficient and epsilon.

Three things move them. Schedules, over the run. An entropy target, which turns temperature or coefficient a
little after each update. And interventions, after evaluations: a pulse of temperature when the score no
longer rises, and more of everything while the policy stays behind a baseline. Interventions are rare and
returned as `Event`s, to be logged; the values themselves are in the metrics of every update. Evaluation and
serving take the arg-max: nothing here touches them.

The controller holds all that outlives an update (the weight of the adaptive KL penalty too), as plain JSON.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from pointsman.spec import Spec
from pointsman.training.ppo import Knobs, PpoSpec, RateByKlSpec
from pointsman.training.schedules import Schedule, check_range, constant, linear

RATE_STEP = 1.5  # by which the learning rate moves after an update


class EntropyTargetSpec(Spec):
    """Hold the entropy near a share of its maximum."""

    entropy_frac: Schedule = Field(
        default=constant(0.5), description="entropy to hold, as a share of that of uniform legal actions"
    )
    through: Literal["temperature", "coefficient"] = Field(
        default="temperature", description="what to turn; it multiplies the schedule's value"
    )
    gain: float = Field(
        default=0.5, gt=0, description="an update turns by e^(gain * missing share of the entropy)"
    )
    limit: float = Field(default=4.0, gt=1, description="turned by this factor at most, up or down")


class StagnationSpec(Spec):
    """A pulse of temperature when the mean score of the last evaluations is hardly above the one before."""

    evaluations: int = Field(default=4, ge=1, description="compare the last so many with as many before")
    min_gain: float = Field(
        default=0.05, ge=0, description="less gain is a plateau; as a share of the range of those compared"
    )
    factor: float = Field(default=1.5, gt=1, description="of the temperature in a pulse")
    updates: int = Field(default=10, ge=1, description="length of a pulse")


class BehindSpec(Spec):
    """More exploration while the policy stays behind the baseline and does not come closer."""

    evaluations: int = Field(default=3, ge=1, description="raise after so many evaluations behind, in a row")
    temperature_factor: float = Field(default=1.1, ge=1, description="of the temperature, each time")
    entropy_factor: float = Field(default=1.5, ge=1, description="of the entropy coefficient, each time")
    max_raises: int = Field(default=3, ge=1, description="then it helps no more")


class ExplorationSpec(Spec):
    temperature: Schedule = Field(default=constant(1.0), description="divides the logits in training")
    entropy_coef: Schedule = Field(default=linear(0.01, 0.001), description="weight of the entropy bonus")
    epsilon: Schedule = Field(default=constant(0.0), description="share of uniform actions in training")
    target: EntropyTargetSpec | None = Field(default=None, description="hold the entropy; null: off")
    stagnation: StagnationSpec | None = Field(default=None, description="pulses on a plateau; null: off")
    behind: BehindSpec | None = Field(default=BehindSpec(), description="behind a baseline; null: off")

    @model_validator(mode="after")
    def _in_range(self) -> Self:
        check_range("temperature", self.temperature, 0.01)
        check_range("entropy_coef", self.entropy_coef, 0.0)
        check_range("epsilon", self.epsilon, 0.0, 1.0)
        if self.target is not None:
            check_range("target.entropy_frac", self.target.entropy_frac, 0.0, 1.0)
        return self


class Event(NamedTuple):
    """One intervention: from update `update` on, `what` is `after` instead of `before`."""

    update: int
    what: str
    why: str
    before: float
    after: float

    def __str__(self) -> str:
        return f"update {self.update}: {self.what} {self.before:.4g} → {self.after:.4g}, {self.why}"


@dataclass
class State:
    """All that outlives an update, as plain JSON."""

    log_turn: float = 0.0  # of the entropy target
    kl_coef: float = 0.0
    pulse_updates_left: int = 0
    num_raises: int = 0
    gaps: list[float] = field(default_factory=list)  # to the baseline, evaluations behind it since a raise
    scores: list[float] = field(default_factory=list)  # since the last pulse, as many as are compared
    log_rate: float = 0.0  # of the learning rate that follows the KL


class Exploration:
    """The controller. `knobs` before a rollout, `after_update` and `after_evaluation` when they are done."""

    def __init__(self, spec: ExplorationSpec, ppo: PpoSpec) -> None:
        self.spec = spec
        self.ppo = ppo
        self.state = State(kl_coef=0.0 if ppo.kl_penalty is None else ppo.kl_penalty.start)

    def knobs(self, fraction_done: float) -> Knobs:
        """What holds for the next rollout and its update."""
        return Knobs(
            lr=self.ppo.learning_rate.value(fraction_done) * math.exp(self.state.log_rate),
            clip=self.ppo.clip_ratio.value(fraction_done),
            temperature=self.spec.temperature.value(fraction_done) * self._temperature_factor(),
            epsilon=self.spec.epsilon.value(fraction_done),
            entropy_coef=self.spec.entropy_coef.value(fraction_done) * self._entropy_factor(),
            kl_coef=self.state.kl_coef,
            kl_ref_coef=self.ppo.kl_reference.value(fraction_done),
            imitation_coef=self.ppo.imitation.value(fraction_done),
        )

    def after_update(self, update: int, fraction_done: float, metrics: Mapping[str, float]) -> list[Event]:
        """`metrics` are those of `ppo.update`. Update `update` is done; events hold from the next on."""
        events = []
        if self.ppo.lr_by_kl is not None:
            events += self._adapt_rate(update, metrics["approx_kl_mean"], self.ppo.lr_by_kl)
        if self.ppo.kl_penalty is not None:
            events += self._adapt_kl_coef(update, metrics["approx_kl_mean"])
        if self.spec.target is not None:
            events += self._follow_target(update, fraction_done, metrics["entropy_frac"])
        if self.state.pulse_updates_left > 0:
            before = self._factors()
            self.state.pulse_updates_left -= 1
            events += self._changes(update, "the pulse is over", before)
        return events

    def after_evaluation(self, update: int, score: float, baseline: float | None = None) -> list[Event]:
        """`score` of the arg-max policy and of the baseline on the same seeds; higher is better."""
        events = []
        if self.spec.behind is not None and baseline is not None:
            events += self._compare_with_baseline(update, score, baseline, self.spec.behind)
        if self.spec.stagnation is not None:
            events += self._look_for_plateau(update, score, self.spec.stagnation)
        return events

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON; with it, a resumed run explores as the uninterrupted one would have."""
        return asdict(self.state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = State(**copy.deepcopy(dict(state)))

    def _temperature_factor(self) -> float:
        factor = 1.0
        if self.spec.target is not None and self.spec.target.through == "temperature":
            factor *= math.exp(self.state.log_turn)
        if self.spec.stagnation is not None and self.state.pulse_updates_left > 0:
            factor *= self.spec.stagnation.factor
        if self.spec.behind is not None:
            factor *= self.spec.behind.temperature_factor**self.state.num_raises
        return factor

    def _entropy_factor(self) -> float:
        factor = 1.0
        if self.spec.target is not None and self.spec.target.through == "coefficient":
            factor *= math.exp(self.state.log_turn)
        if self.spec.behind is not None:
            factor *= self.spec.behind.entropy_factor**self.state.num_raises
        return factor

    def _adapt_rate(self, update: int, kl: float, spec: RateByKlSpec) -> list[Event]:
        """Updates that go twice as far as wanted get a lower rate, those that go half as far a higher one."""
        before, limit = self.state.log_rate, math.log(spec.limit)
        if kl > 2.0 * spec.target:
            self.state.log_rate = max(before - math.log(RATE_STEP), -limit)
        elif kl < spec.target / 2.0:
            self.state.log_rate = min(before + math.log(RATE_STEP), limit)
        # Its course is the column `lr`; that it can do no more is news.
        if abs(self.state.log_rate) < limit or abs(before) >= limit:
            return []
        why = f"at its limit: the KL of the update was {kl:.2g}, target {spec.target:.2g}"
        return [Event(update, "lr factor", why, math.exp(before), math.exp(self.state.log_rate))]

    def _adapt_kl_coef(self, update: int, kl: float) -> list[Event]:
        penalty = self.ppo.kl_penalty
        assert penalty is not None
        before = self.state.kl_coef
        if kl > penalty.target * 1.5:
            self.state.kl_coef = min(before * 2.0, penalty.highest)
        elif kl < penalty.target / 1.5:
            self.state.kl_coef = max(before / 2.0, penalty.start / 1024)  # from 0 it could not come back
        if self.state.kl_coef == before:
            return []
        why = f"the KL of the update was {kl:.2g}, target {penalty.target:.2g}"
        return [Event(update, "kl_coef", why, before, self.state.kl_coef)]

    def _follow_target(self, update: int, fraction_done: float, entropy_frac: float) -> list[Event]:
        target = self.spec.target
        assert target is not None
        wanted = target.entropy_frac.value(fraction_done)
        before, limit = self.state.log_turn, math.log(target.limit)
        turned = before + target.gain * (wanted - entropy_frac)
        self.state.log_turn = min(max(turned, -limit), limit)
        # Small turns are seen in the metrics; that the controller can't do what it should is news.
        if abs(self.state.log_turn) < limit or abs(before) >= limit:
            return []
        why = f"at its limit: entropy is {entropy_frac:.2f} of the maximum, target {wanted:.2f}"
        what = "temperature factor" if target.through == "temperature" else "ent_coef factor"
        return [Event(update, what, why, math.exp(before), math.exp(self.state.log_turn))]

    def _look_for_plateau(self, update: int, score: float, spec: StagnationSpec) -> list[Event]:
        state, size = self.state, spec.evaluations
        state.scores = [*state.scores, score][-2 * size :]
        if state.pulse_updates_left > 0 or len(state.scores) < 2 * size:
            return []
        # Means, not the best so far: the best of noisy scores creeps up for ever, and no pulse would fire.
        # A share of the range, not of the score: scores relative to a baseline cross zero. Of the range of
        # these scores, not of all: one bad evaluation long ago must not make every later rise look small.
        gain = (sum(state.scores[size:]) - sum(state.scores[:size])) / size
        wanted = spec.min_gain * (max(state.scores) - min(state.scores))
        if gain > wanted:
            return []
        before = self._factors()
        state.pulse_updates_left = spec.updates
        state.scores = []
        why = f"plateau: the mean score of {size} evaluations rose by {gain:.3g}, less than {wanted:.3g}"
        return self._changes(update, why, before)

    def _compare_with_baseline(
        self, update: int, score: float, baseline: float, spec: BehindSpec
    ) -> list[Event]:
        state, before = self.state, self._factors()
        if score >= baseline:
            state.gaps = []
            state.num_raises = 0
            return self._changes(update, f"caught up with the baseline ({baseline:.4g})", before)
        state.gaps = [*state.gaps, score - baseline][-spec.evaluations :]
        is_closing_in = state.gaps[-1] > state.gaps[0]
        if len(state.gaps) < spec.evaluations or is_closing_in or state.num_raises == spec.max_raises:
            return []
        state.gaps = []
        state.num_raises += 1
        why = f"behind the baseline {spec.evaluations} times in a row ({score:.4g} against {baseline:.4g})"
        return self._changes(update, why, before)

    def _factors(self) -> dict[str, float]:
        return {"temperature factor": self._temperature_factor(), "ent_coef factor": self._entropy_factor()}

    def _changes(self, update: int, why: str, before: dict[str, float]) -> list[Event]:
        after = self._factors()
        return [
            Event(update, what, why, before[what], after[what])
            for what in after
            if after[what] != before[what]
        ]
