"""The controller of exploration: what moves, when it speaks up, and that it resumes exactly."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from pointsman.errors import InputError
from pointsman.spec import parse_spec
from pointsman.training.exploration import Event, Exploration, ExplorationSpec
from pointsman.training.ppo import PpoSpec


def make(ppo: dict[str, Any] | None = None, **spec: Any) -> Exploration:
    spec = {"behind": None, **spec}
    return Exploration(
        parse_spec(ExplorationSpec, spec, "exploration"), parse_spec(PpoSpec, ppo or {}, "ppo")
    )


def test_schedules_reach_the_knobs() -> None:
    controller = make(
        ppo={
            "learning_rate": {"start": 1e-3, "end": 0.0},
            "clip_ratio": {"start": 0.3, "end": 0.1},
            "kl_reference": {"kind": "exponential", "start": 1.0, "end": 0.01},
            "imitation": {"start": 0.5, "end": 0.0, "until": 0.5},
        },
        temperature={"start": 1.5, "end": 1.0},
        entropy_coef={"kind": "cosine", "start": 0.02, "end": 0.0},
        epsilon={"start": 0.05, "end": 0.0, "until": 0.2},
    )
    start, middle, end = (controller.knobs(fraction) for fraction in (0.0, 0.5, 1.0))
    assert [knobs.temperature for knobs in (start, middle, end)] == [1.5, 1.25, 1.0]
    assert [knobs.epsilon for knobs in (start, middle, end)] == [0.05, 0.0, 0.0]
    assert [knobs.entropy_coef for knobs in (start, middle, end)] == pytest.approx([0.02, 0.01, 0.0])
    assert [knobs.lr for knobs in (start, middle, end)] == pytest.approx([1e-3, 5e-4, 0.0])
    assert [knobs.clip for knobs in (start, middle, end)] == pytest.approx([0.3, 0.2, 0.1])
    assert [knobs.kl_ref_coef for knobs in (start, middle, end)] == pytest.approx([1.0, 0.1, 0.01])
    assert [knobs.imitation_coef for knobs in (start, middle, end)] == [0.5, 0.0, 0.0]
    assert start.kl_coef == 0.0


# Entropy target


def entropy_frac(temperature: float, logits: tuple[float, ...] = (0.0, 2.0, 3.0, 5.0)) -> float:
    weights = np.exp(np.array(logits) / temperature)
    shares = weights / weights.sum()
    return float(-(shares * np.log(shares)).sum() / math.log(len(logits)))


@pytest.mark.parametrize("wanted", [0.25, 0.8])
def test_temperature_brings_the_entropy_to_its_target(wanted: float) -> None:
    controller = make(target={"entropy_frac": wanted})
    for update in range(60):
        controller.after_update(
            update, 0.0, {"entropy_frac": entropy_frac(controller.knobs(0.0).temperature)}
        )
    knobs = controller.knobs(0.0)
    assert entropy_frac(knobs.temperature) == pytest.approx(wanted, abs=0.01)
    assert abs(entropy_frac(1.0) - wanted) > 0.05, "left alone, it would be somewhere else"
    assert knobs.entropy_coef == make().knobs(0.0).entropy_coef


def test_the_coefficient_rises_while_entropy_is_missing() -> None:
    controller = make(target={"entropy_frac": 0.6, "through": "coefficient", "gain": 1.0}, entropy_coef=0.01)
    controller.after_update(0, 0.0, {"entropy_frac": 0.2})
    assert controller.knobs(0.0).entropy_coef == pytest.approx(0.01 * math.exp(0.4))
    controller.after_update(1, 0.0, {"entropy_frac": 0.9})
    assert controller.knobs(0.0).entropy_coef == pytest.approx(0.01 * math.exp(0.1))
    assert controller.knobs(0.0).temperature == 1.0


def test_a_controller_at_its_limit_says_so_once() -> None:
    controller = make(target={"entropy_frac": 1.0, "gain": 1.0, "limit": 2.0})
    events = [
        event for update in range(10) for event in controller.after_update(update, 0.0, {"entropy_frac": 0.8})
    ]
    assert controller.knobs(0.0).temperature == pytest.approx(2.0)
    assert [(event.update, event.what) for event in events] == [(3, "temperature factor")]
    assert "limit" in events[0].why


# Stagnation


def evaluate(controller: Exploration, scores: Any) -> list[Event]:
    """One evaluation every two updates."""
    events = []
    for i, score in enumerate(scores):
        for update in (2 * i, 2 * i + 1):
            events += controller.after_update(update, 0.0, {"entropy_frac": 0.5, "approx_kl_mean": 0.01})
        events += controller.after_evaluation(2 * i + 2, float(score))
    return events


def noise(num: int, seed: int) -> Any:
    return np.random.default_rng(seed).normal(size=num)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("level", [-5.0, 0.0, 1000.0])
def test_a_plateau_fires_a_pulse_soon_however_noisy(seed: int, level: float) -> None:
    """Ten evaluations of learning, then flat. The seeds' detector stayed silent on exactly this."""
    rise = np.concatenate((np.linspace(-20, 0, 10), np.zeros(25)))
    events = evaluate(make(stagnation={}), level + rise + 0.5 * noise(35, seed))
    starts = [event for event in events if event.after > event.before]
    assert starts and 10 < starts[0].update / 2 <= 30
    assert "plateau" in starts[0].why and starts[0].after == 1.5


def test_a_plateau_from_the_very_start_fires_too() -> None:
    assert evaluate(make(stagnation={}), np.zeros(8))[0].update == 16
    assert any(evaluate(make(stagnation={}), noise(20, seed)) for seed in range(5))


@pytest.mark.parametrize("seed", range(5))
def test_a_policy_that_still_learns_is_left_alone(seed: int) -> None:
    assert not evaluate(make(stagnation={}), np.linspace(-20, 0, 40) + 0.3 * noise(40, seed))


def test_a_pulse_ends_and_may_come_again() -> None:
    controller = make(stagnation={"evaluations": 2, "updates": 5, "factor": 2.0}, temperature=1.2)
    for _ in range(3):
        assert controller.after_evaluation(0, 1.0) == []
    (start,) = controller.after_evaluation(7, 1.0)
    assert (start.update, start.what, start.before, start.after) == (7, "temperature factor", 1.0, 2.0)
    for update in range(8, 12):
        assert controller.knobs(0.0).temperature == 2.4
        assert controller.after_update(update, 0.0, {}) == []
    (end,) = controller.after_update(12, 0.0, {})
    assert (end.before, end.after) == (2.0, 1.0) and "over" in end.why
    assert controller.knobs(0.0).temperature == 1.2
    again = [event for _ in range(4) for event in controller.after_evaluation(20, 1.0)]
    assert len(again) == 1
    assert str(start).startswith("update 7: temperature factor 1 → 2, plateau")


# Behind a baseline


def test_falling_behind_raises_exploration_until_it_catches_up() -> None:
    behind = {"evaluations": 3, "temperature_factor": 1.1, "entropy_factor": 2.0, "max_raises": 2}
    controller = make(behind=behind, entropy_coef=0.01)
    assert controller.after_evaluation(1, -2.0, -1.0) == []
    assert controller.after_evaluation(2, -2.0, -1.0) == []
    events = controller.after_evaluation(3, -2.0, -1.0)
    assert [(event.what, event.before, event.after) for event in events] == [
        ("temperature factor", 1.0, 1.1),
        ("ent_coef factor", 1.0, 2.0),
    ]
    assert "behind the baseline 3 times in a row (-2 against -1)" in events[0].why
    assert controller.knobs(0.0).entropy_coef == pytest.approx(0.02)
    assert controller.knobs(0.0).temperature == pytest.approx(1.1)
    for update in range(4, 20):
        controller.after_evaluation(update, -2.0, -1.0)
    assert controller.knobs(0.0).entropy_coef == pytest.approx(0.04), "no more than max_raises"
    caught_up = controller.after_evaluation(20, -1.0, -1.0)
    assert [event.after for event in caught_up] == [1.0, 1.0] and "caught up" in caught_up[0].why
    assert controller.knobs(0.0).entropy_coef == pytest.approx(0.01)


def test_behind_but_closing_in_is_no_reason() -> None:
    controller = make(behind={"evaluations": 3})
    events = [event for i in range(20) for event in controller.after_evaluation(i, -100.0 + i, 0.0)]
    assert events == []


def test_one_good_evaluation_starts_the_count_anew() -> None:
    controller = make(behind={"evaluations": 3})
    scores = [-2.0, -2.0, 1.0, -2.0, -2.0, 1.0]
    assert [
        event for i, score in enumerate(scores) for event in controller.after_evaluation(i, score, 0.0)
    ] == []
    assert make(behind={"evaluations": 1}).after_evaluation(0, 5.0) == [], "no baseline, nothing to compare"


# KL penalty


def test_the_kl_penalty_follows_the_kl() -> None:
    """With KL = 0.1 / (1 + weight), the target of 0.01 is met at a weight of 9; from both sides."""
    for start in (0.1, 100.0):
        controller = make(ppo={"kl_penalty": {"target": 0.01, "start": start, "highest": 200.0}})
        assert controller.knobs(0.0).kl_coef == start
        for update in range(30):
            kl = 0.1 / (1 + controller.knobs(0.0).kl_coef)
            for event in controller.after_update(update, 0.0, {"approx_kl_mean": kl}):
                assert event.what == "kl_coef" and event.after in (2 * event.before, event.before / 2)
        assert 0.01 / 1.5 <= 0.1 / (1 + controller.knobs(0.0).kl_coef) <= 0.01 * 1.5


# Resume


def test_a_resumed_controller_does_the_same() -> None:
    spec: dict[str, Any] = {
        "ppo": {"kl_penalty": {}},
        "target": {"entropy_frac": 0.7},
        "stagnation": {"evaluations": 2, "updates": 3},
        "behind": {"evaluations": 2},
    }
    rng = np.random.default_rng(0)
    inputs = [
        (float(rng.random()), float(rng.exponential(0.01)), float(rng.normal()), float(rng.normal() + 1))
        for _ in range(40)
    ]

    def drive(controller: Exploration, steps: range) -> list[Any]:
        log: list[Any] = []
        for i in steps:
            entropy, kl, score, baseline = inputs[i]
            log += controller.after_update(i, i / 40, {"entropy_frac": entropy, "approx_kl_mean": kl})
            log += controller.after_evaluation(i, score, baseline)
            log.append(controller.knobs(i / 40))
        return log

    whole = drive(make(**spec), range(40))
    for cut in range(1, 40):
        first = make(**spec)
        before = drive(first, range(cut))
        saved = json.dumps(first.state_dict(), allow_nan=False)
        drive(first, range(cut, 40))  # what is saved does not change with the controller
        second = make(**spec)
        second.load_state_dict(json.loads(saved))
        assert before + drive(second, range(cut, 40)) == whole
    forgetful = make(**spec)
    assert drive(make(**spec), range(20)) + drive(forgetful, range(20, 40)) != whole


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"temperature": 0.0}, ["temperature must stay"]),
        ({"epsilon": {"start": 0.5, "end": 1.5}}, ["epsilon must stay within 0 and 1"]),
        ({"target": {"entropy_frac": 1.3}}, ["entropy_frac must stay within 0 and 1"]),
        ({"stagnation": {"factor": 0.5}}, ["exploration.stagnation.factor"]),
        ({"entropy": 0.1}, ["exploration.entropy", "unknown key", "entropy_coef"]),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(spec: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        make(**spec)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_one_bad_evaluation_long_ago_makes_no_plateau_of_a_rise() -> None:
    """Its distance to all others was the yardstick for ever, and every rise small beside it."""
    scores = np.concatenate(([-500.0], np.linspace(0.0, 10.0, 39)))
    assert not evaluate(make(stagnation={}), scores)


def test_the_learning_rate_follows_the_kl() -> None:
    """With a KL of 3000 lr², the target of 0.01 is met at 0.0018; from both sides, and within the limit."""
    for start in (1e-4, 1e-2):
        controller = make(ppo={"learning_rate": start, "lr_by_kl": {"target": 0.01, "limit": 30.0}})
        for update in range(30):
            kl = 3000 * controller.knobs(0.0).lr ** 2
            controller.after_update(update, 0.0, {"approx_kl_mean": kl})
        assert 0.004 < 3000 * controller.knobs(0.0).lr ** 2 < 0.021
    stuck = make(ppo={"learning_rate": 1e-3, "lr_by_kl": {"limit": 4.0}})
    events = [event for i in range(20) for event in stuck.after_update(i, 0.0, {"approx_kl_mean": 0.0})]
    assert [event.what for event in events] == ["lr factor"]
    assert stuck.knobs(0.0).lr == pytest.approx(4e-3)
    assert make(ppo={"learning_rate": 1e-3}).knobs(0.0).lr == 1e-3
