"""What the simulation measures: integrals over time of the load, and sums over requests.

Rewards and metrics are made of these. They are the truth, output lengths included, so no policy sees them.
"""

from __future__ import annotations

import math

from pointsman.compiled.jit import kernel
from pointsman.routing.booking import signals_of
from pointsman.routing.signals import OUTSTANDING
from pointsman.simulator.state import request_at


@kernel
def integrate_load(sim):
    """Bring the time integrals up to now; call it before the load changes."""
    elapsed = sim.now - sim.load_since
    sim.load_since = sim.now
    if elapsed > 0.0 and sim.num_in_system > 0:
        sim.in_system_area += sim.num_in_system * elapsed
        sim.unstarted_area += sim.num_unstarted * elapsed
        sim.age_area += (sim.num_unstarted * (sim.now - 0.5 * elapsed) - sim.sum_unstarted_at) * elapsed
        sim.imbalance_area += sim.imbalance_cv * elapsed
        sim.busy_span += elapsed


@kernel
def measure_arrival(sim, i):
    integrate_load(sim)
    sim.num_in_system += 1
    sim.num_unstarted += 1
    sim.sum_unstarted_at += sim.now
    sim.num_decode_left += request_at(sim.requests, i).num_decode


@kernel
def measure_outstanding(sim, k, before):
    """Replica k had `before` requests outstanding until now."""
    integrate_load(sim)
    after = signals_of(sim.router)[OUTSTANDING, k]
    sim.sum_outstanding += int(after - before)
    sim.sum_squared_outstanding += int(after * after - before * before)
    total = sim.sum_outstanding
    if total > 0:
        # Over the replicas that could have been chosen; one that drains or is gone is not the router's doing.
        spread = sim.router.num_accepting * sim.sum_squared_outstanding / (total * total) - 1.0
        sim.imbalance_cv = math.sqrt(spread) if spread > 0.0 else 0.0
    else:
        sim.imbalance_cv = 0.0


@kernel
def measure_first_token(sim, i):
    """The request has its first token, however often it may be sent again."""
    request = request_at(sim.requests, i)
    integrate_load(sim)
    request.first_token_at = sim.now
    ttft_s = sim.now - request.arrived_at
    sim.num_unstarted -= 1
    # Nothing left of rounding errors when nobody waits.
    sim.sum_unstarted_at = sim.sum_unstarted_at - request.arrived_at if sim.num_unstarted > 0 else 0.0
    sim.num_first_tokens += 1
    sim.num_fast_first_tokens += ttft_s <= sim.slo_ttft_s
    sim.slo_excess_s += max(0.0, ttft_s - sim.slo_ttft_s)
    sim.ttft_excess_s += max(0.0, ttft_s - sim.tail_ttft_s)


@kernel
def measure_finish(sim, i):
    """Add a finished request to the sums; `measure_outstanding` must have brought the integrals up to now."""
    request = request_at(sim.requests, i)
    sim.num_in_system -= 1
    e2e_s = sim.now - request.arrived_at
    sim.sum_e2e_s += e2e_s
    sim.e2e_excess_s += max(0.0, e2e_s - sim.tail_e2e_s)
    decode_s = sim.now - request.first_token_at
    sim.slo_excess_s += max(0.0, decode_s - (request.num_decode - 1) * sim.slo_tpot_s)
