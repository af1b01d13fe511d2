"""From specification and workload to the arrays of state.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pointsman.errors import InputError
from pointsman.signals import (
    ACCEPTING,
    DECODE_S_PER_TOKEN,
    KV_CAPACITY_TOKENS,
    PREFILL_S_PER_TOKEN,
    STEP_FLOOR_S,
    WEIGHT,
)
from pointsman.simulator.cost import CostTables, cost_tables
from pointsman.simulator.events import SCRAPE, USER_ARRIVAL, encode
from pointsman.simulator.hardware import (
    Catalogue,
    Deployment,
    kv_capacity_blocks,
    load_catalogue,
    vidur_plan,
)
from pointsman.simulator.replica import FAR
from pointsman.simulator.spec import ClusterEvent, ClusterSpec, ReplicaGroup, VidurScheduler, VllmV1Scheduler
from pointsman.simulator.state import (
    DRAIN,
    FAIL,
    JOIN,
    NEVER,
    NOBODY,
    ORCA,
    SARATHI,
    SLOW,
    VLLM,
    VLLM_V1,
    Array,
    Batch,
    Costs,
    Sizes,
    allocate,
)
from pointsman.workload import Workload

SCHEDULER_KINDS = {"vllm-v1": VLLM_V1, "vllm": VLLM, "sarathi": SARATHI, "orca": ORCA}
EVENT_KINDS = {"slow": SLOW, "fail": FAIL, "recover": JOIN, "join": JOIN, "drain": DRAIN}

# The steps a router's calibration would time: a prompt chunk, and decoding with a full and an empty batch.
CALIBRATION_PREFILL_TOKENS = 1024
CALIBRATION_DECODES = 64
CALIBRATION_CONTEXT_TOKENS = 1024
INITIAL_OUTPUT_ESTIMATE = 256


@dataclass(frozen=True)
class ReplicaPlan:
    """One replica with everything resolved."""

    scheduler: VllmV1Scheduler | VidurScheduler
    costs: CostTables
    num_blocks: int
    max_seqs: int
    slowdown: float

    @property
    def kv_capacity_tokens(self) -> int:
        """The longest sequence that can be served at all."""
        blocks = self.num_blocks - int(self.scheduler.watermark * self.num_blocks)
        tokens = blocks * self.scheduler.block_size
        if self.scheduler.kind == "orca":
            return min(tokens, self.scheduler.max_sequence_tokens)
        return tokens

    @property
    def max_prompt_tokens(self) -> int:
        if self.scheduler.kind == "vllm":
            return min(self.kv_capacity_tokens, self.scheduler.max_tokens_in_batch)
        return self.kv_capacity_tokens

    @property
    def prefill_s_per_token(self) -> float:
        one, two = CALIBRATION_PREFILL_TOKENS, 2 * CALIBRATION_PREFILL_TOKENS
        difference = self._prefill_s(two) - self._prefill_s(one)
        return difference / CALIBRATION_PREFILL_TOKENS * self.slowdown

    def _prefill_s(self, num_tokens: int) -> float:
        return self.costs.stage_s(num_tokens, pairs=num_tokens**2 / 2, squares=float(num_tokens**2))

    @property
    def decode_s_per_token(self) -> float:
        decodes = min(CALIBRATION_DECODES, self.max_seqs)
        context = decodes * CALIBRATION_CONTEXT_TOKENS
        step_s = self.costs.stage_s(num_decodes=decodes, context_tokens=context, num_seqs=decodes)
        return step_s / decodes * self.slowdown

    @property
    def step_floor_s(self) -> float:
        return self.costs.stage_s(num_decodes=1, context_tokens=1) * self.slowdown


def plan_replicas(spec: ClusterSpec, base_dir: Path | None = None) -> list[ReplicaPlan]:
    """Resolve every replica of the cluster; what cannot be run is refused here."""
    catalogue_path = spec.catalogue
    if catalogue_path is not None and base_dir is not None:
        catalogue_path = base_dir / catalogue_path
    catalogue = load_catalogue(catalogue_path)
    plans = []
    for group in spec.groups:
        plans += [_plan_group(spec, group, catalogue)] * group.count
    return plans


def _plan_group(spec: ClusterSpec, group: ReplicaGroup, catalogue: Catalogue) -> ReplicaPlan:
    scheduler = group.scheduler or spec.scheduler
    deployment = Deployment(
        device=catalogue.device(group.device or spec.device),
        model=catalogue.model(group.model or spec.model),
        tensor_parallel=group.tensor_parallel or spec.tensor_parallel,
        pipeline_parallel=scheduler.pipeline_stages,
        dtype=group.dtype or spec.dtype,
    )
    costs = cost_tables(group.cost or spec.cost, deployment)
    share = group.kv_memory_share or spec.kv_memory_share
    if isinstance(scheduler, VllmV1Scheduler):
        max_seqs = scheduler.max_num_seqs
        num_blocks = scheduler.num_blocks or kv_capacity_blocks(
            deployment, scheduler.block_size, spec.memory_utilization
        )
    else:
        max_seqs = scheduler.max_batch_size
        num_blocks = scheduler.num_blocks or 0
        if num_blocks == 0:
            plan = vidur_plan(deployment, scheduler.max_sequence_tokens, scheduler.block_size)
            num_blocks = plan.num_blocks
            if scheduler.kind == "orca":
                max_seqs = min(max_seqs, plan.num_slots)
    if max_seqs < scheduler.pipeline_stages:
        raise InputError(
            "cluster.scheduler.pipeline_stages",
            scheduler.pipeline_stages,
            f"more stages than sequences on a replica ({max_seqs})",
            "lower it or raise the batch size",
        )
    return ReplicaPlan(scheduler, costs, max(1, int(num_blocks * share)), max_seqs, group.slowdown)


def check_workload(plans: Sequence[ReplicaPlan], workload: Workload) -> None:
    """Every request must fit on some replica, else it would wait for ever."""
    prompts, outputs = workload.num_prefill_tokens, workload.num_decode_tokens
    largest = max(plan.kv_capacity_tokens for plan in plans)
    longest_prompt = max(plan.max_prompt_tokens for plan in plans)
    if prompts.max() > longest_prompt:
        row = int(prompts.argmax())
        limit = "max_tokens_in_batch" if longest_prompt < largest else "num_blocks"
        raise InputError(
            f"workload request {workload.request_id[row]}, num_prefill_tokens",
            int(prompts[row]),
            f"no replica takes a prompt of more than {longest_prompt} tokens",
            f"raise cluster.scheduler.{limit} or set workload.max_tokens",
        )
    sizes = prompts + outputs
    if sizes.max() > largest:
        row = int(sizes.argmax())
        raise InputError(
            f"workload request {workload.request_id[row]}, num_prefill_tokens + num_decode_tokens",
            int(sizes[row]),
            f"more than the KV memory of any replica ({largest} tokens)",
            "raise cluster.scheduler.num_blocks, use a larger device, or set workload.max_tokens",
        )


def build_batch(
    specs: Sequence[ClusterSpec],
    plans: Sequence[Sequence[ReplicaPlan]],
    workloads: Sequence[Workload],
    seeds: Sequence[int],
    num_logged_batches: int = 0,
) -> Batch:
    """N clusters ready to run, each with its own workload and seed."""
    for cluster_plans, workload in zip(plans, workloads, strict=True):
        check_workload(cluster_plans, workload)
    every_plan = [plan for cluster_plans in plans for plan in cluster_plans]
    tables = list({id(plan.costs): plan.costs for plan in every_plan}.values())
    cost_index = {id(costs): index for index, costs in enumerate(tables)}
    sizes = Sizes(
        num_clusters=len(specs),
        num_replicas=max(len(cluster_plans) for cluster_plans in plans),
        num_requests=max(len(workload.num_prefill_tokens) for workload in workloads),
        num_events=max(len(spec.events) for spec in specs),
        max_seqs=max(plan.max_seqs for plan in every_plan),
        num_stages=max(plan.scheduler.pipeline_stages for plan in every_plan),
        block_size=max(plan.scheduler.block_size for plan in every_plan),
        num_users=max(workload.num_users for workload in workloads),
        batch_log=num_logged_batches,
    )
    batch = allocate(sizes, stack_costs(tables))
    for i, (spec, cluster_plans, workload, seed) in enumerate(
        zip(specs, plans, workloads, seeds, strict=True)
    ):
        _fill_cluster(batch, i, spec, len(cluster_plans), workload, seed)
        for k, plan in enumerate(cluster_plans):
            _fill_replica(batch, i, k, plan, cost_index[id(plan.costs)])
        _fill_weights(batch, i, cluster_plans)
        _fill_requests(batch.requests[i], workload)
        _fill_events(batch, i, spec.events)
        _plan_first_events(batch, i, workload)
    return batch


def _fill_cluster(
    batch: Batch, i: int, spec: ClusterSpec, num_replicas: int, workload: Workload, seed: int
) -> None:
    cluster = batch.cluster[i, 0]
    cluster.time_limit = np.inf
    cluster.num_replicas = num_replicas
    cluster.num_requests = len(workload.num_prefill_tokens)
    cluster.num_users = workload.num_users
    cluster.queue_head = cluster.queue_tail = NOBODY
    cluster.max_hold_s = spec.hold.max_hold_s
    cluster.hold_timer_s = spec.hold.timer_s
    cluster.scrape_interval_s = spec.signals.scrape_interval_s
    cluster.scrape_delay_s = spec.signals.scrape_delay_s
    cluster.is_oracle = spec.signals.oracle
    # xorshift must not start from 0.
    cluster.rng = int(np.random.SeedSequence([seed, 0x5EED]).generate_state(1)[0]) | 1
    batch.output_estimate[i] = INITIAL_OUTPUT_ESTIMATE


def _fill_replica(batch: Batch, i: int, k: int, plan: ReplicaPlan, cost: int) -> None:
    replica = batch.replicas[i, k]
    scheduler = plan.scheduler
    replica.scheduler = SCHEDULER_KINDS[scheduler.kind]
    replica.num_stages = scheduler.pipeline_stages
    replica.block_size = scheduler.block_size
    replica.num_blocks = plan.num_blocks
    replica.watermark_blocks = int(scheduler.watermark * plan.num_blocks)
    replica.max_seqs = plan.max_seqs
    replica.micro_seqs = plan.max_seqs
    if isinstance(scheduler, VllmV1Scheduler):
        replica.max_batch_tokens = scheduler.max_num_batched_tokens
        replica.long_prefill_tokens = scheduler.long_prefill_token_threshold
    else:
        replica.max_batch_tokens = scheduler.max_tokens_in_batch
        replica.chunk_tokens = scheduler.chunk_size
        replica.blocks_per_seq = scheduler.max_sequence_tokens // scheduler.block_size
        if scheduler.kind != "orca":
            replica.micro_seqs = plan.max_seqs // scheduler.pipeline_stages
    replica.cost = cost
    replica.slowdown = plan.slowdown
    replica.is_alive = replica.is_accepting = 1
    replica.waiting_head = replica.waiting_tail = NOBODY
    replica.next_finish = FAR
    signals = batch.signals[i]
    signals[ACCEPTING, k] = 1.0
    signals[KV_CAPACITY_TOKENS, k] = plan.kv_capacity_tokens
    signals[PREFILL_S_PER_TOKEN, k] = plan.prefill_s_per_token
    signals[DECODE_S_PER_TOKEN, k] = plan.decode_s_per_token
    signals[STEP_FLOOR_S, k] = plan.step_floor_s
    batch.cluster[i, 0].num_accepting += 1


def _fill_weights(batch: Batch, i: int, plans: Sequence[ReplicaPlan]) -> None:
    """Shares of the capacity for a typical mix of prompt and output tokens."""
    speeds = np.array([1.0 / (4 * plan.prefill_s_per_token + plan.decode_s_per_token) for plan in plans])
    batch.signals[i, WEIGHT, : len(plans)] = speeds / speeds.mean()


def _fill_requests(requests: Array, workload: Workload) -> None:
    table = requests[: len(workload.num_prefill_tokens)]
    table["arrived_at"] = workload.think_s if workload.num_users > 0 else workload.arrived_at
    table["num_prefill"] = workload.num_prefill_tokens
    table["num_decode"] = workload.num_decode_tokens
    table["prefill"] = workload.num_prefill_tokens
    table["session"] = workload.session
    for column in ("dispatched_at", "scheduled_at", "first_token_at", "completed_at", "last_token_at"):
        table[column] = NEVER
    table["replica"] = NOBODY


def _fill_events(batch: Batch, i: int, events: Sequence[ClusterEvent]) -> None:
    batch.events[i]["at"] = np.inf
    for row, event in zip(batch.events[i], sorted(events, key=lambda event: event.at_s), strict=False):
        row.at = event.at_s
        row.kind = EVENT_KINDS[event.kind]
        row.replica = event.replica
        row.value = event.factor * batch.replicas[i, event.replica].slowdown
    seen: set[int] = set()
    for event in sorted(events, key=lambda event: event.at_s):
        if event.kind == "join" and event.replica not in seen:
            replica = batch.replicas[i, event.replica]
            replica.is_alive = replica.is_accepting = 0
            batch.signals[i, ACCEPTING, event.replica] = 0.0
            batch.cluster[i, 0].num_accepting -= 1
        seen.add(event.replica)


def _plan_first_events(batch: Batch, i: int, workload: Workload) -> None:
    """The first scrape, and the first request of every closed-loop user."""
    planned = [(0.0, SCRAPE)]

    for user in range(min(workload.num_users, len(workload.num_prefill_tokens))):
        planned.append((float(workload.think_s[user]), encode(USER_ARRIVAL, user, 0, 0)))
    batch.cluster[i, 0].next_arrival = len(planned) - 1
    # A sorted list is a heap.
    for position, (time, what) in enumerate(sorted(planned)):
        batch.heap_time[i, position] = time
        batch.heap_seq[i, position] = position
        batch.heap_what[i, position] = what
    batch.cluster[i, 0].heap_size = len(planned)
    batch.cluster[i, 0].next_seq = len(planned)


def stack_costs(tables: Sequence[CostTables]) -> Costs:
    """One array a table for all cost models; shorter ones are continued as `stage_time` would continue them."""

    def stacked(arrays: list[Array]) -> Array:
        shape = tuple(max(array.shape[axis] for array in arrays) for axis in range(arrays[0].ndim))
        return np.stack([_continued(array, shape) for array in arrays])

    return Costs(
        kind=np.array([table.kind for table in tables], np.int64),
        coefficients=np.stack([table.coefficients for table in tables]),
        token_s=stacked([table.token_s for table in tables]),
        sequence_s=stacked([table.sequence_s for table in tables]),
        decode_s=stacked([table.decode_s for table in tables]),
        prefill_s=stacked([table.prefill_s for table in tables]),
        grid=np.stack([table.grid for table in tables]),
    )


def _continued(array: Array, shape: tuple[int, ...]) -> Array:
    for axis, length in enumerate(shape):
        missing = length - array.shape[axis]
        if missing > 0:
            last = np.take(array, [-1], axis)
            slope = last - np.take(array, [-2], axis) if array.shape[axis] > 1 else 0 * last
            counts = np.arange(1, missing + 1).reshape([-1 if a == axis else 1 for a in range(array.ndim)])
            array = np.concatenate([array, last + slope * counts], axis)
    return array
