"""Environments that can be brought back to where they were.

Their state cannot be saved, but it follows from the seed of the last reset and the actions since: those are
kept, and played again. So is who was asked for advice: teachers that take turns or draw lots go on with it.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pointsman.envs.entity import Bools, EntityEnv, Observation, Step


class EnvRecording(NamedTuple):
    seed: int
    difficulty: dict[str, Any]  # before the reset
    changes: list[tuple[int, dict[str, Any]]]  # of the difficulty since: (steps done, what was set)
    actions: list[NDArray[np.int16]]  # [steps, N] each
    asked: list[tuple[int, int]]  # (steps done, teacher)


class RecordedEnv:
    """`restart` it before the first step."""

    observation: Observation  # what is to be acted on
    is_start: Bools  # [N] an episode begins with it

    def __init__(self, env: EntityEnv) -> None:
        self.env = env
        self.difficulty: dict[str, Any] = {}  # as set last
        self._forget(0)

    def _forget(self, seed: int) -> None:
        self._recording = EnvRecording(seed, dict(self.difficulty), [], [], [])
        self._rows: list[NDArray[np.int16]] = []  # actions [N] that are not yet in the recording
        self._num_steps = 0

    @property
    def recording(self) -> EnvRecording:
        """As it is now. It is asked for after every update, and makes a block of the actions since then:
        to put all rows together each time would take ten milliseconds in the end."""
        if self._rows:
            self._recording.actions.append(np.stack(self._rows))
            self._rows = []
        return self._recording

    def restart(self, seed: int) -> None:
        """Start all environments anew, and the recording with them."""
        self.observation = self.env.reset(seed)
        self.is_start = np.ones(self.env.num_envs, np.bool_)
        self._forget(seed)

    def set_difficulty(self, difficulty: dict[str, Any]) -> None:
        self.difficulty = difficulty
        self.env.set_difficulty(difficulty)
        self._recording.changes.append((self._num_steps, difficulty))

    def advise(self, teacher: int) -> NDArray[np.int64]:
        self._recording.asked.append((self._num_steps, teacher))
        return self.env.advise(teacher)

    def step(self, actions: NDArray[np.int64]) -> Step:
        self._rows.append(actions.astype(np.int16))
        self._num_steps += 1
        step = self.env.step(actions)
        self.observation, self.is_start = step.observation, step.terminated | step.truncated
        return step

    def play(self, recording: EnvRecording) -> None:
        """Go to where the recording ends."""
        if recording.difficulty:
            self.set_difficulty(recording.difficulty)
        self.restart(recording.seed)
        changes, asked = dict(recording.changes), deque(recording.asked)
        for step, actions in enumerate(row for block in recording.actions for row in block):
            if step in changes:
                self.set_difficulty(changes[step])
            while asked and asked[0][0] == step:
                self.advise(asked.popleft()[1])
            self.step(actions.astype(np.int64))
