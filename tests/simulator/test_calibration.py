"""What is said of a live replica, by figures or by the catalogue."""

from __future__ import annotations

import numpy as np
import pytest

from pointsman.errors import InputError
from pointsman.routing.books import Books
from pointsman.simulator.calibration import known_figures
from pointsman.simulator.plan import plan_replicas
from pointsman.simulator.spec import ClusterSpec, ReplicaGroup


def test_figures_are_given_or_looked_up() -> None:
    plan = plan_replicas(ClusterSpec(replicas=1, model="Llama-3-8B", device="H100"))[0]
    looked_up = known_figures({"model": "Llama-3-8B", "device": "H100", "step_floor_s": 0.5})
    assert looked_up["step_floor_s"] == 0.5
    assert looked_up["prefill_s_per_token"] == plan.prefill_s_per_token
    assert looked_up["kv_capacity_tokens"] == plan.kv_capacity_tokens
    assert known_figures({"kv_capacity_tokens": 5000}) == {"kv_capacity_tokens": 5000.0}
    assert known_figures(None) == {}


@pytest.mark.parametrize("calibration", [{"model": "Llama-3-8B"}, {"step_floor_s": -1.0}, {"speed": 3}])
def test_calibration_that_makes_no_sense_is_refused(calibration: dict[str, object]) -> None:
    with pytest.raises(InputError, match="calibration"):
        known_figures(calibration)


def test_weights_are_those_of_the_simulator() -> None:
    spec = ClusterSpec(replicas=tuple(ReplicaGroup(device=name) for name in ("A100-80", "H100", "L40S")))
    plans = plan_replicas(spec)
    speeds = np.array([1 / plan.typical_step_s for plan in plans])
    books = Books(now=0.0)
    slots = [
        books.add(group.device or "", known_figures({"model": spec.model, "device": group.device}))
        for group in spec.groups
    ]
    found = [books.replica_signals(slot)["weight"] for slot in slots]
    np.testing.assert_allclose(found, speeds / speeds.mean())
