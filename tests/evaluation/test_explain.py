from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from pointsman.errors import InputError
from pointsman.evaluation.explain import (
    Network,
    RecordedDecisions,
    dependence,
    features_of,
    groups_of,
    importances,
    permutation,
    permuted,
    record,
    require_features,
)
from pointsman.inference.checkpoint import Checkpoint, NetworkSpec
from pointsman.inference.space import EntitySpace
from pointsman.routing.features import CONTEXT_FEATURES, ENTITY_FEATURES
from pointsman.simulator.privileged import PRIVILEGED_FEATURES
from pointsman.training.networks import TensorObservation, build_network, from_checkpoint, to_checkpoint

torch.set_num_threads(1)

SPACE = EntitySpace(4, ENTITY_FEATURES, CONTEXT_FEATURES, PRIVILEGED_FEATURES)
ENTITY_NAMES = [feature.name for feature in ENTITY_FEATURES]
CONTEXT_NAMES = [feature.name for feature in CONTEXT_FEATURES]


@cache
def hinted(kind: str = "pooled", hint: str = "outstanding", strength: float = 3.0) -> Checkpoint:
    """Untrained, and so close to indifferent, but for a hint: it sends to where that feature is lowest."""
    spec = NetworkSpec.model_validate({"kind": kind, "width": 16, "hint": hint, "hint_strength": strength})
    return to_checkpoint(build_network(spec, SPACE, seed=0), {})


def decisions(num: int = 400, num_entities: int = 4, seed: int = 0) -> RecordedDecisions:
    rng = np.random.default_rng(seed)
    legal = np.zeros((num, 5), np.bool_)
    legal[:, 1 : num_entities + 1] = True
    return RecordedDecisions(
        rng.normal(size=(num, 4, len(ENTITY_FEATURES))).astype(np.float32),
        rng.normal(size=(num, len(CONTEXT_FEATURES))).astype(np.float32),
        np.full(num, num_entities),
        legal,
        np.zeros((num, 16), np.float32),
    )


def test_only_what_the_policy_looks_at_matters() -> None:
    network = Network(hinted())
    groups = importances(network, decisions(), groups_of(SPACE))
    # Four replicas, one of them lowest: what another decision says is right a quarter of the time.
    assert groups[0].name == "load"
    assert groups[0].changed == pytest.approx(0.75, abs=0.07)
    assert groups[0].kl > 1
    assert groups[0].lost > 0.3
    assert all(abs(group.lost) < 0.02 and group.kl < 0.01 for group in groups[1:])
    features = importances(network, decisions(), features_of(SPACE))
    assert features[0].name == "outstanding"
    assert features[0].changed == pytest.approx(groups[0].changed, abs=0.02)
    assert features[1].changed < 0.1


def test_importance_follows_the_strength() -> None:
    """An indifferent policy changes its mind as easily, but loses nothing by it."""
    strong, weak = (
        importances(Network(hinted(strength=strength)), decisions(), {"it": groups_of(SPACE)["load"]})[0]
        for strength in (3.0, 0.1)
    )
    assert weak.kl < 0.02 * strong.kl
    assert weak.lost < 0.2 * strong.lost


def test_permuting_moves_whole_groups() -> None:
    some = decisions(100)
    columns = groups_of(SPACE)["request"]
    assert columns.entities == (ENTITY_NAMES.index("own_prefill"),)
    assert set(columns.context) >= {CONTEXT_NAMES.index("prompt")}
    order = np.random.default_rng(0).permutation(100)
    moved = permuted(some, columns, order)
    others = [i for i in range(len(ENTITY_FEATURES)) if i not in columns.entities]
    assert np.array_equal(moved.entities[:, :, others], some.entities[:, :, others])
    assert np.array_equal(
        moved.entities[:, :, columns.entities], some.entities[order][:, :, columns.entities]
    )
    assert np.array_equal(moved.context[:, columns.context], some.context[order][:, columns.context])
    assert some.entities.shape == moved.entities.shape


def test_decisions_swap_with_those_of_as_many_replicas() -> None:
    num_entities = np.array([4, 2] * 50)
    order = permutation(num_entities, np.random.default_rng(0))
    assert sorted(order) == list(range(100))
    assert np.array_equal(num_entities[order], num_entities)
    assert np.mean(order == np.arange(100)) < 0.1


def test_probabilities_are_those_of_the_network_that_was_trained() -> None:
    checkpoint, some = hinted("attention"), decisions(20)
    seen = TensorObservation(
        torch.from_numpy(some.entities),
        torch.from_numpy(some.context),
        torch.ones(20, 4, dtype=torch.bool),
        torch.from_numpy(some.legal),
        torch.zeros(20, len(PRIVILEGED_FEATURES)),
    )
    with torch.inference_mode():
        logits, _ = from_checkpoint(checkpoint).act(seen)
    assert Network(checkpoint).probabilities(some) == pytest.approx(logits.softmax(1).numpy(), abs=1e-5)


def test_a_recurrent_network_keeps_its_memory() -> None:
    checkpoint, some = hinted("attention+gru"), decisions(20)
    network = Network(checkpoint)
    _, state = network.logits(some)
    assert state.any(axis=1).all()
    assert not some.state.any()
    remembered = replace(some, state=state)
    assert not np.array_equal(network.logits(remembered)[0], network.logits(some)[0])
    assert np.array_equal(network.logits(remembered)[0], network.logits(remembered)[0])


def test_the_choice_follows_the_feature() -> None:
    network = Network(hinted())
    curve = dependence(network, decisions(), SPACE, "outstanding")
    assert curve.part == "replica"
    assert curve.values[0] == pytest.approx(-2.33, abs=0.3)  # the 1st percentile of what was drawn
    assert (np.diff(curve.probability) < 0).all()
    assert curve.probability[0] > 0.8
    assert curve.probability[-1] < 0.02
    unread = dependence(network, decisions(), SPACE, "backlog")
    assert np.ptp(unread.probability) < 0.01
    assert unread.probability.mean() == pytest.approx(0.25, abs=0.05)
    context = dependence(network, decisions(), SPACE, "prompt")
    assert context.part == "context"
    assert np.ptp(context.probability) < 0.01
    assert context.probability.mean() > 0.5  # of what it chose


def test_a_feature_that_does_not_vary_has_no_curve() -> None:
    some = decisions()
    some.entities[:, :, ENTITY_NAMES.index("accepting")] = 1.0
    assert len(dependence(Network(hinted()), some, SPACE, "accepting").values) == 0


def test_decisions_are_recorded_as_the_policy_makes_them() -> None:
    recorded = record(hinted(), ["steady-chat"], 64)
    assert len(recorded) == 64
    assert recorded.entities.shape[1:] == (4, len(ENTITY_FEATURES))
    assert recorded.legal.any(axis=1).all()
    outstanding = recorded.entities[:, :, 0]
    chosen = Network(hinted()).probabilities(recorded).argmax(axis=1)
    rows = np.flatnonzero(chosen > 0)
    assert len(rows) > 32
    assert (outstanding[rows, chosen[rows] - 1] <= outstanding[rows].min(axis=1) + 0.05).all()


def test_an_mlp_is_asked_about_as_many_replicas_as_it_knows() -> None:
    assert len(record(hinted("mlp"), ["steady-chat"], 16)) == 16
    with pytest.raises(InputError, match=r"env\.max_replicas = 4: an episode has 16 replicas"):
        record(hinted("mlp"), ["wide-16"], 16)


def test_other_features_are_refused() -> None:
    other = EntitySpace(4, ENTITY_FEATURES[1:], CONTEXT_FEATURES, PRIVILEGED_FEATURES)
    checkpoint = replace(hinted(), space=other)
    with pytest.raises(InputError, match="was trained on other entity features"):
        record(checkpoint, ["steady-chat"], 16)
    require_features(SPACE, ["prompt", "outstanding"])
    with pytest.raises(
        InputError, match="--feature = 'outstandin': unknown feature; did you mean 'outstanding'"
    ):
        require_features(SPACE, ["outstandin"])
