from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pointsman.envs.episodes import check_groups
from pointsman.errors import InputError
from pointsman.evaluation.tune import search_and_check
from pointsman.experiments import own
from pointsman.experiments.own import (
    PARTS,
    REPORT,
    kept_text,
    part_text,
    parts_text,
    report_configs,
    selection_episodes,
    training_episode,
    window,
)
from pointsman.experiments.scenarios import REPORT_SEEDS, find_scenario, short_names
from pointsman.experiments.simulate import prepare
from pointsman.workload import Workload

CLUSTER = "cluster: {replicas: 2, device: A100-80, model: Llama-3.1-8B"


def file_with_trace(folder: Path, num_requests: int = 1000, more: str = "") -> Path:
    """Prompts are 1, 2, 3, …: every request can be told by its length. One in ten gaps is long."""
    rows = [f"{0.1 * i + 2.0 * (i // 10)},{i + 1},{5 + i % 7}" for i in range(num_requests)]
    header = "arrived_at,num_prefill_tokens,num_decode_tokens"
    (folder / "trace.csv").write_text("\n".join([header, *rows]) + "\n")
    path = folder / "mine.yaml"
    path.write_text(f"workload: {{trace: trace.csv}}\n{CLUSTER}{more}}}\nslo: {{ttft_s: 0.7}}\n")
    return path


def synthetic_file(folder: Path, arrivals: str, more: str = "") -> Path:
    path = folder / "made-up.yaml"
    lengths = "lengths: {kind: fixed, prompt: 50, output: 5}"
    path.write_text(f"workload: {{arrivals: {arrivals}, {lengths}, requests: 4000}}\n{CLUSTER}{more}}}\n")
    return path


def episode(path: Path, seed: int = 0, num_requests: int = 200, load: float = 1.0) -> own.Prepared:
    return training_episode(path, num_requests, load, seed, np.random.default_rng(seed))


def prompts(workload: Workload) -> set[int]:
    return set(workload.num_prefill_tokens.tolist())


def test_training_selection_and_report_share_no_request(tmp_path: Path) -> None:
    path = file_with_trace(tmp_path)
    scenario = find_scenario(str(path))
    trained = set().union(*(prompts(episode(path, seed).workload) for seed in range(40)))
    selected = set().union(*(prompts(one.workload) for one in selection_episodes(scenario, 8)))
    (config, *same) = report_configs(scenario, REPORT_SEEDS[:8])
    reported = prompts(prepare(config, tmp_path).workload)
    assert all(other == config.model_copy(update={"seed": other.seed}) for other in same)
    assert trained == set(range(1, 601))
    assert selected == set(range(601, 801))
    assert reported == set(range(801, 1001))


def test_a_passage_again_is_not_the_same_passage(tmp_path: Path) -> None:
    path = file_with_trace(tmp_path)
    first, again, other = (episode(path, seed) for seed in (1, 1, 2))
    assert first.workload.num_prefill_tokens.tobytes() == again.workload.num_prefill_tokens.tobytes()
    assert first.workload.num_prefill_tokens.tobytes() != other.workload.num_prefill_tokens.tobytes()
    order = first.workload.num_prefill_tokens
    assert (np.diff(order) != 1).mean() > 0.5, "neighbours change places"
    assert np.abs(order - np.sort(order)).max() < 2 * own.SHUFFLED_REQUESTS, "but stay near"


def test_a_window_goes_on_where_the_trace_ends_and_keeps_its_bursts() -> None:
    count = 50
    gaps = np.where(np.arange(count) % 10 == 0, 5.0, 0.1)
    trace = Workload(
        np.cumsum(gaps) - gaps[0],
        np.arange(1, count + 1, dtype=np.int32),
        np.ones(count, np.int32),
        np.full(count, -1, np.int32),
        np.arange(count),
    )
    made = window(trace, 3 * count, 2.0, np.random.default_rng(0))
    assert len(made) == 3 * count
    assert sorted(np.bincount(made.num_prefill_tokens)[1:].tolist()) == [3] * count
    assert made.arrived_at[0] == 0.0
    assert (np.diff(made.arrived_at) >= 0).all()
    long = np.diff(made.arrived_at) > 1.0
    assert 12 <= long.sum() <= 15, "twice as fast, with the pauses in it"


def test_load_moves_the_rate_of_a_trace_and_of_made_up_traffic(tmp_path: Path) -> None:
    for path in (file_with_trace(tmp_path), synthetic_file(tmp_path, "{kind: poisson, rate: 20}")):
        slow, fast = (episode(path, 3, load=load).workload for load in (1.0, 2.0))
        assert slow.arrived_at[-1] / fast.arrived_at[-1] == pytest.approx(2.0, rel=1e-6)


def test_cluster_slo_and_events_are_those_of_the_file(tmp_path: Path) -> None:
    more = ", events: [{at_s: 110, kind: fail, replica: 1}, {at_s: 220, kind: recover, replica: 1}]"
    path = file_with_trace(tmp_path, 1000, more)  # 297.9 s
    one = episode(path, 0, 200)
    assert len(one.plans) == 2
    assert one.config.slo.ttft_s == 0.7
    window_s = float(one.workload.arrived_at[-1])
    times = [event.at_s / window_s for event in one.config.cluster.events]
    assert times == pytest.approx([110 / 297.9, 220 / 297.9], rel=1e-3)
    kept = report_configs(find_scenario(str(path)), range(1000, 1006))[0]
    assert kept.cluster.events[0].at_s == pytest.approx(110 / 5)


def test_rates_that_change_with_time_are_entered_anywhere(tmp_path: Path) -> None:
    path = synthetic_file(tmp_path, "{kind: diurnal, rate: 20, period_s: 200, amplitude: 1}")
    spans = [float(episode(path, seed, 100).workload.arrived_at[-1]) for seed in range(12)]
    assert max(spans) > 2 * min(spans)


def test_a_part_is_served_in_one_run_unless_it_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = find_scenario(str(file_with_trace(tmp_path, 1000)))
    configs = report_configs(scenario, range(1000, 1016))
    assert [config.seed for config in configs] == list(range(1000, 1016))
    assert kept_text(scenario, configs[0]).endswith("80 to 100 % of trace.csv, kept for the report")
    assert {len(one.workload) for one in selection_episodes(scenario, 5)} == {200}
    monkeypatch.setattr(own, "MAX_SELECTION_REQUESTS", 80)
    assert [len(one.workload) for one in selection_episodes(scenario, 5)] == [67, 66, 67, 67, 66]
    assert {len(one.workload) for one in selection_episodes(scenario, 2)} == {80}


def test_blocks_are_as_many_as_make_sense() -> None:
    assert [own.num_blocks_of(count, 16) for count in (4, 200, 3000, 4000, 10**6)] == [4, 6, 6, 8, 16]


def test_a_part_again_has_its_times_and_its_requests_in_other_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "MAX_SELECTION_REQUESTS", 40)
    scenario = find_scenario(str(file_with_trace(tmp_path, 1000)))
    episodes = [one.workload for one in selection_episodes(scenario, 20)]
    blocks, again = episodes[:5], episodes[5:10]
    for block, other in zip(blocks, again, strict=True):
        assert other.arrived_at.tolist() == block.arrived_at.tolist()
        assert other.num_prefill_tokens.tolist() != block.num_prefill_tokens.tolist()
        assert sorted(other.num_prefill_tokens) == block.num_prefill_tokens.tolist()
        lengths = dict(zip(block.num_prefill_tokens, block.num_decode_tokens, strict=True))
        assert lengths == dict(zip(other.num_prefill_tokens, other.num_decode_tokens, strict=True))
    assert len({one.num_prefill_tokens.tobytes() for one in episodes}) == 20, "none is judged on twice"


def test_what_has_not_trained_yet_is_chosen_on_all_that_is_not_kept(tmp_path: Path) -> None:
    scenario = find_scenario(str(file_with_trace(tmp_path, 1000)))
    episodes = [one.workload for one in selection_episodes(scenario, 8, part=own.BEFORE_REPORT)]
    assert [len(one) for one in episodes] == [200] * 8, "as long as the part that selects, each twice"
    seen = set().union(*(prompts(one) for one in episodes))
    assert seen == set(range(1, 801))


def test_long_traces_are_replayed_less_often() -> None:
    assert [own.num_replays_of(count) for count in (1, 12_500, 40_000, 10**6)] == [8, 8, 2, 1]


def test_too_few_requests_are_not_cut_into_parts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="29 requests are too few to train, to select and to judge on"):
        episode(file_with_trace(tmp_path, 29))
    scenario = find_scenario(str(file_with_trace(tmp_path, 1)))
    for use in (parts_text, lambda one: selection_episodes(one, 4)):
        with pytest.raises(InputError, match=r"trace\.csv': 1 request is too few to train"):
            use(scenario)


def test_a_trace_comes_in_a_file_of_its_own(tmp_path: Path) -> None:
    """In place of a scenario's traffic it would be trained and judged on as a whole. Mooncake has its own."""
    file_with_trace(tmp_path)
    change = f"workload={{trace: {tmp_path / 'trace.csv'}}}"
    with pytest.raises(InputError, match="name it in a file"):
        search_and_check(find_scenario("steady-chat"), (change,))
    with pytest.raises(InputError, match="name it in a file"):
        check_groups(("steady-chat",), (change,))
    check_groups(("mooncake",))
    search, check = search_and_check(find_scenario("mooncake"))
    assert search is check, "seeds tell its parts apart"


def test_a_part_of_a_repeated_and_cut_trace_is_a_part_of_what_is_replayed(tmp_path: Path) -> None:
    path = file_with_trace(tmp_path)
    overrides = ["workload.requests=500", "workload.trace.repeat=0"]
    config = report_configs(find_scenario(str(path)), range(1000, 1004), overrides)[0]
    lengths = prompts(prepare(config, tmp_path).workload)
    assert lengths == set(range(401, 501))


def test_what_is_said_of_the_parts(tmp_path: Path) -> None:
    said = parts_text(find_scenario(str(file_with_trace(tmp_path))))
    assert said == (
        "trace.csv: training by requests 1 to 600, selection by requests 601 to 800, "
        "report by requests 801 to 1,000"
    )
    assert "seeds" in parts_text(find_scenario(str(synthetic_file(tmp_path, "{kind: poisson, rate: 5}"))))
    assert PARTS[REPORT][1] == 1.0


@pytest.mark.parametrize(
    ("changes", "share", "first"),
    [
        ([], "80 to 100 %", 1),
        (["workload.trace.begin=0.5"], "90 to 100 %", 501),
        (["workload.requests=500"], "40 to 50 %", 1),
        (["workload.trace.begin=0.25", "workload.requests=400"], "57 to 65 %", 251),
        (["workload.trace.part=[0.5,1]"], "90 to 100 %", 501),
        (["workload.trace.begin=0.5", "workload.trace.part=[0.2,0.6]"], "76 to 80 %", 601),
        (["workload.duration_s=150"], "40 to 50 %", 1),
    ],
)
def test_parts_are_said_by_their_places_in_the_file(
    tmp_path: Path, changes: list[str], share: str, first: int
) -> None:
    """Prompts are 1, 2, 3, …: what is served tells where it stands in the file."""
    scenario = find_scenario(str(file_with_trace(tmp_path)))
    (config,) = report_configs(scenario, [1000], changes)
    served = prompts(prepare(config, tmp_path).workload)
    assert part_text(scenario, REPORT, changes) == f"requests {min(served)} to {max(served):,} of trace.csv"
    assert f"{share} of trace.csv" in kept_text(scenario, config)
    assert f"training by requests {first} to" in parts_text(scenario, changes)


def test_a_closed_loop_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="depend on the policy"):
        episode(synthetic_file(tmp_path, "{kind: closed, users: 5}"))


def test_files_are_called_by_their_stems() -> None:
    assert short_names(["a/x.yaml", "steady-chat", "b/x.yaml", "a/x.yaml"]) == (
        "x",
        "steady-chat",
        "x-2",
        "x",
    )
