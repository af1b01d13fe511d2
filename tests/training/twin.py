"""The losses of PPO in PyTorch's own words, with its own gradients: what `losses.py` is checked against."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pointsman.training.losses import Rows, Terms, entropy_of, mix_uniform, policy_logp
from pointsman.training.ppo import Knobs, PpoSpec


class Minibatch(NamedTuple):
    """`losses.Rows` as tensors."""

    actions: Tensor
    scalars: Tensor
    action_mask: Tensor
    ref_logits: Tensor | None = None
    teacher_actions: Tensor | None = None

    def rows(self) -> Rows:
        num_actions = self.action_mask.shape[1]
        return Rows(
            self.actions.numpy(),
            self.scalars.numpy(),
            self.action_mask.numpy(),
            np.empty((0, num_actions), np.float32) if self.ref_logits is None else self.ref_logits.numpy(),
            np.empty(0, np.int64) if self.teacher_actions is None else self.teacher_actions.numpy(),
        )


def kl_between(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """[B] KL(policy, reference) [nats], exact, from log-probabilities [B, A] under the same mask."""
    return (logp.exp() * (logp - ref_logp)).sum(-1)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """[] the policy loss: nothing is gained by a ratio [B] past 1 ± clip on the good side."""
    return -torch.min(ratio * advantages, ratio.clamp(1.0 - clip, 1.0 + clip) * advantages).mean()


def value_loss(values: Tensor, returns: Tensor, old_values: Tensor, clip: float | None) -> Tensor:
    """[] half the mean squared error; with `clip`, nothing is gained by moving further from old values."""
    error = (values - returns).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.max(error, (near - returns).square())
    return 0.5 * error.mean()


def imitation_loss(logp: Tensor, teacher_actions: Tensor, action_mask: Tensor) -> Tensor:
    """[] cross-entropy to the teacher's actions [B], over the rows where its advice is legal (-1: none)."""
    advice = teacher_actions.clamp(min=0)
    counts = _chosen(action_mask, advice) & (teacher_actions >= 0)
    # `where`, not a product: the log-probability of an illegal action is -1e9.
    chosen = torch.where(counts, _chosen(logp, advice), 0.0)
    return -chosen.sum() / counts.sum().clamp(min=1)


def _chosen(table: Tensor, actions: Tensor) -> Tensor:
    """[B] the entry of each row of [B, A] that belongs to its action."""
    return table.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def minibatch_terms(
    spec: PpoSpec, knobs: Knobs, output: Any, rows: Minibatch, highest_entropy: float = math.inf
) -> dict[str, Tensor]:
    """All losses of a minibatch; above `highest_entropy` the entropy bonus has no gradient."""
    old_logp, advantages, returns, old_values = rows.scalars
    logp = policy_logp(output.logits, knobs.temperature)
    chosen = logp.gather(-1, rows.actions.unsqueeze(-1)).squeeze(-1)
    log_ratio = mix_uniform(chosen, knobs.epsilon, rows.action_mask) - old_logp
    ratio = log_ratio.exp()
    pg_loss = clipped_surrogate(ratio, advantages, knobs.clip)
    v_loss = value_loss(output.value, returns, old_values, spec.clip_value)
    entropy = entropy_of(logp).mean()
    # Schulman's k3: unbiased, never negative, and its expected gradient is that of the exact KL(old, new).
    kl = (ratio - 1.0 - log_ratio).mean()
    loss = pg_loss + spec.value_coef * v_loss - knobs.entropy_coef * entropy.clamp(max=highest_entropy)
    if knobs.kl_coef > 0.0:
        loss = loss + knobs.kl_coef * kl
    kl_ref = imitation = torch.zeros(())
    if rows.ref_logits is not None:
        kl_ref = kl_between(logp, policy_logp(rows.ref_logits, knobs.temperature)).mean()
        loss = loss + knobs.kl_ref_coef * kl_ref
    if rows.teacher_actions is not None:
        imitation = imitation_loss(logp, rows.teacher_actions, rows.action_mask)
        loss = loss + knobs.imitation_coef * imitation
    with torch.no_grad():
        off = (ratio - 1.0).abs()
        clip_frac = (off > knobs.clip).float().mean()
        log_legal = rows.action_mask.sum(-1).float().log().mean().clamp(min=1e-9)
    frac = entropy / log_legal
    terms = (loss, pg_loss, v_loss, entropy, frac, kl, clip_frac, off.max(), kl_ref, imitation)
    return dict(zip(Terms._fields, terms, strict=True))
