"""Every heuristic against a slow twin that reads the same signals, and what each promises in a sentence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from simulator.factories import (
    AdvisedRun,
    Run,
    assert_all_served,
    assert_same_outcome,
    make_cluster,
    make_policy,
    make_workload,
    random_workload,
)

from pointsman.compiled.memory import array_at
from pointsman.routing.heuristics import HEURISTICS
from pointsman.routing.policy import PolicySpec, PolicyTables
from pointsman.routing.records import INDEX
from pointsman.routing.signals import SIGNALS
from pointsman.simulator.cluster import Clusters
from pointsman.simulator.plan import plan_replicas
from pointsman.simulator.run import run as run_kernel
from pointsman.workload import Workload

# Replicas that differ in speed and memory, some too small for the longest requests; one drains, one joins,
# one slows down, one fails. Without a block that stays free, Vidur's schedulers may fall asleep.
MIXED: dict[str, Any] = {
    "replicas": [
        {"scheduler": {"kind": "vllm-v1", "num_blocks": 400, "max_num_seqs": 8}},
        {"scheduler": {"kind": "vllm", "num_blocks": 19, "watermark": 0.06}, "slowdown": 2.0},
        {
            "scheduler": {
                "kind": "sarathi",
                "num_blocks": 19,
                "watermark": 0.06,
                "chunk_size": 24,
                "max_batch_size": 6,
                "pipeline_stages": 2,
            }
        },
        {"scheduler": {"kind": "vllm-v1", "num_blocks": 100}, "slowdown": 0.5},
    ],
    "events": [
        {"at_s": 1.0, "kind": "drain", "replica": 0},
        {"at_s": 2.0, "kind": "slow", "replica": 2, "factor": 3.0},
        {"at_s": 3.0, "kind": "recover", "replica": 0},
        {"at_s": 1.5, "kind": "join", "replica": 3},
        {"at_s": 2.5, "kind": "fail", "replica": 1},
        {"at_s": 3.5, "kind": "recover", "replica": 1},
    ],
    "hold": {"max_hold_s": 1.0, "timer_s": 0.07},
}


class Twin:
    """Says which actions a policy may take, in plain Python."""

    def __init__(self, run: Run, policy: PolicySpec) -> None:
        self.run = run
        self.policy = policy
        self.last = -1
        self.credit = np.zeros(len(run.replicas))

    def actions(self, request: int) -> set[int]:
        able = self.able(request)
        if not able:
            return {0}
        return {k + 1 for k in getattr(self, self.policy.kind.replace("-", "_"))(able, request)} or {0}

    def able(self, request: int) -> list[int]:
        """Those that accept requests and have memory for what the router knows and expects of this one."""
        row = self.run.requests[request]
        is_accepting = self.run.signal("accepting") == 1.0
        memory = self.run.signal("kv_capacity_tokens")
        expected = row.num_prefill + self.expected_output(row.num_prefill)
        is_taker = is_accepting & (row.num_prefill <= self.run.signal("max_prompt_tokens"))
        needs = max(row.num_prefill, row.seen + 1, min(expected, memory[is_taker].max(initial=0)))
        return np.flatnonzero(is_taker & (needs <= memory)).tolist()

    def expected_output(self, prompt: int) -> float:
        return float(self.run.clusters.arrays("output_estimate")[0][int(prompt).bit_length() - 1])

    def lowest(self, able: Iterable[int], score: np.ndarray) -> set[int]:
        best = min(score[k] for k in able)
        return {k for k in able if score[k] <= best + 1e-12 * abs(best)}

    def random(self, able: list[int], request: int) -> set[int]:
        return set(able)

    def round_robin(self, able: list[int], request: int) -> set[int]:
        later = [k for k in able if k > self.last]
        self.last = later[0] if later else able[0]
        return {self.last}

    def weighted_round_robin(self, able: list[int], request: int) -> set[int]:
        weight = self.run.signal("weight")
        self.credit[able] += weight[able]
        richest = max(able, key=lambda k: (self.credit[k], -k))
        self.credit[richest] -= weight[able].sum()
        return {richest}

    def least_outstanding(self, able: list[int], request: int) -> set[int]:
        return self.lowest(able, self.run.signal("outstanding"))

    def vidur_lor(self, able: list[int], request: int) -> set[int]:
        return {min(self.lowest(able, self.run.replicas["num_waiting"]))}

    def power_of_two(self, able: list[int], request: int) -> set[int]:
        """Whoever has no more than some other; the busiest only if it is alone or has company."""
        outstanding = self.run.signal("outstanding")
        rivals = {k: [j for j in able if j != k] for k in able}
        return {k for k in able if not rivals[k] or any(outstanding[k] <= outstanding[j] for j in rivals[k])}

    def least_tokens(self, able: list[int], request: int) -> set[int]:
        return self.lowest(
            able, self.run.signal("pending_prefill_tokens") + self.run.signal("context_tokens")
        )

    def least_work(self, able: list[int], request: int) -> set[int]:
        signal = self.run.signal
        prompts = signal("pending_prefill_tokens") + self.run.requests["num_prefill"][request]
        work_s = prompts * signal("prefill_s_per_token")
        return self.lowest(able, work_s + signal("expected_tokens") * signal("decode_s_per_token"))

    def least_delay(self, able: list[int], request: int) -> set[int]:
        """What the request waits itself, and what it makes each of the others wait."""
        signal = self.run.signal
        prompt = self.run.requests["num_prefill"][request]
        output = self.expected_output(prompt)
        others, sequence_s = signal("outstanding"), signal("decode_s_per_token")
        prefill_s = (signal("pending_prefill_tokens") + prompt) * signal("prefill_s_per_token")
        own_s = 8 * prefill_s + output * (signal("step_floor_s") + others * sequence_s)
        others_s = others * prefill_s + output * others * sequence_s
        return self.lowest(able, (own_s + others_s) * self.slowdown())

    def slowdown(self) -> np.ndarray:
        """Measured step over the calibrated one, where that is half more than usual."""
        signal = self.run.signal
        decoding, step_s = np.maximum(1, signal("decoding")), signal("step_slow_s")
        calibrated_s = signal("step_floor_s") + (decoding - 1) * signal("decode_s_per_token")
        excess = np.where(step_s > 0, step_s / calibrated_s, 1.0)
        relative = excess / np.exp(np.log(excess).mean())
        return np.where(relative > 1.5, relative, 1.0)

    def least_kv(self, able: list[int], request: int) -> set[int]:
        return self.lowest(able, self.run.signal("scraped_kv_use"))

    def session_affinity(self, able: list[int], request: int) -> set[int]:
        assert self.run.requests["session"][request] == -1
        return self.least_outstanding(able, request)

    # Prompts share nothing here; where they do, tests/routing/test_prefix_heuristics.py has the rules.
    cache_aware = cache_aware_nearby = prefix_hash = load_aware = least_outstanding

    def weighted_scorer(self, able: list[int], request: int) -> set[int]:
        waiting, is_accepting = self.run.signal("scraped_waiting"), self.run.signal("accepting") > 0
        low, high = waiting[is_accepting].min(), waiting[is_accepting].max()
        queue = (high - waiting) / (high - low) if high > low else np.ones(len(waiting))
        return self.lowest(able, self.run.signal("scraped_kv_use") - 2 * queue)

    def overlap_cost(self, able: list[int], request: int) -> set[int]:
        pending = self.run.signal("pending_prefill_tokens")
        return self.lowest(able, 2 * pending + self.run.signal("context_tokens"))

    def room(self, request: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each replica: whether it has memory for the request, would start it at once, has plenty."""
        signal, row = self.run.signal, self.run.requests[request]
        pending = signal("pending_prefill_tokens")
        already = signal("context_tokens") + pending
        booked = already + row.num_prefill
        may_have_more = signal("outstanding") < (self.policy.stream_limit or np.inf)
        grows = signal("expected_tokens") >= 0.05 * already
        limit = np.where(grows, 1.0, 1.6) * self.policy.kv_limit * signal("kv_capacity_tokens")
        has_memory = may_have_more & (booked <= limit)
        has_room = has_memory & (pending < self.policy.prefill_limit_tokens)
        is_idle = signal("outstanding") == 0
        is_overdue = self.run.sim.now - row.arrived_at >= self.run.spec.hold.max_hold_s
        is_ample = may_have_more & (booked <= 0.8 * limit)
        return tuple(one | is_idle | is_overdue for one in (has_memory, has_room, is_ample))

    def hold_until_room(self, able: list[int], request: int) -> set[int]:
        _, has_room, _ = self.room(request)
        able = [k for k in able if has_room[k]]
        return self.lowest(able, self.run.signal("outstanding")) if able else set()

    def late_binding(self, able: list[int], request: int) -> set[int]:
        able = self.worth_sending(able, request)
        return self.least_delay(able, request) if able else set()

    def gathering(self, able: list[int], request: int) -> set[int]:
        """Like late-binding, where prompts sent lately keep streams away; waiting ones do no more harm."""
        able = self.worth_sending(able, request)
        signal = self.run.signal
        prompt = self.run.requests["num_prefill"][request]
        output = self.expected_output(prompt)
        others, prefill_s = signal("outstanding"), signal("prefill_s_per_token")
        wait_s = 30 * (signal("pending_prefill_tokens") + prompt) * prefill_s
        harm_s = 1.5 * others * prompt * prefill_s
        stretch = 1 + 8 * self.slowdown() * self.any_signal("prefill_share") * output / 200
        own_s = output * (signal("step_floor_s") + others * signal("decode_s_per_token")) * stretch
        return self.lowest(able, (wait_s + harm_s + own_s) * self.slowdown()) if able else set()

    def worth_sending(self, able: list[int], request: int) -> list[int]:
        """None while the request had better be held."""
        has_memory, has_room, is_ample = self.room(request)
        is_crowded = self.run.sim.router.queue_size > 2 * len(self.run.replicas)
        if not (has_room[able].any() or (is_crowded and is_ample[able].any())):
            return []
        return [k for k in able if has_memory[k]]

    def linear_score(self, able: list[int], request: int) -> set[int]:
        score = sum(weight * self.any_signal(name) for name, weight in self.policy.weights.items())
        return self.lowest(able, np.asarray(score))

    def prefill_share(self, now: float) -> np.ndarray:
        return self.run.signal("prefill_load") * np.exp((self.run.accounts["prefill_at"] - now) / 10)

    def any_signal(self, name: str) -> np.ndarray:
        """Derived rows are only there for policies that ask: here from their definition."""
        run, signal = self.run, self.run.signal
        requests, now = run.requests, float(run.sim.now)
        is_waiting = (requests["replica"] >= 0) & (run.tickets["is_started"] == 0)
        is_waiting &= requests["completed_at"] < 0
        sent_at = [requests["dispatched_at"][is_waiting & (requests["replica"] == k)] for k in range(4)]
        derived = {
            "mean_wait_s": lambda: np.array([now - times.mean() if len(times) else 0 for times in sent_at]),
            "oldest_wait_s": lambda: np.array([now - times.min() if len(times) else 0 for times in sent_at]),
            "kv_use": lambda: (
                (signal("context_tokens") + signal("pending_prefill_tokens")) / signal("kv_capacity_tokens")
            ),
            "prefill_share": lambda: self.prefill_share(now),
            "remaining_tokens": lambda: np.maximum(0, signal("expected_tokens") - signal("generated_tokens")),
            "prefill_backlog_s": lambda: signal("pending_prefill_tokens") * signal("prefill_s_per_token"),
            "work_s": lambda: (
                signal("pending_prefill_tokens") * signal("prefill_s_per_token")
                + signal("expected_tokens") * signal("decode_s_per_token")
            ),
            "ttft_trend_s": lambda: signal("ttft_s") - signal("ttft_slow_s"),
            "token_rate_trend": lambda: signal("token_rate") - signal("token_rate_slow"),
            "scrape_age_s": lambda: now - signal("scraped_at"),
            "cache_fill": lambda: np.minimum(1, self.cached_tokens() / signal("kv_capacity_tokens")),
        }
        return derived[name]() if name in derived else signal(name)

    def cached_tokens(self) -> np.ndarray:
        """That went into each cache since it was empty."""
        index = array_at(self.run.sim.router.prefixes, INDEX, 1)[0]
        clocks, began = (array_at(at, np.int64, 4) for at in (index.clocks, index.began))
        return np.asarray(clocks - began)


def assert_twin_agrees(policy: PolicySpec, workload: Workload, seed: int = 0) -> Run:
    """Run the policy; then go through the same states outside the kernel and ask the twin each time."""
    cluster = make_cluster(**MIXED)
    inside = Run(cluster, workload, policy, seed).to_end()
    assert_all_served(inside)
    outside = AdvisedRun(cluster, workload, policy, seed)
    twin = Twin(outside, policy)
    for request in outside.decisions():
        allowed = twin.actions(request)
        outside.action = outside.advice()
        assert outside.action in allowed
    assert_same_outcome(inside, outside)
    assert inside.sim.num_decisions == outside.sim.num_decisions
    return inside


def busy_workload(seed: int, **columns: Any) -> Workload:
    """More than the cluster can take for a while, in lengths that not every replica can take."""
    workload = random_workload(200, 40.0, seed=seed, mean_tokens=60)
    return make_workload(
        workload.arrived_at, workload.num_prefill_tokens, workload.num_decode_tokens, **columns
    )


@pytest.mark.parametrize("kind", [kind for kind in HEURISTICS if kind != "linear-score"])
def test_choice_is_one_its_twin_would_make(kind: str) -> None:
    num_outgrown = 0
    for seed in range(3):
        run = assert_twin_agrees(make_policy(kind), busy_workload(seed), seed)
        assert np.all(run.replicas["num_sent"] > 0)
        num_outgrown += run.sim.num_outgrown
    assert num_outgrown > 0 or kind == "weighted-scorer"  # which goes where memory is free


@pytest.mark.parametrize("signal", [signal.name for signal in SIGNALS])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_linear_score_reads_any_signal(signal: str, sign: float) -> None:
    assert_twin_agrees(make_policy("linear-score", weights={signal: sign}), busy_workload(0))


def test_linear_score_adds_up() -> None:
    weights = {"outstanding": 1.0, "kv_use": 8.0, "mean_wait_s": 0.7, "token_rate": -0.002, "work_s": 0.3}
    for seed in range(3):
        assert_twin_agrees(make_policy("linear-score", weights=weights), busy_workload(seed), seed)


@pytest.mark.parametrize(
    "limits",
    [
        {"kv_limit": 0.5},
        {"kv_limit": 0.2},
        {"prefill_limit_tokens": 50},
        {"kv_limit": 1e-9, "prefill_limit_tokens": 1},
        {"stream_limit": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["hold-until-room", "late-binding"])
def test_holds_by_its_limits(kind: str, limits: dict[str, float]) -> None:
    held = assert_twin_agrees(make_policy(kind, **limits), busy_workload(1))
    assert held.sim.num_held > 0


@pytest.mark.parametrize(("num_decode", "most_booked"), [(1, 1.52), (300, 0.95)])
def test_prompts_may_wait_for_memory_where_hardly_any_output_is_to_come(
    num_decode: int, most_booked: float
) -> None:
    """Else one that fits nowhere yet keeps all behind it at the router."""
    scheduler = {"kind": "vllm-v1", "num_blocks": 250, "block_size": 16}
    cluster = make_cluster(replicas=2, scheduler=scheduler, hold={"max_hold_s": 1e6})
    workload = make_workload(np.arange(400) * 0.02, 500, num_decode)
    run = AdvisedRun(cluster, workload, make_policy("late-binding", prefill_limit_tokens=100_000))
    booked = [0.0]
    for request in run.decisions():
        run.action = run.advice()
        if run.action > 0 and request > 200:  # the first answers are expected to be as long as anybody's
            tokens = run.signal("context_tokens") + run.signal("pending_prefill_tokens") + 500
            booked.append((tokens / run.signal("kv_capacity_tokens"))[run.action - 1])
    assert 0.9 * most_booked < max(booked) <= most_booked


def test_a_replica_has_no_more_requests_than_its_limit() -> None:
    cluster = make_cluster(replicas=2, hold={"max_hold_s": 1e6})
    run = AdvisedRun(cluster, busy_workload(0), make_policy("late-binding", stream_limit=3))
    most = 0.0
    for _ in run.decisions():
        run.action = run.advice()
        most = max(most, run.signal("outstanding").max())
    assert most == 3


def test_hold_until_room_releases_when_room_is_made() -> None:
    cluster = make_cluster(replicas=1, cost={"kind": "linear", "a": 0.25}, hold={"max_hold_s": 10.0})
    policy = make_policy("hold-until-room", kv_limit=1e-9)
    run = Run(cluster, make_workload([0.0, 0.1, 0.2], 10, 4), policy).to_end()
    assert run.requests["completed_at"].tolist() == [1.0, 2.0, 3.0]
    assert run.requests["dispatched_at"].tolist() == [0.0, 1.0, 2.0]


def test_hold_until_room_waits_for_prompts_to_be_read() -> None:
    """Not more than so many prompt tokens wait on a replica: released by the first token."""
    cluster = make_cluster(replicas=1, cost={"kind": "linear", "a": 0.25}, hold={"max_hold_s": 10.0})
    policy = make_policy("hold-until-room", prefill_limit_tokens=15)
    run = Run(cluster, make_workload([0.0, 0.1, 0.11, 0.12], 10, 4), policy).to_end()
    # 10 tokens wait at 0.1, which is below 15; 20 at 0.11. At 0.25 the first is read, 10 wait again.
    assert run.requests["dispatched_at"].tolist() == [0.0, 0.1, 0.25, 0.5]


def test_hold_until_room_sends_what_is_overdue() -> None:
    """Nothing else happens meanwhile: the timer, set at 0.1, rings every 0.3 s."""
    cluster = make_cluster(
        replicas=1,
        cost={"kind": "linear", "a": 10.0},
        hold={"max_hold_s": 1.0, "timer_s": 0.3},
        signals={"scrape_interval_s": 100.0},
    )
    run = Run(
        cluster, make_workload([0.0, 0.1], 10, 4), make_policy("hold-until-room", kv_limit=1e-9)
    ).to_end()
    assert run.requests["dispatched_at"][1] == pytest.approx(1.3)


def sessions_for(kind: str, count: int) -> Any:
    return np.arange(count) if kind == "session-affinity" else -1


def shares_at_low_load(
    kind: str, num_replicas: int, events: Any = (), num_requests: int = 3000
) -> np.ndarray:
    """One request every 2 s, each takes a tenth of that."""
    rng = np.random.default_rng(4)
    workload = make_workload(
        np.cumsum(rng.exponential(2.0, num_requests)),
        rng.integers(1, 200, num_requests),
        rng.integers(1, 30, num_requests),
        sessions_for(kind, num_requests),
    )
    run = Run(make_cluster(replicas=num_replicas, events=events), workload, make_policy(kind)).to_end()
    return run.replicas["num_sent"] / num_requests


@pytest.mark.parametrize("num_replicas", [2, 4, 7])
@pytest.mark.parametrize("kind", [kind for kind in HEURISTICS if kind != "vidur-lor"])
def test_no_replica_gets_more_than_its_share_at_low_load(kind: str, num_replicas: int) -> None:
    shares = shares_at_low_load(kind, num_replicas)
    assert shares.sum() == pytest.approx(1.0)
    assert shares.max() * num_replicas < 1.25  # 1.5 is promised; this is six standard deviations


@pytest.mark.parametrize("kind", [kind for kind in HEURISTICS if kind != "vidur-lor"])
def test_the_share_of_the_dead_is_taken_by_all(kind: str) -> None:
    """Four neighbours of eight are gone: no one inherits for all of them."""
    events = [{"at_s": 0.0, "kind": "drain", "replica": k} for k in range(2, 6)]
    shares = shares_at_low_load(kind, 8, events)
    assert np.all(shares[2:6] == 0.0)
    assert shares.max() * 4 < 1.25


def test_vidurs_router_prefers_the_lowest_id() -> None:
    assert shares_at_low_load("vidur-lor", 4)[0] > 0.9


def test_weighted_round_robin_follows_the_weights() -> None:
    groups = [{"slowdown": 1.0}, {"slowdown": 2.0}, {"slowdown": 4.0}]
    run = Run(make_cluster(replicas=groups), make_workload(np.arange(70.0)), "weighted-round-robin").to_end()
    assert run.replicas["num_sent"].tolist() == [40, 20, 10]
    chosen = run.requests["replica"].tolist()
    assert chosen[:7] == chosen[7:14]
    for start in range(0, 70, 7):  # in every round of seven, and spread out over it
        assert sorted(chosen[start : start + 7]) == [0, 0, 0, 0, 1, 1, 2]
        assert chosen[start : start + 4] != [0, 0, 0, 0]


def test_equal_weights_make_it_round_robin() -> None:
    workload = random_workload(100, 20.0)
    runs = [Run(make_cluster(replicas=4), workload, kind).to_end() for kind in HEURISTICS if "robin" in kind]
    assert_same_outcome(*runs)


def test_round_robin_goes_around() -> None:
    run = Run(make_cluster(replicas=3), random_workload(100, 20.0), "round-robin").to_end()
    assert run.requests["replica"].tolist() == [number % 3 for number in range(100)]


@pytest.mark.parametrize("seed", [0, 1])
def test_session_stays_on_one_replica(seed: int) -> None:
    run = Run(make_cluster(replicas=5), random_workload(500, 50.0, seed), "session-affinity", seed).to_end()
    homes = {session: set() for session in range(20)}
    for session, replica in zip(run.requests["session"], run.requests["replica"], strict=True):
        homes[int(session)].add(int(replica))
    assert all(len(replicas) == 1 for replicas in homes.values())
    assert len(set.union(*homes.values())) > 3


def test_only_the_sessions_of_a_failed_replica_move() -> None:
    workload = make_workload(np.arange(900) * 0.05, 20, 20, np.arange(900) % 60)
    events = [{"at_s": 15.0, "kind": "fail", "replica": 2}, {"at_s": 30.0, "kind": "recover", "replica": 2}]
    run = Run(make_cluster(replicas=4, events=events), workload, "session-affinity").to_end()
    session, replica = run.requests["session"], run.requests["replica"]
    sent_at = run.requests["dispatched_at"]
    spans = [sent_at < 14.0, (sent_at >= 15.0) & (sent_at < 30.0), sent_at >= 30.0]
    before, during, after = (
        {int(s): int(k) for s, k in zip(session[i], replica[i], strict=True)} for i in spans
    )
    assert len(before) == len(during) == len(after) == 60
    moved = {s for s in before if before[s] != during[s]}
    assert moved == {s for s in before if before[s] == 2}
    assert len(moved) > 5 and len({during[s] for s in moved}) == 3  # to all the others, not to a neighbour
    assert after == before


def test_sessions_do_not_depend_on_seed_or_load() -> None:
    """A router that restarts finds the sessions where they were."""
    runs = [
        Run(make_cluster(replicas=4), make_workload(np.arange(80) * gap, 20, 20, np.arange(80)), kind, seed)
        for gap, seed, kind in ((0.01, 0, "session-affinity"), (1.0, 9, "session-affinity"))
    ]
    first, second = (run.to_end().requests["replica"].tolist() for run in runs)
    assert first == second


NUM_TRIES = 400


def next_choices(kind: str, outstanding: list[int]) -> np.ndarray:
    """[R] how often a replica is chosen for one more request when so many are on each, of NUM_TRIES seeds."""
    placed = [k for k, count in enumerate(outstanding) for _ in range(count)]
    cluster = make_cluster(replicas=len(outstanding), cost={"kind": "linear", "a": 1.0, "b": 1e-3, "c": 1e-3})
    workload = make_workload([0.0] * len(placed) + [0.5], 10, 10)
    clusters = Clusters(
        [cluster] * NUM_TRIES, [plan_replicas(cluster)] * NUM_TRIES, [workload] * NUM_TRIES, range(NUM_TRIES)
    )
    outside = PolicyTables([None] * NUM_TRIES, len(outstanding))
    actions = np.zeros(NUM_TRIES, np.int64)
    run_kernel(clusters.sims, outside.rows, actions, 0, NUM_TRIES)
    for k in placed[:-1]:
        actions[:] = k + 1
        run_kernel(clusters.sims, outside.rows, actions, 0, NUM_TRIES)
    actions[:] = placed[-1] + 1
    # The last is placed from outside, then the policy decides.
    inside = PolicyTables([make_policy(kind)] * NUM_TRIES, len(outstanding))
    run_kernel(clusters.sims, inside.rows, actions, 0, NUM_TRIES)
    return np.bincount(
        [requests["replica"][-1] for requests in clusters.requests], minlength=len(outstanding)
    )


def test_power_of_two_takes_the_better_of_two_different_ones() -> None:
    """Replicas with 0, 1 and 2 requests: two of the three pairs hold the first, none ends at the last."""
    counts = next_choices("power-of-two", [0, 1, 2])
    assert counts[2] == 0
    assert counts[0] / NUM_TRIES == pytest.approx(2 / 3, abs=0.08)


def test_power_of_two_with_two_takes_the_better() -> None:
    assert next_choices("power-of-two", [3, 1]).tolist() == [0, NUM_TRIES]


@pytest.mark.parametrize(
    "kind", ["least-outstanding", "least-tokens", "least-work", "least-delay", "least-kv"]
)
def test_ties_are_broken_at_random_and_evenly(kind: str) -> None:
    counts = next_choices(kind, [1, 2, 1, 1])
    tied = [0, 2, 3] if kind != "least-kv" else [0, 1, 2, 3]  # the first scrape has seen nothing yet
    assert counts[tied].sum() == NUM_TRIES
    assert np.all(np.abs(counts[tied] / NUM_TRIES - 1 / len(tied)) < 0.09)


def test_random_does_not_look() -> None:
    counts = next_choices("random", [0, 9, 0, 0])
    assert np.all(np.abs(counts / NUM_TRIES - 1 / 4) < 0.08)


@pytest.mark.parametrize(
    "policy",
    [
        make_policy("least-work"),
        make_policy("least-delay"),
        make_policy("linear-score", weights={"outstanding": 1.0, "weight": -0.3}),
        make_policy("linear-score", weights={"work_s": 1.0, "step_floor_s": 5.0, "oldest_wait_s": 0.1}),
    ],
    ids=["least-work", "least-delay", "outstanding", "work"],
)
def test_other_labels_same_choices(policy: PolicySpec) -> None:
    """Replicas of different speed, so that there are no ties: their order in the file must not matter."""
    groups = [
        {"slowdown": slowdown, "scheduler": {"kind": kind, "num_blocks": blocks}}
        for slowdown, kind, blocks in ((1.0, "vllm-v1", 300), (1.3, "vllm", 200), (0.8, "sarathi", 90))
    ]
    order = [2, 0, 1]  # new replica -> old replica
    workload = random_workload(300, 100.0)
    plain = Run(make_cluster(replicas=groups), workload, policy).to_end()
    mixed = Run(make_cluster(replicas=[groups[k] for k in order]), workload, policy, seed=1).to_end()
    assert np.all(plain.replicas["num_sent"] > 20)
    np.testing.assert_array_equal(np.array(order)[mixed.requests["replica"]], plain.requests["replica"])
    np.testing.assert_array_equal(mixed.requests["completed_at"], plain.requests["completed_at"])
