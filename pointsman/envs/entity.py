"""What the trainer knows of an environment: entities to choose from, a context, masks, and time.

Routing chooses a replica for a request, job scheduling a job for free GPUs; both are "pick one of R entities
or do nothing", and the trainer, the networks and the checkpoints know no more than that.

Letters: N environments, R entities (padded), F features of an entity, C of the context, P privileged ones,
A = R + 1 actions: 0 does nothing (hold), k picks entity k - 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pointsman.inference.space import EntitySpace

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


class Observation(NamedTuple):
    """Views into buffers that the next step overwrites: copy what you keep."""

    entities: Floats  # [N, R, F]
    context: Floats  # [N, C]
    entity_mask: Bools  # [N, R] True where there is an entity
    action_mask: Bools  # [N, A] True where the action is legal; never all False
    privileged: Floats  # [N, P]


class Episode(NamedTuple):
    """An episode that ended in this step."""

    env: int
    group: int  # which of the environment's `groups` (scenarios) it was
    episode_return: float
    length: int  # decisions
    metrics: dict[str, float]


class Step(NamedTuple):
    """What followed the actions. Environments that ended are already reset (same-step autoreset)."""

    observation: Observation
    reward: Floats  # [N]
    elapsed_s: Floats  # [N] time from this decision to the next
    terminated: Bools  # [N]
    truncated: Bools  # [N]
    final_observation: Observation  # rows of environments that ended: what was seen last. Others: undefined
    groups: NDArray[np.int64]  # [N] the group each environment was in
    terms: dict[str, Floats]  # [N] the reward's terms, weighted and scaled; their sum is the raw reward
    is_flat: Bools  # [N] rewards that were clipped or squashed beyond telling better from worse
    episodes: Sequence[Episode]
    is_illegal: Bools | None = None  # [N] actions not allowed, where the environment plays on; or it raises
    tails: Mapping[str, Floats] = MappingProxyType(
        {}
    )  # [N] what each tail with a limit earned, at a price of 1
    lifetime_s: Floats | None = None  # [N] how long what a decision causes lasts in this episode, on average


class EntityEnv(Protocol):
    """N environments that step together."""

    space: EntitySpace
    num_envs: int
    groups: tuple[str, ...]
    metadata: dict[str, Any]  # what a policy trained here must be told where it serves; JSON
    teachers: tuple[str, ...]  # heuristics that `advise` knows
    baseline: str  # the one of them that learning has to beat

    def reset(self, seed: int) -> Observation:
        """Start all environments anew; everything after follows from the seed and the actions."""
        ...

    def step(self, actions: NDArray[np.int64]) -> Step: ...

    def advise(self, teacher: int) -> NDArray[np.int64]:
        """[N] what one of the environment's `teachers` (heuristics) would do now; changes no episode.

        A teacher that takes turns or draws lots does so from decision to decision.
        """
        ...

    def set_difficulty(self, difficulty: dict[str, Any]) -> None:
        """Take a stage of a curriculum; holds from each environment's next episode on.

        What is not named is as configured: an empty stage takes all others back.
        """
        ...
