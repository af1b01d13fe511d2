"""What a rule is made of: what it needs, a function that looks, and what to say about what it found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pointsman.diagnosis.curves import RunLog

Severity = Literal["bad", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("bad", "warning", "note")


class Evidence(NamedTuple):
    """What shows that a rule applies."""

    severity: Severity
    text: str  # the figures in words
    figures: Mapping[str, float]
    column: str  # to draw
    began_at: float | None = None  # on the log's x axis; None: from the start


class Margin(NamedTuple):
    """What shows that a rule does not apply, and how far it is from applying."""

    what: str
    value: float
    limit: float
    trouble: Literal["above", "below"] = "above"  # the limit

    @property
    def is_beyond(self) -> bool:
        return self.value > self.limit if self.trouble == "above" else self.value < self.limit

    def __str__(self) -> str:
        side = ">" if self.trouble == "above" else "<"
        return f"{self.what}: {self.value:.3g}, trouble at {side} {self.limit:.3g}"


class Unclear(NamedTuple):
    """What says that the log has the columns, but they do not tell."""

    why: str


Looked = Evidence | Margin | Unclear | None  # None: nothing to say


class Knob(NamedTuple):
    name: str  # as anybody would call it
    turn: str  # which way
    key: str = ""  # ours, in the configuration

    @property
    def aim(self) -> str:
        """What it changes. Knobs with the same aim that turn different ways contradict each other."""
        return AIMS.get(self.name, self.name)

    @property
    def direction(self) -> int:
        """1 for more, -1 for less, 0 where it is neither."""
        word = self.turn.partition(",")[0].partition(" ")[0]
        return 1 if word in UP else -1 if word in DOWN else 0


UP, DOWN = ("raise", "more", "larger", "longer"), ("lower", "fewer", "smaller", "off")
AIMS = {
    "learning rate": "size of a step",
    "epochs per update": "size of a step",
    "ratio clip": "size of a step",
    "target KL": "size of a step",
    "entropy coefficient": "exploration",
    "temperature": "exploration",
    "pulses and raises": "exploration",
}


@dataclass(frozen=True)
class Rule:
    """`needs` names columns (`a|b`: one of the two), `score`, or a part of a run directory, `config` say."""

    name: str
    title: str
    needs: tuple[str, ...]
    look: Callable[[RunLog], Looked]
    cause: str
    check: str
    knobs: tuple[Knob, ...] = ()
    min_rows: int = 8
    from_fraction: float = 0.0  # of the run: before, it is too early to tell


LOWER_LR = Knob("learning rate", "lower", "ppo.learning_rate")
RAISE_LR = Knob("learning rate", "raise", "ppo.learning_rate")
FEWER_EPOCHS = Knob("epochs per update", "fewer", "ppo.num_epochs")
MORE_EPOCHS = Knob("epochs per update", "more", "ppo.num_epochs")
LOWER_CLIP = Knob("ratio clip", "lower", "ppo.clip_ratio")
LOWER_TARGET_KL = Knob("target KL", "lower", "ppo.target_kl")
LARGER_BATCH = Knob("decisions per update", "more", "run.num_envs, run.rollout_steps")
RAISE_ENTROPY = Knob("entropy coefficient", "raise", "exploration.entropy_coef")
LOWER_ENTROPY = Knob("entropy coefficient", "lower", "exploration.entropy_coef")
LOWER_TEMPERATURE = Knob("temperature", "lower, to 1", "exploration.temperature")
RAISE_VALUE_COEF = Knob("value coefficient", "raise", "ppo.value_coef")
