from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

from pointsman.envs import gym
from pointsman.envs.gym import GymRoutingEnv, GymRoutingVectorEnv
from pointsman.errors import InputError

ID = "pointsman/Routing-v0"
# A fixed scale of the reward saves the run that finds it.
SMALL: dict[str, Any] = {
    "max_replicas": 5,  # one more than steady-chat has
    "decisions": 16,
    "warmup_requests": 50,
    "reward": {"scale": "none"},
}


def make(**settings: Any) -> GymRoutingEnv:
    env = gymnasium.make(ID, **(SMALL | settings)).unwrapped
    assert isinstance(env, GymRoutingEnv)
    return env


def make_vec(num_envs: int, **settings: Any) -> GymRoutingVectorEnv:
    envs = gymnasium.make_vec(ID, num_envs=num_envs, **(SMALL | settings)).unwrapped
    assert isinstance(envs, GymRoutingVectorEnv)
    return envs


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(np.array_equal(a[key], b[key]) for key in a)


def test_gymnasium_approves() -> None:
    """Warnings are errors in all tests, so it has nothing to remark on either."""
    check_env(make())


def test_gymnasium_would_notice_a_reused_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[int, Any] = {}

    def into_the_same(seen: Any, i: Any) -> Any:
        buffers = kept.setdefault(0, observed(seen, i))
        for key, value in observed(seen, i).items():
            buffers[key][...] = value
        return buffers

    observed = gym._observed
    monkeypatch.setattr(gym, "_observed", into_the_same)
    with pytest.raises(AssertionError):
        check_env(make())


def test_an_observation_names_what_is_there_and_what_may_be_done() -> None:
    env = make()
    seen, info = env.reset(seed=0)
    assert seen in env.observation_space
    assert seen["entity_mask"].tolist() == [1, 1, 1, 1, 0]
    assert not seen["entities"][4].any()
    assert seen["entities"][:4].any(axis=1).all()
    assert np.array_equal(env.action_masks(), seen["action_mask"])
    assert seen["action_mask"][5] == 0
    assert info["scenario"] == "steady-chat"
    assert info["privileged"].shape == (len(env.entity_env.space.privileged_features),)
    assert "privileged" not in seen


def test_an_episode_ends_in_its_last_state_and_reset_begins_another() -> None:
    env = make()
    seen, _ = env.reset(seed=1)
    kept, total = [seen], 0.0
    for t in range(16):
        seen, reward, terminated, truncated, info = env.step(np.int64(1 + t % 4))
        kept.append(seen)
        total += reward
        assert (terminated, truncated) == (False, t == 15)
        assert info["elapsed_s"] > 0
        assert not info["invalid"]
        assert reward == pytest.approx(sum(info["terms"].values()), rel=1e-4, abs=1e-6)
    # The last request was placed on the last replica: it is outstanding there in the final observation.
    assert not same(kept[-1], kept[-2])
    assert kept[-1]["entities"][3, 0] > 0
    assert not same(env.reset()[0], kept[-1])
    again, _ = env.reset(seed=1)
    assert same(again, kept[0])
    assert sum(env.step(np.int64(1 + t % 4))[1] for t in range(16)) == total


@pytest.mark.parametrize("action", [0, 5], ids=["hold with room", "a replica that is not there"])
def test_an_illegal_action_is_replaced_by_the_first_legal_one(action: int) -> None:
    first, second = make(), make()
    first.reset(seed=2)
    second.reset(seed=2)
    assert not first.action_masks()[action]
    instead = int(first.action_masks().argmax())
    a, b = first.step(np.int64(action)), second.step(np.int64(instead))
    assert same(a[0], b[0])
    assert a[1] == b[1]
    assert (a[4]["invalid"], b[4]["invalid"]) == (True, False)


def test_one_environment_sees_all_scenarios() -> None:
    env = make(scenarios=["steady-chat", "mixed-hardware"], decisions=2)
    env.reset(seed=0)
    assert {env.reset()[1]["scenario"] for _ in range(12)} == {"steady-chat", "mixed-hardware"}


def test_settings_are_those_of_the_configuration() -> None:
    with pytest.raises(InputError, match=r"env\.max_replica = 3: unknown key; did you mean 'max_replicas'"):
        gymnasium.make(ID, max_replica=3)
    with pytest.raises(InputError, match=r"2 scenarios need as many environments"):
        make_vec(1, scenarios=["steady-chat", "mixed-hardware"])


def test_many_environments_reset_in_the_step_that_ends_them() -> None:
    envs = make_vec(3, decisions=4)
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    seen, infos = envs.reset(seed=0)
    assert seen in envs.observation_space
    assert infos["privileged"].shape[0] == 3
    for t in range(4):
        before = seen
        actions = envs.action_masks().argmax(axis=1)
        assert actions in envs.action_space
        seen, rewards, terminated, truncated, infos = envs.step(actions)
        assert seen in envs.observation_space
        assert rewards.shape == terminated.shape == (3,)
        assert truncated.tolist() == [t == 3] * 3
        assert ("final_obs" in infos) == (t == 3)
    assert infos["_final_obs"].all()
    assert infos["_final_info"].all()
    for i, final in enumerate(infos["final_obs"]):
        assert final in envs.single_observation_space
        assert not same(final, {key: value[i] for key, value in seen.items()})  # the next episode's first
        assert not same(final, {key: value[i] for key, value in before.items()})
    assert infos["final_info"]["elapsed_s"] == pytest.approx(infos["elapsed_s"])
    assert not np.array_equal(infos["final_info"]["privileged"], infos["privileged"])


def test_many_environments_do_what_one_does() -> None:
    """From the same seed, and also across the end of an episode."""
    env, envs = make(decisions=6), make_vec(1, decisions=6)
    env.reset(seed=3)
    envs.reset(seed=3)
    # The single environment draws its scenario before the seed of its episode: bring them together.
    seen = env.entity_env.reset(7)
    many = envs.entity_env.reset(7)
    assert np.array_equal(seen.entities, many.entities)
    for t in range(6):
        one, reward, _, truncated, info = env.step(np.int64(1 + t % 4))
        all_seen, rewards, _, all_truncated, infos = envs.step(np.array([1 + t % 4]))
        assert (reward, truncated) == (rewards[0], all_truncated[0])
        assert info["elapsed_s"] == infos["elapsed_s"][0]
        last = infos["final_obs"][0] if truncated else {key: value[0] for key, value in all_seen.items()}
        assert same(one, last)
    assert truncated
    assert same(info["terms"], {name: infos["final_info"]["terms"][name][0] for name in info["terms"]})


def test_maskable_ppo_learns_on_it_unchanged() -> None:
    pytest.importorskip("sb3_contrib")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what stable-baselines3 imports
        import torch
        from sb3_contrib import MaskablePPO

    torch.set_num_threads(1)
    env = make(decisions=64)
    model = MaskablePPO("MultiInputPolicy", env, n_steps=128, batch_size=64, n_epochs=2, seed=0, device="cpu")
    before = [parameter.detach().clone() for parameter in model.policy.parameters()]
    model.learn(256)
    after = list(model.policy.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(torch.isfinite(parameter).all() for parameter in after)
    assert len(model.ep_info_buffer) == 4
    seen, _ = env.reset(seed=0)
    action, _ = model.predict(seen, action_masks=env.action_masks(), deterministic=True)
    assert env.action_masks()[int(action)]


@pytest.mark.parametrize(
    ("lines", "is_known"),
    [
        ("import pointsman.envs.entity, pointsman.inference.checkpoint", None),
        ("import gymnasium, pointsman.envs; known = gymnasium.registry", True),
        ("import pointsman.envs.gym, gymnasium; known = gymnasium.registry", True),
    ],
)
def test_gymnasium_is_imported_by_those_who_want_it(lines: str, is_known: bool | None) -> None:
    question = "'gymnasium' in sys.modules" if is_known is None else f"{ID!r} in known"
    code = f"import sys; {lines}; print({question})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(bool(is_known))
