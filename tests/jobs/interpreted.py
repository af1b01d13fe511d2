"""Small runs of everything, printed as digests: the same with and without compilation.

NUMBA_DISABLE_JIT=1 python interpreted.py
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[2])]

from pointsman.envs.jobs import JobsEnv, JobsSpec  # noqa: E402
from pointsman.evaluation.jobs import JobsJudge  # noqa: E402
from pointsman.jobs.observation import LOOKAHEADS  # noqa: E402

SMALL = {"num_gpus": 4, "window": 5, "workload": {"num_jobs": 12}, "warmup_steps": 10}


def digests() -> list[str]:
    """Of what every heuristic earns, and of what random actions show and pay in every mode."""
    judge = JobsJudge(JobsSpec.model_validate(SMALL))
    found = [digest(judge.play(name, range(2))["return"]) for name in judge.heuristics]
    for lookahead in LOOKAHEADS:
        env = JobsEnv(JobsSpec.model_validate(SMALL | {"lookahead": lookahead}), 2)
        seen, rng = env.reset(0), np.random.default_rng(0)
        rows = [*seen]
        for _ in range(30):
            step = env.step(rng.integers(0, 6, 2))
            rows += [*(array.copy() for array in step.observation), step.reward, step.elapsed_s]
        found.append(digest(*rows))
    return found


def digest(*arrays: np.ndarray) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]


if __name__ == "__main__":
    sys.stdout.write("\n".join(digests()))
