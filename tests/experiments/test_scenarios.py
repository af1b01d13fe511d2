from __future__ import annotations

import warnings

import numpy as np
import pytest

from pointsman.config import Config
from pointsman.errors import InputError, PointsmanWarning
from pointsman.experiments.capacity import capacity_rps
from pointsman.experiments.metrics import hits_over_time, work_over_time, work_peak
from pointsman.experiments.scenarios import (
    DEFAULT,
    LONGEST_CHAT_TOKENS,
    PREFIXES,
    REPORT_SEEDS,
    SATURATED,
    SCENARIOS,
    SELECTION_SEEDS,
    SUITES,
    UNSEEN,
    expected_window_s,
    find_scenario,
    find_suite,
)
from pointsman.experiments.simulate import prepare, simulate
from pointsman.simulator.plan import plan_replicas
from pointsman.simulator.state import REQUEST
from pointsman.workload.spec import Rated
from pointsman.workload.tables import load_table

NAMES = [
    "steady-chat",
    "light-chat",
    "heavy-chat",
    "steady-code",
    "mixed",
    "long-context",
    "bursty-chat",
    "diurnal",
    "tight-memory",
    "overload",
    "mixed-hardware",
    "random-hardware",
    "wide-16",
    "wide-64",
    "straggler",
    "failure",
]


def load(config: Config) -> float:
    assert isinstance(config.workload.arrivals, Rated)
    assert config.workload.arrivals.load is not None
    return config.workload.arrivals.load


def test_a_trace_takes_the_place_of_a_scenarios_traffic() -> None:
    config = find_scenario(DEFAULT).config(0, ["workload.trace=mine.csv", "workload.trace.load=0.5"])
    assert config.workload.trace is not None
    assert (config.workload.trace.path, config.workload.trace.load) == ("mine.csv", 0.5)
    assert config.cluster == find_scenario(DEFAULT).config(0).cluster


def test_all_are_there() -> None:
    assert list(SCENARIOS) == [*NAMES, *PREFIXES]
    assert all(name == one.name and one.what for name, one in SCENARIOS.items())


def test_seeds_for_selection_and_report_never_mix() -> None:
    assert not set(SELECTION_SEEDS) & set(REPORT_SEEDS)
    assert REPORT_SEEDS[0] == 1000


@pytest.mark.parametrize("name", [*NAMES, *PREFIXES, *SATURATED, *UNSEEN])
def test_runs_to_the_end(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PointsmanWarning)  # overload
        prepared = prepare(find_scenario(name).config(7, ["workload.requests=600"]))
    (outcome,) = simulate([prepared])
    assert len(outcome.requests) == 600
    assert outcome.metrics["num_unfinished"] == 0
    assert np.all(outcome.requests["completed_at"] > outcome.requests["arrived_at"])


@pytest.mark.parametrize("name", [*NAMES, *PREFIXES, *SATURATED, *UNSEEN])
def test_a_seed_gives_one_configuration(name: str) -> None:
    one = find_scenario(name)
    assert one.config(3) == one.config(3)
    assert one.config(3).seed == 3
    assert one.config(3) != one.config(4)


def test_what_the_issue_fixes() -> None:
    chat = find_scenario(DEFAULT).config()
    assert (chat.cluster.num_replicas, chat.cluster.device, chat.cluster.model) == (
        4,
        "A100-80",
        "Llama-3-8B",
    )
    assert load(chat) == 0.85
    assert load(find_scenario("light-chat").config()) == 0.5
    assert load(find_scenario("heavy-chat").config()) == 0.97
    tight, over = find_scenario("tight-memory").config(), find_scenario("overload").config()
    assert tight.cluster.kv_memory_share == pytest.approx(1 / 6)
    assert (load(tight), load(over)) == (0.9, 1.05)
    assert over.cluster == tight.cluster
    assert find_scenario("wide-16").config().cluster.num_replicas == 16
    assert find_scenario("wide-64").config().cluster.num_replicas == 64


def test_random_hardware_holds_the_model() -> None:
    one = find_scenario("random-hardware")
    table = load_table("azure-conv")
    assert table.prompt_tokens.max() + table.output_tokens.max() <= LONGEST_CHAT_TOKENS
    sizes, devices = set(), set()
    for seed in range(60):
        cluster = one.config(seed).cluster
        sizes.add(cluster.num_replicas)
        devices |= {group.device for group in cluster.groups}
        for plan in plan_replicas(cluster):
            assert plan.kv_capacity_tokens >= LONGEST_CHAT_TOKENS
    assert sizes == {4, 5, 6, 7, 8}
    assert len(devices) == 9, "every device of the catalogue holds an 8B model"


@pytest.mark.parametrize(
    ("name", "kinds"), [("straggler", ["slow", "slow"]), ("failure", ["fail", "recover"])]
)
def test_events_are_at_the_thirds_of_the_run(name: str, kinds: list[str]) -> None:
    config = find_scenario(name).config(1)
    assert [event.kind for event in config.cluster.events] == kinds
    last_arrival_s = prepare(config).workload.arrived_at[-1]
    shares = [event.at_s / last_arrival_s for event in config.cluster.events]
    assert shares == pytest.approx([1 / 3, 2 / 3], rel=0.05)


def test_events_move_with_the_length_of_the_run() -> None:
    one = find_scenario("failure")
    long, short = (one.config(1, [f"workload.requests={n}"]).cluster.events for n in (8000, 2000))
    assert [event.at_s for event in long] == pytest.approx([4 * event.at_s for event in short])
    timed = one.config(1, ["workload.duration_s=30"]).cluster.events
    assert [event.at_s for event in timed] == pytest.approx([10, 20])
    faster = one.config(1, ["workload.arrivals={kind: poisson, rate: 100}"]).cluster.events
    assert faster[0].at_s == pytest.approx(8000 / 100 / 3)


def test_events_given_by_the_user_are_in_seconds() -> None:
    one = find_scenario("failure")
    (event,) = one.config(1, ["cluster.events=[{at_s: 5, kind: drain, replica: 0}]"]).cluster.events
    assert (event.at_s, event.kind) == (5.0, "drain")
    assert one.config(1, ["cluster.events=[]"]).cluster.events == ()
    with pytest.raises(InputError, match="replica"):
        one.config(1, ["cluster.replicas=1"])


def test_expected_window_is_requests_over_rate() -> None:
    config = find_scenario("mixed-hardware").config()
    rate = 0.85 * capacity_rps(config.workload, plan_replicas(config.cluster))
    assert expected_window_s(config) == pytest.approx(8000 / rate)


def test_overrides_do_not_stick() -> None:
    one = find_scenario("mixed")
    before = one.config(0)
    one.config(0, ["workload.requests=5", "cluster.scheduler.max_num_seqs=7"])
    assert one.config(0) == before


def test_suites() -> None:
    assert [one.name for one in find_suite("all")] == NAMES
    generalisation = find_suite("generalisation")
    assert {one.config(0).cluster.num_replicas for one in generalisation} >= {16, 64}
    assert set(SUITES["generalisation"]) > set(UNSEEN)
    assert not set(UNSEEN) & set(SCENARIOS)
    with pytest.raises(InputError, match="known: all, prefixes, saturated, generalisation"):
        find_suite("al")


def test_wide_hardware_is_drawn_for_each_seed() -> None:
    one = find_scenario("wide-hardware")
    devices = [[group.device for group in one.config(seed).cluster.groups] for seed in range(3)]
    assert all(one.config(seed).cluster.num_replicas == 16 for seed in range(3))
    assert devices[0] != devices[1] != devices[2]


def test_unknown_name() -> None:
    with pytest.raises(InputError, match="did you mean 'diurnal'"):
        find_scenario("diurnl")


@pytest.mark.parametrize("name", PREFIXES)
def test_prompts_share_prefixes_and_replicas_find_them(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PointsmanWarning)
        prepared = prepare(find_scenario(name).config(7, ["workload.requests=600"]))
    assert prepared.workload.is_shared
    (outcome,) = simulate([prepared])
    assert outcome.metrics["hit_share"] > 0.03
    assert find_scenario(name).config(3).cluster.num_replicas in (4, 8, 16)


def test_mooncake_is_reported_on_what_nothing_was_tuned_on() -> None:
    one = find_scenario("mooncake")
    begins = [one.config(seed).workload.trace.begin for seed in (*range(50), 10**9)]  # type: ignore[union-attr]
    reported = [one.config(seed).workload.trace.begin for seed in range(1000, 1050)]  # type: ignore[union-attr]
    assert max(begins) + 2000 / 12_031 < 0.6 <= min(reported)
    assert max(reported) + 2000 / 12_031 < 1.0


def test_hits_by_replica_over_time_add_up() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PointsmanWarning)
        prepared = prepare(find_scenario("multi-turn").config(7, ["workload.requests=600"]))
    (outcome,) = simulate([prepared])
    requests = outcome.requests
    window_s, shares = hits_over_time(requests, 8, 5)
    assert shares.shape == (8, 5)
    assert window_s == pytest.approx(requests["scheduled_at"].max() / 5)
    here = (requests["replica"] == 3) & (requests["scheduled_at"] < window_s)
    assert shares[3, 0] == requests["hit_tokens"][here].sum() / requests["num_prefill"][here].sum()
    whole = requests["hit_tokens"].sum() / requests["num_prefill"].sum()
    assert hits_over_time(requests, 8, 1)[1].min() <= whole <= hits_over_time(requests, 8, 1)[1].max()
    assert whole == pytest.approx(outcome.metrics["hit_share"])


def test_work_by_replica_and_minute() -> None:
    """By hand: twice as slow a replica has the same work with half the tokens."""
    requests = np.zeros(5, REQUEST)
    requests["replica"] = (0, 1, 0, 1, 0)
    requests["scheduled_at"] = (1.0, 59.0, 61.0, 90.0, 125.0)
    requests["num_prefill"], requests["hit_tokens"] = (100, 100, 90, 40, 10), (0, 50, 0, 0, 0)
    requests["num_decode"] = (10, 5, 0, 0, 0)
    requests["completed_at"] = (1.0, 1.0, 1.0, 1.0, 200.0)
    work_s = work_over_time(requests, np.array([1.0, 2.0]), np.array([10.0, 20.0]))
    assert work_s.tolist() == [[200.0, 100.0], [200.0, 80.0]], (
        "what began after the last whole minute is in it"
    )
    assert work_peak(work_s) == pytest.approx(100 / 90)
    assert work_peak(np.array([[9.0, 1.0], [7.0, 0.0]])) == pytest.approx(9 / 8), (
        "a quiet minute does not count"
    )
    assert work_peak(np.array([[9.0, 0.0], [7.0, 0.0]])) == pytest.approx(9 / 8), "nor one without any work"
