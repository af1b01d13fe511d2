"""From specification and workload to the arrays of state.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pointsman.compiled.memory import Records
from pointsman.compiled.random import first_state
from pointsman.routing.booking import NUM_SIZES
from pointsman.routing.policy import fill_memory
from pointsman.routing.prefixes import NUM_BYTES, WAYS, PrefixIndex, num_sets_in
from pointsman.routing.records import (
    ACCOUNT,
    INITIAL_OUTPUT_ESTIMATE,
    LINK,
    NEVER,
    NOBODY,
    NUM_LENGTH_CLASSES,
    TICKET,
)
from pointsman.routing.signals import (
    ACCEPTING,
    DECODE_S_PER_TOKEN,
    KV_CAPACITY_TOKENS,
    MAX_PROMPT_TOKENS,
    NUM_SIGNALS,
    PREFILL_S_PER_TOKEN,
    STEP_FLOOR_S,
    WEIGHT,
)
from pointsman.simulator.cost import CostTables
from pointsman.simulator.events import SCRAPE, USER_ARRIVAL, encode
from pointsman.simulator.plan import ReplicaPlan, check_workload
from pointsman.simulator.replica import FAR
from pointsman.simulator.spec import AnyScheduler, ClusterEvent, ClusterSpec, VllmV1Scheduler
from pointsman.simulator.state import (
    BATCH,
    BATCH_LOG,
    BUCKET,
    CACHE,
    COST,
    DRAIN,
    ENTRY,
    EVENT,
    FAIL,
    FUTURE,
    INSTANT,
    JOIN,
    LINE,
    NUM_TBT_BINS,
    ORCA,
    PIECE,
    POWER,
    PREFIX,
    REPLICA,
    REQUEST,
    SARATHI,
    SIM,
    SLOW,
    STAGE,
    STRETCH,
    VLLM,
    VLLM_V1,
)
from pointsman.simulator.steps import PowerLimit
from pointsman.workload import Workload

Array = NDArray[Any]

SCHEDULER_KINDS = {"vllm-v1": VLLM_V1, "vllm": VLLM, "sarathi": SARATHI, "orca": ORCA}
COST_ARRAYS = ("coefficients", "token_s", "sequence_s", "decode_s", "prefill_s", "grid", "start_s")
EVENT_KINDS = {"slow": SLOW, "fail": FAIL, "recover": JOIN, "join": JOIN, "drain": DRAIN}

NO_LIMIT_S = 1e9
PIECES_PER_SEQUENCE = 64  # far more than ever seen; one more would end a hit early


class Clusters:
    """N independent clusters, ready to run: their records, which hold the arrays they point into.

    `sims` [N] SIM is what kernels get; `requests[i]` is the table of cluster i, `signals[i]` its signals.
    """

    def __init__(
        self,
        specs: Sequence[ClusterSpec],
        plans: Sequence[Sequence[ReplicaPlan]],
        workloads: Sequence[Workload],
        seeds: Sequence[int],
        num_logged_batches: int = 0,
    ) -> None:
        for cluster_plans, workload in zip(plans, workloads, strict=True):
            check_workload(cluster_plans, workload)
        self.sims = Records(len(specs), SIM)
        self.replicas: list[Array] = []
        self.requests: list[Array] = []
        self.signals: list[Array] = []
        self.accounts: list[Array] = []
        self.tbt_histograms: list[Array] = []
        self.batch_logs: list[Array] = []
        tables = list({id(plan.costs): plan.costs for some in plans for plan in some}.values())
        cost_index = {id(costs): index for index, costs in enumerate(tables)}
        costs = self._costs(tables)
        for sim, spec, some, workload, seed in zip(self.sims, specs, plans, workloads, seeds, strict=True):
            sim.costs = costs
            self._fill_cluster(sim, spec, some, workload, seed, num_logged_batches)
            self._fill_router(sim.router, spec, some, len(workload))
            self._fill_requests(sim, workload)
            are_caching = [_is_caching(plan.scheduler, workload) for plan in some]
            if workload.is_shared or any(are_caching):
                self._fill_prefixes(sim, workload)
            self._fill_index(sim.router, workload)
            for k, plan in enumerate(some):
                self._fill_replica(sim, k, plan, cost_index[id(plan.costs)])
                if are_caching[k]:
                    self._fill_cache(self.replicas[-1][k], plan)
            self.replicas[-1]["next_on_card"] = _rings(some)
            self._fill_events(sim, spec.events)
            _plan_first_events(sim, self._new(sim, "heap", _heap_size(some, workload), FUTURE), workload)

    def _new(self, owner: Any, field: str, shape: int | tuple[int, ...], dtype: Any) -> Array:
        """A zeroed array whose address is noted in `owner.field`."""
        array = _records(shape, dtype) if np.dtype(dtype).names else np.zeros(shape, dtype)
        setattr(owner, field, self.sims.hold(array))
        return array

    def _costs(self, tables: Sequence[CostTables]) -> int:
        rows = _records(len(tables), COST)
        for row, table in zip(rows, tables, strict=True):
            row.kind = table.kind
            row.num_token_s, row.num_sequence_s = table.token_s.size, table.sequence_s.size
            row.decode_rows, row.decode_columns = table.decode_s.shape
            row.prefill_rows, row.prefill_columns = table.prefill_s.shape
            row.num_start_s = table.start_s.size
            row.power = self.sims.hold(_power_record(table.power))
            for field in COST_ARRAYS:
                setattr(row, field, self.sims.hold(np.ascontiguousarray(getattr(table, field))))
        return self.sims.hold(rows)

    def _fill_cluster(
        self,
        sim: Any,
        spec: ClusterSpec,
        plans: Sequence[ReplicaPlan],
        workload: Workload,
        seed: int,
        num_logged_batches: int,
    ) -> None:
        num_replicas = len(plans)
        num_stages = max(plan.scheduler.pipeline_stages for plan in plans)
        sim.pause_at = FAR
        sim.stop_at = np.inf
        sim.slo_ttft_s = sim.slo_tpot_s = sim.tail_ttft_s = sim.tail_e2e_s = NO_LIMIT_S
        sim.max_seqs = max(plan.max_held_seqs for plan in plans)
        sim.num_requests = len(workload)
        sim.num_users = workload.num_users
        sim.num_later_turns = workload.num_later_turns
        sim.is_shared = workload.is_shared
        if len(workload.next_turn):
            sim.next_turn = self.sims.hold(np.ascontiguousarray(workload.next_turn))
        sim.queue_head = NOBODY
        lines = self._new(sim, "lines", NUM_SIZES, LINE)
        lines["head"] = lines["tail"] = lines["held_request"] = NOBODY
        sim.hold_timer_s = spec.hold.timer_s
        sim.scrape_interval_s = spec.signals.scrape_interval_s
        sim.scrape_delay_s = spec.signals.scrape_delay_s
        sim.is_oracle = spec.signals.oracle
        fill_memory(sim.memory, self.sims, num_replicas, first_state(seed, 0x5EED))
        # An instant holds a few events for each batch in flight, and one wake-up of the router.
        sim.ring_capacity = 4 * num_replicas * (num_stages + 1) + 16
        sim.batch_log_capacity = num_logged_batches
        self._new(sim, "ring", int(sim.ring_capacity), INSTANT)
        self._new(sim, "scraped", (3, num_replicas), np.float64)
        self.tbt_histograms.append(self._new(sim, "tbt_histogram", NUM_TBT_BINS, np.int64))
        self._new(sim, "touched", num_replicas + 1, np.int32)
        self._new(sim, "scratch", int(sim.max_seqs), np.int32)
        self.batch_logs.append(self._new(sim, "batch_log", num_logged_batches, BATCH_LOG))
        self.replicas.append(self._new(sim, "replicas", num_replicas, REPLICA))

    def _fill_router(
        self, router: Any, spec: ClusterSpec, plans: Sequence[ReplicaPlan], num_requests: int
    ) -> None:
        num_replicas = len(plans)
        router.num_replicas = router.num_accepting = num_replicas
        router.max_hold_s = spec.hold.max_hold_s
        router.overtake_s = spec.hold.overtake_s
        router.fits_anywhere = min(plan.max_prompt_tokens for plan in plans)
        self._new(router, "output_estimate", NUM_LENGTH_CLASSES, np.float64)[:] = INITIAL_OUTPUT_ESTIMATE
        self._new(router, "tickets", num_requests, TICKET)
        accounts = self._new(router, "accounts", num_replicas, ACCOUNT)
        accounts["waiting_head"] = accounts["waiting_tail"] = NOBODY
        self.accounts.append(accounts)
        signals = self._new(router, "signals", (NUM_SIGNALS, num_replicas), np.float64)
        for k, plan in enumerate(plans):
            signals[ACCEPTING, k] = 1.0
            signals[KV_CAPACITY_TOKENS, k] = plan.kv_capacity_tokens
            signals[MAX_PROMPT_TOKENS, k] = plan.max_prompt_tokens
            signals[PREFILL_S_PER_TOKEN, k] = plan.prefill_s_per_token
            signals[DECODE_S_PER_TOKEN, k] = plan.decode_s_per_token
            signals[STEP_FLOOR_S, k] = plan.step_floor_s
        _fill_weights(signals, plans)
        self.signals.append(signals)

    def _fill_replica(self, sim: Any, k: int, plan: ReplicaPlan, cost: int) -> None:
        replica = self.replicas[-1][k]
        scheduler = plan.scheduler
        replica.scheduler = SCHEDULER_KINDS[scheduler.kind]
        replica.num_stages = scheduler.pipeline_stages
        replica.block_size = scheduler.block_size
        replica.num_blocks = plan.num_blocks
        replica.max_tokens = plan.kv_capacity_tokens
        replica.give_up_tokens = plan.give_up_tokens
        replica.watermark_blocks = plan.watermark_blocks
        replica.max_seqs = replica.micro_seqs = plan.max_seqs
        if isinstance(scheduler, VllmV1Scheduler):
            replica.max_batch_tokens = scheduler.max_num_batched_tokens
            replica.long_prefill_tokens = scheduler.long_prefill_token_threshold
            replica.is_async = bool(scheduler.async_scheduling)
            replica.api_s = scheduler.api_s or 0.0
            replica.api_s_per_token = scheduler.api_s_per_token or 0.0
            replica.api_s_per_stream = scheduler.api_s_per_stream or 0.0
        else:
            replica.max_batch_tokens = scheduler.max_tokens_in_batch
            replica.chunk_tokens = scheduler.chunk_size
            replica.blocks_per_seq = scheduler.max_sequence_tokens // scheduler.block_size
            if scheduler.kind != "orca":
                replica.micro_seqs = plan.max_seqs // scheduler.pipeline_stages
        replica.cost = cost
        replica.is_power_limited = plan.costs.power is not None
        replica.slowdown = plan.slowdown
        replica.neighbour_step_s = plan.neighbour_step_s
        replica.is_alive = replica.is_accepting = 1
        replica.waiting_head = replica.waiting_tail = NOBODY
        replica.next_finish = FAR
        self._new(replica, "running", int(sim.max_seqs), np.int32)
        self._new(replica, "fresh", int(sim.max_seqs), np.int32)
        self._new(replica, "phase_count", scheduler.block_size, np.int32)
        for batch in self._new(replica, "batches", scheduler.pipeline_stages, BATCH):
            self._new(batch, "entries", int(sim.max_seqs), ENTRY)
        for stage in self._new(replica, "stages", scheduler.pipeline_stages, STAGE):
            self._new(stage, "queue", scheduler.pipeline_stages, np.int32)

    def _fill_requests(self, sim: Any, workload: Workload) -> None:
        table = self._new(sim, "requests", len(workload), REQUEST)
        table["arrived_at"] = workload.think_s if workload.num_users > 0 else workload.arrived_at
        if (num_later := workload.num_later_turns) > 0:
            table["arrived_at"][-num_later:] = workload.think_s[-num_later:]
        table["num_prefill"] = workload.num_prefill_tokens
        table["num_decode"] = workload.num_decode_tokens
        table["prefill"] = workload.num_prefill_tokens
        table["session"] = workload.session
        for column in ("dispatched_at", "scheduled_at", "first_token_at", "completed_at", "last_token_at"):
            table[column] = NEVER
        table["replica"] = NOBODY
        self.requests.append(table)

    def _fill_prefixes(self, sim: Any, workload: Workload) -> None:
        table = self._new(sim, "prefixes", len(workload), PREFIX)
        if workload.is_shared:
            links = np.zeros(len(workload.link_key), LINK)
            links["key"], links["tokens"] = workload.link_key, workload.link_tokens
            table["links"] = self.sims.hold(links) + workload.chain_start * LINK.itemsize
            table["num_links"] = workload.chain_length
            table["answer_key"] = table["own_key"] = workload.answer_key

    def _fill_index(self, router: Any, workload: Workload) -> None:
        """Room for all prefixes there are, and to spare where they meet in one set."""
        num_replicas = int(router.num_replicas)
        num_prefixes = 2 * (len(np.unique(workload.link_key)) + len(workload)) if workload.is_shared else 0
        num_sets = min(1 << (num_prefixes // WAYS).bit_length(), num_sets_in(NUM_BYTES, num_replicas))
        index = PrefixIndex(num_sets, num_replicas)
        router.prefixes = self.sims.hold(index.records)
        for k in range(num_replicas):
            self.accounts[-1][k].column = index.claim(str(k))

    def _fill_cache(self, replica: Any, plan: ReplicaPlan) -> None:
        (cache,) = self._new(replica, "cache", 1, CACHE)
        cache.num_buckets = 1 << max(4, (plan.num_blocks // 4).bit_length())
        cache.max_pieces = PIECES_PER_SEQUENCE * plan.max_held_seqs
        self._new(cache, "buckets", int(cache.num_buckets), BUCKET)
        self._new(cache, "pieces", int(cache.max_pieces) + 1, PIECE)
        stretches = self._new(cache, "stretches", plan.num_blocks + 2, STRETCH)
        stretches[1].stop = plan.num_blocks  # all blocks are free and have no key
        cache.oldest = cache.newest = cache.last_stretch = 1

    def _fill_events(self, sim: Any, events: Sequence[ClusterEvent]) -> None:
        sim.num_events = len(events)
        seen: set[int] = set()
        in_order = sorted(events, key=lambda event: event.at_s)
        for row, event in zip(self._new(sim, "events", len(events), EVENT), in_order, strict=True):
            replica = self.replicas[-1][event.replica]
            row.at = event.at_s
            row.kind = EVENT_KINDS[event.kind]
            row.replica = event.replica
            row.value = event.factor * replica.slowdown
            if event.kind == "join" and event.replica not in seen:  # it is not there before
                replica.is_alive = replica.is_accepting = 0
                self.signals[-1][ACCEPTING, event.replica] = 0.0
                sim.router.num_accepting -= 1
            seen.add(event.replica)


def _rings(plans: Sequence[ReplicaPlan]) -> list[int]:
    """[R] the next replica on the card of each; after the last one comes the first."""
    following = list(range(len(plans)))
    newest: dict[Any, int] = {}
    for k, plan in enumerate(plans):
        if plan.card is not None:
            last = newest.get(plan.card, k)
            following[k], following[last] = following[last], k
            newest[plan.card] = k
    return following


def _is_caching(scheduler: AnyScheduler, workload: Workload) -> bool:
    if not isinstance(scheduler, VllmV1Scheduler):
        return False
    return workload.is_shared if scheduler.prefix_caching is None else scheduler.prefix_caching


def _power_record(limit: PowerLimit | None) -> Array:
    record = _records(1, POWER)
    for name, value in limit or ():
        record[name] = value
    return record


def _records(shape: int | tuple[int, ...], dtype: Any) -> Array:
    return np.zeros(shape, dtype).view(np.recarray)


def _fill_weights(signals: Array, plans: Sequence[ReplicaPlan]) -> None:
    """Shares of the capacity for a typical mix: one prompt chunk with a batch of decodes."""
    speeds = np.array([1.0 / plan.typical_step_s for plan in plans])
    signals[WEIGHT] = speeds / speeds.mean()


def _heap_size(plans: Sequence[ReplicaPlan], workload: Workload) -> int:
    """An end a stage, a wake-up a replica, an arrival a user or later turn, a timer, two scrapes."""
    num_users = workload.num_users + workload.num_later_turns
    return sum(plan.scheduler.pipeline_stages + 1 for plan in plans) + num_users + 3


def _plan_first_events(sim: Any, heap: Array, workload: Workload) -> None:
    """The first scrape, and the first request of every closed-loop user."""
    planned = [(0.0, encode(SCRAPE, 0, 0, 0))]
    for user in range(min(workload.num_users, len(workload))):
        planned.append((float(workload.think_s[user]), encode(USER_ARRIVAL, user, 0, 0)))
    sim.next_arrival = len(planned) - 1
    # A sorted list is a heap.
    for seq, (future, (time, what)) in enumerate(zip(heap, sorted(planned), strict=False)):
        future.time = time
        future.seq = seq
        future.what = what
    sim.heap_size = sim.next_seq = len(planned)
    sim.num_live = len(planned) - 1
