"""The behaviour policy (how actions are drawn in training) and the losses of PPO with their gradients.

The behaviour policy is softmax(logits / temperature) over the legal actions, mixed with a share epsilon of
the uniform one. No torch.distributions: it takes longer than the network.

The losses are compiled. In PyTorch's operations (`tests/training/twin.py`) they are about 250 calls on arrays
of a few thousand numbers, as long as the network itself; so the slopes are written out here, for both ways to
run a network. With z = logits / temperature, p = softmax(z), b = (1 - epsilon) p_a + epsilon / num_legal, and
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

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pointsman.training.jit import Array, compiled, inner

if TYPE_CHECKING:
    from pointsman.training.networks import Output

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
    chance = torch.rand(len(logits), dtype=torch.float64, generator=generator)
    return draw(logits, temperature, epsilon, action_mask, chance)


def draw(
    logits: Tensor, temperature: float, epsilon: float, action_mask: Tensor, chance: Tensor
) -> tuple[Tensor, Tensor]:
    """The same, by random numbers [B] that are uniform in [0, 1)."""
    logp = policy_logp(logits, temperature)
    share = logp.double().exp()
    if epsilon > 0.0:
        share = (1.0 - epsilon) * share + epsilon * action_mask / action_mask.sum(-1, keepdim=True)
    # Inverse CDF in float64: a number < 1 stays below the total there, so what is found has a share above 0.
    cdf = share.cumsum(-1)
    actions = (cdf <= chance[:, None] * cdf[:, -1:]).sum(-1)
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


class Losses(NamedTuple):
    """What is minimised: how much each loss counts."""

    temperature: float
    epsilon: float
    clip: float
    entropy_coef: float
    kl_coef: float
    kl_ref_coef: float
    imitation_coef: float
    value_coef: float
    clip_value: float  # inf: off
    highest_entropy: float  # above this mean, the entropy bonus has no slope


class Rows(NamedTuple):
    """What the losses of decisions depend on beside the network."""

    actions: Array  # [B] int64
    scalars: Array  # [4, B] float32: old_logp, advantages, returns, old_values
    action_mask: Array  # [B, A] bool
    ref_logits: Array  # [B, A] float32, or [0, A]: no reference
    teacher_actions: Array  # [B] int64, -1 or illegal: no advice; or [0]: no teacher


class Gradients(NamedTuple):
    terms: Tensor  # [10] as `Terms`
    logits: Tensor  # [B, A] slope of the loss
    values: Tensor  # [B] slope of the loss


def loss_gradients(output: Output, rows: Rows, losses: Losses) -> Gradients:
    """The losses of a minibatch."""
    slopes = Gradients(
        torch.empty(len(Terms._fields)), torch.empty_like(output.logits), torch.empty_like(output.value)
    )
    _minibatch_losses(
        output.logits.detach().numpy(),
        output.value.detach().numpy(),
        rows,
        losses,
        slopes.terms.numpy(),
        slopes.logits.numpy(),
        slopes.values.numpy(),
    )
    return slopes


@compiled
def _minibatch_losses(
    logits: Array,
    values: Array,
    rows: Rows,
    losses: Losses,
    terms: Array,
    slope_logits: Array,
    slope_values: Array,
) -> None:
    num = len(values)
    sums = np.zeros(NUM_SUMS)
    num_advice = num_advised(rows, np.arange(num))
    add_losses(logits, values, rows, num, num, num_advice, losses, True, sums, slope_logits, slope_values)
    if is_bonus_off(sums, num, losses):
        sums[:] = 0.0
        add_losses(
            logits, values, rows, num, num, num_advice, losses, False, sums, slope_logits, slope_values
        )
    finish_terms(sums, num, num_advice, losses, terms)


@inner
def _log_softmax(logits: Array, mask: Array, temperature: float, logp: Array, p: Array) -> None:
    """[A] log-probabilities and probabilities of the legal actions; the others get -1e9 and 0."""
    highest = -np.inf
    for j in range(len(mask)):
        if mask[j]:
            highest = max(highest, logits[j] / temperature)
    total = 0.0
    for j in range(len(mask)):
        p[j] = np.exp(logits[j] / temperature - highest) if mask[j] else 0.0
        total += p[j]
    log_total = highest + np.log(total)
    for j in range(len(mask)):
        p[j] /= total
        logp[j] = logits[j] / temperature - log_total if mask[j] else ILLEGAL


@inner
def draw_action(
    logits: Array, mask: Array, temperature: float, epsilon: float, chance: float
) -> tuple[int, float]:
    """`draw` for one decision: an action and its log-probability."""
    logp, share = np.empty(len(mask)), np.empty(len(mask))
    _log_softmax(logits, mask, temperature, logp, share)
    num_legal = mask.sum()
    total = 0.0
    for j in range(len(mask)):
        if mask[j]:
            share[j] = (1.0 - epsilon) * share[j] + epsilon / num_legal
            total += share[j]
    action, so_far = 0, 0.0
    for j in range(len(mask)):
        # The last legal action with a share takes what rounding leaves over.
        if share[j] > 0.0:
            action = j
            so_far += share[j]
            if so_far > chance * total:
                break
    return action, np.log(share[action]) if epsilon > 0.0 else logp[action]


@inner
def num_advised(rows: Rows, index: Array) -> int:
    """How many of the decisions at `index` have a teacher's advice."""
    num = 0
    if len(rows.teacher_actions) > 0:
        for i in index:
            advice = rows.teacher_actions[i]
            num += advice >= 0 and rows.action_mask[i, advice]
    return num


# Sums over decisions, added up piece by piece.
_PG, _V, _ENTROPY, _LOG_LEGAL, _KL, _CLIPPED, _RATIO_ERROR, _KL_REF, _IMITATION, NUM_SUMS = range(10)


@inner
def add_losses(
    logits: Array,
    values: Array,
    rows: Rows,
    num: int,
    num_total: int,
    num_advice: int,
    losses: Losses,
    has_bonus: bool,
    sums: Array,
    slope_logits: Array,
    slope_values: Array,
) -> None:
    """Slopes of the first `num` decisions of `rows`, which are part of a minibatch of `num_total`."""
    num_actions = logits.shape[1]
    has_reference, has_teacher = len(rows.ref_logits) > 0, len(rows.teacher_actions) > 0
    entropy_slope = -losses.entropy_coef / num_total if has_bonus else 0.0
    logp, p = np.empty(num_actions), np.empty(num_actions)
    ref_logp, unused = np.empty(num_actions), np.empty(num_actions)
    for i in range(num):
        mask, action = rows.action_mask[i], rows.actions[i]
        _log_softmax(logits[i], mask, losses.temperature, logp, p)
        entropy, num_legal = 0.0, 0
        for j in range(num_actions):
            if mask[j]:
                entropy -= p[j] * logp[j]
                num_legal += 1
        sums[_ENTROPY] += entropy
        sums[_LOG_LEGAL] += np.log(num_legal)

        log_b, slope_b = logp[action], 1.0
        if losses.epsilon > 0.0:
            share = (1.0 - losses.epsilon) * np.exp(log_b)
            b = share + losses.epsilon / num_legal
            log_b, slope_b = np.log(b), share / b
        log_ratio, advantage = log_b - rows.scalars[0, i], rows.scalars[1, i]
        ratio = np.exp(log_ratio)
        gain = ratio * advantage
        clipped_gain = min(max(ratio, 1.0 - losses.clip), 1.0 + losses.clip) * advantage
        slope_action = losses.kl_coef * (ratio - 1.0)
        if gain > clipped_gain:
            sums[_PG] -= clipped_gain
        else:  # not `<=`: a NaN must show
            sums[_PG] -= gain
            slope_action -= gain
        slope_action *= slope_b / num_total
        sums[_KL] += ratio - 1.0 - log_ratio
        off = abs(ratio - 1.0)
        sums[_CLIPPED] += off > losses.clip
        sums[_RATIO_ERROR] = off if not off <= sums[_RATIO_ERROR] else sums[_RATIO_ERROR]

        row_kl = 0.0
        if has_reference:
            _log_softmax(rows.ref_logits[i], mask, losses.temperature, ref_logp, unused)
            for j in range(num_actions):
                if mask[j]:
                    row_kl += p[j] * (logp[j] - ref_logp[j])
            sums[_KL_REF] += row_kl
        advice, slope_advice = -1, 0.0
        if has_teacher and rows.teacher_actions[i] >= 0 and mask[rows.teacher_actions[i]]:
            advice, slope_advice = rows.teacher_actions[i], losses.imitation_coef / num_advice
            sums[_IMITATION] -= logp[advice]

        for j in range(num_actions):
            if not mask[j]:
                slope_logits[i, j] = 0.0
                continue
            slope = (slope_advice - slope_action) * p[j] - entropy_slope * p[j] * (logp[j] + entropy)
            if has_reference:
                slope += losses.kl_ref_coef / num_total * p[j] * (logp[j] - ref_logp[j] - row_kl)
            if j == action:
                slope += slope_action
            if j == advice:
                slope -= slope_advice
            slope_logits[i, j] = slope / losses.temperature

        target, old_value = rows.scalars[2, i], rows.scalars[3, i]
        error = values[i] - target
        moved = min(max(values[i] - old_value, -losses.clip_value), losses.clip_value)
        near_error = old_value + moved - target
        if near_error * near_error > error * error:
            sums[_V] += 0.5 * near_error * near_error
            is_near = abs(values[i] - old_value) <= losses.clip_value
            slope_values[i] = losses.value_coef * near_error / num_total if is_near else 0.0
        else:
            sums[_V] += 0.5 * error * error
            slope_values[i] = losses.value_coef * error / num_total


@inner
def is_bonus_off(sums: Array, num_total: int, losses: Losses) -> bool:
    """Whether slopes that were computed with an entropy bonus must be computed anew without it."""
    return losses.entropy_coef != 0.0 and sums[_ENTROPY] / num_total > losses.highest_entropy


@inner
def finish_terms(sums: Array, num_total: int, num_advice: int, losses: Losses, terms: Array) -> None:
    """`Terms` from the sums over a whole minibatch."""
    pg_loss, v_loss, entropy = sums[_PG] / num_total, sums[_V] / num_total, sums[_ENTROPY] / num_total
    kl, kl_ref, imitation = (
        sums[_KL] / num_total,
        sums[_KL_REF] / num_total,
        sums[_IMITATION] / max(num_advice, 1),
    )
    loss = pg_loss + losses.value_coef * v_loss - losses.entropy_coef * min(entropy, losses.highest_entropy)
    terms[0] = loss + losses.kl_coef * kl + losses.kl_ref_coef * kl_ref + losses.imitation_coef * imitation
    terms[1] = pg_loss
    terms[2] = v_loss
    terms[3] = entropy
    terms[4] = sums[_ENTROPY] / max(sums[_LOG_LEGAL], 1e-9)
    terms[5] = kl
    terms[6] = sums[_CLIPPED] / num_total
    terms[7] = sums[_RATIO_ERROR]
    terms[8] = kl_ref
    terms[9] = imitation
