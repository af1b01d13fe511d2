"""What a run leaves in the end: the average of its best policies, if it is asked to.

The best of a hundred evaluations is a lucky one where what they are judged by is uncertain, a trace for
example. The average of several of the best ones owes less to luck. Learning moves in small steps, so that its
policies lie near each other and their average is one of them; that is checked, as it is not so after a jump.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pointsman.inference.checkpoint import Checkpoint, load_checkpoint

LEAST_GAIN_KEPT = 0.5  # of the score that training gained; with less, it is none of the good policies


class Average(NamedTuple):
    policy: Checkpoint
    updates: list[int]  # of the policies averaged
    metrics: dict[str, float]


def average_of_best(
    checkpoints: Path,
    count: int,
    first_score: float,
    evaluate: Callable[[Checkpoint], dict[str, float]],
) -> Average | None:
    """From the policies kept on the way; None if there are too few, or if their average is not as good."""
    kept = [load_checkpoint(path) for path in sorted(checkpoints.glob("update-*.safetensors"))]
    best = sorted(kept, key=_score, reverse=True)[:count]
    if len(best) < count:
        return None
    policy = replace(best[0], arrays=_mean([one.arrays for one in best]))
    metrics = evaluate(policy)
    gained, best_gained = metrics["eval_score"] - first_score, _score(best[0]) - first_score
    if gained < LEAST_GAIN_KEPT * best_gained:
        return None
    return Average(policy, sorted(int(one.metadata["update"]) for one in best), metrics)


def _score(checkpoint: Checkpoint) -> float:
    return float(checkpoint.metadata["metrics"].get("eval_score", -np.inf))


def _mean(parts: list[Mapping[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """The mean of what is a number; counts stay those of the first."""
    mean = dict(parts[0])
    for name, array in mean.items():
        if np.issubdtype(array.dtype, np.floating):
            stacked = np.stack([part[name] for part in parts]).astype(np.float64)
            mean[name] = np.asarray(stacked.mean(0), array.dtype)
    return mean
