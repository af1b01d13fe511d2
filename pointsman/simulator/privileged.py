"""What a critic may know in training and no policy ever does: the true state of cluster and shadow."""

from __future__ import annotations

from pointsman.compiled.jit import kernel
from pointsman.inference.space import LEAD, Feature
from pointsman.routing.booking import signals_of
from pointsman.routing.observation import TTFT_LIMIT_S, log2p
from pointsman.routing.signals import (
    DECODE_S_PER_TOKEN,
    GENERATED_TOKENS,
    OUTSTANDING,
    PENDING_PREFILL_TOKENS,
    PREFILL_LOAD,
    PREFILL_S_PER_TOKEN,
    STEP_FLOOR_S,
)
from pointsman.simulator.state import replica_at

_declared: list[Feature] = []


def _privileged(name: str, unit: str, meaning: str) -> int:
    """Declare the next number; -> its place in the part of either cluster."""
    _declared.append(Feature(name, unit, "privileged", meaning))
    return len(_declared) - 1


IN_SYSTEM = _privileged("in_system", "log2(1 + requests/16 a replica)", "in the system")
UNSTARTED = _privileged("unstarted", "log2(1 + requests/4 a replica)", "without a first token")
MEAN_AGE = _privileged("mean_age", "log2(1 + s/2)", "mean age of those")
QUEUE = _privileged("queue", "log2(1 + requests/8 a replica)", "held at the router")
USED_BLOCKS = _privileged("used_blocks", "share", "KV blocks in use, mean")
MAX_USED_BLOCKS = _privileged("max_used_blocks", "share", "KV blocks in use, fullest replica")
OUTPUT_LEFT = _privileged("output_left", "log2(1 + tokens/4096 a replica)", "true output still to come")
BACKLOG = _privileged("backlog", "log2(1 + s/2)", "mean prefill backlog")
MAX_BACKLOG = _privileged("max_backlog", "log2(1 + s/2)", "longest prefill backlog")

NUM_OF_EACH = len(_declared)
PRIVILEGED_FEATURES = (
    *_declared,
    *(feature._replace(name=f"shadow_{feature.name}") for feature in _declared),
    Feature(LEAD, "reward", "privileged", "time ahead of the shadow's requests less that of its own"),
)


@kernel
def fill_privileged(sim, privileged, which):
    """privileged [P]; which: 0 for the cluster's own part, 1 for its shadow's."""
    signals = signals_of(sim.router)
    num_replicas = sim.router.num_replicas
    sum_backlog_s = max_backlog_s = sum_used = max_used = 0.0
    for k in range(num_replicas):
        replica = replica_at(sim.replicas, k)
        backlog_s = signals[PENDING_PREFILL_TOKENS, k] * signals[PREFILL_S_PER_TOKEN, k]
        used = replica.used_blocks / replica.num_blocks
        sum_backlog_s += backlog_s
        max_backlog_s = max(max_backlog_s, backlog_s)
        sum_used += used
        max_used = max(max_used, used)
    age_s = sim.now - sim.sum_unstarted_at / sim.num_unstarted if sim.num_unstarted > 0 else 0.0
    start = which * NUM_OF_EACH
    privileged[start + IN_SYSTEM] = log2p(sim.num_in_system / (16.0 * num_replicas))
    privileged[start + UNSTARTED] = log2p(sim.num_unstarted / (4.0 * num_replicas))
    privileged[start + MEAN_AGE] = log2p(age_s / TTFT_LIMIT_S)
    privileged[start + QUEUE] = log2p(sim.router.queue_size / (8.0 * num_replicas))
    privileged[start + USED_BLOCKS] = sum_used / num_replicas
    privileged[start + MAX_USED_BLOCKS] = max_used
    privileged[start + OUTPUT_LEFT] = log2p(sim.num_decode_left / (4096.0 * num_replicas))
    privileged[start + BACKLOG] = log2p(sum_backlog_s / num_replicas / TTFT_LIMIT_S)
    privileged[start + MAX_BACKLOG] = log2p(max_backlog_s / TTFT_LIMIT_S)


@kernel
def time_ahead(sim):
    """Request-seconds that what is in the system will still take, by a plain model of its true output.

    Every token of a stream takes a step of its replica as full as it is now, stretched by the prompts that
    came lately; what waits to be prefilled delays all who are there. What the router still has is taken to go
    to a replica like the mean of all.
    """
    signals = signals_of(sim.router)
    num_replicas = sim.router.num_replicas
    total_s = sum_step_s = sum_harm_s = 0.0
    queued = float(sim.num_decode_left)
    for k in range(num_replicas):
        replica = replica_at(sim.replicas, k)
        others = signals[OUTSTANDING, k]
        step_s = signals[STEP_FLOOR_S, k] + others * signals[DECODE_S_PER_TOKEN, k]
        step_s *= replica.slowdown * (1.0 + signals[PREFILL_LOAD, k])
        left = replica.sum_decode - signals[GENERATED_TOKENS, k]
        harm_s = others * replica.slowdown * signals[PREFILL_S_PER_TOKEN, k]  # of a prompt token
        total_s += left * step_s + harm_s * signals[PENDING_PREFILL_TOKENS, k]
        sum_step_s += step_s
        sum_harm_s += harm_s
        queued -= left
    return total_s + (queued * sum_step_s + sim.queued_prompt * sum_harm_s) / num_replicas
