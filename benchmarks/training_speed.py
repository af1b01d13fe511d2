"""How fast training is: decisions a second, rollout and update together, beside sb3-contrib's MaskablePPO.

All train on `steady-chat` with the same number of environments, rollout length, epochs and minibatches, on
by turns in one run: a machine's mood hits them all, and CPU time beside wall time shows
what it took away. Two peers, because "the same size" can mean two things: MaskablePPO's own MLP with as many
parameters as our network, and our architecture in plain PyTorch as its policy. (Per parameter it computes
more: every weight is used for each replica.) Both on one thread and on two, as they may use both cores too;
ours has one thread a process. Early stopping is off: every update makes all its passes.
Evaluation and checkpoints are not included; that environments start anew every `checkpoint_every` updates is.

    python benchmarks/training_speed.py [--rounds 5] [--updates 4] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.policies import MaskableMultiInputActorCriticPolicy
from stable_baselines3.common.vec_env import VecEnv
from torch import nn

from pointsman.envs.entity import Observation
from pointsman.envs.gym import HIGHEST, observation_space
from pointsman.envs.routing import RoutingEnv
from pointsman.evaluation.problem import make_env
from pointsman.inference.checkpoint import NetworkSpec
from pointsman.inference.space import EntitySpace
from pointsman.spec import parse_spec
from pointsman.training.config import TrainConfig
from pointsman.training.passes import use_one_thread
from pointsman.training.ranks import Ranks, started
from pointsman.training.trainer import Trainer
from pointsman.workers.processes import LocalProcesses

FRACTION_DONE = 0.5  # of a run that never ends; schedules follow it


def make_config() -> TrainConfig:
    data = {
        "env": {"kind": "routing", "scenarios": ["steady-chat"], "max_replicas": 4},
        "ppo": {"target_kl": None, "entropy_jump_clip": None},
        "run": {"steps": 1 << 40},
    }
    return parse_spec(TrainConfig, data)


@dataclass
class Peer:
    """`train(n)` makes n updates and returns seconds spent in the environment and elsewhere, by name."""

    name: str
    num_parameters: int
    train: Callable[[int], dict[str, float]]
    num_cores: int = 1
    wall_s: list[float] = field(default_factory=list)  # of each round
    cpu_s: list[float] = field(default_factory=list)  # of this process
    parts_s: dict[str, float] = field(default_factory=dict)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# Ours -----------------------------------------------------------------------------------------------------


def follow(ranks: Ranks, config: TrainConfig) -> None:
    """What the other ranks do: an update whenever rank 0 makes one."""
    use_one_thread()
    trainer = Trainer(config, ranks)
    trainer.prepare()
    while ranks.from_first(False):
        trainer.step(FRACTION_DONE)


def ours(ranks: Ranks, config: TrainConfig) -> Peer:
    trainer = Trainer(config, ranks)
    trainer.prepare()

    def train(num_updates: int) -> dict[str, float]:
        total = dict.fromkeys(("env", "inference", "update"), 0.0)
        for _ in range(num_updates):
            ranks.from_first(True)
            metrics, _ = trainer.step(FRACTION_DONE)
            for part in total:
                total[part] += metrics[f"time/{part}_s"]
        return total

    plural = "s" if ranks.size > 1 else ""
    return Peer(f"Pointsman, {ranks.size} worker{plural}", count(trainer.network), train, ranks.size)


# sb3-contrib ----------------------------------------------------------------------------------------------


class Sb3Env(VecEnv):
    """Our environments behind Stable-Baselines3's interface, privileged features included."""

    def __init__(self, env: RoutingEnv) -> None:
        self.env = env
        self.env_s = 0.0
        space = observation_space(env.space)
        num_privileged = len(env.space.privileged_features)
        space["privileged"] = spaces.Box(-HIGHEST, HIGHEST, (num_privileged,), np.float32)
        super().__init__(env.num_envs, space, spaces.Discrete(env.space.num_actions))

    def reset(self) -> dict[str, Any]:
        return self._copied(self.env.reset(0))

    def step_async(self, actions: Any) -> None:
        self.actions = actions

    def step_wait(self) -> Any:
        start = time.perf_counter()
        step = self.env.step(self.actions)
        self.env_s += time.perf_counter() - start
        is_over = step.terminated | step.truncated
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for i in np.flatnonzero(is_over):
            final = self._copied(Observation(*(array[i] for array in step.final_observation)))
            infos[i] = {"terminal_observation": final, "TimeLimit.truncated": bool(step.truncated[i])}
        return self._copied(step.observation), step.reward, is_over, infos

    def _copied(self, seen: Observation) -> dict[str, Any]:
        arrays = {name: array.copy() for name, array in seen._asdict().items()}
        for name in ("entity_mask", "action_mask"):
            arrays[name] = arrays[name].view(np.int8)
        return arrays

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> Any:
        assert method_name == "action_masks"
        return self.env._observation.action_mask.copy()

    def has_attr(self, attr_name: str) -> bool:
        return attr_name == "action_masks"

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        assert attr_name == "render_mode"
        return [None] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs

    def close(self) -> None:
        pass


class PlainNetwork(nn.Module):
    """What training/networks.py computes for `pooled`, as one would write it: layers, cat, mean, amax."""

    def __init__(self, spec: NetworkSpec, space: EntitySpace) -> None:
        super().__init__()
        width, num_context = spec.width, len(space.context_features)
        num_privileged = len(space.privileged_features)
        num_inputs = len(space.entity_features) + num_context

        def encoder() -> nn.Module:
            sizes = [num_inputs, *[width] * spec.depth]
            layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(sizes)]
            return nn.Sequential(*itertools.chain.from_iterable(layers))

        def summary(num_extra: int) -> nn.Module:
            return nn.Sequential(nn.Linear(2 * width + num_extra, width), nn.ReLU())

        self.actor, self.critic = encoder(), encoder()
        self.actor_summary, self.critic_summary = summary(num_context), summary(num_context + num_privileged)
        self.of_entity = nn.Linear(width, width)
        self.of_all = nn.Linear(width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)
        self.hold = nn.Linear(width, 1)
        self.value = nn.Linear(width, 1)

    def forward(self, obs: Any) -> tuple[Any, Any]:
        """-> logits [B, A], values [B, 1]"""
        entities, context, mask = obs["entities"], obs["context"], obs["entity_mask"][:, :, None]
        x = torch.cat((entities, context[:, None].expand(-1, entities.shape[1], -1)), -1)

        def pooled(h: Any, *extra: Any) -> Any:
            return torch.cat((h.sum(1) / mask.sum(1), h.amax(1), *extra), -1)

        h = self.actor(x) * mask
        g = self.actor_summary(pooled(h, context))
        hidden = torch.relu(self.of_entity(h) + self.of_all(g)[:, None])
        logits = torch.cat((self.hold(g), self.score(hidden).squeeze(-1)), -1)
        seen = pooled(self.critic(x) * mask, context, obs["privileged"])
        return logits, self.value(self.critic_summary(seen))


class PlainPolicy(MaskableMultiInputActorCriticPolicy):
    """That network as a policy of Stable-Baselines3."""

    def __init__(self, *args: Any, make_network: Callable[[], nn.Module], **kwargs: Any) -> None:
        self.make_network = make_network
        super().__init__(*args, **kwargs)

    def _build(self, lr_schedule: Any) -> None:
        self.network = self.make_network()
        self.optimizer = self.optimizer_class(
            self.network.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs
        )

    def _run(self, obs: Any, action_masks: Any) -> tuple[Any, Any]:
        logits, values = self.network({name: array.float() for name, array in obs.items()})
        distribution = self.action_dist.proba_distribution(action_logits=logits)
        distribution.apply_masking(action_masks)
        return distribution, values

    def forward(self, obs: Any, deterministic: bool = False, action_masks: Any = None) -> Any:
        distribution, values = self._run(obs, action_masks)
        actions = distribution.get_actions(deterministic=deterministic)
        return actions, values, distribution.log_prob(actions)

    def evaluate_actions(self, obs: Any, actions: Any, action_masks: Any = None) -> Any:
        distribution, values = self._run(obs, action_masks)
        return values, distribution.log_prob(actions), distribution.entropy()

    def predict_values(self, obs: Any) -> Any:
        return self._run(obs, None)[1]


def sb3(config: TrainConfig, name: str, policy: Any, policy_kwargs: dict[str, Any]) -> list[Peer]:
    """On one thread and on two."""
    run, ppo = config.run, config.ppo
    env = make_env(config.env, run.num_envs)
    assert isinstance(env, RoutingEnv)
    adapter = Sb3Env(env)
    model = MaskablePPO(
        policy,
        adapter,
        n_steps=run.rollout_steps,
        batch_size=ppo.minibatch_size,
        n_epochs=ppo.num_epochs,
        policy_kwargs=policy_kwargs,
        seed=0,
        device="cpu",
    )

    def train(num_threads: int, num_updates: int) -> dict[str, float]:
        torch.set_num_threads(num_threads)
        start, adapter.env_s = time.perf_counter(), 0.0
        model.learn(num_updates * run.steps_per_update, reset_num_timesteps=False)
        torch.set_num_threads(1)
        return {"env": adapter.env_s, "other": time.perf_counter() - start - adapter.env_s}

    return [
        Peer(f"MaskablePPO, {name}{more}", count(model.policy), partial(train, num_threads), num_threads)
        for num_threads, more in ((1, ""), (2, ", 2 threads"))
    ]


def mlp_width(num_inputs: int, num_actions: int, num_parameters: int) -> int:
    """Of two hidden layers, once for the actor and once for the critic, with about as many parameters."""

    def size(width: int) -> int:
        each = (num_inputs + 1) * width + (width + 1) * width
        return 2 * each + (width + 1) * (num_actions + 1)

    return min(range(8, 512), key=lambda width: abs(size(width) - num_parameters))


# All of them ----------------------------------------------------------------------------------------------


def measure(peers: list[Peer], num_rounds: int, num_updates: int) -> None:
    for peer in peers:
        peer.train(1)  # the first has to allocate, and to start the environments
    for _ in range(num_rounds):
        for peer in peers:
            start, cpu_start = time.perf_counter(), time.process_time()
            parts = peer.train(num_updates)
            peer.wall_s.append(time.perf_counter() - start)
            peer.cpu_s.append(time.process_time() - cpu_start)
            for part, seconds in parts.items():
                peer.parts_s[part] = peer.parts_s.get(part, 0.0) + seconds


def ratio(times: list[float], other: list[float]) -> float:
    """How many times as fast as the other: median over rounds, to compare what ran a moment apart."""
    return float(np.median(np.array(other) / times))


def results(peers: list[Peer], decisions: int) -> list[dict[str, Any]]:
    """`decisions` a round."""
    rows = []
    for peer in peers:
        others = [other for other in peers if other is not peer]
        alike = [other for other in others if other.num_cores == peer.num_cores == 1]
        rows.append(
            {
                "name": peer.name,
                "parameters": peer.num_parameters,
                "decisions_per_s": float(np.median(decisions / np.array(peer.wall_s))),
                "cpu_us_per_decision": 1e6 * float(np.median(peer.cpu_s)) / decisions,
                "shares": {part: seconds / sum(peer.wall_s) for part, seconds in peer.parts_s.items()},
                "times_as_fast_as": {other.name: ratio(peer.wall_s, other.wall_s) for other in others},
                "cpu_times_as_fast_as": {other.name: ratio(peer.cpu_s, other.cpu_s) for other in alike},
            }
        )
    return rows


def print_table(rows: list[dict[str, Any]], config: TrainConfig) -> None:
    run, ppo = config.run, config.ppo
    print(
        f"{run.num_envs} environments, rollouts of {run.rollout_steps} steps, {ppo.num_epochs} epochs, "
        f"minibatches of {ppo.minibatch_size}\n"
    )
    print("| | parameters | decisions/s | CPU µs each | environment | inference | update |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        shares = row["shares"]
        parts = ["env", "inference", "update"] if "update" in shares else ["env", "", "other"]
        cells = [f"{100 * shares[part]:.0f} %" if part else "" for part in parts]
        figures = (f"{row[key]:,.0f}" for key in ("parameters", "decisions_per_s", "cpu_us_per_decision"))
        print(f"| {' | '.join([row['name'], *figures, *cells])} |")
    print(
        "\nShares of the wall time; MaskablePPO's update is all but the environment. CPU: of one process.\n"
    )
    for row in rows:
        for other, times in row["times_as_fast_as"].items():
            if row["name"].startswith("Pointsman") and not other.startswith("Pointsman"):
                cpu = row["cpu_times_as_fast_as"].get(other)
                by_cpu = f" ({cpu:.2f} by CPU time)" if cpu else ""
                print(f"{row['name']}: {times:.2f} times as fast as {other}{by_cpu}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=4, help="of each peer in a round")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    use_one_thread()
    config = make_config()
    two = config.model_copy(update={"run": config.run.model_copy(update={"workers": 2})})
    with started(LocalProcesses(), 2, follow, (two,)) as ranks:
        alone, together = ours(Ranks(), config), ours(ranks, two)
        space = make_env(config.env, 1).space
        num_inputs = (
            space.num_entities * (len(space.entity_features) + 1)
            + len(space.context_features)
            + space.num_actions
            + len(space.privileged_features)
        )
        width = mlp_width(num_inputs, space.num_actions, alone.num_parameters)
        mlp = sb3(config, f"MLP {width}-{width}", "MultiInputPolicy", {"net_arch": [width, width]})
        assert 0.9 < mlp[0].num_parameters / alone.num_parameters < 1.1
        make_network = partial(PlainNetwork, config.network, space)
        same = sb3(config, "our architecture", PlainPolicy, {"make_network": make_network})
        assert same[0].num_parameters == alone.num_parameters
        peers = [alone, together, *mlp, *same]
        measure(peers, arguments.rounds, arguments.updates)
        ranks.from_first(False)
    rows = results(peers, arguments.updates * config.run.steps_per_update)
    if arguments.json:
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        print(json.dumps({"machine": platform.processor(), **versions, "peers": rows}, indent=2))
    else:
        print_table(rows, config)


if __name__ == "__main__":
    main()
