from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pointsman.training.recorded import EnvRecording, RecordedEnv

from .fakes import FakeEnv, FakeSpec


class InTurn(FakeEnv):
    """Its teachers take turns from one advice to the next."""

    def reset(self, seed: int) -> Any:
        self.turn = 0
        return super().reset(seed)

    def advise(self, teacher: int) -> NDArray[np.int64]:
        self.turn += 1 + teacher
        return np.full(self.num_envs, 1 + self.turn % 2)


def test_environments_and_teachers_are_brought_back_to_where_they_were() -> None:
    first, second = (RecordedEnv(InTurn(FakeSpec(episode_steps=7), 3)) for _ in range(2))
    first.set_difficulty({"entities": 3})
    first.restart(5)
    for t in range(20):
        advice = [first.advise(teacher) for teacher in (0, 1)] if t % 3 else []
        first.step(advice[0] if advice else np.ones(3, np.int64))
        if t == 8:  # as after an update: the rest comes as another block
            assert [len(block) for block in first.recording.actions] == [9]
    assert [len(block) for block in first.recording.actions] == [9, 11]
    # As it is saved: actions as arrays, the rest as JSON.
    plain = json.loads(json.dumps(first.recording._replace(actions=[])))
    second.play(EnvRecording(*plain)._replace(actions=first.recording.actions))
    assert isinstance(first.env, InTurn) and isinstance(second.env, InTurn)
    assert second.env.turn == first.env.turn > 0
    np.testing.assert_array_equal(second.observation.entities, first.observation.entities)
    assert json.dumps(second.recording._replace(actions=[])) == json.dumps(
        first.recording._replace(actions=[])
    )
