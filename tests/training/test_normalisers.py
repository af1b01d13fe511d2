from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor

from pointsman.training.normalisers import CLIP, MIN_STD, FeatureScale, RewardScale, ValueScale

from .networks import make_network, make_observation


def batches(num_batches: int = 7, num_features: int = 5) -> list[Tensor]:
    rng = np.random.default_rng(0)
    offset = rng.normal(0, 100, num_features)
    return [
        torch.from_numpy(rng.normal(offset + i, 1 + i, (rng.integers(1, 50), num_features)))
        for i in range(num_batches)
    ]


def test_running_statistics_equal_batch_statistics() -> None:
    scale = FeatureScale(5)
    for batch in batches():
        scale.update(batch)
    rows = torch.cat(batches()).numpy()
    np.testing.assert_allclose(scale.mean, rows.mean(0), rtol=1e-9)
    np.testing.assert_allclose(scale.std, rows.std(0), rtol=1e-9)
    # The average of the batches' own statistics, the usual mistake, is far off.
    of_batches = np.mean([batch.numpy().std(0) for batch in batches()], 0)
    assert np.abs(of_batches / rows.std(0) - 1).max() > 1e-3


def test_statistics_of_two_processes_are_those_of_one() -> None:
    first, second, alone = FeatureScale(5), FeatureScale(5), FeatureScale(5)
    for batch in batches():
        sent: list[Tensor] = []

        def send(sums: Tensor, sent: list[Tensor] = sent) -> Tensor:
            sent.append(sums)
            return sums

        copy.deepcopy(first).update(batch[::2], send)
        copy.deepcopy(second).update(batch[1::2], send)
        total = sent[0] + sent[1]
        first.update(batch[::2], lambda _, total=total: total)
        second.update(batch[1::2], lambda _, total=total: total)
        alone.update(batch)
    assert torch.equal(first.mean, second.mean)
    np.testing.assert_allclose(first.mean, alone.mean, rtol=1e-12)
    np.testing.assert_allclose(first.std, alone.std, rtol=1e-9)


def test_scaled_features_have_mean_0_and_std_1_and_are_clipped() -> None:
    scale = FeatureScale(5)
    rows = torch.cat(batches()).float()
    assert torch.equal(scale(rows), rows.clamp(-CLIP, CLIP))  # nothing seen yet
    scale.update(rows)
    scaled = scale(rows)
    assert scaled.mean(0).abs().max() < 1e-4
    assert (scaled.std(0, unbiased=False) - 1).abs().max() < 1e-4
    assert scale(rows + 1e6).max() == CLIP
    assert scale(rows - 1e6).min() == -CLIP


def test_a_feature_that_hardly_moved_is_not_blown_up() -> None:
    scale = FeatureScale(1)
    scale.update(torch.tensor([[0.5], [0.5001]]))
    assert scale(torch.tensor([[0.51]])).item() == pytest.approx(0.00995 / MIN_STD, rel=1e-2)


def test_a_feature_that_never_moved_is_not_looked_at() -> None:
    """One that is switched off in training must not disturb when the compiled policy is shown it."""
    scale = FeatureScale(1)
    scale.update(torch.full((100, 1), 0.5))
    assert scale(torch.tensor([[7.0]])).item() == 0.0


def test_rewards_are_divided_by_the_spread_of_their_group() -> None:
    """The same rewards ten times as large come out the same; a group without any stays as it is."""
    rng = np.random.default_rng(0)
    rewards = rng.normal(size=(50, 4)) * [1.0, 10.0, 1.0, 0.0]
    groups = np.broadcast_to(np.arange(4), rewards.shape)
    scale = RewardScale(4, memory=10)
    scale.update(rewards, np.full(rewards.shape, 0.5), groups)
    scaled = rewards / scale.scale(groups)
    sums = np.zeros((50, 4))
    to_come = np.zeros(4)
    for t in reversed(range(50)):
        sums[t] = to_come = scaled[t] + 0.5 * to_come
    assert np.square(sums).mean(axis=0)[:3] == pytest.approx(1.0)
    assert not scaled[:, 3].any()


def test_only_observe_moves_the_scales_and_padded_entities_do_not_enter() -> None:
    network = make_network()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    observation = make_observation(50, is_padded=True)
    network(observation)
    with torch.no_grad():
        network.act(observation)
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    network.observe(observation)
    assert not torch.equal(network.entity_scale.mean, before["entity_scale.mean"])
    garbage = torch.where(observation.entity_mask[:, :, None], observation.entities, float("nan"))
    other = make_network()
    other.observe(observation._replace(entities=garbage))
    assert torch.equal(other.entity_scale.mean, network.entity_scale.mean)


def test_the_value_in_real_units_stays_when_its_scale_moves() -> None:
    scale = ValueScale(8)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        scale.output.weight.normal_(generator=generator)
        scale.output.bias.normal_(generator=generator)
    features = torch.randn(64, 8, generator=generator)
    for number in range(5):
        before, normalised = scale.denormalise(scale(features)), scale(features)
        scale.update(torch.randn(1000, generator=generator) * 10.0**number + 50 * number)
        after = scale.denormalise(scale(features))
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
        # Without the correction of the layer the value would have jumped.
        assert (scale.denormalise(normalised) - before).abs().max() > 0.1


def test_the_scale_of_returns_follows_them() -> None:
    scale = ValueScale(2)
    with torch.no_grad():
        scale.output.weight.zero_()
        scale.output.bias.zero_()
    returns = torch.tensor([[3.0, 5.0], [7.0, 9.0]])
    scale.update(returns)
    assert scale.mean.item() == pytest.approx(6.0)
    assert scale.std.item() == pytest.approx(returns.std(unbiased=False).item())
    torch.testing.assert_close(scale.denormalise(scale.normalise(returns)), returns)
    for _ in range(200):
        scale.update(returns + 100)
    assert scale.mean.item() == pytest.approx(106.0, abs=0.1)
