"""Logs of others, made by running them for a few seconds: Stable-Baselines3, and PPO as CleanRL writes it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

NUM_ENVS, NUM_STEPS, NUM_UPDATES = 4, 64, 20


def stable_baselines(folder: Path, is_evaluated: bool = False, **settings: Any) -> None:
    """progress.csv and a TensorBoard file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what stable-baselines3 imports
        import torch
        from stable_baselines3 import PPO
        from stable_baselines3.common.callbacks import EvalCallback
        from stable_baselines3.common.env_util import make_vec_env
        from stable_baselines3.common.logger import configure
    torch.set_num_threads(1)
    envs = make_vec_env("CartPole-v1", n_envs=NUM_ENVS, seed=0)
    model = PPO(
        "MlpPolicy", envs, n_steps=NUM_STEPS, batch_size=64, seed=0, device="cpu", n_epochs=4, **settings
    )
    model.set_logger(configure(str(folder), ["csv", "tensorboard"]))
    callback = None
    if is_evaluated:
        envs_evaluated = make_vec_env("CartPole-v1", seed=1)
        callback = EvalCallback(envs_evaluated, n_eval_episodes=2, eval_freq=4 * NUM_STEPS, verbose=0)
    model.learn(NUM_ENVS * NUM_STEPS * NUM_UPDATES, callback=callback)
    model.logger.close()
    envs.close()


def cleanrl_style(folder: Path, learning_rate: float = 2.5e-3) -> None:
    """PPO on CartPole in one loop, with CleanRL's tags: charts/…, losses/…, by global step."""
    import gymnasium
    import torch
    from torch import nn
    from torch.distributions import Categorical
    from torch.utils.tensorboard import SummaryWriter

    torch.set_num_threads(1)
    torch.manual_seed(0)
    writer = SummaryWriter(str(folder))
    writer.add_text("hyperparameters", "|param|value|")  # no scalar: to be skipped
    envs = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1") for _ in range(NUM_ENVS)])
    actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=learning_rate)
    seen, _ = envs.reset(seed=0)
    returns_so_far, global_step = np.zeros(NUM_ENVS), 0
    for _ in range(NUM_UPDATES):
        steps: list[tuple[torch.Tensor, ...]] = []
        for _ in range(NUM_STEPS):
            global_step += NUM_ENVS
            observation = torch.as_tensor(seen, dtype=torch.float32)
            with torch.no_grad():
                policy = Categorical(logits=actor(observation))
                action = policy.sample()
            seen, reward, terminated, truncated, _ = envs.step(action.numpy())
            is_end = terminated | truncated
            returns_so_far += reward
            for env in np.flatnonzero(is_end):
                writer.add_scalar("charts/episodic_return", returns_so_far[env], global_step)
                returns_so_far[env] = 0.0
            steps.append(
                (
                    observation,
                    action,
                    policy.log_prob(action),
                    *map(torch.as_tensor, (reward, is_end.astype(float))),
                )
            )
        observations, actions, old_logp, rewards, ends = (
            torch.stack(part) for part in zip(*steps, strict=True)
        )
        with torch.no_grad():
            values = critic(observations)[..., 0]
            future = critic(torch.as_tensor(seen, dtype=torch.float32))[..., 0]
        targets = torch.zeros_like(values)
        for t in reversed(range(NUM_STEPS)):
            future = rewards[t] + 0.99 * (1.0 - ends[t]) * future
            targets[t] = future
        advantages = targets - values
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        flat = [part.flatten(0, 1) for part in (observations, actions, old_logp, advantages, targets)]
        for rows in torch.randperm(NUM_STEPS * NUM_ENVS).repeat(4).split(64):
            seen_, action_, logp_, advantage_, target_ = (part[rows] for part in flat)
            policy = Categorical(logits=actor(seen_))
            log_ratio = policy.log_prob(action_) - logp_
            ratio = log_ratio.exp()
            policy_loss = -torch.min(ratio * advantage_, ratio.clamp(0.8, 1.2) * advantage_).mean()
            value_loss = 0.5 * (critic(seen_)[..., 0] - target_).square().mean()
            entropy = policy.entropy().mean()
            optimizer.zero_grad()
            (policy_loss + 0.5 * value_loss - 0.01 * entropy).backward()
            optimizer.step()
        scalars = {
            "charts/learning_rate": learning_rate,
            "losses/value_loss": value_loss.item(),
            "losses/policy_loss": policy_loss.item(),
            "losses/entropy": entropy.item(),
            "losses/old_approx_kl": (-log_ratio).mean().item(),
            "losses/approx_kl": ((ratio - 1.0) - log_ratio).mean().item(),
            "losses/clipfrac": ((ratio - 1.0).abs() > 0.2).float().mean().item(),
            "losses/explained_variance": float(1.0 - (targets - values).var() / targets.var()),
            "charts/SPS": 1000.0,
        }
        for tag, value in scalars.items():
            writer.add_scalar(tag, value, global_step)
    writer.close()
    envs.close()
