"""The loop, on a problem of which everything is known. Resuming is compared bit for bit."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from pointsman.errors import InputError
from pointsman.training.advantages import gae
from pointsman.training.config import TrainConfig
from pointsman.training.networks import TensorObservation
from pointsman.training.ppo import DivergedError, RatioError
from pointsman.training.ranks import Ranks, started
from pointsman.training.state import TrainerState, restore
from pointsman.training.trainer import Trainer, train
from pointsman.workers.processes import LocalProcesses

from .fakes import FakeEnv, FakeSpec, MemoryHost, fake_config

O1 = """update timesteps mean_ep_return mean_ep_length eval_mean_return eval_score invalid_frac noop_frac lr
ent_coef temperature kl_ref_coef approx_kl_last approx_kl_mean approx_kl_max early_stop pg_loss v_loss entropy
clip_frac explained_variance grad_norm reward/picked reward/held reward_raw_p50 reward_zero_frac
reward_clipped_frac action_frac_max time/env_s time/inference_s time/update_s steps_per_s interventions"""

# Everything that has a state: schedules, a curriculum, a memory, a reference, teachers, an entropy target.
EVERYTHING: dict[str, Any] = {
    "env": {"episode_steps": 7},  # no divisor of a rollout: memories outlive it
    "network": {"kind": "attention+gru", "width": 8, "depth": 1, "heads": 2},
    "ppo": {
        "kl_reference": 0.1,
        "imitation": 0.1,
        "sequence_length": 4,
        "num_epochs": 1,
        "kl_penalty": {},
        "reward_memory": 3,
        "critic_first": 1,
    },
    "exploration": {"epsilon": 0.05, "target": {"entropy_frac": 0.7}, "stagnation": {"evaluations": 1}},
    "warm_start": {"decisions": 1024, "num_epochs": 1, "teachers": {"cheapest": 1, "first": 1}},
    "curriculum": {
        "stages": [{"difficulty": {"entities": 2}}, {"difficulty": {"entities": 4}, "from_fraction": 0.4}]
    },
    "run": {"num_envs": 16, "rollout_steps": 8, "steps": 16 * 8 * 6, "average_updates": 3},
}


def parameters(trainer: Trainer) -> bytes:
    """Of the network, and of what would be served."""
    arrays = [tensor.numpy() for tensor in trainer.network.state_dict().values()]
    return b"".join(array.tobytes() for array in (*arrays, *trainer.checkpoint().arrays.values()))


def run(
    config: TrainConfig, state: TrainerState | None = None, stop_after: int | None = None
) -> tuple[Trainer, MemoryHost]:
    host = MemoryHost(config, stop_after)
    return train(Ranks(), config, state, host), host


def through_json(state: TrainerState) -> TrainerState:
    return TrainerState(state.arrays, json.loads(json.dumps(state.values)))


def optimum() -> float:
    """The mean reward of always picking the cheapest, on the decisions that `make_evaluate` takes."""
    env = FakeEnv(FakeSpec(), 512)
    env.reset(seed=1)
    return float(env.step(env.advise(0)).reward.mean())


def share_of_optimum(config: TrainConfig) -> float:
    """0: as good as random, 1: as good as can be."""
    _, host = run(config)
    random = -0.5
    return (host.rows[-1]["eval_score"] - random) / (optimum() - random)


def test_learns_to_pick_the_cheapest() -> None:
    long = {"steps": 16 * 32 * 12, "evaluate_every": 12, "checkpoint_every": 6}
    assert share_of_optimum(fake_config(run=long)) > 0.95
    assert share_of_optimum(fake_config(ppo={"learning_rate": 0.0})) < 0.5  # the check can fail


def test_rows_have_all_names_and_nothing_illegal() -> None:
    config = fake_config()
    _, host = run(config)
    assert [row["update"] for row in host.rows] == [1, 2, 3, 4, 5, 6]
    assert host.rows[-1]["timesteps"] == config.run.steps
    assert set(O1.split()) <= set(host.rows[-1])
    assert ["eval_score" in row for row in host.rows] == [False, True] * 3
    for row in host.rows:
        assert row["invalid_frac"] == 0
        assert row["reward/picked"] + row["reward/held"] == pytest.approx(row["reward_raw_mean"], abs=1e-6)
        assert row["mean_ep_length"] == 8


@pytest.fixture(scope="module")
def everything() -> tuple[TrainConfig, Trainer]:
    config = fake_config(**EVERYTHING)
    return config, run(config)[0]


def test_same_seed_same_bits(everything: tuple[TrainConfig, Trainer]) -> None:
    config, trainer = everything
    assert parameters(run(config)[0]) == parameters(trainer)
    other = config.model_copy(update={"run": config.run.model_copy(update={"seed": 1})})
    assert parameters(run(other)[0]) != parameters(trainer)


@pytest.mark.parametrize("stop_after", [3, 4])  # environments start anew after 4
def test_resumed_is_the_same_to_the_last_bit(
    everything: tuple[TrainConfig, Trainer], stop_after: int
) -> None:
    config, trainer = everything
    stopped, host = run(config, stop_after=stop_after)
    assert stopped.num_updates == stop_after
    assert parameters(stopped) != parameters(trainer)
    resumed, _ = run(config, through_json(host.states[-1]))
    assert resumed.num_updates == trainer.num_updates
    assert parameters(resumed) == parameters(trainer)


def forget_recordings(state: TrainerState) -> TrainerState:
    values = {name: value for name, value in state.values.items() if name != "recordings"}
    return TrainerState(state.arrays, values)


@pytest.fixture(scope="module")
def stopped(everything: tuple[TrainConfig, Trainer]) -> TrainerState:
    config, _ = everything
    return through_json(run(config, stop_after=5)[1].states[-1])


@pytest.mark.parametrize(
    "part", ["optimizer/", "rank0/state", "rank0/reference_state", "reference/", "average/", "reward_scale"]
)
def test_everything_saved_is_needed(
    everything: tuple[TrainConfig, Trainer], stopped: TrainerState, part: str
) -> None:
    config, trainer = everything
    damaged = {
        name: np.zeros_like(array) if name.startswith(part) else array
        for name, array in stopped.arrays.items()
    }
    assert any(name.startswith(part) for name in damaged)
    assert parameters(run(config, TrainerState(damaged, stopped.values))[0]) != parameters(trainer)


def test_environments_are_played_to_where_they_were() -> None:
    """Without that, resuming between two restarts is a restart too many, and the result another."""
    config = fake_config()
    whole, _ = run(config)
    _, host = run(config, stop_after=3)
    state = host.states[-1]
    assert parameters(run(config, state)[0]) == parameters(whole)
    trainer = Trainer(config, Ranks())
    restore(trainer, forget_recordings(state))
    trainer.restart()
    trainer.step(0.5)
    assert parameters(trainer) != parameters(run(config, state, stop_after=1)[0])


def train_thrice(ranks: Ranks) -> list[Any]:
    """In two processes: a whole run; one stopped after update 3; and that one resumed."""
    config = fake_config(
        network={"width": 8},
        run={"workers": 2, "steps": 16 * 32 * 5},
        ppo={"target_kl": 0.001, "minibatch_size": 256},  # ranks must agree when to stop an update
    )
    is_first = ranks.rank == 0
    results: list[Any] = []
    state = None
    for stop_after in (None, 3, None):
        host = MemoryHost(config, stop_after) if is_first else None
        trainer = train(ranks, config, ranks.from_first(state) if len(results) == 2 else None, host)
        results.append((ranks.gather(parameters(trainer)), trainer.num_updates, host and host.rows))
        state = through_json(host.states[-1]) if host else None
    return results


def test_two_processes_agree_and_resume_too() -> None:
    with started(LocalProcesses(), 2, train_thrice) as ranks:
        (whole, _, rows), (stopped, num_updates, _), (resumed, _, _) = train_thrice(ranks)
    assert whole[0] == whole[1]
    assert any(row["early_stop"] for row in rows)
    assert num_updates == 3
    assert stopped[0] == stopped[1] != whole[0]
    assert resumed == whole
    assert rows[-1]["timesteps"] == 16 * 32 * 5  # of both together
    alone = fake_config(network={"width": 8}, run={"steps": 16 * 32 * 5}, ppo={"target_kl": 0.001})
    assert parameters(run(alone)[0]) != whole[0]


def prepared(config: TrainConfig) -> Trainer:
    trainer = Trainer(config, Ranks())
    trainer.prepare()
    trainer.restart()
    return trainer


def test_values_at_the_end_of_episodes_are_those_of_what_was_seen_last() -> None:
    trainer = prepared(fake_config(run={"rollout_steps": 20}))
    knobs = trainer.exploration.knobs(0.0)
    finals: dict[tuple[int, int], TensorObservation] = {}
    step = trainer.env.env.step
    count = iter(range(20))

    def spy(actions: Any) -> Any:
        result, t = step(actions), next(count)
        for env in np.flatnonzero(result.truncated):
            rows = (torch.from_numpy(array[env : env + 1].copy()) for array in result.final_observation)
            finals[t, int(env)] = TensorObservation(*rows)
        return result

    trainer.env.env.step = spy  # type: ignore[method-assign]
    trainer.rollout(knobs)
    values, final_values = trainer.values()
    assert len(finals) == 2 * 32  # steps 8 and 16 of each environment
    network = trainer.network
    for (t, env), seen in finals.items():
        with torch.no_grad():
            expected = float(network.value_scale.denormalise(network.value(seen)))
        assert final_values[t, env] == pytest.approx(expected, abs=1e-5)
        assert abs(values[t + 1, env] - expected) > 1e-5  # of the next episode's first observation


def test_scales_settle_first_and_stand_still_within_an_update() -> None:
    config = fake_config(run={"settle_steps": 24})
    trainer = prepared(config)
    scale = trainer.network.context_scale
    assert float(scale.count) == 24 * 32
    before = scale.mean.clone()
    knobs = trainer.exploration.knobs(0.0)
    trainer.rollout(knobs)
    batch = trainer.compute_gae(knobs)
    assert torch.equal(scale.mean, before)
    trainer.checkpoint()
    trainer.update(batch, knobs)
    assert float(scale.count) == (24 + 16) * 32
    # The broken variant: scales that move between rollout and update are found out.
    trainer.rollout(knobs)
    batch = trainer.compute_gae(knobs)
    trainer.network.observe(batch.observation._replace(entities=batch.observation.entities * 3))
    with pytest.raises(RatioError):
        trainer.update(batch, knobs)


def test_the_reference_is_the_policy_at_the_start() -> None:
    trainer = prepared(fake_config(ppo={"kl_reference": 1.0}))
    knobs = trainer.exploration.knobs(0.0)
    trainer.rollout(knobs)
    batch = trainer.compute_gae(knobs)
    with torch.no_grad():
        own = trainer.network(batch.observation).logits
    assert batch.ref_logits is not None
    assert torch.allclose(batch.ref_logits, own, atol=1e-6)
    trainer.update(batch, knobs)
    with torch.no_grad():
        moved = trainer.network(batch.observation).logits
    assert torch.equal(trainer.reference_logits(), batch.ref_logits)
    assert not torch.allclose(batch.ref_logits, moved, atol=1e-6)


def test_teachers_advise_only_while_imitated() -> None:
    sections = {"warm_start": {"decisions": 256}, "ppo": {"imitation": 0.5}}
    trainer = prepared(fake_config(**sections))
    knobs = trainer.exploration.knobs(0.0)
    trainer.rollout(knobs)
    batch = trainer.compute_gae(knobs)
    assert batch.teacher_actions is not None
    costs = batch.observation.entities[:, :, 0].masked_fill(~batch.observation.entity_mask, 9.0)
    assert torch.equal(batch.teacher_actions, costs.argmin(-1) + 1)
    with pytest.raises(InputError, match="imitation needs teachers"):
        fake_config(ppo={"imitation": 0.5})


def test_the_curriculum_reaches_the_environment() -> None:
    stages = [
        {"difficulty": {"entities": 2}},
        {"difficulty": {"entities": 3}, "from_metrics": {"eval_score": -0.9}},
    ]
    config = fake_config(
        env={"episode_steps": 10_000}, curriculum={"stages": stages}, run={"evaluate_every": 3}
    )
    trainer = prepared(config)
    trainer.step(0.0)
    env = trainer.env.env
    assert isinstance(env, FakeEnv)
    assert env.max_entities == 2
    assert env._num.max() == 2
    trainer.evaluation = {"eval_score": -0.8}
    metrics, news = trainer.step(0.1)
    assert (env.max_entities, metrics["stage"]) == (3, 2)
    # Episodes are far longer than an update, and yet the stage is there when it is announced.
    assert trainer.buffers.arrays.entity_mask[0].sum(axis=1).max() == 3
    assert str(news[0]) == ("update 2: curriculum stage 1 → 2, of 2: entities 3; all episodes began anew")


def test_a_run_that_diverges_keeps_its_last_good_state() -> None:
    config = fake_config(env={"poison_at_step": 24 + 5 * 16})  # in the sixth update
    host = MemoryHost(config)
    with pytest.raises(DivergedError, match="not finite"):
        train(Ranks(), config, host=host)
    assert host.states[-1].values["num_updates"] == 4
    assert all(np.isfinite(array).all() for array in host.states[-1].arrays.values())


def test_what_the_environment_expects_counts_as_value_and_not_as_reward() -> None:
    """With a lead, advantages are those of rewards shaped by it, and the critic learns what is left."""
    trainer = prepared(fake_config())
    knobs = trainer.exploration.knobs(0.0)
    trainer.rollout(knobs)
    lead = np.random.default_rng(0).normal(size=(trainer.buffers.num_steps + 1, trainer.buffers.num_envs))
    final = np.random.default_rng(1).normal(size=(trainer.buffers.num_steps, trainer.buffers.num_envs))
    trainer._leads = lambda: (lead, final)  # type: ignore[method-assign]
    buffers, (values, final_values) = trainer.buffers, trainer.values()
    discount, trace = trainer.ppo.discount.arrays(buffers.elapsed_s, buffers.lifetime_s)
    follows = np.where(buffers.truncated, final, lead[1:]) * ~buffers.terminated
    batch = trainer.compute_gae(knobs)
    assert trainer.reward_scale is not None
    rewards = buffers.rewards / trainer.reward_scale.scale(buffers.groups)
    shaped = rewards + discount * follows - lead[:-1]
    expected, returns = gae(
        shaped, values, final_values, buffers.terminated, buffers.truncated, discount, trace
    )
    np.testing.assert_allclose(batch.advantages.numpy(), expected.ravel(), atol=1e-5)
    unit = trainer.network.value_scale
    np.testing.assert_allclose(unit.denormalise(batch.returns.double()).numpy(), returns.ravel(), atol=1e-4)
