"""Runs an episode to its end under reference policies before it begins, to know what it will be like.

From the shadow's run come the cost of a second, which rewards are divided by, and how long requests live,
which credit follows. From the runs of policies that limits name come the tails: where they begin, and how
heavy they are. All of it follows from the arrivals, so no policy can move it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pointsman.envs.totals import FIELDS, RewardTotals, read_totals
from pointsman.experiments.objective import Limit, Objective
from pointsman.experiments.simulate import Prepared
from pointsman.routing.policy import PolicySpec, PolicyTables
from pointsman.simulator.cluster import Clusters
from pointsman.simulator.run import run

# What is beyond a P99 is too little to learn from: a tail begins where 97 % are done, as far below the limit
# as it is below the reference's P99.
TAIL_BEGINS, LIMITED_AT = 0.97, 0.99
# A tail is never taken for lighter than this, in units of where it begins: some limits are far away.
LIGHTEST_TAIL = 0.002
ENDS = {"ttft_p99": "first_token_at", "e2e_p99": "completed_at"}


class LatencyTail(NamedTuple):
    """The tail of one latency: where it begins, and how heavy it is under the reference policy."""

    begins_s: float
    excess_rate: float  # seconds beyond it, of all requests, in a second of the episode


class Foresight(NamedTuple):
    cost_rate: float  # what the shadow pays for a second
    lifetime_s: float  # of a request, on average
    mean_in_system: float  # requests
    tails: dict[str, LatencyTail]  # by limit


class Oracle:
    """Runs the reference policies on clusters of its own: the third and later ones.

    The first is the policy's, the second the shadow's.
    """

    def __init__(self, objective: Objective, shadow: PolicySpec, max_replicas: int) -> None:
        self.objective = objective
        self.names = list(dict.fromkeys((shadow.kind, *objective.references)))
        others = [PolicySpec(kind=name) for name in self.names[1:]]
        self._policies = PolicyTables([shadow, *others], max_replicas)
        self._actions: NDArray[np.int64] = np.zeros(len(self.names), np.int64)

    @property
    def num_clusters(self) -> int:
        return 2 + len(self.names)

    def foresee(
        self, clusters: Clusters, episode: Prepared, num_warmup: int, cost: Callable[[RewardTotals], Any]
    ) -> Foresight:
        """Run them to the last arrival; `num_warmup` requests came before the episode."""
        sims = clusters.sims[2:]
        before, after = np.empty((2, len(FIELDS), len(sims)))
        read_totals(sims, before)
        sims["stop_at"] = episode.workload.arrived_at[-1]
        run(sims, self._policies.rows, self._actions, 0, len(self.names))
        read_totals(sims, after)
        gained = RewardTotals(*(after - before))
        seconds = max(float(gained.now[0]), 1e-9)
        num_arrivals = max(len(episode.workload) - num_warmup, 1)
        area = float(gained.in_system_area[0])
        tables = [clusters.requests[2 + k][num_warmup:] for k in range(len(self.names))]
        return Foresight(
            cost_rate=float(cost(gained)[0] / seconds) or 1.0,
            # By Little's law; a floor, for episodes in which nothing happens.
            lifetime_s=max(area / num_arrivals, 1e-3),
            mean_in_system=area / seconds,
            tails={limit.metric: self._tail(limit, tables, seconds) for limit in self.objective.limits},
        )

    def _tail(self, limit: Limit, tables: Sequence[Any], seconds: float) -> LatencyTail:
        requests = tables[0 if limit.seconds is not None else self.names.index(limit.policy)]
        end = ENDS[limit.metric]
        requests = requests[requests[end] >= 0]
        latencies_s = requests[end] - requests["arrived_at"]
        if len(latencies_s) == 0:
            return LatencyTail(limit.seconds or np.inf, 1.0)
        begins_s, p99_s = np.quantile(latencies_s, (TAIL_BEGINS, LIMITED_AT))
        if limit.seconds is not None:
            begins_s *= limit.seconds / p99_s
        else:
            begins_s *= limit.factor
        excess_s = max(float(np.maximum(0.0, latencies_s - begins_s).mean()), LIGHTEST_TAIL * begins_s)
        return LatencyTail(float(begins_s), excess_s * len(latencies_s) / seconds)
