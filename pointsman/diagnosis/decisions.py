"""Logs with one row a decision, as home-made trainers write them: folded into windows of many decisions.

A single decision says next to nothing, its reward is mostly noise; a window has means, and shares of the
actions. Rows of another kind between the decisions (one an update, say) go to the window that they close. A
column that both kinds have (`reward`, `entropy`) is taken from the others: they have seen more.

Letters: U rows, W windows, A actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pointsman.diagnosis.curves import Array

MIN_DECISIONS = 40
PER_WINDOW = 25  # decisions, where there are few
MIN_WINDOWS, MAX_WINDOWS = 8, 60
MAX_ACTIONS = 256
MANY_REWARDS = 50  # different ones
MANY_ROWS = 20_000  # that many are folded though they name no action
NO_ENTITY = ("hold", "noop", "no-op", "no_op", "none", "wait", "skip")
LAST_COUNTS = ("timesteps", "fraction_done", "elapsed_s")  # the others: their mean
LARGEST_COUNTS = ("approx_kl_max",)


class Folded(NamedTuple):
    columns: dict[str, Array]  # [W]
    broken_at: dict[str, int]
    notes: tuple[str, ...]
    num_actions: int | None


def fold(
    columns: Mapping[str, Array],
    broken_at: Mapping[str, int],
    action_words: Mapping[int, str],
) -> Folded | None:
    """Shares of actions and means, window by window; None for a log with one row an update.
    `action_words`: by row, where actions have names instead of numbers."""
    num_rows = len(next(iter(columns.values()), ()))
    actions = _actions(columns.get("action"), action_words, num_rows)
    if actions is not None:
        of_decision = np.flatnonzero(actions.codes >= 0)
    elif num_rows > MANY_ROWS:
        of_decision = np.arange(num_rows)
    else:
        return None
    num_windows = min(max(len(of_decision) // PER_WINDOW, MIN_WINDOWS), MAX_WINDOWS)
    ends = np.array([part[-1] for part in np.array_split(of_decision, num_windows)])
    # What is logged after a window's last decision and before the next one closes the window.
    starts = of_decision[np.searchsorted(of_decision, ends[:-1], side="right")]
    place = np.searchsorted(starts, np.arange(num_rows), side="right")  # [U] window of each row
    is_decision = np.zeros(num_rows, bool)
    is_decision[of_decision] = True
    folded = {
        name: _fold_column(name, values, place, num_windows, is_decision)
        for name, values in columns.items()
        if name not in ("update", "action")
    }
    if not (np.diff(folded.get("timesteps", np.full(2, np.nan))) > 0).all():
        folded["timesteps"] = np.cumsum(np.bincount(place[of_decision], minlength=num_windows)).astype(float)
    num_actions = None
    what = "rows"
    if actions is not None:
        folded |= _shares(actions, of_decision, place, num_windows)
        folded |= _flat_rewards(columns.get("mean_ep_return"), of_decision, place, num_windows)
        num_actions, what = len(actions.names), "decisions"
    notes = (
        f"{len(of_decision):,} {what}, one a row, in {num_windows} windows of about "
        f"{len(of_decision) / num_windows:.0f}",
    )
    return Folded(folded, _broken(columns, broken_at, place, num_windows), notes, num_actions)


class _Actions(NamedTuple):
    codes: NDArray[np.int64]  # [U] indices into `names`; -1: no decision
    names: list[str]  # [A]
    is_entity: NDArray[np.bool_]  # [A]


def _actions(values: Array | None, words: Mapping[int, str], num_rows: int) -> _Actions | None:
    """None where the column does not hold one of a few actions a row."""
    if values is None:
        return None
    seen = np.isfinite(values)
    if words and not seen.any():
        texts = np.array([words.get(row, "") for row in range(num_rows)])
        seen = texts != ""
        names, inverse = np.unique(texts[seen], return_inverse=True)
        labels = [str(name) for name in names]
        is_entity = np.array([name.lower() not in NO_ENTITY for name in labels])
    else:
        if (values[seen] % 1 != 0).any():
            return None
        numbers, inverse = np.unique(values[seen], return_inverse=True)
        labels = [f"{number:g}" for number in numbers]
        is_entity = numbers >= 0  # -1 is how many write that nobody was chosen
    if seen.sum() < MIN_DECISIONS or not 1 < len(labels) <= min(MAX_ACTIONS, seen.sum() // 4):
        return None
    codes = np.full(num_rows, -1)
    codes[seen] = inverse
    return _Actions(codes, labels, is_entity)


def _fold_column(
    name: str, values: Array, place: NDArray[np.int64], num_windows: int, is_decision: NDArray[np.bool_]
) -> Array:
    seen = np.isfinite(values)
    of_others = seen & ~is_decision
    if len(np.unique(place[of_others])) > num_windows // 2:
        seen = of_others
    rows = np.flatnonzero(seen)
    folded = np.full(num_windows, np.nan)
    if name in LAST_COUNTS:
        folded[place[rows]] = values[rows]  # the last of several assignments stays
    elif name in LARGEST_COUNTS:
        np.fmax.at(folded, place[rows], values[rows])
    else:
        counts = np.bincount(place[rows], minlength=num_windows)
        sums = np.bincount(place[rows], weights=values[rows], minlength=num_windows)
        folded[counts > 0] = sums[counts > 0] / counts[counts > 0]
    return folded


def _shares(
    actions: _Actions, of_decision: NDArray[np.int64], place: NDArray[np.int64], num_windows: int
) -> dict[str, Array]:
    """The share of each action, and of doing nothing, among the decisions of a window."""
    counts = np.zeros((num_windows, len(actions.names)))
    np.add.at(counts, (place[of_decision], actions.codes[of_decision]), 1.0)
    shares = counts / counts.sum(axis=1, keepdims=True)
    entities = [i for i, is_entity in enumerate(actions.is_entity) if is_entity]
    columns = {f"action_share/{actions.names[i]}": shares[:, i] for i in entities}
    if entities:
        columns["action_frac_max"] = shares[:, entities].max(axis=1)
    if len(entities) < len(actions.names):
        columns["noop_frac"] = shares[:, ~actions.is_entity].sum(axis=1)
    return columns


def _flat_rewards(
    rewards: Array | None, of_decision: NDArray[np.int64], place: NDArray[np.int64], num_windows: int
) -> dict[str, Array]:
    """How many rewards are exactly 0, and how many lie exactly on the highest or lowest value of all, as
    clipped ones do. Nothing of rewards that take a few values only: there it says nothing."""
    if rewards is None:
        return {}
    rows = of_decision[np.isfinite(rewards[of_decision])]
    values = rewards[rows]
    if len(np.unique(values)) < MANY_REWARDS:
        return {}
    counts = np.bincount(place[rows], minlength=num_windows)
    is_clipped = (values == values.min()) | (values == values.max())

    def share(holds: NDArray[np.bool_]) -> Array:
        return np.asarray(
            np.bincount(place[rows], weights=holds, minlength=num_windows) / np.maximum(counts, 1)
        )

    return {"reward_clipped_frac": share(is_clipped), "reward_zero_frac": share(values == 0)}


def _broken(
    columns: Mapping[str, Array], broken_at: Mapping[str, int], place: NDArray[np.int64], num_windows: int
) -> dict[str, int]:
    """Columns that are no number any more at the end. Elsewhere NaN is how many write "not in this row"."""
    broken = {}
    for name in broken_at:
        seen = np.flatnonzero(np.isfinite(columns[name])) if name in columns else np.empty(0, int)
        if len(seen) and place[seen[-1]] < num_windows - 2:
            broken[name] = int(place[seen[-1]]) + 1
    return broken
