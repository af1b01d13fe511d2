from __future__ import annotations

import ctypes
from typing import Any

import pytest

from pointsman.errors import InputError
from pointsman.routing.policy import HEURISTICS, PolicySpec, PolicyTables
from pointsman.routing.signals import NUM_SIGNALS, SIGNAL_INDEX
from pointsman.spec import parse_spec


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"kind": "least-luck"}, ["policy.kind", "least-luck", "least-work"]),
        ({"kind": "linear-score"}, ["policy.weights", "outstanding"]),
        ({"kind": "linear-score", "weights": {"outstanding": 0.0}}, ["policy.weights"]),
        ({"kind": "linear-score", "weights": {"luck": 1.0}}, ["policy.weights", "luck", "outstanding"]),
        ({"kind": "random", "weights": {"outstanding": 1.0}}, ["policy.weights", "linear-score"]),
        ({"kind": "hold-until-room", "kv_limit": 0.0}, ["policy.kv_limit"]),
        ({"kind": "random", "seed": 3}, ["policy.seed", "unknown key"]),
        ({"kind": "learned"}, ["policy.checkpoint", ".safetensors"]),
        ({"kind": "random", "checkpoint": "a.safetensors"}, ["policy.checkpoint", "learned"]),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(policy: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        parse_spec(PolicySpec, policy, "policy")
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_every_heuristic_says_what_it_does_in_a_line() -> None:
    assert len({heuristic.kernel for heuristic in HEURISTICS.values()}) == len(HEURISTICS)
    for kind, heuristic in HEURISTICS.items():
        assert heuristic.what and "\n" not in heuristic.what, kind


def test_weights_reach_the_row_of_their_signal() -> None:
    specs = [None, PolicySpec(kind="linear-score", weights={"kv_use": 2.0, "outstanding": 1.0})]
    tables = PolicyTables(specs, max_replicas=1)
    assert tables.rows["kind"].tolist() == [0, HEURISTICS["linear-score"].kernel]
    assert tables.rows["reads_derived"].tolist() == [0, 1]
    weights = (ctypes.c_double * NUM_SIGNALS).from_address(int(tables.rows[1].weights))
    assert weights[SIGNAL_INDEX["kv_use"]] == 2.0
    assert sum(weights) == 3.0
