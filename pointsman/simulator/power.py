"""How a device with a power limit slows down.

A device keeps the power that it draws on average over a window below its limit by lowering its clock.
Arithmetic takes longer in proportion, memory traffic only in part. What a step would draw at full clocks
follows from its work: energy for reading the weights, for arithmetic, and for the context it reads.
"""

from __future__ import annotations

import math

from pointsman.compiled.jit import kernel
from pointsman.compiled.memory import float_list
from pointsman.simulator.cost import NUM_COEFFICIENTS, PER_PAIR, value_at
from pointsman.simulator.state import batch_at, cost_at, power_limit_at, replica_at


@kernel
def limited_time(sim, k, slot, full_s):
    """Seconds a step takes that would take `full_s` at full clocks, on a device with a power limit.

    The average power at the end of the step depends on how long it takes, so the time is computed twice.
    """
    replica = replica_at(sim.replicas, k)
    cost = cost_at(sim.costs, replica.cost)
    limit = power_limit_at(cost.power, 0)
    batch = batch_at(replica.batches, slot)
    num_tokens = batch.prefill_tokens + batch.num_decodes
    token_s = value_at(float_list(cost.token_s, cost.num_token_s), num_tokens)
    attention_s = float_list(cost.coefficients, NUM_COEFFICIENTS)[PER_PAIR] * batch.pairs
    product_s = min(token_s, limit.compute_s_per_token * num_tokens)
    clocked_s = product_s + limit.memory_share * (token_s - product_s) + attention_s
    energy_j = (
        limit.step_j
        + limit.compute_w * (limit.compute_s_per_token * num_tokens + attention_s)
        + limit.context_j * batch.context_tokens
    )
    power_w = limit.idle_w + energy_j / full_s
    before_w = moved(limit, replica.power_w, limit.idle_w, max(0.0, sim.now - replica.power_at))
    first_s = full_s + clocked_s * (1.0 / clock(limit, before_w) - 1.0)
    after_w = moved(limit, before_w, power_w, first_s)
    share = 0.5 * (clock(limit, before_w) + clock(limit, after_w))
    limited_s = full_s + clocked_s * (1.0 / share - 1.0)
    replica.power_w = moved(limit, before_w, power_w, limited_s)
    replica.power_at = sim.now + limited_s
    return limited_s


@kernel
def moved(limit, average_w, power_w, elapsed_s):
    """The average power after `elapsed_s` more seconds at `power_w`."""
    return power_w + (average_w - power_w) * math.exp(-elapsed_s / limit.window_s)


@kernel
def clock(limit, power_w):
    """Share of the full clock at which the power stays within its limit."""
    if power_w <= limit.limit_w:
        return 1.0
    return ((limit.limit_w - limit.idle_w) / (power_w - limit.idle_w)) ** (1.0 / limit.exponent)
