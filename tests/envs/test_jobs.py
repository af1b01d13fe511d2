"""GPU jobs as an environment: what it pays adds up, episodes end and begin as told, for gymnasium too."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from numpy.typing import NDArray

from pointsman.envs.gym import GymJobsEnv, GymJobsVectorEnv
from pointsman.envs.jobs import JobsEnv, JobsSpec
from pointsman.errors import InputError
from pointsman.spec import parse_spec

from .factories import any_legal, copy_of, same

ID = "pointsman/Jobs-v0"
# So little slack that about half of the episodes are cut off.
SMALL: dict[str, Any] = {"num_gpus": 4, "window": 6, "workload": {"num_jobs": 20}, "horizon_slack": 0.9}
ALL = ("entities", "context", "entity_mask", "action_mask", "privileged")


def make_env(num_envs: int = 4, **fields: Any) -> JobsEnv:
    return JobsEnv(parse_spec(JobsSpec, SMALL | fields, "env"), num_envs)


def history(env: JobsEnv, num_steps: int, seed: int) -> list[bytes]:
    """All that a run under random actions shows and pays."""
    rng = np.random.default_rng(0)
    seen = env.reset(seed)
    rows = []
    for _ in range(num_steps):
        step = env.step(any_legal(seen, rng))
        seen = step.observation
        paid = (step.reward, step.elapsed_s, *step.terms.values())
        rows.append(b"".join(array.tobytes() for array in (*seen, *paid)))
    return rows


# The environment --------------------------------------------------------------------------------------------


def test_the_seed_decides_all() -> None:
    assert history(make_env(), 120, 7) == history(make_env(), 120, 7)
    assert history(make_env(), 120, 7) != history(make_env(), 120, 8)


def test_terms_add_up_to_the_reward_and_rewards_to_the_return() -> None:
    env, rng = make_env(noop_price=0.2), np.random.default_rng(0)
    seen = env.reset(0)
    totals = np.zeros(env.num_envs)
    moved: set[str] = set()
    num_episodes = 0
    for _ in range(400):
        step = env.step(any_legal(seen, rng))
        seen = step.observation
        np.testing.assert_allclose(sum(step.terms.values()), step.reward, rtol=1e-5, atol=1e-7)
        moved |= {name for name, term in step.terms.items() if term.any()}
        totals += step.reward
        for episode in step.episodes:
            assert totals[episode.env] == pytest.approx(episode.episode_return, abs=1e-4)
            totals[episode.env] = 0.0
            num_episodes += 1
    assert num_episodes > 20
    assert moved == {"completed", "holding", "noop", "finished", "unfinished"}


def test_shaping_moves_rewards_within_an_episode_and_adds_nothing_to_it() -> None:
    """All that it adds up to is known when the episode begins: what perfect packing would earn."""
    plain, shaped = make_env(), make_env(shaping=True)
    rng = np.random.default_rng(0)
    seen, _ = plain.reset(0), shaped.reset(0)
    ideal = [feature.name for feature in shaped.space.privileged_features].index("ideal")
    promised = shaped._observation.privileged[:, ideal].copy()
    sums = np.zeros((2, 4))
    num_episodes = 0
    for _ in range(300):
        actions = any_legal(seen, rng)
        one, other = plain.step(actions), shaped.step(actions)
        assert same(one.observation, other.observation, *ALL)
        np.testing.assert_allclose(other.reward - one.reward, other.terms["shaping"], atol=1e-6)
        sums += (one.reward, other.reward)
        for before, episode in zip(one.episodes, other.episodes, strict=True):
            i = episode.env
            assert episode.episode_return == before.episode_return == pytest.approx(sums[0, i], abs=1e-4)
            assert sums[1, i] == pytest.approx(sums[0, i] - promised[i], abs=1e-4)
            sums[:, i], promised[i] = 0.0, other.observation.privileged[i, ideal]
            num_episodes += 1
        seen = one.observation
    assert num_episodes > 10


def test_an_episode_ends_in_its_last_state_and_the_next_begins_in_the_same_step() -> None:
    env, rng = make_env(), np.random.default_rng(1)
    seen = env.reset(0)
    kinds: set[tuple[bool, bool]] = set()
    for _ in range(300):
        before = copy_of(seen)
        step = env.step(any_legal(seen, rng))
        seen = step.observation
        is_over = step.terminated | step.truncated
        assert [episode.env for episode in step.episodes] == np.flatnonzero(is_over).tolist()
        for i in np.flatnonzero(is_over):
            kinds.add((bool(step.terminated[i]), bool(step.truncated[i])))
            final = step.final_observation
            # A new episode: nothing has arrived and nothing runs. The old one: everything has, or time is up.
            assert not seen.entity_mask[i].any()
            assert column(env, "running", seen.context)[i] == 0
            done = column(env, "arrived", final.context)[i] == 1 and not final.entity_mask[i].any()
            assert done != bool(step.truncated[i]) or column(env, "time_left", final.context)[i] == 0
            assert not np.array_equal(final.context[i], before.context[i])
    # Either way nothing comes after, and learners are told so.
    assert kinds == {(True, False), (True, True)}


def column(env: JobsEnv, name: str, context: NDArray[np.float32]) -> NDArray[np.float32]:
    return context[:, [feature.name for feature in env.space.context_features].index(name)]


def test_an_illegal_action_counts_as_none_and_is_reported() -> None:
    one, other = make_env(), make_env()
    rng = np.random.default_rng(0)
    seen = one.reset(0)
    other.reset(0)
    num_illegal = 0
    for _ in range(60):
        actions = rng.integers(0, 7, 4)
        is_legal = seen.action_mask[np.arange(4), actions]
        step, twin = one.step(actions), other.step(np.where(is_legal, actions, 0))
        assert step.is_illegal is not None and twin.is_illegal is not None
        assert np.array_equal(step.is_illegal, ~is_legal)
        assert not twin.is_illegal.any()
        assert same(step.observation, twin.observation, *ALL)
        assert np.array_equal(step.reward, twin.reward)
        num_illegal += int((~is_legal).sum())
        seen = step.observation
    assert num_illegal > 50


def test_environments_warm_up_to_different_stages() -> None:
    settings: dict[str, Any] = {"workload": {"num_jobs": 100}, "warmup_steps": 150}

    def arrived(env: JobsEnv) -> NDArray[np.float32]:
        return column(env, "arrived", env.reset(0).context)

    assert arrived(make_env(32, **settings)).std() > 0.2
    assert np.array_equal(arrived(make_env(32, **settings)), arrived(make_env(32, **settings)))
    assert not arrived(make_env(32)).any()


def test_skipping_leaves_decisions_only() -> None:
    env, rng = make_env(skip_forced=True), np.random.default_rng(0)
    seen = env.reset(0)
    first = env.step(np.zeros(4, np.int64))  # before it, nothing has arrived
    seen, lengths, num_decisions = first.observation, 0, 0
    for _ in range(200):
        is_new = ~seen.entity_mask.any(axis=1)
        assert (seen.action_mask[:, 1:].any(axis=1) | is_new).all()
        step = env.step(any_legal(seen, rng))
        seen = step.observation
        lengths += sum(episode.length for episode in step.episodes)
        num_decisions += 4
    assert lengths > 1.2 * num_decisions  # steps, of which there are more


def test_a_teacher_that_draws_lots_draws_others_at_every_step() -> None:
    """Of as many jobs that fit, it does not name the same one for a whole episode."""
    env = make_env(num_envs=1, teachers=["random-feasible"], num_gpus=64)
    seen, num_episodes = env.reset(3), 0
    named: dict[tuple[int, int], set[int]] = {}  # by episode and number of jobs that fit
    for _ in range(60):
        legal, advice = np.flatnonzero(seen.action_mask[0, 1:]), env.advise(0)
        if len(legal):
            place = int(np.searchsorted(legal, advice[0] - 1))
            named.setdefault((num_episodes, len(legal)), set()).add(place)
        step = env.step(np.zeros(1, np.int64))
        seen, num_episodes = step.observation, num_episodes + len(step.episodes)
    assert max(map(len, named.values())) > 2


def test_teachers_advise_what_is_legal_and_change_nothing() -> None:
    env = make_env(teachers=["random-feasible", "wide-and-short"], noop_price=0.0)
    assert env.teachers == ("random-feasible", "wide-and-short", "sjf")
    assert env.baseline == "sjf"
    rng = np.random.default_rng(0)
    seen = env.reset(3)
    durations, gpus = seen.entities[:, :, 0], seen.entities[:, :, 2]  # views: they follow
    for _ in range(80):
        before = copy_of(seen)
        advice = [env.advise(k) for k in range(3)]
        assert all(np.array_equal(env.advise(k), advice[k]) for k in range(3))
        assert same(seen, before, *ALL)
        for actions in advice:
            assert seen.action_mask[np.arange(4), actions].all()
            assert ((actions == 0) == ~seen.action_mask[:, 1:].any(axis=1)).all()
        for i in np.flatnonzero(advice[2]):
            legal = seen.action_mask[i, 1:]
            assert durations[i, advice[2][i] - 1] == durations[i][legal].min()
            score = gpus[i] - 0.5 * durations[i]
            assert score[advice[1][i] - 1] == pytest.approx(score[legal].max())
        seen = env.step(any_legal(seen, rng)).observation


def test_a_curriculum_may_shorten_episodes() -> None:
    env = make_env(1)
    env.set_difficulty({"num_jobs": 5})
    env.reset(0)
    assert env._clusters.sims[0].num_jobs == 5
    env.set_difficulty({})
    env.reset(0)
    assert env._clusters.sims[0].num_jobs == 20
    with pytest.raises(InputError, match=r"difficulty\.num_jobs = 21: above env\.workload\.num_jobs"):
        env.set_difficulty({"num_jobs": 21})
    with pytest.raises(InputError, match=r"difficulty\.max_duration_s = 5\.0: cannot change"):
        env.set_difficulty({"max_duration_s": 5.0})
    with pytest.raises(InputError, match=r"difficulty\.load = 2: unknown key"):
        env.set_difficulty({"load": 2})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_gpus": 0}, r"env\.num_gpus = 0: must be greater than or equal to 1"),
        (
            {"lookahead": "far"},
            r"env\.lookahead = 'far': must be 'off', 'per_gpu', 'sorted' or 'cdf'",
        ),
        ({"teachers": ["ljf"]}, r"env\.teachers = 'ljf': unknown heuristic; known: fifo, sjf"),
        ({"windows": 3}, r"env\.windows = 3: unknown key; did you mean 'window'"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_env(**settings)


def test_original_features_are_the_first_of_all() -> None:
    few, all_ = make_env(features="original"), make_env()
    assert [f.name for f in few.space.entity_features] == ["duration", "priority", "gpus", "wait"]
    assert len(few.space.context_features) == 4 + 2
    assert few.space.entity_features == all_.space.entity_features[:4]
    one, other = few.reset(0), all_.reset(0)
    rng = np.random.default_rng(0)
    for _ in range(50):
        assert np.array_equal(one.entities, other.entities[:, :, :4])
        assert np.array_equal(one.context, other.context[:, :6])
        assert (one.entities >= 0).all() and (one.entities <= 1).all()
        assert (one.context >= 0).all() and (one.context <= 1).all()
        actions = any_legal(one, rng)
        one, other = few.step(actions).observation, all_.step(actions).observation


# Gymnasium --------------------------------------------------------------------------------------------------


def make_gym(**settings: Any) -> GymJobsEnv:
    env = gymnasium.make(ID, **(SMALL | settings)).unwrapped
    assert isinstance(env, GymJobsEnv)
    return env


@pytest.mark.parametrize("features", ["original", "full"])
def test_gymnasium_approves(features: str) -> None:
    """Warnings are errors in all tests, so it has nothing to remark on either."""
    check_env(make_gym(features=features))


def test_episodes_are_terminated_or_truncated_as_published() -> None:
    env, rng = make_gym(), np.random.default_rng(0)
    ends = set()
    for seed in range(12):
        env.reset(seed=seed)
        is_over = False
        while not is_over:
            legal = np.flatnonzero(env.action_masks())
            seen, _, terminated, truncated, info = env.step(legal[-1 - int(rng.integers(len(legal)))])
            is_over = terminated or truncated
            assert seen in env.observation_space
        assert terminated == (info["terms"]["unfinished"] == 0)
        ends.add((terminated, truncated))
    assert ends == {(True, False), (False, True)}


def test_an_illegal_action_is_told() -> None:
    env = make_gym()
    env.reset(seed=0)
    assert env.action_masks().tolist() == [True] + [False] * 6
    assert env.step(np.int64(3))[4]["invalid"]
    assert not env.step(np.int64(0))[4]["invalid"]


def test_many_environments_do_what_one_does() -> None:
    env = make_gym()
    envs = gymnasium.make_vec(ID, num_envs=1, **SMALL).unwrapped
    assert isinstance(envs, GymJobsVectorEnv)
    env.reset(seed=3)
    envs.reset(seed=3)
    # The single environment draws its scenario before the seed of its episode: bring them together.
    env._seen, envs._seen = env.entity_env.reset(7), envs.entity_env.reset(7)
    rng = np.random.default_rng(0)
    is_over = False
    while not is_over:
        legal = np.flatnonzero(env.action_masks())
        action = legal[-1 - int(rng.integers(max(1, len(legal) - 1)))]
        one, reward, terminated, truncated, info = env.step(action)
        all_seen, rewards, all_terminated, all_truncated, infos = envs.step(np.array([action]))
        assert (reward, terminated, truncated) == (rewards[0], all_terminated[0], all_truncated[0])
        assert info["elapsed_s"] == infos["elapsed_s"][0]
        is_over = terminated or truncated
        last = infos["final_obs"][0] if is_over else {key: value[0] for key, value in all_seen.items()}
        assert all(np.array_equal(one[key], last[key]) for key in one)
    assert not all_seen["entity_mask"].any()  # the next episode's first


def test_maskable_ppo_learns_on_it_unchanged() -> None:
    pytest.importorskip("sb3_contrib")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what stable-baselines3 imports
        import torch
        from sb3_contrib import MaskablePPO

    torch.set_num_threads(1)
    env = make_gym()
    model = MaskablePPO("MultiInputPolicy", env, n_steps=128, batch_size=64, n_epochs=2, seed=0, device="cpu")
    before = [parameter.detach().clone() for parameter in model.policy.parameters()]
    model.learn(256)
    after = list(model.policy.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(torch.isfinite(parameter).all() for parameter in after)
    seen, _ = env.reset(seed=0)
    action, _ = model.predict(seen, action_masks=env.action_masks(), deterministic=True)
    assert env.action_masks()[int(action)]
