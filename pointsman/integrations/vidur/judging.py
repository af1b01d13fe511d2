"""How good a policy is on Vidur: what it saves of the cost of least-outstanding, on the same arrivals.

A return is that share: 0.1 is a tenth less. Policies decide by arg-max, through the router's own books.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from pointsman.evaluation.returns import RETURN, Metrics
from pointsman.experiments.scenarios import SELECTION_SEEDS
from pointsman.inference.checkpoint import Checkpoint, save_checkpoint
from pointsman.integrations.vidur.spec import BASELINE, VidurSpec, spent
from pointsman.routing.heuristics import HEURISTICS

Floats = NDArray[np.float64]


class VidurJudge:
    """A `Judge`: an episode a seed."""

    baseline = BASELINE
    heuristics: Mapping[str, str] = {name: one.what for name, one in HEURISTICS.items()}
    rivals: Sequence[str] = ("round-robin", BASELINE, "late-binding")
    num_episodes = 8
    headers: Mapping[str, str] = {
        "e2e_mean_s": "e2e mean",
        "e2e_p99_s": "e2e P99",
        "ttft_mean_s": "TTFT mean",
        "ttft_p99_s": "TTFT P99",
    }

    def __init__(self, spec: VidurSpec) -> None:
        self.spec = spec
        self._costs: dict[int, float] = {}  # of the baseline, by seed

    def play(self, policy: str | Checkpoint, seeds: Sequence[int], where: str = "policy") -> Metrics:
        with _named(policy) as name:
            played = [self.spec.cluster(seed, name).play() for seed in seeds]
        found = [self._measures(times, seed) for times, seed in zip(played, seeds, strict=True)]
        return {metric: np.array([one[metric] for one in found]) for metric in found[0]}

    def _measures(self, times: Floats, seed: int) -> dict[str, float]:
        e2e_s, ttft_s = times[:, 2] - times[:, 0], times[:, 1] - times[:, 0]
        measured = {RETURN: 1.0 - self._cost(times) / self._baseline_cost(seed)}
        for name, values in (("e2e", e2e_s), ("ttft", ttft_s)):
            measured[f"{name}_mean_s"] = float(values.mean())
            measured[f"{name}_p99_s"] = float(np.percentile(values, 99))
        return measured

    def _baseline_cost(self, seed: int) -> float:
        if seed not in self._costs:
            self._costs[seed] = self._cost(self.spec.cluster(seed, BASELINE).play())
        return self._costs[seed]

    def _cost(self, times: Floats) -> float:
        return float(self.spec.weights @ spent(times, np.inf))


@contextmanager
def _named(policy: str | Checkpoint) -> Iterator[str]:
    """A name that a `Core` takes: a checkpoint gets a file for as long as it is played."""
    if isinstance(policy, str):
        yield policy
        return
    with TemporaryDirectory() as folder:
        path = Path(folder) / "policy.safetensors"
        save_checkpoint(path, policy)
        yield str(path)


class VidurSelection:
    """An `Evaluate` for the trainer, on selection seeds."""

    def __init__(self, spec: VidurSpec) -> None:
        self._judge = VidurJudge(spec)
        self._seeds = SELECTION_SEEDS[: spec.evaluation.seeds]

    @cached_property
    def _rivals(self) -> dict[str, float]:
        """Returns."""
        names = [name for name in self._judge.rivals if name != BASELINE]
        return {name: float(self._judge.play(name, self._seeds)[RETURN].mean()) for name in names}

    def __call__(self, checkpoint: Checkpoint) -> dict[str, float]:
        played = self._judge.play(checkpoint, self._seeds)
        returns = played[RETURN]
        metrics = {f"eval_{name}": float(played[name].mean()) for name in self._judge.headers}
        metrics |= {f"eval_block{k}_return": float(value) for k, value in enumerate(returns)}
        metrics |= {f"eval_{name}_return": value for name, value in self._rivals.items()}
        mean = float(returns.mean())
        metrics |= {"eval_min_block_return": float(returns.min()), "eval_mean_return": mean}
        return metrics | {"eval_baseline_score": 0.0, "eval_score": mean}


def make_evaluate(spec: VidurSpec) -> VidurSelection:
    return VidurSelection(spec)


def make_judge(spec: VidurSpec) -> VidurJudge:
    return VidurJudge(spec)
