"""What a routing policy in training is judged by: columns that are what they are called."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pointsman.envs.routing import HoldRule, RoutingEvaluationSpec, RoutingSpec
from pointsman.errors import InputError, PointsmanWarning
from pointsman.evaluation import routing
from pointsman.evaluation.routing import CURABLE, SHOWN, RoutingSelection, choose_start, settle
from pointsman.experiments import own
from pointsman.experiments.own import BEFORE_REPORT, Part
from pointsman.inference.checkpoint import load_checkpoint
from pointsman.routing.ordering import SMALL_FIRST
from pointsman.routing.policy import PolicySpec
from pointsman.routing.sources import DEFAULT_CHECKPOINT
from pointsman.spec import parse_spec


def selection(**evaluation: object) -> RoutingSelection:
    fields = {"scenarios": ["overload", "mixed-hardware"], "evaluation": {"seeds": 3, **evaluation}}
    return RoutingSelection(parse_spec(RoutingSpec, fields, "env"))


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """400 requests of each scenario; an order needs some more to show."""
    whole = own._selection_configs
    monkeypatch.setattr(
        own,
        "_selection_configs",
        lambda scenario, seeds, overrides, part: whole(
            scenario, seeds, [*overrides, "workload.requests=400"], part
        ),
    )


def test_values_are_in_their_units_for_the_policy_and_the_baselines() -> None:
    judge = selection()
    metrics = judge(load_checkpoint(DEFAULT_CHECKPOINT))
    default = PolicySpec(kind="default")
    table, baseline = judge.measure(default), judge.measure(PolicySpec(kind="least-outstanding"))
    for name in SHOWN:
        assert metrics[f"eval_{name}"] == pytest.approx(float(table[name].mean()))
        assert metrics[f"eval_{name}/least-outstanding"] == pytest.approx(float(baseline[name].mean()))
        assert f"eval_{name}/random" in metrics
    for name in ("ttft_p90_s", "e2e_p95_s", "tbt_p99_s", "goodput_per_s", "imbalance_cv", "preemptions"):
        assert f"eval_{name}/round-robin" in metrics
    ratios = table["ttft_p99_s"].mean(axis=1) / baseline["ttft_p99_s"].mean(axis=1)
    assert metrics["eval_change/ttft_p99_s"] == pytest.approx(np.exp(np.log(ratios).mean()) - 1)
    assert "eval_invalid_frac" not in metrics


def test_no_ops_are_counted_by_decision() -> None:
    judge = selection()
    metrics = judge(load_checkpoint(DEFAULT_CHECKPOINT))
    table = judge.measure(PolicySpec(kind="default"))
    held = table["decisions"] - table["num_requests"] - table["resent"]
    assert metrics["eval_noop_frac"] == pytest.approx(float((held / table["decisions"]).mean()))
    assert 0 < metrics["eval_noop_frac"] < 1


def test_the_worst_block_may_choose() -> None:
    checkpoint = load_checkpoint(DEFAULT_CHECKPOINT)
    usual, careful = selection()(checkpoint), selection(select="worst-block")(checkpoint)
    lost = usual["eval_mean_return"] - usual["eval_min_block_return"]
    assert lost > 0
    assert careful["eval_score"] == pytest.approx(usual["eval_score"] - lost)


def test_the_order_that_is_left_open_is_what_serves_the_traffic_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code completion queues, and its prompts differ; a chat at half the load holds nobody."""
    monkeypatch.undo()

    def settled_on(scenario: str, small_first: float | None = None) -> float | None:
        spec = RoutingSpec(
            scenarios=(scenario,),
            hold=HoldRule(small_first=small_first),
            evaluation=RoutingEvaluationSpec(seeds=2),
        )
        return settle(spec).hold.small_first

    found = settled_on("steady-code")
    assert found is not None and found > SMALL_FIRST
    assert settled_on("light-chat") == SMALL_FIRST
    assert settled_on("steady-code", small_first=0.0) == 0.0


def test_traces_too_short_to_judge_by_are_told_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the whole trace
    rows = [f"{0.1 * i},500,400" for i in range(200)]
    (tmp_path / "trace.csv").write_text("\n".join(["timestamp,prompt_tokens,completion_tokens", *rows]))
    path = tmp_path / "mine.yaml"
    path.write_text("workload: {trace: trace.csv}\ncluster: {replicas: 2, device: A100-80}\n")
    judge = RoutingSelection(parse_spec(RoutingSpec, {"scenarios": [str(path)]}, "env"))
    with pytest.warns(PointsmanWarning, match="mine, selection: the trace lasts 3.9 s, a request"):
        judge.baselines  # noqa: B018


def test_a_tail_of_a_trace_may_be_longer_by_what_replays_cannot_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    rows = [f"{0.1 * i},500,400" for i in range(200)]
    (tmp_path / "trace.csv").write_text("\n".join(["timestamp,prompt_tokens,completion_tokens", *rows]))
    path = tmp_path / "mine.yaml"
    path.write_text("workload: {trace: trace.csv}\ncluster: {replicas: 2, device: A100-80}\n")
    replaying = RoutingSelection(parse_spec(RoutingSpec, {"scenarios": [str(path)]}, "env"))
    drawn = RoutingSelection(parse_spec(RoutingSpec, {"scenarios": ["mixed"]}, "env"))
    returns = np.array([0.3])

    def lost(judge: RoutingSelection, breach: float) -> float:
        return 0.3 - judge.score(returns, {"e2e_p99": np.array([breach])})

    assert lost(replaying, 0.05) == lost(drawn, 0.01) == 0.0
    assert lost(replaying, 0.07) == pytest.approx(lost(drawn, 0.03)) == pytest.approx(2 * 0.02)


def chosen(policies: list[str], **fields: object) -> tuple[str, tuple[float | None, ...]]:
    fields = {"scenarios": ["mixed"], "evaluation": {"seeds": 2}, **fields}
    start, spec = choose_start(parse_spec(RoutingSpec, fields, "env"), policies)
    return start, spec.detours_s


def test_a_run_learns_on_from_what_serves_its_objective_best() -> None:
    assert chosen(["default", "default-mean"], objective="mean")[0] == "default-mean"
    assert chosen(["default-mean", "default"], objective="tail")[0] == "default"


def test_a_start_brings_its_limit_on_a_late_first_token() -> None:
    limited = "default-mean:0.3s"
    assert chosen([limited]) == (limited, (0.3,))
    assert chosen(["default"]) == ("default", (None,))
    assert chosen(["default", limited], objective="mean") == (limited, (0.3,))


def test_the_order_that_is_left_open_is_what_serves_the_start_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that holds more than late-binding does has more to gain by it."""
    monkeypatch.undo()

    def order(small_first: float | None) -> float | None:
        fields = {
            "scenarios": ["steady-code"],
            "evaluation": {"seeds": 2},
            "hold": {"small_first": small_first},
        }
        start, spec = choose_start(parse_spec(RoutingSpec, fields, "env"), ["default"])
        assert start == "default"
        return spec.hold.small_first

    found = order(None)
    assert found is not None and found > SMALL_FIRST
    assert order(0.2) == 0.2


def test_an_order_is_chosen_on_all_but_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[tuple[object, float]] = []

    class Judge(RoutingSelection):
        def __init__(self, spec: RoutingSpec, part: Part, tolerance: float) -> None:
            judged.append((part, tolerance))
            super().__init__(spec, part, tolerance)

    monkeypatch.setattr(routing, "RoutingSelection", Judge)
    settle(parse_spec(RoutingSpec, {"hold": {"small_first": None}, "evaluation": {"seeds": 2}}, "env"))
    chosen(["default"], hold={"small_first": None})
    assert judged == [(BEFORE_REPORT, CURABLE)] * 2


def test_only_what_learned_can_be_learned_on_from() -> None:
    with pytest.raises(InputError, match=r"run\.start_from = 'late-binding': was not trained"):
        chosen(["default", "late-binding"])
