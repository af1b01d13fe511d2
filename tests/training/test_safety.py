from __future__ import annotations

import json

import pytest

from pointsman.training.safety import Monitor, SafetyError, SafetySpec

SPEC = SafetySpec(max_kl=0.5, min_entropy_frac=0.01, entropy_until=0.5, max_behind=0.1, patience=2)


def row(**changes: float) -> dict[str, float]:
    """Of a healthy update."""
    healthy = {"update": 7, "pg_loss": 0.1, "v_loss": 0.1, "grad_norm": 1.0, "entropy": 1.0}
    return {**healthy, "entropy_frac": 0.7, "approx_kl_max": 0.01, "invalid_frac": 0.0, **changes}


def test_a_healthy_run_raises_nothing() -> None:
    monitor = Monitor(SPEC)
    for _ in range(10):
        assert monitor.check(row(eval_score=0.0, eval_baseline_score=0.05), 0.1) == []
    assert monitor.metrics() == {"safety/behind": 0, "safety/entropy": 0, "safety/kl": 0}


@pytest.mark.parametrize("name", ["pg_loss", "v_loss", "grad_norm", "entropy"])
def test_what_is_not_finite_ends_the_run_at_once(name: str) -> None:
    with pytest.raises(SafetyError, match=f"update 7: {name} not finite"):
        Monitor(SPEC).check(row(**{name: float("nan")}), 0.1)


def test_illegal_actions_end_the_run_at_once() -> None:
    with pytest.raises(SafetyError, match="a mask is wrong"):
        Monitor(SPEC).check(row(invalid_frac=0.001), 0.1)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("kl", row(approx_kl_max=0.6)),
        ("entropy", row(entropy_frac=0.001)),
        ("behind", row(eval_score=-0.2, eval_baseline_score=0.0)),
    ],
)
def test_alerts_come_once_when_patience_is_over(name: str, bad: dict[str, float]) -> None:
    monitor = Monitor(SPEC)
    found = [monitor.check(bad, 0.1) for _ in range(4)]
    assert [[alert.name for alert in alerts] for alerts in found] == [[], [name], [], []]
    assert monitor.metrics()[f"safety/{name}"] == 4
    monitor.check(row(eval_score=0.0, eval_baseline_score=0.0), 0.1)  # it recovers: counting starts anew
    assert [len(monitor.check(bad, 0.1)) for _ in range(2)] == [0, 1]
    stopping = Monitor(SPEC.model_copy(update={"stop": True}))
    stopping.check(bad, 0.1)
    with pytest.raises(SafetyError, match="update 7"):
        stopping.check(bad, 0.1)


def test_low_entropy_is_no_news_late_in_the_run() -> None:
    monitor = Monitor(SPEC)
    assert [monitor.check(row(entropy_frac=0.001), 0.9) for _ in range(3)] == [[], [], []]


def test_updates_without_evaluation_do_not_interrupt_being_behind() -> None:
    monitor = Monitor(SPEC)
    behind = row(eval_score=-0.2, eval_baseline_score=0.0)
    assert [len(monitor.check(one, 0.1)) for one in (behind, row(), row(), behind)] == [0, 0, 0, 1]


def test_a_resumed_monitor_counts_on() -> None:
    monitor = Monitor(SPEC)
    monitor.check(row(approx_kl_max=0.6), 0.1)
    resumed = Monitor(SPEC)
    resumed.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    assert len(resumed.check(row(approx_kl_max=0.6), 0.1)) == 1
