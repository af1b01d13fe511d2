"""The service level of the configuration reaches what a policy sees, earns, and is served with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pointsman.envs.routing import RoutingEnv
from pointsman.errors import InputError
from pointsman.evaluation.routing import RoutingSelection
from pointsman.inference.checkpoint import Checkpoint, load_checkpoint
from pointsman.routing.policy import PolicyTables
from pointsman.routing.sources import DEFAULT_CHECKPOINT

from .factories import column, make_env

TIMES = ("backlog_after", "own_prefill", "mean_wait", "oldest_wait", "ttft")


def env_for(ttft_s: float, tpot_s: float = 0.1) -> RoutingEnv:
    return make_env(
        4, slo={"ttft_s": ttft_s, "tpot_s": tpot_s}, reward={"terms": {"slo": 1.0}, "scale": "none"}
    )


def test_times_are_seen_as_shares_of_the_limit() -> None:
    strict, usual = env_for(0.5), env_for(2.0)
    seen = [env.reset(0) for env in (strict, usual)]
    for name in TIMES:
        tight, wide = (
            np.exp2(column(one, env, name)) - 1 for one, env in zip(seen, (strict, usual), strict=True)
        )
        np.testing.assert_allclose(tight, 4 * wide, rtol=2e-3, atol=1e-5)
    plain = make_env(4).reset(0)
    assert plain.entities.tobytes() == seen[1].entities.tobytes(), "the default service level changes nothing"


def test_steps_are_seen_as_shares_of_theirs() -> None:
    strict, usual = env_for(2.0, 0.05), env_for(2.0, 0.1)
    tight, wide = (np.exp2(column(env.reset(0), env, "step_predicted")) - 1 for env in (strict, usual))
    np.testing.assert_allclose(tight, 2 * wide, rtol=2e-3)


def test_rewards_and_evaluations_count_what_is_beyond_it() -> None:
    def lost(env: RoutingEnv) -> float:
        env.reset(0)
        return sum(float(env.step(env.advise(0)).terms["slo"].sum()) for _ in range(200))

    assert lost(env_for(0.02)) != lost(env_for(2.0))
    strict = RoutingSelection(env_for(0.5).spec)
    assert {one.config.slo.ttft_s for one in strict._prepared} == {0.5}


def test_a_policy_is_served_with_the_limits_it_was_trained_for() -> None:
    shipped = load_checkpoint(DEFAULT_CHECKPOINT)
    own = Checkpoint(shipped.network, shipped.space, shipped.arrays, {"slo": {"ttft_s": 0.5, "tpot_s": 0.03}})
    rows = PolicyTables([shipped, own], 4).rows
    assert rows.ttft_limit_s.tolist() == [2.0, 0.5]
    assert rows.step_limit_s.tolist() == [0.1, 0.03]


def test_files_must_agree_on_it(tmp_path: Path) -> None:
    paths = []
    for number, limit in enumerate((0.5, 5.0)):
        paths.append(tmp_path / f"{number}.yaml")
        paths[-1].write_text(
            "workload: {arrivals: {kind: poisson, rate: 5}, lengths: azure-conv}\n"
            f"cluster: {{replicas: 2}}\nslo: {{ttft_s: {limit}}}\n"
        )
    names = [str(path) for path in paths]
    assert make_env(2, scenarios=names[:1]).metadata["slo"]["ttft_s"] == 0.5
    with pytest.raises(InputError, match="another service level"):
        make_env(2, scenarios=names)
    assert make_env(2, scenarios=names, slo={"ttft_s": 1.0}).metadata["slo"]["ttft_s"] == 1.0
