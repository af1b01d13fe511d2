from __future__ import annotations

import numpy as np
import pytest

from pointsman.envs import episodes
from pointsman.envs.episodes import (
    LONGEST_CHAT_TOKENS,
    RANDOM,
    Difficulty,
    check_groups,
    draw,
)
from pointsman.errors import InputError
from pointsman.experiments.scenarios import REPORT_SEEDS, SCENARIOS, SELECTION_SEEDS, UNSEEN
from pointsman.experiments.simulate import Prepared

NUM_REQUESTS = 60


def drawn(group: str, seed: int, num_requests: int = NUM_REQUESTS, **difficulty: float) -> Prepared:
    return draw(group, num_requests, Difficulty(**difficulty), np.random.default_rng(seed))  # type: ignore[arg-type]


def devices(episode: Prepared) -> list[str]:
    return [group.device or "" for group in episode.config.cluster.groups for _ in range(group.count)]


@pytest.mark.parametrize("group", ["steady-chat", "failure", RANDOM])
def test_training_never_sees_the_seeds_that_select_and_report(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len({drawn(group, seed).config.seed for seed in range(8)}) == 8
    monkeypatch.setattr(episodes, "SEED_RANGE", 1)  # the smallest there is
    lowest = drawn(group, 0).config.seed
    assert lowest > max(*SELECTION_SEEDS, *REPORT_SEEDS)


@pytest.mark.parametrize("group", ["steady-chat", RANDOM])
def test_an_episode_follows_from_the_generator(group: str) -> None:
    one, again, other = (drawn(group, seed) for seed in (1, 1, 2))
    assert len(one.workload) == NUM_REQUESTS
    assert one.config == again.config != other.config
    assert one.workload.arrived_at.tobytes() == again.workload.arrived_at.tobytes()
    assert one.workload.arrived_at.tobytes() != other.workload.arrived_at.tobytes()


@pytest.mark.parametrize("group", ["steady-chat", "overload"])
def test_load_is_a_factor_on_the_rate_of_arrivals(group: str) -> None:
    both = [drawn(group, 0, 2000, load=load, load_jitter=0.0) for load in (0.5, 1.0)]
    spans = [float(episode.workload.arrived_at[-1]) for episode in both]
    assert spans[0] / spans[1] == pytest.approx(2.0, rel=1e-6)


def test_load_varies_from_episode_to_episode() -> None:
    def rates(jitter: float) -> set[float]:
        return {
            round(drawn("steady-chat", seed, load_jitter=jitter).config.workload.arrivals.load, 6)  # type: ignore[union-attr]
            for seed in range(6)
        }

    base = SCENARIOS["steady-chat"].config(0).workload.arrivals.load  # type: ignore[union-attr]
    assert rates(0.0) == {round(base, 6)}
    assert len(rates(0.1)) == 6
    assert all(0.9 * base - 1e-6 <= rate <= 1.1 * base + 1e-6 for rate in rates(0.1))


def test_random_clusters_are_as_large_and_as_mixed_as_asked() -> None:
    for limit in (2, 4):
        sizes = {len(drawn(RANDOM, seed, max_replicas=limit).plans) for seed in range(12)}
        assert sizes == set(range(2, limit + 1))
    for seed in range(6):
        assert len(set(devices(drawn(RANDOM, seed, hardware_mix=0.0)))) == 1
    assert any(len(set(devices(drawn(RANDOM, seed, hardware_mix=1.0)))) > 1 for seed in range(6))


def test_random_episodes_can_be_served() -> None:
    """Every replica holds the longest request that may come, and events fall inside the window."""
    kinds, num_events = set(), 0
    for seed in range(12):
        episode = drawn(RANDOM, seed, max_replicas=4)
        workload, spec = episode.workload, episode.config.workload
        longest = int((workload.num_prefill_tokens + workload.num_decode_tokens).max())
        assert min(plan.kv_capacity_tokens for plan in episode.plans) >= max(longest, LONGEST_CHAT_TOKENS)
        kinds.add((spec.arrivals.kind, str(getattr(spec.lengths, "kind", spec.lengths))))
        for event in episode.config.cluster.events:
            assert 0 < event.at_s < workload.arrived_at[-1]
            assert 0 <= event.replica < len(episode.plans)
            num_events += 1
    assert len(kinds) > 4
    assert num_events > 0


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "nothing to train on"),
        (["steady-chats"], "steady-chat"),
        ([next(iter(UNSEEN))], "not to train on"),
    ],
)
def test_groups_that_cannot_be_trained_on(groups: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_groups(groups)


def test_groups_that_can() -> None:
    check_groups([*SCENARIOS, RANDOM])


def test_random_episodes_draw_models_too() -> None:
    drawn_models = {drawn(RANDOM, seed, max_replicas=2).plans[0].model for seed in range(30)}
    assert len(drawn_models) >= 4
