"""Jobs as columns, in order of arrival."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_PRIORITY = 10

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Jobs:
    arrived_at: Floats  # [J] s
    duration_s: Floats  # [J]
    gpus: NDArray[np.int64]  # [J] needed all at once
    priority: NDArray[np.int64]  # [J] 1 to 10, 10 most urgent
    deadline_at: Floats  # [J] s, when it should have ended; infinite without a deadline

    def __len__(self) -> int:
        return len(self.arrived_at)

    def rows(self, index: slice | NDArray[Any]) -> Jobs:
        return Jobs(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    @property
    def has_deadlines(self) -> bool:
        return bool(np.isfinite(self.deadline_at).any())

    @property
    def work(self) -> float:
        """GPU seconds of all jobs."""
        return float(self.duration_s @ self.gpus)

    def horizon_s(self, num_gpus: int, slack: float) -> float:
        """When an episode is cut off: so many times the perfectly packed work after the last arrival."""
        return float(self.arrived_at[-1] + slack * self.work / num_gpus)
