from __future__ import annotations

import math
from typing import Any

import pytest

from pointsman.errors import InputError
from pointsman.spec import Spec, parse_spec
from pointsman.training.schedules import Schedule, check_range, constant, linear


class Section(Spec):
    rate: Schedule = constant(1.0)


def read(value: Any) -> Schedule:
    return parse_spec(Section, {"rate": value}, "ppo").rate


@pytest.mark.parametrize(
    ("written", "start", "middle", "end"),
    [
        (0.25, 0.25, 0.25, 0.25),
        ("3e-4", 3e-4, 3e-4, 3e-4),
        ({"kind": "constant", "start": 2}, 2, 2, 2),
        ({"start": 1.5, "end": 1.0}, 1.5, 1.25, 1.0),
        ({"kind": "linear", "start": 0.0, "end": 4.0}, 0, 2, 4),
        ({"kind": "linear", "start": 0.05, "end": 0.0, "until": 0.25}, 0.05, 0, 0),
        ({"kind": "exponential", "start": 1e-2, "end": 1e-4}, 1e-2, 1e-3, 1e-4),
        ({"kind": "cosine", "start": 3.0, "end": 1.0}, 3, 2, 1),
        ({"kind": "piecewise", "points": [[0, 1], [0.25, 5], [0.75, 3], [0.9, 0]]}, 1, 4, 0),
    ],
)
def test_values_at_start_middle_and_end(written: Any, start: float, middle: float, end: float) -> None:
    schedule = read(written)
    assert schedule.value(0.0) == pytest.approx(start, rel=1e-12)
    assert schedule.value(0.5) == pytest.approx(middle, rel=1e-12, abs=1e-12)
    assert schedule.value(1.0) == pytest.approx(end, rel=1e-12, abs=1e-12)
    assert schedule.value(-0.1) == schedule.value(0.0), "before the start it stays"
    assert schedule.value(1.1) == schedule.value(1.0), "the last update may end late"


def test_kinds_differ_between_start_and_end() -> None:
    """A quarter of the way: else a linear one would pass for all of them in the middle or at the ends."""
    at_quarter = {
        kind: Schedule(kind=kind, start=4.0, end=1.0).value(0.25)  # type: ignore[arg-type]
        for kind in ("linear", "exponential", "cosine")
    }
    assert at_quarter["linear"] == pytest.approx(3.25)
    assert at_quarter["exponential"] == pytest.approx(4.0**0.75)
    assert at_quarter["cosine"] == pytest.approx(1 + 3 * (1 + math.sqrt(0.5)) / 2)


def test_what_is_written_beside_a_run_reads_back_the_same() -> None:
    for schedule in (
        constant(2.0),
        linear(1.0, 0.5, 0.3),
        read({"kind": "piecewise", "points": [[0, 1], [1, 2]]}),
    ):
        assert read(schedule.model_dump(mode="json")) == schedule


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("fast", ["ppo.rate", "fast", "number"]),
        (None, ["ppo.rate", "number"]),
        ({"kind": "linear", "start": 1.0}, ["ppo.rate", "linear needs start and end"]),
        ({"kind": "constant", "start": 1.0, "end": 2.0}, ["ppo.rate", "no end"]),
        ({"kind": "exponential", "start": 1.0, "end": 0.0}, ["ppo.rate", "above 0"]),
        ({"kind": "piecewise"}, ["ppo.rate", "points"]),
        ({"kind": "piecewise", "points": [[0.5, 1], [0.5, 2]]}, ["ppo.rate", "growing"]),
        ({"kind": "linear", "start": 1, "end": 2, "points": [[0, 1]]}, ["ppo.rate", "piecewise"]),
        ({"kind": "sawtooth", "start": 1, "end": 2}, ["ppo.rate.kind", "sawtooth", "cosine"]),
        ({"start": 1, "stop": 2}, ["ppo.rate.stop", "unknown key"]),
        ({"start": 1, "end": 2, "until": 0}, ["ppo.rate.until"]),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(written: Any, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        read(written)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_ranges_hold_for_the_whole_run() -> None:
    check_range("epsilon", linear(0.2, 0.0), 0.0, 1.0)
    for schedule in (linear(0.2, -0.1), read({"kind": "piecewise", "points": [[0, 0], [0.5, 2], [1, 0]]})):
        with pytest.raises(ValueError, match="epsilon must stay within 0 and 1"):
            check_range("epsilon", schedule, 0.0, 1.0)
