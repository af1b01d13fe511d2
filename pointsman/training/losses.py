"""The behaviour policy (how actions are drawn in training) and the losses of PPO with their gradients.

The behaviour policy is softmax(logits / temperature) over the legal actions, mixed with a share epsilon of
the uniform one. No torch.distributions: it takes longer than the network.

The losses are one compiled pass over a minibatch. In PyTorch's operations (`tests/training/twin.py`) they are
about 250 calls on arrays of a few thousand numbers, as long as the network itself; so the slopes are written
out here. With z = logits / temperature, p = softmax(z), b = (1 - epsilon) p_a + epsilon / num_legal, and
r = b / old b:

    -min(r A, clip(r) A)        by log b:   -r A, or 0 past the clip on the good side
    r - 1 - log r               by log b:   r - 1     (Schulman's k3; its mean estimates KL(old, new))
    log b                       by log p_a: (1 - epsilon) p_a / b
    log p_a                     by z_j:     [j = a] - p_j
    entropy H                   by z_j:     -p_j (log p_j + H)
    KL(policy, reference)       by z_j:     p_j (log p_j - log ref_j - KL)

Letters: B decisions, A actions. Illegal actions have logits of -1e9.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pointsman.training.layers import compiled

if TYPE_CHECKING:
    from pointsman.training.minibatches import Minibatch
    from pointsman.training.networks import Output
    from pointsman.training.ppo import Knobs

Array = NDArray[Any]
ILLEGAL = -1e9


def policy_logp(logits: Tensor, temperature: float) -> Tensor:
    """[B, A] log-probabilities without epsilon; illegal actions get probability and gradient exactly 0."""
    return torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)


def mix_uniform(logp: Tensor, epsilon: float, action_mask: Tensor) -> Tensor:
    """[B] log-probability of a legal action that has `logp` [B] in the policy, epsilon included."""
    if epsilon == 0.0:
        return logp
    return ((1.0 - epsilon) * logp.exp() + epsilon / action_mask.sum(-1)).log()


def behaviour_logp(
    logits: Tensor, actions: Tensor, temperature: float, epsilon: float, action_mask: Tensor
) -> Tensor:
    """[B] log-probability with which `sample` takes legal actions [B]; logits and action_mask: [B, A]."""
    return mix_uniform(_chosen(policy_logp(logits, temperature), actions), epsilon, action_mask)


@torch.no_grad()
def sample(
    logits: Tensor, temperature: float, epsilon: float, action_mask: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Actions [B] and their log-probabilities [B] from masked logits [B, A]."""
    logp = policy_logp(logits, temperature)
    share = logp.double().exp()
    if epsilon > 0.0:
        share = (1.0 - epsilon) * share + epsilon * action_mask / action_mask.sum(-1, keepdim=True)
    # Inverse CDF in float64: u < 1 stays below the total there, so the action found has a share above 0.
    cdf = share.cumsum(-1)
    u = torch.rand((len(logits), 1), dtype=torch.float64, generator=generator)
    actions = (cdf <= u * cdf[:, -1:]).sum(-1)
    return actions, mix_uniform(_chosen(logp, actions), epsilon, action_mask)


def entropy_of(logp: Tensor) -> Tensor:
    """[B] entropy over the legal actions [nats], from log-probabilities [B, A]."""
    return -(logp.exp() * logp).sum(-1)


def _chosen(table: Tensor, actions: Tensor) -> Tensor:
    """[B] the entry of each row of [B, A] that belongs to its action."""
    return table.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


class Terms(NamedTuple):
    """The scalars of one minibatch; `loss` is what the gradients are of."""

    loss: float
    pg_loss: float
    v_loss: float
    entropy: float  # of the legal actions [nats]
    entropy_frac: float  # of the entropy of uniform legal actions
    approx_kl: float
    clip_frac: float
    ratio_error: float  # largest abs(ratio - 1)
    kl_ref: float
    imitation_loss: float


class Gradients(NamedTuple):
    terms: Tensor  # [10] as `Terms`
    logits: Tensor  # [B, A] slope of the loss
    values: Tensor  # [B] slope of the loss


def loss_gradients(
    output: Output,
    rows: Minibatch,
    knobs: Knobs,
    value_coef: float,
    clip_value: float | None = None,
    highest_entropy: float = math.inf,
) -> Gradients:
    """The losses of a minibatch; above a mean of `highest_entropy`, the entropy bonus has no slope."""
    slopes = Gradients(
        torch.empty(len(Terms._fields)), torch.empty_like(output.logits), torch.empty_like(output.value)
    )
    _losses(
        output.logits.detach().numpy(),
        output.value.detach().numpy(),
        rows.actions.numpy(),
        rows.action_mask.numpy(),
        rows.scalars.numpy(),
        _or_empty(rows.ref_logits, np.empty((0, 0), np.float32)),
        _or_empty(rows.teacher_actions, np.empty(0, np.int64)),
        knobs.temperature,
        knobs.epsilon,
        knobs.clip,
        knobs.entropy_coef,
        knobs.kl_coef,
        knobs.kl_ref_coef,
        knobs.imitation_coef,
        value_coef,
        math.inf if clip_value is None else clip_value,
        highest_entropy,
        slopes.terms.numpy(),
        slopes.logits.numpy(),
        slopes.values.numpy(),
    )
    return slopes


def _or_empty(tensor: Tensor | None, empty: Array) -> Array:
    return empty if tensor is None else tensor.numpy()


@compiled
def _log_softmax(logits: Array, mask: Array, temperature: float, out: Array) -> None:
    """[A] over the legal actions; the others get -1e9."""
    highest = -np.inf
    for j in range(len(out)):
        if mask[j]:
            highest = max(highest, logits[j] / temperature)
    total = 0.0
    for j in range(len(out)):
        if mask[j]:
            total += np.exp(logits[j] / temperature - highest)
    log_total = highest + np.log(total)
    for j in range(len(out)):
        out[j] = logits[j] / temperature - log_total if mask[j] else ILLEGAL


@compiled
def _losses(
    logits: Array,
    values: Array,
    actions: Array,
    mask: Array,
    scalars: Array,
    ref_logits: Array,
    teacher_actions: Array,
    temperature: float,
    epsilon: float,
    clip: float,
    entropy_coef: float,
    kl_coef: float,
    kl_ref_coef: float,
    imitation_coef: float,
    value_coef: float,
    clip_value: float,
    highest_entropy: float,
    terms: Array,
    slope_logits: Array,
    slope_values: Array,
) -> None:
    num_rows, num_actions = logits.shape
    has_reference, has_teacher = len(ref_logits) > 0, len(teacher_actions) > 0
    logp = np.empty((num_rows, num_actions))
    entropies = np.empty(num_rows)
    entropy = log_legal = 0.0
    num_advice = 0
    for i in range(num_rows):
        _log_softmax(logits[i], mask[i], temperature, logp[i])
        sum_plogp, num_legal = 0.0, 0
        for j in range(num_actions):
            if mask[i, j]:
                sum_plogp += np.exp(logp[i, j]) * logp[i, j]
                num_legal += 1
        entropies[i] = -sum_plogp
        entropy -= sum_plogp
        log_legal += np.log(num_legal)
        if has_teacher and teacher_actions[i] >= 0 and mask[i, teacher_actions[i]]:
            num_advice += 1
    entropy /= num_rows
    entropy_slope = -entropy_coef / num_rows if entropy <= highest_entropy else 0.0
    imitation_slope = imitation_coef / max(num_advice, 1)

    pg_loss = v_loss = kl = num_clipped = ratio_error = kl_ref = imitation = 0.0
    ref_logp = np.empty(num_actions)
    for i in range(num_rows):
        old_logp, advantage, target, old_value = scalars[0, i], scalars[1, i], scalars[2, i], scalars[3, i]
        action = actions[i]
        log_b, slope_b = logp[i, action], 1.0
        if epsilon > 0.0:
            num_legal = 0
            for j in range(num_actions):
                num_legal += mask[i, j]
            share = (1.0 - epsilon) * np.exp(log_b)
            b = share + epsilon / num_legal
            log_b, slope_b = np.log(b), share / b
        log_ratio = log_b - old_logp
        ratio = np.exp(log_ratio)
        gain, clipped_gain = ratio * advantage, min(max(ratio, 1.0 - clip), 1.0 + clip) * advantage
        slope_action = kl_coef * (ratio - 1.0)
        if gain > clipped_gain:
            pg_loss -= clipped_gain
        else:  # not `<=`: a NaN must show
            pg_loss -= gain
            slope_action -= gain
        slope_action *= slope_b / num_rows
        kl += ratio - 1.0 - log_ratio
        off = abs(ratio - 1.0)
        num_clipped += off > clip
        ratio_error = off if not off <= ratio_error else ratio_error

        row_kl = 0.0
        if has_reference:
            _log_softmax(ref_logits[i], mask[i], temperature, ref_logp)
            for j in range(num_actions):
                if mask[i, j]:
                    row_kl += np.exp(logp[i, j]) * (logp[i, j] - ref_logp[j])
            kl_ref += row_kl
        advice = -1
        if has_teacher and teacher_actions[i] >= 0 and mask[i, teacher_actions[i]]:
            advice = teacher_actions[i]
            imitation -= logp[i, advice]
        slope_advice = imitation_slope if advice >= 0 else 0.0

        for j in range(num_actions):
            if not mask[i, j]:
                slope_logits[i, j] = 0.0
                continue
            p = np.exp(logp[i, j])
            slope = (slope_advice - slope_action) * p - entropy_slope * p * (logp[i, j] + entropies[i])
            if has_reference:
                slope += kl_ref_coef / num_rows * p * (logp[i, j] - ref_logp[j] - row_kl)
            if j == action:
                slope += slope_action
            if j == advice:
                slope -= slope_advice
            slope_logits[i, j] = slope / temperature

        error = values[i] - target
        moved = min(max(values[i] - old_value, -clip_value), clip_value)
        near_error = old_value + moved - target
        if near_error * near_error > error * error:
            v_loss += 0.5 * near_error * near_error
            is_near = abs(values[i] - old_value) <= clip_value
            slope_values[i] = value_coef * near_error / num_rows if is_near else 0.0
        else:
            v_loss += 0.5 * error * error
            slope_values[i] = value_coef * error / num_rows

    pg_loss, v_loss, kl, kl_ref = pg_loss / num_rows, v_loss / num_rows, kl / num_rows, kl_ref / num_rows
    imitation /= max(num_advice, 1)
    loss = pg_loss + value_coef * v_loss - entropy_coef * min(entropy, highest_entropy)
    terms[0] = loss + kl_coef * kl + kl_ref_coef * kl_ref + imitation_coef * imitation
    terms[1] = pg_loss
    terms[2] = v_loss
    terms[3] = entropy
    terms[4] = entropy * num_rows / max(log_legal, 1e-9)
    terms[5] = kl
    terms[6] = num_clipped / num_rows
    terms[7] = ratio_error
    terms[8] = kl_ref
    terms[9] = imitation
