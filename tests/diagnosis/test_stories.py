"""One story per cause: what follows from what, and advice that does not contradict itself."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import numpy as np
import pytest

from pointsman.diagnosis.curves import RunLog
from pointsman.diagnosis.findings import Finding, diagnose
from pointsman.diagnosis.rules import RULES
from pointsman.diagnosis.stories import FOLLOWS

from .made import foreign, found, make
from .test_rules import BEHIND, DONE, SHOWS, noisy, scored, with_


def directions(findings: Iterable[Finding]) -> dict[str, set[int]]:
    turned: dict[str, set[int]] = {}
    for finding in findings:
        for knob in finding.knobs:
            turned.setdefault(knob.aim, set()).add(knob.direction)
    return turned


def contradictions(log: RunLog) -> list[str]:
    turned = directions(diagnose(log).findings)
    return [aim for aim, ways in turned.items() if {1, -1} <= ways]


def both(first: RunLog, second: RunLog) -> RunLog:
    """What the second log changed, in the first."""
    plain = SHOWS["stopped"][0].columns
    changed = {
        name: values
        for name, values in second.columns.items()
        if name not in plain or not np.array_equal(values, plain[name], equal_nan=True)
    }
    return make({**first.columns, **changed}, stopped={**first.facts.stopped, **second.facts.stopped})


@pytest.mark.parametrize(("first", "second"), list(combinations(SHOWS, 2)))
def test_no_knob_is_turned_both_ways(first: str, second: str) -> None:
    """Every two faults at once."""
    assert contradictions(both(SHOWS[first][0], SHOWS[second][0])) == []


def test_a_step_too_small_is_one_story() -> None:
    columns = with_(
        scored(0.05 - 0.2 * DONE),
        approx_kl_mean=1e-12,
        entropy_frac=noisy(0.999, 1e-4),
        mean_ep_return=noisy(-5.0, 0.3),
        explained_variance=noisy(-0.5, 0.2),
        v_loss=noisy(1.4, 0.1),
    )
    (story,) = [one for one in diagnose(make(columns)).findings if one.severity != "note"]
    assert story.name == "flat-learning"
    assert {"stuck-at-uniform", "critic-bottleneck"} <= {one.name for one in story.symptoms}
    assert [knob.turn for knob in story.knobs if knob.name == "learning rate"] == ["raise"]


@pytest.mark.parametrize("log", [make, foreign])
def test_nothing_drifts_at_a_kl_of_nothing(log: object) -> None:
    """The score falls, but not because of the policy: it stands still."""
    columns = with_(scored(0.05 - 0.2 * DONE), approx_kl_mean=1e-12)
    names = found(log(columns))  # type: ignore[operator]
    assert {"slow-drift", "best-early", "oscillation", "training-evaluation-gap", "wrong-sign"}.isdisjoint(
        names
    )
    assert "flat-learning" in names


def test_a_story_is_as_bad_as_the_worst_in_it() -> None:
    columns = with_(
        scored(np.where(DONE > 0.6, -0.1, 0.05)),
        approx_kl_mean=np.where(abs(DONE - 0.62) < 0.02, 0.4, 0.0015),
    )
    story = diagnose(make(columns)).findings[0]
    assert story.name == "overshoot"
    assert "best-early" not in [one.name for one in diagnose(make(columns)).findings]


def test_a_step_too_large_explains_what_it_collapses_to() -> None:
    columns = with_(
        scored(BEHIND),
        early_stop=1.0,
        num_steps=1.0,
        approx_kl_mean=noisy(0.04, 0.005),
        entropy_frac=np.clip(1.0 - 3.0 * DONE, 0.003, 1.0),
    )
    story = diagnose(make(columns)).findings[0]
    assert story.name == "kl-brake-always-on"
    assert "entropy-collapse" in [one.name for one in story.symptoms]


def test_symptoms_have_no_causes_in_a_circle() -> None:
    names = {rule.name for rule in RULES}
    assert set(FOLLOWS) <= names
    assert {name for followers in FOLLOWS.values() for name in followers} <= names

    def below(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, path
        for follower in FOLLOWS.get(name, ()):
            below(follower, (*path, name))

    for name in FOLLOWS:
        below(name, ())


def test_what_is_left_of_a_note_stays_on_its_own() -> None:
    """A note explains nothing worse: the critic is a little weak, the drift is bad all the same."""
    columns = with_(
        scored(0.06 - 0.05 * np.clip(DONE - 0.3, 0.0, None) / 0.7), mean_ep_return=noisy(-5.0, 0.3)
    )
    columns["reward_mean"] = noisy(0.0, 0.1)
    columns["explained_variance"] = np.where(DONE < 0.5, 0.5, 0.1)
    columns["v_loss"] = np.where(DONE < 0.1, 0.5, 0.01)
    causes = {one.name: one.severity for one in diagnose(make(columns)).findings}
    assert causes == {"slow-drift": "bad", "critic-bottleneck": "note"}


def test_behind_is_enough_for_one_cause_only() -> None:
    log = make(with_(scored(BEHIND), reward_clipped_frac=noisy(0.8, 0.02), mean_ep_return=noisy(-5.0, 0.3)))
    assert [one.name for one in diagnose(log).findings] == ["reward-saturation"]
