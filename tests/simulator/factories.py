"""Clusters, workloads and runs with defaults for everything a test doesn't care about."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pointsman.compiled.memory import Records
from pointsman.inference.checkpoint import Checkpoint
from pointsman.routing.policy import PolicySpec, PolicyTables, fill_memory
from pointsman.routing.records import MEMORY
from pointsman.routing.signals import SIGNAL_INDEX
from pointsman.simulator.cluster import Clusters
from pointsman.simulator.plan import plan_replicas
from pointsman.simulator.run import advise, run
from pointsman.simulator.spec import ClusterSpec
from pointsman.simulator.state import DECISION, DONE, NUM_TBT_BINS, TBT_BINS_PER_OCTAVE, TBT_LOWEST_EXPONENT
from pointsman.spec import parse_spec
from pointsman.workload import Workload

ROOT = Path(__file__).parents[2]
GOLDEN_COST = {"kind": "linear", "a": 0.0085, "b": 8.0e-5, "c": 3.0e-5, "d": 8.0e-8, "e": 3.4e-9}
NO_SCRAPES = {"scrape_interval_s": 1e308, "scrape_delay_s": 0.0}  # the second would come at infinity

# What is compared between runs: everything a request lived through.
OUTCOME = (
    "replica",
    "restarts",
    "arrived_at",
    "dispatched_at",
    "scheduled_at",
    "first_token_at",
    "completed_at",
)


def load_benchmark(name: str) -> Any:
    """A module of `benchmarks/`, which is no package."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def make_cluster(**cluster: Any) -> ClusterSpec:
    """Linear cost, so that nothing depends on the hardware; roomy KV memory."""
    data = {
        "replicas": 2,
        "scheduler": {"kind": "vllm-v1", "num_blocks": 1000},
        "cost": GOLDEN_COST,
    }
    return parse_spec(ClusterSpec, data | cluster, "cluster")


def make_workload(
    arrived_at: Sequence[float] | np.ndarray,
    num_prefill_tokens: int | Sequence[int] | np.ndarray = 10,
    num_decode_tokens: int | Sequence[int] | np.ndarray = 10,
    session: int | Sequence[int] | np.ndarray = -1,
    **closed_loop: Any,
) -> Workload:
    count = len(arrived_at)

    def column(value: Any, dtype: Any) -> Any:
        return np.ascontiguousarray(np.broadcast_to(np.asarray(value, dtype), count))

    return Workload(
        np.array(arrived_at, np.float64),
        column(num_prefill_tokens, np.int32),
        column(num_decode_tokens, np.int32),
        column(session, np.int32),
        np.arange(count, dtype=np.int64),
        **closed_loop,
    )


def random_workload(count: int, rate_rps: float, seed: int = 0, mean_tokens: float = 40.0) -> Workload:
    rng = np.random.default_rng(seed)
    return make_workload(
        np.cumsum(rng.exponential(1 / rate_rps, count)),
        1 + rng.exponential(mean_tokens, count).astype(int),
        1 + rng.exponential(mean_tokens, count).astype(int),
        rng.integers(0, 20, count),
    )


def make_policy(kind: str, **policy: Any) -> PolicySpec:
    if kind == "linear-score" and "weights" not in policy:
        policy["weights"] = {"outstanding": 1.0, "mean_wait_s": 0.5}
    return parse_spec(PolicySpec, {"kind": kind} | policy, "policy")


GUARD_BYTES = 4096
GUARD = 0xA5


class GuardedClusters(Clusters):
    """Clusters with guard bytes around their arrays: a kernel that writes too far is found, without harm."""

    def __init__(self, *arguments: Any) -> None:
        self._buffers: list[tuple[str, np.ndarray, np.ndarray]] = []
        super().__init__(*arguments)

    def _new(self, owner: Any, field: str, shape: int | tuple[int, ...], dtype: Any) -> Any:
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        buffer = np.full(num_bytes + 2 * GUARD_BYTES, GUARD, np.uint8)
        inside = buffer[GUARD_BYTES : GUARD_BYTES + num_bytes]
        inside[:] = 0
        array = inside.view(dtype).reshape(shape)
        self._buffers.append((field, buffer, array))
        setattr(owner, field, self.sims.hold(array))
        return array.view(np.recarray) if array.dtype.names else array

    def arrays(self, field: str) -> list[np.ndarray]:
        return [array for name, _, array in self._buffers if name == field]

    def broken_guards(self) -> list[str]:
        """Names of the arrays beside which something was written."""
        return [
            field
            for field, buffer, _ in self._buffers
            if np.any(buffer[:GUARD_BYTES] != GUARD) or np.any(buffer[-GUARD_BYTES:] != GUARD)
        ]


class Run:
    """One cluster and its policy; None stands for a policy outside the kernel, which decides by `step`."""

    def __init__(
        self,
        cluster: ClusterSpec,
        workload: Workload,
        policy: str | PolicySpec | None = "round-robin",
        seed: int = 0,
        num_logged_batches: int = 0,
    ) -> None:
        self.spec = cluster
        self.plans = plan_replicas(cluster)
        self.clusters = GuardedClusters([cluster], [self.plans], [workload], [seed], num_logged_batches)
        spec = make_policy(policy) if isinstance(policy, str) else policy
        self.policies = PolicyTables([spec], len(self.plans))
        self.sim = self.clusters.sims[0]
        self.requests = self.clusters.requests[0]
        self.replicas = self.clusters.replicas[0]
        self.table = self.clusters.signals[0]
        self.tickets = self.clusters.arrays("tickets")[0]
        self.accounts = self.clusters.accounts[0]
        self.batch_log = self.clusters.batch_logs[0]
        self._actions = np.zeros(1, np.int64)

    def step(self, action: int = 0) -> bool:
        """Carry out the action, run to the next stop; False at the end."""
        self._actions[0] = action
        run(self.clusters.sims, self.policies.rows, self._actions, 0, 1)
        return bool(self.sim.status != DONE)

    def to_end(self) -> Run:
        while self.step():
            assert self.sim.status != DECISION, "a policy outside the kernel decides by `step`"
        return self

    def decisions(self) -> Iterator[int]:
        """The request to decide about, at each decision; the caller puts its choice in `action`."""
        self.action = 0
        while self.step(self.action):
            assert self.sim.status == DECISION
            yield int(self.sim.queue_head)

    def decide(self, choose: Callable[[Run], int]) -> Run:
        for _ in self.decisions():
            self.action = choose(self)
        return self

    def takers(self, request: int) -> list[int]:
        """Replicas that accept requests and have memory for this one, as far as anybody has seen."""
        row = self.requests[request]
        needs = max(row.num_prefill, row.seen + 1)
        fits = (needs <= self.signal("kv_capacity_tokens")) & (
            row.num_prefill <= self.signal("max_prompt_tokens")
        )
        return np.flatnonzero(fits & (self.signal("accepting") == 1.0)).tolist()

    def signal(self, name: str) -> np.ndarray:
        """[R] a copy of a row of the table."""
        return self.table[SIGNAL_INDEX[name]].copy()

    def num_tokens(self) -> np.ndarray:
        """[num_requests] prompt and output tokens of each running request, as counted at its last token."""
        requests = self.requests
        steps = self.replicas["steps"][np.maximum(requests["replica"], 0)]
        counted = requests["processed"] + np.where(requests["is_decoding"], steps, 0)
        return np.maximum(counted, np.where(requests["is_decoding"], 0, requests["prefill"]))

    def intervals_s(self) -> float:
        """Sum of the times between tokens, by the histogram: each within half a bin."""
        bins = np.arange(NUM_TBT_BINS) + 0.5
        octave, within = np.divmod(bins, TBT_BINS_PER_OCTAVE)
        middles = 2.0 ** (octave + TBT_LOWEST_EXPONENT) * (1 + within / TBT_BINS_PER_OCTAVE)
        return float(self.clusters.tbt_histograms[0] @ middles)

    def outcome(self) -> dict[str, np.ndarray]:
        return {name: self.requests[name].copy() for name in OUTCOME}


class AdvisedRun(Run):
    """A run whose policy is asked from outside: `advice` is what it would do about the request at hand."""

    def __init__(
        self, cluster: ClusterSpec, workload: Workload, policy: PolicySpec | Checkpoint, seed: int = 0
    ) -> None:
        super().__init__(cluster, workload, None, seed)
        num_replicas = len(self.replicas)
        self._advisers = PolicyTables([policy], num_replicas)
        for name in ("may_hold", "hold_s", "kv_limit", "prefill_limit", "stream_limit", "small_first"):
            self.policies.rows[name] = self._advisers.rows[name]
        self._memories = Records(1, MEMORY)
        fill_memory(self._memories[0], self._memories, num_replicas, int(self.sim.memory.rng))

    def advice(self) -> int:
        actions = np.zeros(1, np.int64)
        advise(self.clusters.sims, self._advisers.rows, self._memories, actions, 0, 1)
        return int(actions[0])


def assert_same_outcome(first: Run, second: Run) -> None:
    for name in OUTCOME:
        np.testing.assert_array_equal(first.requests[name], second.requests[name], err_msg=name)
    assert first.sim.num_batches == second.sim.num_batches


def assert_all_served(run: Run) -> None:
    assert run.sim.num_completed == run.sim.num_requests
    assert np.all(run.requests["completed_at"] >= run.requests["first_token_at"])
    assert np.all(run.requests["first_token_at"] >= run.requests["scheduled_at"])


def scheduler_of(settings: dict[str, Any]) -> dict[str, Any]:
    """The `scheduler:` section for settings of `reference_simulator.simulate`."""
    kind = settings["scheduler"]
    names = ["block_size", "num_blocks", "watermark", "pipeline_stages"]
    if kind == "vllm-v1":
        names += ["max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold"]
    else:
        names += ["max_batch_size", "chunk_size", "max_tokens_in_batch", "max_sequence_tokens"]
    return {"kind": kind} | {name: settings[name] for name in names if name in settings}


def cost_of(coefficients: Sequence[float]) -> dict[str, Any]:
    return {"kind": "linear"} | dict(zip("abcde", coefficients, strict=True))
