"""What adds up in clusters while they run, and rewards are made of."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import literal_unroll
from numpy.typing import NDArray

from pointsman.compiled.jit import entry_point

Array = NDArray[np.float64]


class RewardTotals(NamedTuple):
    """What has added up in a time, by cluster [N]."""

    now: Array
    in_system_area: Array
    unstarted_area: Array
    age_area: Array
    slo_excess_s: Array
    ttft_excess_s: Array
    e2e_excess_s: Array
    sum_e2e_s: Array
    num_completed: Array
    num_fast_first_tokens: Array


FIELDS = RewardTotals._fields


@entry_point
def read_totals(clusters: Any, totals: Array) -> None:
    """totals [K, N]: what the clusters [N] SIM have now; a difference of two of these is `RewardTotals`."""
    for i in range(len(clusters)):
        k = 0
        for name in literal_unroll(FIELDS):
            totals[k, i] = clusters[i][name]
            k += 1  # noqa: SIM113  numba unrolls no `enumerate`
