"""What the router sees: its own books at once, the servers' gauges late, never how long an answer will be."""

from __future__ import annotations

import numpy as np
import pytest

from pointsman.routing.heuristics import HEURISTICS
from pointsman.routing.signals import SIGNAL_INDEX, SIGNALS
from pointsman.workload import Workload

from .factories import GOLDEN_COST, Run, make_cluster, make_policy, make_workload, random_workload

GAUGES = ("scraped_running", "scraped_waiting", "scraped_kv_use")
TINY = {"kind": "vllm-v1", "num_blocks": 600, "max_num_seqs": 6}  # queues build up, no preemptions


def record_gauges(run: Run, num_replicas: int) -> list[tuple[float, np.ndarray, np.ndarray]]:
    """(time, gauges [3, R], scraped_at [R]) at every decision; requests go around."""
    seen = []
    for request in run.decisions():
        gauges = np.array([run.signal(name) for name in GAUGES])
        seen.append((float(run.sim.now), gauges, run.signal("scraped_at")))
        run.action = request % num_replicas + 1
    return seen


def gauges_at(run: Run, time: float) -> np.ndarray:
    """[3, R] what the servers' gauges said, told afterwards from requests and batches."""
    gauges = np.zeros((3, len(run.replicas)))
    log = run.batch_log[: run.sim.num_logged_batches]
    for k in range(len(run.replicas)):
        steps = log[(log["replica"] == k) & (log["ended_at"] <= time)]
        if len(steps) == 0:
            continue
        moved_at = steps["ended_at"][-1]
        mine = run.requests[run.requests["replica"] == k]
        is_running = (mine["scheduled_at"] < moved_at) & (mine["completed_at"] > moved_at)
        is_waiting = (mine["dispatched_at"] < moved_at) & (mine["scheduled_at"] >= moved_at)
        blocks = steps["used_blocks"][-1] / run.replicas["num_blocks"][k]
        gauges[:, k] = is_running.sum(), is_waiting.sum(), blocks
    return gauges


@pytest.mark.parametrize(("interval_s", "delay_s"), [(0.1, 0.05), (0.3, 0.3), (0.25, 0.0), (2.0, 0.5)])
def test_scraped_gauges_are_those_of_the_last_scrape_that_has_arrived(
    interval_s: float, delay_s: float
) -> None:
    cluster = make_cluster(
        replicas=3,
        scheduler=TINY,
        signals={"scrape_interval_s": interval_s, "scrape_delay_s": delay_s},
    )
    run = Run(cluster, random_workload(300, 80.0), None, num_logged_batches=100_000)
    seen = record_gauges(run, 3)
    assert run.sim.num_preemptions == 0
    scrapes = np.cumsum(np.append(0.0, np.full(1000, interval_s)))
    num_moved = 0
    for time, gauges, scraped_at in seen:
        arrived = scrapes[scrapes + delay_s <= time]
        if len(arrived) == 0:
            assert not gauges.any()
            continue
        np.testing.assert_allclose(scraped_at, arrived[-1], atol=1e-9)
        np.testing.assert_array_equal(gauges, gauges_at(run, arrived[-1]))
        num_moved += np.any(gauges != gauges_at(run, time))
    assert num_moved > 20  # they are late: the present would have looked different
    assert max(gauges[1].max() for _, gauges, _ in seen) > 2


def test_gauges_stand_still_during_a_step() -> None:
    """A long step: what is sent meanwhile shows in the gauges only when the step ends."""
    cluster = make_cluster(
        replicas=1,
        cost={"kind": "linear", "a": 10.0},
        signals={"scrape_interval_s": 0.1, "scrape_delay_s": 0.0},
    )
    times = [0.0, 1.0, 2.0, 9.9, 10.2, 12.0]
    run = Run(cluster, make_workload(times, 16, 3), None)
    seen = {time: gauges[:2, 0].tolist() for time, gauges, _ in record_gauges(run, 1)}
    assert seen[9.9] == [0.0, 0.0]
    assert seen[10.2] == [1.0, 3.0]  # three wait; they enter the batch that is formed just after
    assert seen[12.0] == [1.0, 3.0]


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_scrape_at_the_instant_a_step_ends_sees_the_time_before(num_replicas: int) -> None:
    """A step from 0.5 to 1.5, a scrape at 1.5: what the step leaves behind shows in the next one."""
    cluster = make_cluster(
        replicas=num_replicas,
        cost={"kind": "linear", "a": 1.0},
        signals={"scrape_interval_s": 0.5, "scrape_delay_s": 0.0},
    )
    times = np.repeat([0.5, 1.6, 2.1], num_replicas)
    run = Run(cluster, make_workload(times, 16, 9), None)
    seen = {time: gauges[0].tolist() for time, gauges, _ in record_gauges(run, num_replicas)}
    assert seen[1.6] == [0.0] * num_replicas
    assert seen[2.1] == [1.0] * num_replicas


def test_oracle_shows_the_present() -> None:
    cluster = make_cluster(replicas=3, scheduler=TINY, signals={"oracle": True})
    run = Run(cluster, random_workload(300, 80.0), None)
    num_waiting = 0
    for request in run.decisions():
        replicas = run.replicas
        use = replicas["used_blocks"] / replicas["num_blocks"]
        outstanding = run.signal("outstanding")
        assert run.signal("scraped_running").tolist() == replicas["num_holding"].tolist()
        assert run.signal("scraped_waiting").tolist() == replicas["num_waiting"].tolist()
        assert run.signal("scraped_kv_use").tolist() == use.tolist()
        assert np.all(run.signal("scraped_at") == run.sim.now)
        np.testing.assert_array_equal(
            run.signal("scraped_running") + run.signal("scraped_waiting"), outstanding
        )
        num_waiting += replicas["num_waiting"].sum()
        run.action = request % 3 + 1
    assert num_waiting > 100


@pytest.mark.parametrize("num_users", [0, 1])
def test_scrapes_go_on_after_a_burst_at_time_zero(num_users: int) -> None:
    """All requests arrive with the first scrape; a router that holds some must see the gauges move later."""
    closed = {"num_users": num_users, "think_s": np.zeros(20)} if num_users else {}
    run = Run(make_cluster(replicas=1), make_workload(np.zeros(20), 50, 50, **closed), None)
    last = 0.0
    for _ in run.decisions():
        last = max(last, run.signal("scraped_at")[0])
        run.action = 1 if run.signal("outstanding")[0] < 2 else 0
    assert run.sim.now > 2.0
    assert last > 1.0


def with_output(workload: Workload, request: int, num_decode_tokens: int) -> Workload:
    outputs = workload.num_decode_tokens.copy()
    outputs[request] = num_decode_tokens
    return make_workload(workload.arrived_at, workload.num_prefill_tokens, outputs, workload.session)


@pytest.mark.parametrize("request_id", [3, 40, 70])
@pytest.mark.parametrize("kind", ["vllm-v1", "vllm", "sarathi", "orca"])
def test_length_of_an_answer_is_unknown_until_it_ends(kind: str, request_id: int) -> None:
    """Two runs differ in the output of one request: no signal differs before the shorter one ends."""
    scheduler = {"kind": kind, "num_blocks": 400}
    scheduler |= {"max_sequence_tokens": 640} if kind == "orca" else {}
    cluster = make_cluster(replicas=2, scheduler=scheduler)
    workload = random_workload(300, 150.0)
    tables: list[list[tuple[float, bytes]]] = []
    ends = []
    for num_decode in (20, 300):
        run = Run(cluster, with_output(workload, request_id, num_decode), None)
        tables.append([])
        for request in run.decisions():
            tables[-1].append((float(run.sim.now), run.table.tobytes()))
            run.action = request % 2 + 1
        ends.append(float(run.requests["completed_at"][request_id]))
    started = run.requests["scheduled_at"][request_id]
    before_end = [[seen for seen in table if seen[0] < min(ends)] for table in tables]
    assert len(before_end[0]) == len(before_end[1])
    for number, (first, second) in enumerate(zip(*before_end, strict=True)):
        is_same = first == second
        assert is_same, f"decision {number}"
    assert sum(time > started for time, _ in before_end[0]) > 3
    is_same = tables[0] == tables[1]
    assert not is_same


@pytest.mark.parametrize("policy", HEURISTICS)
def test_no_heuristic_decides_by_the_length_of_an_answer(policy: str) -> None:
    cluster, workload = make_cluster(replicas=3), random_workload(150, 150.0)
    runs = [Run(cluster, with_output(workload, 30, count), policy).to_end() for count in (20, 300)]
    end = min(run.requests["completed_at"][30] for run in runs)
    sent = [run.requests[run.requests["dispatched_at"] < end]["replica"].tolist() for run in runs]
    assert sent[0] == sent[1] and len(sent[0]) > 50


def test_expected_output_is_learned_from_finished_requests_alone() -> None:
    """By length class (power of two of the prompt), from 256 on, 5 % at a time."""
    rng = np.random.default_rng(2)
    prompts = rng.choice([3, 100, 1000, 1500], 120)
    workload = make_workload(np.cumsum(rng.exponential(0.1, 120)), prompts, rng.integers(1, 60, 120))
    run = Run(make_cluster(replicas=2), workload).to_end()
    requests = run.requests
    estimates = dict.fromkeys(range(24), 256.0)
    events = [(time, 1, i) for i, time in enumerate(requests["dispatched_at"])]
    events += [(time, 0, i) for i, time in enumerate(requests["completed_at"])]
    for _, is_sent, i in sorted(events):
        length_class = int(requests["num_prefill"][i]).bit_length() - 1
        if is_sent:
            assert run.tickets["expected_output"][i] == int(estimates[length_class])
        else:
            estimates[length_class] += 0.05 * (requests["num_decode"][i] - estimates[length_class])
    assert len(set(run.tickets["expected_output"].tolist())) > 20


def serial_run(num_requests: int, num_decode: int) -> Run:
    """One sequence at a time, a step takes 0.1 s; requests arrive at once and queue."""
    cluster = make_cluster(
        replicas=1,
        scheduler={"kind": "vllm-v1", "max_num_seqs": 1, "max_num_batched_tokens": 64, "num_blocks": 100},
        cost={"kind": "linear", "a": 0.1},
    )
    return Run(cluster, make_workload(np.zeros(num_requests), 10, num_decode)).to_end()


def test_time_to_first_token_is_averaged_over_a_short_and_a_long_past() -> None:
    run = serial_run(20, 5)
    ttfts = run.requests["first_token_at"] - run.requests["dispatched_at"]
    short = long = ttfts[0]
    for ttft in ttfts[1:]:
        short += 0.1 * (ttft - short)
        long += 0.01 * (ttft - long)
    assert run.signal("ttft_s")[0] == pytest.approx(short)
    assert run.signal("ttft_slow_s")[0] == pytest.approx(long)


def test_step_time_is_the_time_between_tokens() -> None:
    run = serial_run(20, 50)
    assert run.signal("step_s")[0] == pytest.approx(0.1, rel=1e-6)
    assert run.signal("step_slow_s")[0] == pytest.approx(0.1, rel=1e-6)


def test_token_rate_is_what_streams_back() -> None:
    run = serial_run(20, 50)
    assert run.signal("token_rate")[0] == pytest.approx(10.0, rel=1e-3)
    assert run.signal("token_rate_slow")[0] == pytest.approx(10.0, rel=1e-3)


def test_prefill_load_is_what_prompts_sent_lately_take_of_the_time() -> None:
    run = Run(make_cluster(replicas=2), random_workload(60, rate_rps=4.0), "least-outstanding").to_end()
    requests, per_token_s = run.requests, run.signal("prefill_s_per_token")
    for k in range(2):
        mine = requests[requests["replica"] == k]
        last = mine["dispatched_at"].max()
        fading = np.exp((mine["dispatched_at"] - last) / 10.0)
        expected = (mine["num_prefill"] * per_token_s[k] / 10.0 * fading).sum()
        assert run.signal("prefill_load")[k] == pytest.approx(expected)
        assert run.accounts["prefill_at"][k] == last


def test_static_signals_follow_from_the_cost_of_a_step() -> None:
    groups = [{"count": 2}, {"slowdown": 3.0, "scheduler": {"kind": "vllm-v1", "num_blocks": 50}}]
    run = Run(make_cluster(replicas=groups), make_workload([0.0]))
    a, b, c, d, e = (GOLDEN_COST[name] for name in "abcde")
    prefill_s = b + e * (2048**2 - 1024**2) / 2 / 1024
    decode_s = c + 1024 * d
    slowdown = np.array([1.0, 1.0, 3.0])
    np.testing.assert_allclose(run.signal("prefill_s_per_token"), prefill_s * slowdown)
    np.testing.assert_allclose(run.signal("decode_s_per_token"), decode_s * slowdown)
    np.testing.assert_allclose(run.signal("step_floor_s"), (a + decode_s) * slowdown)
    np.testing.assert_allclose(run.signal("weight"), (1 / slowdown) / (1 / slowdown).mean())
    assert run.signal("kv_capacity_tokens").tolist() == [16_000, 16_000, 800]


def test_table_names_every_row_once() -> None:
    assert len(SIGNAL_INDEX) == len(SIGNALS)
    assert {signal.source for signal in SIGNALS} == {"own", "scraped", "static", "derived", "oracle"}


def test_only_vidurs_router_reads_the_oracle_by_default() -> None:
    """The queue on the server: two runs with the same books and other queues, same choices."""
    workload = random_workload(200, 30.0)
    for kind in HEURISTICS:
        plain = make_cluster(replicas=3, scheduler=TINY)
        oracle = make_cluster(replicas=3, scheduler=TINY, signals={"oracle": True})
        runs = [Run(cluster, workload, make_policy(kind)).to_end() for cluster in (plain, oracle)]
        is_same = np.array_equal(runs[0].requests["replica"], runs[1].requests["replica"])
        assert is_same == (kind not in ("least-kv", "weighted-scorer")), kind  # read the servers' gauges
