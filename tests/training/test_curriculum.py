from __future__ import annotations

from typing import Any

import pytest

from pointsman.errors import InputError
from pointsman.spec import parse_spec
from pointsman.training.curriculum import Curriculum, CurriculumSpec

from .fakes import FakeEnv, FakeSpec

TIMED = ({"difficulty": {"load": 0.5, "mix": 0}}, {"difficulty": {"load": 1.0}, "from_fraction": 0.4})
EARNED = (
    {"difficulty": {"load": 0.5}},
    {"difficulty": {"load": 0.8}, "from_metrics": {"eval_mean_return": 1.0}},
    {"difficulty": {"mix": 1}, "from_metrics": {"eval_mean_return": 2.0, "eval_score": 0.0}},
)


def make_curriculum(*stages: dict[str, Any]) -> Curriculum:
    return Curriculum(parse_spec(CurriculumSpec, {"stages": stages}))


def test_stages_by_time() -> None:
    curriculum = make_curriculum(*TIMED)
    assert curriculum.stage(0.0, {}) == {"load": 0.5, "mix": 0}
    assert curriculum.stage(0.39, {}) is None
    assert curriculum.stage(0.4, {}) == {"load": 1.0, "mix": 0}  # complete: what was set before stays
    assert curriculum.stage(0.9, {}) is None


def test_stages_earned_by_evaluations() -> None:
    curriculum = make_curriculum(*EARNED)
    curriculum.stage(0.0, {})
    assert curriculum.stage(0.5, {}) is None  # not evaluated yet
    assert curriculum.stage(0.5, {"eval_mean_return": 0.9, "eval_score": 9.0}) is None
    assert curriculum.stage(0.5, {"eval_mean_return": 1.0, "eval_score": -1.0}) == {"load": 0.8}
    assert curriculum.stage(0.5, {"eval_mean_return": 2.0, "eval_score": -1.0}) is None  # both are needed
    assert curriculum.stage(0.5, {"eval_mean_return": 2.0, "eval_score": 0.0}) == {"load": 0.8, "mix": 1}


def test_never_back_to_an_easier_stage() -> None:
    curriculum = make_curriculum(*EARNED)
    curriculum.stage(0.0, {})
    curriculum.stage(0.1, {"eval_mean_return": 1.5, "eval_score": 0.0})
    assert curriculum.stage(0.2, {"eval_mean_return": 0.0, "eval_score": 0.0}) is None
    assert curriculum.index == 1


def test_several_stages_at_once_are_all_taken() -> None:
    curriculum = make_curriculum(*EARNED)
    assert curriculum.stage(0.0, {"eval_mean_return": 5.0, "eval_score": 5.0}) == {"load": 0.8, "mix": 1}


def test_time_or_merit_whichever_comes_first() -> None:
    either = {"difficulty": {"load": 1.0}, "from_fraction": 0.5, "from_metrics": {"eval_score": 1.0}}
    for fraction, score in ((0.5, 0.0), (0.1, 1.0)):
        curriculum = make_curriculum(TIMED[0], either)
        curriculum.stage(0.0, {})
        assert curriculum.stage(fraction, {"eval_score": score}) is not None


def test_resumed_from_its_index_it_goes_on_as_if_never_stopped() -> None:
    whole = make_curriculum(*EARNED)
    history = [(t / 10, {"eval_mean_return": t / 4, "eval_score": 0.0}) for t in range(10)]
    expected = [whole.stage(*row) for row in history]
    assert sum(stage is not None for stage in expected) == 3
    for cut in range(1, 10):
        first, second = make_curriculum(*EARNED), make_curriculum(*EARNED)
        found = [first.stage(*row) for row in history[:cut]]
        second.index = first.index
        assert found + [second.stage(*row) for row in history[cut:]] == expected


def test_an_unknown_metric_is_an_error_and_not_a_stage_that_never_comes() -> None:
    """Said at the first evaluation, of the last stage too: not when it would be due, hours later."""
    curriculum = make_curriculum(*EARNED)
    with pytest.raises(InputError, match=r"stages\.1\.from_metrics.*eval_score"):
        curriculum.stage(0.0, {"eval_score": 1.0})
    with pytest.raises(InputError, match=r"stages\.2\.from_metrics.*eval_mean_return"):
        curriculum.stage(0.0, {"eval_mean_return": 0.0})


def test_a_bad_stage_is_found_before_training() -> None:
    class Strict(FakeEnv):
        def set_difficulty(self, difficulty: dict[str, Any]) -> None:
            if set(difficulty) - {"entities"}:
                raise InputError("difficulty", difficulty, "unknown", "known: entities")
            super().set_difficulty(difficulty)

    env = Strict(FakeSpec(entities=4), 2)
    make_curriculum({"difficulty": {"entities": 2}}).check(env)
    assert env.max_entities == 4  # as before
    late = {"difficulty": {"entitles": 3}, "from_fraction": 0.9}
    with pytest.raises(InputError, match="entitles"):
        make_curriculum({"difficulty": {"entities": 2}}, late).check(env)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], "stages"),
        ([{"difficulty": {}}], "difficulty"),
        ([{"difficulty": {"load": 1}, "from_fraction": 0.1}], "begins at once"),
        ([TIMED[0], {"difficulty": {"load": 1}}], "never begins"),
        ([*TIMED, {"difficulty": {"load": 2}, "from_fraction": 0.3}], "sort"),
        ([TIMED[0], {"difficulty": {"load": 2}, "from_fraction": 1.3}], "less than or equal to 1"),
    ],
)
def test_bad_curricula_are_named(stages: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_curriculum(*stages)
