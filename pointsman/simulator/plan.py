"""What each replica of a cluster runs with: scheduler, execution times and memory, resolved and checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pointsman.errors import InputError
from pointsman.simulator.cost import PER_STEP, AutoCost, CostTables, cost_tables
from pointsman.simulator.hardware import Catalogue, Deployment, kv_capacity_blocks, load_catalogue, vidur_plan
from pointsman.simulator.measured import find_measured
from pointsman.simulator.profile import ProfileCost
from pointsman.simulator.spec import AnyScheduler, ClusterSpec, ReplicaGroup, VllmV1Scheduler
from pointsman.spec import parse_spec, read_yaml
from pointsman.workload import Workload

# The steps a router's calibration would time: a prompt chunk, and decoding with a full and an empty batch.
CALIBRATION_PREFILL_TOKENS = 1024
CALIBRATION_DECODES = 64
CALIBRATION_CONTEXT_TOKENS = 1024


@dataclass(frozen=True)
class ReplicaPlan:
    """One replica with everything resolved."""

    model: str
    max_context_tokens: int  # of the model, prompt and output
    scheduler: AnyScheduler
    costs: CostTables
    num_blocks: int
    max_seqs: int
    slowdown: float
    card: tuple[str, int] | None = None  # which it shares with all that say the same
    num_neighbours: int = 0  # on its card
    neighbour_step_s: float = 0.0

    @property
    def costs_beside(self) -> CostTables:
        """What its steps cost if each neighbour on its card makes as many."""
        extra_s = self.num_neighbours * self.neighbour_step_s
        if extra_s == 0.0:
            return self.costs
        coefficients = self.costs.coefficients.copy()
        coefficients[PER_STEP] += extra_s
        return replace(self.costs, coefficients=coefficients)

    @property
    def max_held_seqs(self) -> int:
        """Sequences that may hold memory at once; Vidur's orca limits the batch, not the replica."""
        return self.max_seqs * (self.scheduler.pipeline_stages if self.scheduler.kind == "orca" else 1)

    @property
    def kv_capacity_tokens(self) -> int:
        """The longest sequence that can be served at all; alone on vllm-v1 it may use what is kept free."""
        blocks = self.num_blocks
        if self.scheduler.kind != "vllm-v1":
            blocks -= self.watermark_blocks
        tokens = blocks * self.scheduler.block_size
        if self.scheduler.kind == "orca":
            return min(tokens, self.scheduler.max_sequence_tokens)
        return tokens

    @property
    def give_up_tokens(self) -> int:
        """The length beyond which a replica gives up a sequence.

        Vidur's vllm and sarathi want a free block for every token, and put to sleep what leaves none.
        """
        if self.scheduler.kind in ("vllm", "sarathi"):
            return min(self.kv_capacity_tokens, (self.num_blocks - 1) * self.scheduler.block_size)
        return self.kv_capacity_tokens

    @property
    def watermark_blocks(self) -> int:
        """Blocks kept free; today's vLLM counts a block that nobody may use."""
        num_null = 1 if self.scheduler.kind == "vllm-v1" else 0
        return int(self.scheduler.watermark * (self.num_blocks + num_null))

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
        return self.costs_beside.stage_s(num_tokens, pairs=num_tokens**2 / 2, squares=float(num_tokens**2))

    @property
    def decode_s_per_token(self) -> float:
        """What one more sequence adds to a step."""
        difference = self._decode_s(CALIBRATION_DECODES) - self._decode_s(1)
        return difference / (CALIBRATION_DECODES - 1) * self.slowdown

    @property
    def typical_step_s(self) -> float:
        """A quarter of a prompt chunk beside a batch of decoding sequences: the mix of a chat."""
        step_s = self._decode_s(CALIBRATION_DECODES) * self.slowdown
        return step_s + CALIBRATION_PREFILL_TOKENS / 4 * self.prefill_s_per_token

    @property
    def step_floor_s(self) -> float:
        return self._decode_s(1) * self.slowdown

    def _decode_s(self, num_decodes: int) -> float:
        context_tokens = num_decodes * CALIBRATION_CONTEXT_TOKENS
        return self.costs_beside.stage_s(
            num_decodes=num_decodes, context_tokens=context_tokens, num_seqs=num_decodes
        )


def plan_replicas(spec: ClusterSpec, base_dir: Path | None = None) -> list[ReplicaPlan]:
    """Resolve every replica of the cluster; what cannot be run is refused here."""
    catalogue_path = spec.catalogue
    if catalogue_path is not None and base_dir is not None:
        catalogue_path = base_dir / catalogue_path
    catalogue = load_catalogue(catalogue_path)
    plans = []
    for group in spec.groups:
        plan = _plan_group(spec, group, catalogue, base_dir)
        cards = [plan.card and (plan.card[0], number) for number in range(group.count)]
        plans += [plan if card is None else replace(plan, card=card) for card in cards]
    num_on = Counter(plan.card for plan in plans)
    return [
        plan if plan.card is None else replace(plan, num_neighbours=num_on[plan.card] - 1) for plan in plans
    ]


def _plan_group(
    spec: ClusterSpec, group: ReplicaGroup, catalogue: Catalogue, base_dir: Path | None
) -> ReplicaPlan:
    if group.description is not None:
        group = _described(group, (base_dir or Path()) / group.description)
    scheduler = group.scheduler or spec.scheduler
    deployment = Deployment(
        device=catalogue.device(group.device or spec.device),
        model=catalogue.model(group.model or spec.model),
        tensor_parallel=group.tensor_parallel or spec.tensor_parallel,
        pipeline_parallel=scheduler.pipeline_stages,
        dtype=group.dtype or spec.dtype,
    )
    cost = group.cost or spec.cost
    if isinstance(cost, ProfileCost) and base_dir is not None:
        cost = cost.under(base_dir)
    costs = cost_tables(cost, deployment)
    measured = find_measured(deployment) if isinstance(cost, AutoCost) else None
    if measured is not None and isinstance(scheduler, VllmV1Scheduler):
        scheduler = scheduler.model_copy(update=measured.missing_times(scheduler))
    num_blocks, max_seqs = _memory(scheduler, deployment, spec.memory_utilization)
    num_blocks = max(1, int(num_blocks * (group.kv_memory_share or spec.kv_memory_share)))
    plan = ReplicaPlan(
        model=deployment.model.name,
        max_context_tokens=deployment.model.max_context_tokens,
        scheduler=scheduler,
        costs=costs,
        num_blocks=num_blocks,
        max_seqs=max_seqs,
        slowdown=group.slowdown,
        card=None if group.card is None else (group.card, 0),
        neighbour_step_s=group.neighbour_step_s or 0.0,
    )
    _check_plan(plan)
    return plan


def _described(group: ReplicaGroup, path: Path) -> ReplicaGroup:
    """Complete a group with what its `description` says."""
    found = read_yaml(path, "replica").get("replica")
    if not isinstance(found, dict):
        remedy = "give a file written by `pointsman calibrate --out`"
        raise InputError("cluster.replicas.description", str(path), "has no section `replica`", remedy)
    described = parse_spec(ReplicaGroup, found, f"{path}: replica")
    given = {name: getattr(group, name) for name in group.model_fields_set}
    return described.model_copy(update=given)


def _memory(scheduler: AnyScheduler, deployment: Deployment, memory_utilization: float) -> tuple[int, int]:
    """KV blocks, and how many sequences a batch may hold."""
    if isinstance(scheduler, VllmV1Scheduler):
        num_blocks = scheduler.num_blocks or kv_capacity_blocks(
            deployment, scheduler.block_size, memory_utilization
        )
        return num_blocks, scheduler.max_num_seqs
    if scheduler.num_blocks is not None:
        return scheduler.num_blocks, scheduler.max_batch_size
    planned = vidur_plan(deployment, scheduler.max_sequence_tokens, scheduler.block_size)
    if scheduler.kind == "orca":
        return planned.num_blocks, min(scheduler.max_batch_size, planned.num_slots)
    return planned.num_blocks, scheduler.max_batch_size


def _check_plan(plan: ReplicaPlan) -> None:
    scheduler = plan.scheduler
    if plan.max_seqs < scheduler.pipeline_stages:
        raise InputError(
            "cluster.scheduler.pipeline_stages",
            scheduler.pipeline_stages,
            f"more stages than sequences on a replica ({plan.max_seqs})",
            "lower it or raise the batch size",
        )
    if scheduler.kind == "orca" and scheduler.max_sequence_tokens // scheduler.block_size > plan.num_blocks:
        raise InputError(
            "cluster.scheduler.max_sequence_tokens",
            scheduler.max_sequence_tokens,
            f"orca reserves that much for every sequence, and there are {plan.num_blocks} blocks of memory",
            "lower it or raise num_blocks",
        )
    if plan.neighbour_step_s > 0.0 and plan.card is None:
        remedy = "give its group, and those of its neighbours, the name of their `card`"
        problem = "counts for servers that share a card, and this one shares none"
        raise InputError("cluster.replicas.neighbour_step_s", plan.neighbour_step_s, problem, remedy)
    if plan.card is not None and scheduler.pipeline_stages > 1:
        problem = f"is not simulated with {scheduler.pipeline_stages} pipeline stages"
        raise InputError("cluster.replicas.card", plan.card[0], problem, "use one stage or leave it out")
    if plan.typical_step_s <= 0.0:
        raise InputError("cluster.cost", "0 s", "a step takes no time", "set one of its coefficients")


def check_workload(plans: Sequence[ReplicaPlan], workload: Workload) -> None:
    """Every request must fit on some replica, else it would wait for ever."""
    prompts, sizes = workload.num_prefill_tokens, workload.num_prefill_tokens + workload.num_decode_tokens
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
    fits = np.zeros(len(workload), np.bool_)
    for longest, memory in {(plan.max_prompt_tokens, plan.kv_capacity_tokens) for plan in plans}:
        fits |= (prompts <= longest) & (sizes <= memory)
    if not fits.all():
        row = int(np.where(fits, 0, sizes).argmax())
        raise InputError(
            f"workload request {workload.request_id[row]}, num_prefill_tokens + num_decode_tokens",
            int(sizes[row]),
            f"more than the KV memory of any replica that takes its prompt (the largest: {largest} tokens)",
            "raise cluster.scheduler.num_blocks, use a larger device, or set workload.max_tokens",
        )
