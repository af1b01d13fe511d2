"""The shape of what a learned policy sees and does: "pick one of R entities, or do nothing".

Routing chooses a replica for a request, job scheduling a job for free GPUs. Networks, checkpoints and the
trainer know no more of a problem than this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

LEAD = "lead"  # a privileged feature, the last: what the environment itself expects of the future, in rewards


class Feature(NamedTuple):
    """One number of an observation, scaled to be comparable with the others."""

    name: str
    unit: str
    group: str  # switched off together in ablations, permuted together in `explain`
    meaning: str


@dataclass(frozen=True)
class EntitySpace:
    """The shape of an environment, and what every number in it means."""

    num_entities: int  # R
    entity_features: tuple[Feature, ...]  # F
    context_features: tuple[Feature, ...]  # C
    privileged_features: tuple[Feature, ...]  # P: for the critic, in training only

    @property
    def has_lead(self) -> bool:
        return any(feature.name == LEAD for feature in self.privileged_features[-1:])

    @property
    def num_actions(self) -> int:
        return self.num_entities + 1
