"""When GPUs are free, told in as many numbers as a policy knows."""

from __future__ import annotations

import numpy as np
import pytest

from pointsman.envs.jobs import JobsSpec, make_clusters
from pointsman.jobs.clusters import JobPolicyTables
from pointsman.jobs.observation import LOOKAHEADS, job_space, lookahead_size
from pointsman.jobs.rollout import look, play_all
from pointsman.jobs.table import Floats
from pointsman.jobs.workload import draw_jobs

NUM_GPUS, NUM_CLUSTERS, STEPS = 6, 20, 40


def contexts(size: int, lookahead: str, has_all: bool) -> Floats:
    """[N, C] of clusters that are busy, as seen by a policy that was trained with `size` GPUs."""
    spec = JobsSpec(num_gpus=NUM_GPUS, window=8)
    clusters = make_clusters(spec, NUM_CLUSTERS)
    for i in range(NUM_CLUSTERS):
        clusters.load(i, draw_jobs(spec.workload, NUM_GPUS, i), i)
    rows = JobPolicyTables("random-feasible", NUM_CLUSTERS, spec.window).rows
    play_all(clusters.sims, rows, np.full(NUM_CLUSTERS, STEPS), 0, NUM_CLUSTERS)
    space = job_space(size, 8, has_all)
    assert lookahead_size(space) == size
    context = np.zeros((NUM_CLUSTERS, len(space.context_features)), np.float32)
    look(
        clusters.sims,
        LOOKAHEADS[lookahead],
        np.zeros((NUM_CLUSTERS, 8, len(space.entity_features)), np.float32),
        context,
        np.zeros((NUM_CLUSTERS, 8), np.bool_),
        np.zeros((NUM_CLUSTERS, 9), np.bool_),
        np.zeros((NUM_CLUSTERS, len(space.privileged_features)), np.float32),
        0,
        NUM_CLUSTERS,
    )
    return context


@pytest.mark.parametrize("has_all", [False, True])
@pytest.mark.parametrize("size", [1, 3, 4, 6, 12])
def test_other_numbers_tell_the_same(size: int, has_all: bool) -> None:
    own = contexts(NUM_GPUS, "sorted", has_all)
    free_in = own[:, :NUM_GPUS]
    assert 0 < (free_in > 0).mean() < 1
    ends = [int(np.ceil((k + 1) * NUM_GPUS / size)) for k in range(size)]
    found = contexts(size, "sorted", has_all)
    assert np.array_equal(found[:, :size], free_in[:, [end - 1 for end in ends]])
    assert np.array_equal(found[:, size:], own[:, NUM_GPUS:])
    shares = np.stack([(free_in <= (k + 1) / size).mean(axis=1) for k in range(size)], axis=1)
    assert contexts(size, "cdf", has_all)[:, :size] == pytest.approx(shares)
    assert not contexts(size, "off", has_all)[:, :size].any()
