"""Joint length distributions as small tables: two marginals and how their ranks go together.

A marginal is its quantiles at fixed levels, so repeated lengths (a system prompt, a context limit) stay
atoms. The dependence is a checkerboard copula: how many requests of the source fall in each cell of a grid
over (rank of the prompt, rank of the output). Sampling draws a cell and a point in it, and maps both ranks
through the marginals: these come out as they were, and so does what the grid resolves of their dependence.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from pointsman.workload.spec import NamedDistribution

NUM_CELLS = 64
# Even steps of 0.1 %, and finer ones in the upper tail, where the long requests are.
LEVELS = np.concatenate((np.linspace(0.0, 0.999, 1000), 1.0 - np.geomspace(0.0008, 0.0001, 8), [1.0]))


@dataclass(frozen=True)
class LengthTable:
    source: str
    num_requests: int
    prompt_tokens: NDArray[np.float64]  # [len(LEVELS)] quantiles
    output_tokens: NDArray[np.float64]  # [len(LEVELS)] quantiles
    cell_counts: NDArray[np.int64]  # [NUM_CELLS * NUM_CELLS] requests by (prompt rank, output rank)

    def sample(
        self, num_requests: int, rng: np.random.Generator
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        shares = np.cumsum(self.cell_counts)
        cell = np.searchsorted(shares, rng.random(num_requests) * shares[-1], side="right")
        prompt_rank = (cell // NUM_CELLS + rng.random(num_requests)) / NUM_CELLS
        output_rank = (cell % NUM_CELLS + rng.random(num_requests)) / NUM_CELLS
        return _at(prompt_rank, self.prompt_tokens), _at(output_rank, self.output_tokens)

    def to_json(self) -> str:
        lists = {
            "source": self.source,
            "num_requests": self.num_requests,
            "prompt_tokens": self.prompt_tokens.astype(int).tolist(),
            "output_tokens": self.output_tokens.astype(int).tolist(),
            "cell_counts": self.cell_counts.tolist(),
        }
        return json.dumps(lists, separators=(",", ":")) + "\n"


@cache
def load_table(name: NamedDistribution) -> LengthTable:
    text = resources.files("pointsman.workload").joinpath("data", f"{name}.json").read_text("utf-8")
    data = json.loads(text)
    return LengthTable(
        source=data["source"],
        num_requests=data["num_requests"],
        prompt_tokens=np.array(data["prompt_tokens"], dtype=np.float64),
        output_tokens=np.array(data["output_tokens"], dtype=np.float64),
        cell_counts=np.array(data["cell_counts"], dtype=np.int64),
    )


def _at(rank: NDArray[np.float64], quantiles: NDArray[np.float64]) -> NDArray[np.int32]:
    return np.rint(np.interp(rank, LEVELS, quantiles)).astype(np.int32)
