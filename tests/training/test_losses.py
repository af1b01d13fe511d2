"""The behaviour policy and the losses, against closed forms, sums and Monte Carlo."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pointsman.training.losses import behaviour_logp, entropy_of, loss_gradients, policy_logp, sample
from pointsman.training.networks import Output
from pointsman.training.ppo import Knobs, PpoSpec, losses_of

from .twin import Minibatch, clipped_surrogate, imitation_loss, kl_between, minibatch_terms, value_loss

ILLEGAL = -1e9
PLAIN_LOSSES = losses_of(PpoSpec(), Knobs(lr=1.0))
MASK = torch.tensor([[True, False, True, True, False], [False, True, False, False, False]])


def masked_logits(seed: int = 0) -> Tensor:
    logits = torch.randn((2, 5), generator=torch.Generator().manual_seed(seed)) * 2
    return logits.masked_fill(~MASK, ILLEGAL)


def exact_shares(logits: Tensor, temperature: float, epsilon: float) -> np.ndarray:  # type: ignore[type-arg]
    """The behaviour policy in numpy, over the legal actions alone."""
    shares = np.zeros(logits.shape)
    for row, mask in enumerate(MASK.numpy()):
        legal = logits[row].double().numpy()[mask] / temperature
        weights = np.exp(legal - legal.max())
        shares[row, mask] = (1 - epsilon) * weights / weights.sum() + epsilon / mask.sum()
    return shares


@pytest.mark.parametrize(("temperature", "epsilon"), [(1.0, 0.0), (1.7, 0.0), (1.0, 0.2), (0.5, 0.1)])
def test_actions_come_as_often_as_their_log_probability_says(temperature: float, epsilon: float) -> None:
    num = 40_000
    logits, mask = masked_logits().repeat(num, 1), MASK.repeat(num, 1)
    actions, logp = sample(logits, temperature, epsilon, mask, torch.Generator().manual_seed(3))
    shares = exact_shares(masked_logits(), temperature, epsilon)
    counts = np.stack([np.bincount(actions[row::2], minlength=5) for row in range(2)]) / num
    np.testing.assert_allclose(counts, shares, atol=4 * math.sqrt(0.25 / num))
    assert (counts[~MASK.numpy()] == 0).all(), "illegal actions are never taken"
    np.testing.assert_allclose(logp.exp(), np.tile(shares, (num, 1))[np.arange(2 * num), actions], rtol=1e-5)
    again = behaviour_logp(logits, actions, temperature, epsilon, mask)
    assert torch.equal(again, logp), "the ratio is exactly 1"
    if (temperature, epsilon) != (1.0, 0.0):
        forgotten = behaviour_logp(logits, actions, 1.0, 0.0, mask)
        assert (forgotten - logp).abs().max() > 0.05, "a forgotten temperature or epsilon shows"


def test_the_largest_random_number_finds_a_legal_action(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float sums end a little beside 1: what lies beyond the last legal action must not be reached."""
    logits = torch.randn((500, 64), generator=torch.Generator().manual_seed(0)) * 3
    mask = torch.ones((500, 64), dtype=torch.bool)
    mask[:, 50:] = False
    largest = torch.tensor(1.0, dtype=torch.float64).nextafter(torch.tensor(0.0, dtype=torch.float64))
    monkeypatch.setattr(torch, "rand", lambda shape, **_: largest.expand(shape))
    for epsilon in (0.0, 0.3):
        actions, logp = sample(logits.masked_fill(~mask, ILLEGAL), 1.0, epsilon, mask, torch.Generator())
        assert actions.max() < 50
        assert torch.isfinite(logp).all()


@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_illegal_actions_have_probability_and_gradient_0(temperature: float) -> None:
    logits = masked_logits().requires_grad_()
    actions = torch.tensor([2, 1])
    logp = policy_logp(logits, temperature)
    assert (logp.exp()[~MASK] == 0).all()
    reference = policy_logp(masked_logits(seed=9), temperature)
    loss = logp.gather(1, actions[:, None]).sum() + entropy_of(logp).sum() + kl_between(logp, reference).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert (logits.grad[~MASK] == 0).all(), "exactly"
    assert (logits.grad[0][MASK[0]] != 0).all()
    unmasked = torch.zeros((1, 5), requires_grad=True)
    entropy_of(policy_logp(unmasked + torch.arange(5.0), 1.0)).sum().backward()  # type: ignore[no-untyped-call]
    assert unmasked.grad is not None and (unmasked.grad != 0).all(), "a dropped mask would show"


def test_entropy_is_that_of_the_legal_actions() -> None:
    uniform = torch.zeros((2, 5)).masked_fill(~MASK, ILLEGAL)
    entropy = entropy_of(policy_logp(uniform, 1.0))
    np.testing.assert_allclose(entropy, [math.log(3), 0.0], atol=1e-6)
    shares = exact_shares(masked_logits(), 1.3, 0.0)
    expected = -np.where(shares > 0, shares * np.log(np.where(shares > 0, shares, 1)), 0).sum(1)
    np.testing.assert_allclose(entropy_of(policy_logp(masked_logits(), 1.3)), expected, atol=1e-6)
    assert entropy_of(policy_logp(torch.zeros((1, 5)), 1.0)) > math.log(4), "a dropped mask would show"


def test_kl_is_exact() -> None:
    """Analytic KL against a million draws; 0 at the reference; direction matters."""
    logp, ref = policy_logp(masked_logits(), 1.0), policy_logp(masked_logits(seed=5), 1.0)
    kl = kl_between(logp, ref)
    num = 500_000
    actions, drawn_logp = sample(
        masked_logits().repeat(num, 1), 1.0, 0.0, MASK.repeat(num, 1), torch.Generator().manual_seed(1)
    )
    drawn = (drawn_logp - ref.repeat(num, 1).gather(1, actions[:, None])[:, 0]).view(num, 2)
    standard_error = float(drawn[:, 0].std() / math.sqrt(num))
    assert float(kl[0]) == pytest.approx(float(drawn[:, 0].mean()), abs=4 * standard_error)
    assert float(kl[1]) == 0.0, "one legal action: nothing can differ"
    assert (kl_between(logp, logp) == 0).all()
    wrong_way = float(kl_between(ref, logp)[0])
    assert abs(wrong_way - float(drawn[:, 0].mean())) > 10 * standard_error, "the broken direction shows"


# Clipped surrogate


def gradient(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    point = at.clone().requires_grad_()
    (result,) = torch.autograd.grad(loss(point), point)
    return result


def test_at_ratio_1_the_gradient_is_the_plain_policy_gradient() -> None:
    advantages = torch.tensor([1.5, -0.7, 0.3])
    logp = torch.tensor([-1.0, -0.2, -2.0])
    clipped = gradient(lambda new: clipped_surrogate((new - logp).exp(), advantages, 0.2), logp)
    plain = gradient(lambda new: -(new * advantages).mean(), logp)
    assert torch.allclose(clipped, plain, rtol=0, atol=1e-7)


def never_clipped(ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    return -(ratio * advantages).mean()


def always_clipped(ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    return -(ratio.clamp(1 - clip, 1 + clip) * advantages).mean()


def check_clipping(surrogate: Callable[[Tensor, Tensor, float], Tensor]) -> None:
    ratio = torch.tensor([1.3, 0.7, 1.3, 0.7, 1.1])
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0])
    slope = gradient(lambda at: surrogate(at, advantages, 0.2), ratio) * 5
    assert (slope[:2] == 0).all(), "past the clip on the good side: exactly nothing"
    np.testing.assert_allclose(slope[2:], [1.0, -1.0, -1.0], rtol=1e-6)


def test_past_the_clip_on_the_good_side_there_is_no_gradient() -> None:
    check_clipping(clipped_surrogate)
    for broken in (never_clipped, always_clipped):
        with pytest.raises(AssertionError):
            check_clipping(broken)


# Other losses


def test_value_loss_by_hand() -> None:
    values, returns, old = torch.tensor([2.0, 0.5]), torch.tensor([3.0, 0.0]), torch.tensor([0.0, 0.4])
    assert float(value_loss(values, returns, old, None)) == pytest.approx(0.5 * (1.0 + 0.25) / 2)
    # The first value may count as 0.2 at most: an error of 2.8; the second has not moved that far.
    assert float(value_loss(values, returns, old, 0.2)) == pytest.approx(0.5 * (2.8**2 + 0.25) / 2)
    slope = gradient(lambda at: value_loss(at, returns, old, 0.2), values)
    assert slope[0] == 0 and slope[1] != 0, "moved far enough towards the return"


def test_imitation_counts_legal_advice_only() -> None:
    logits = masked_logits().repeat(2, 1).requires_grad_()
    mask = MASK.repeat(2, 1)
    logp = policy_logp(logits, 1.0)
    # Legal, illegal, none, legal.
    loss = imitation_loss(logp, torch.tensor([3, 0, -1, 1]), mask)
    assert float(loss.detach()) == pytest.approx(float(-(logp[0, 3] + logp[3, 1]).detach() / 2), rel=1e-6)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None and torch.isfinite(logits.grad).all()
    assert (logits.grad[1:3] == 0).all()
    nothing = imitation_loss(logp.detach(), torch.full((4,), -1), mask)
    assert float(nothing) == 0.0


# The compiled pass against PyTorch's own gradients


@pytest.mark.parametrize("seed", range(12))
def test_compiled_losses_and_slopes_are_those_of_the_twin(seed: int) -> None:
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    num, num_actions = 300, 6
    knobs = Knobs(
        lr=1.0,
        clip=0.2,
        temperature=float(rng.choice([1.0, 0.7, 1.5])),
        epsilon=float(rng.choice([0.0, 0.15])),
        entropy_coef=float(rng.choice([0.0, 0.3])),
        kl_coef=float(rng.choice([0.0, 0.5])),
        kl_ref_coef=0.7,
        imitation_coef=0.4,
    )
    spec = PpoSpec(clip_value=float(rng.choice([0.3, 1.0])) if seed % 2 else None, value_coef=0.6)
    mask = torch.rand((num, num_actions), generator=generator) < 0.6
    mask[:, 2] = True

    def random_logits() -> Tensor:
        return (torch.randn((num, num_actions), generator=generator) * 2).masked_fill(~mask, ILLEGAL)

    logits, value = random_logits().requires_grad_(), torch.randn(num, generator=generator).requires_grad_()
    actions, old_logp = sample(random_logits(), knobs.temperature, knobs.epsilon, mask, generator)
    scalars = torch.stack((old_logp, *torch.randn((3, num), generator=generator)))
    teacher = torch.randint(-1, num_actions, (num,), generator=generator)  # some of it none, some illegal
    has_guides = seed % 3 > 0
    rows = Minibatch(
        actions, scalars, mask, random_logits() if has_guides else None, teacher if has_guides else None
    )
    output = Output(logits, value, None)
    entropy = float(entropy_of(policy_logp(logits.detach(), knobs.temperature)).mean())
    highest_entropy = entropy + (0.1 if seed % 4 else -0.1)

    expected = minibatch_terms(spec, knobs, output, rows, highest_entropy)
    slopes = torch.autograd.grad(expected["loss"], (logits, value))
    found = loss_gradients(output, rows.rows(), losses_of(spec, knobs, highest_entropy))
    terms = torch.stack(list(expected.values())).detach()
    np.testing.assert_allclose(found.terms, terms, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(found.logits, slopes[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.values, slopes[1], rtol=1e-5, atol=1e-8)
    assert (found.logits[~mask] == 0).all(), "exactly"
    assert 0.1 < float(found.terms[6]) < 0.99, "clipped and unclipped rows were both seen"


def test_rows_past_the_clip_on_the_good_side_have_slope_exactly_0() -> None:
    logits = masked_logits()[:1].repeat(4, 1)
    actions, mask = torch.tensor([0, 0, 0, 0]), MASK[:1].repeat(4, 1)
    logp = policy_logp(logits, 1.0)[:, 0]
    # Ratios 1.5, 0.5, 1.5, 0.5; the first two with the advantage that wanted them there.
    old_logp = logp - torch.tensor([1.5, 0.5, 1.5, 0.5]).log()
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0])
    scalars = torch.stack((old_logp, advantages, torch.zeros(4), torch.zeros(4)))
    rows = Minibatch(actions, scalars, mask).rows()
    slopes = loss_gradients(Output(logits, torch.zeros(4), None), rows, PLAIN_LOSSES).logits
    assert (slopes[:2] == 0).all()
    assert (slopes[2:][mask[2:]] != 0).all()


@pytest.mark.parametrize("where", [0, 1, 2, "logits", "value"])
def test_nan_in_a_single_row_is_not_lost(where: Any) -> None:
    """A comparison with NaN is false either way: it must not be counted as an ordinary row."""
    logits, value, scalars = masked_logits(), torch.zeros(2), torch.zeros((4, 2))
    (scalars[where] if isinstance(where, int) else {"logits": logits[0], "value": value}[where])[0] = math.nan
    rows = Minibatch(torch.tensor([0, 1]), scalars, MASK).rows()
    slopes = loss_gradients(Output(logits, value, None), rows, PLAIN_LOSSES)
    assert not math.isfinite(float(slopes.terms[0]))
