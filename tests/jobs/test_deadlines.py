"""Deadlines: who gets one, when it counts as missed, what that costs, and who sees it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pointsman.envs.jobs import JobsEnv, JobsSpec, make_clusters
from pointsman.errors import InputError
from pointsman.evaluation.jobs import JobsJudge, JobsSelection, measure_deadlines
from pointsman.jobs.clusters import JobClusters, JobPolicyTables
from pointsman.jobs.heuristics import HEURISTICS
from pointsman.jobs.observation import sees_deadlines
from pointsman.jobs.rollout import decide_all, play_all
from pointsman.jobs.state import CUT_OFF, TERMS
from pointsman.jobs.workload import JobsWorkloadSpec, draw_jobs
from pointsman.spec import parse_spec

SLACK = [2.0, 30.0]
TIGHT: dict[str, Any] = {"num_gpus": 4, "window": 8, "workload": {"num_jobs": 40, "deadline_slack": SLACK}}
SEEDS = range(40)


def make_spec(**fields: Any) -> JobsSpec:
    return parse_spec(JobsSpec, TIGHT | fields, "env")


def played(name: str, spec: JobsSpec) -> JobClusters:
    clusters = make_clusters(spec, len(SEEDS))
    for i, seed in enumerate(SEEDS):
        clusters.load(i, draw_jobs(spec.workload, spec.num_gpus, seed), seed)
    to_the_end = np.full(len(SEEDS), spec.max_steps)
    tables = JobPolicyTables(name, len(SEEDS), spec.window)
    play_all(clusters.sims, tables.rows, to_the_end, 0, len(SEEDS))
    return clusters


# Who has one ------------------------------------------------------------------------------------------------


def test_drawn_deadlines_change_nothing_else() -> None:
    plain = draw_jobs(JobsWorkloadSpec(), 8, 3)
    jobs = draw_jobs(JobsWorkloadSpec(deadline_slack=(2.0, 30.0)), 8, 3)
    assert not plain.has_deadlines and jobs.has_deadlines
    for field in fields(plain):
        if field.name != "deadline_at":
            assert np.array_equal(getattr(plain, field.name), getattr(jobs, field.name))
    slack = (jobs.deadline_at - jobs.arrived_at) / jobs.duration_s
    assert 2 <= slack.min() < 3 and 29 < slack.max() <= 30
    assert slack.mean() == pytest.approx(16, abs=1.5)


@pytest.mark.parametrize("slack", [[0.5, 2], [3, 2]])
def test_a_range_that_is_none(slack: list[float]) -> None:
    with pytest.raises(InputError, match=r"workload\.deadline_slack = .*: is not a range from 1 up"):
        parse_spec(JobsWorkloadSpec, {"deadline_slack": slack}, "workload")


def test_jobs_of_a_trace_keep_theirs_and_others_get_drawn_ones(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text("submitted_at,duration_s,gpus,deadline\n100,10,1,160\n110,10,1,\n120,10,1,125\n")
    spec = parse_spec(JobsWorkloadSpec, {"trace": str(path)}, "workload")
    assert draw_jobs(spec, 8, 0).deadline_at.tolist() == [60, np.inf, 25]
    drawn = draw_jobs(spec.model_copy(update={"deadline_slack": (3.0, 3.0)}), 8, 0)
    assert drawn.deadline_at.tolist() == [60, 40, 25]


# What it costs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(HEURISTICS))
@pytest.mark.parametrize("horizon_slack", [1.3, 0.5], ids=["done", "cut off"])
def test_missed_is_what_ends_too_late_or_never_starts(name: str, horizon_slack: float) -> None:
    clusters = played(name, make_spec(horizon_slack=horizon_slack))
    found = measure_deadlines(clusters)
    for i, (sim, jobs) in enumerate(zip(clusters.sims, clusters.jobs, strict=True)):
        is_started = jobs["started_at"] >= 0
        ends_at = jobs["started_at"] + jobs["duration_s"]
        is_late = ~is_started | (ends_at > jobs["deadline_at"])
        assert found["missed_deadlines"][i] == is_late.mean()
        lateness = [
            max(0.0, (end if started else sim.now) - deadline)
            for end, started, deadline in zip(ends_at, is_started, jobs["deadline_at"], strict=True)
        ]
        assert found["lateness_s"][i] == pytest.approx(np.mean(lateness))
    assert 0 < found["missed_deadlines"].mean() < 1
    assert horizon_slack == 1.3 or (clusters.sims.status == CUT_OFF).any()


def test_a_miss_costs_its_share_of_the_price() -> None:
    """No heuristic knows the price, so that all else is the same."""
    free, dear = (JobsJudge(make_spec(deadline_price=price)).play("sjf", SEEDS) for price in (0.0, 3.0))
    assert free["missed_deadlines"].std() > 0
    assert dear["return"] == pytest.approx(free["return"] - 3.0 * free["missed_deadlines"])


def test_a_miss_is_paid_when_it_becomes_certain() -> None:
    """A job of 10 s that should end at 30 s is lost at the first event after 20 s, though it ends later."""
    workload = JobsWorkloadSpec(num_jobs=3)
    spec = make_spec(num_gpus=1, workload=workload.model_dump())
    jobs = draw_jobs(workload, 1, 0)
    jobs.arrived_at[:], jobs.duration_s[:] = [0, 1, 2], [15, 10, 20]
    jobs.deadline_at[:] = [15, 30, np.inf]
    clusters = make_clusters(spec, 1)
    clusters.load(0, jobs, 0)
    sim, paid = clusters.sims[0], []
    # The first job as it arrives; the third when that is done; the second last.
    for action in (0, 1, 0, 0, 2, 1):
        decide_all(clusters.sims, np.array([action]), False, 0, 1)
        paid.append((float(sim.now), float(sim.missed)))
    assert paid == [(0, 0), (1, 0), (2, 0), (15, 0), (35, -0.5), (45, 0)]
    assert (sim.num_completed, sim.num_missed) == (3, 1)


def test_earliest_deadline_misses_fewer_than_who_does_not_look() -> None:
    names = ("earliest-deadline", "fifo", "random-feasible", "wide-and-short")
    ours, *others = (
        measure_deadlines(played(name, make_spec()))["missed_deadlines"].mean() for name in names
    )
    assert ours < 0.9 * min(others)


def test_without_deadlines_it_is_fifo_and_nobody_is_shown_it() -> None:
    judge = JobsJudge(JobsSpec())
    ours, fifo = (judge.play(name, range(5)) for name in ("earliest-deadline", "fifo"))
    assert np.array_equal(ours["return"], fifo["return"])
    assert "missed_deadlines" not in ours
    assert "earliest-deadline" not in judge.rivals
    assert "earliest-deadline" in judge.heuristics
    assert "earliest-deadline" in JobsJudge(make_spec()).rivals


# Who sees it ------------------------------------------------------------------------------------------------


def test_features_and_terms_come_with_deadlines() -> None:
    plain, env = JobsEnv(JobsSpec(), 1), JobsEnv(make_spec(), 4)
    assert not sees_deadlines(plain.space) and sees_deadlines(env.space)
    assert not sees_deadlines(JobsEnv(make_spec(features="original"), 1).space)
    seen, rng, episodes = env.reset(0), np.random.default_rng(0), []
    missed = np.zeros(4)
    plain.reset(0)
    assert set(plain.step(np.zeros(1, np.int64)).terms) == set(TERMS)
    while len(episodes) < 8:
        step = env.step(np.array([rng.choice(np.flatnonzero(mask)) for mask in seen.action_mask]))
        seen, missed = step.observation, missed + step.terms["missed"]
        for episode in step.episodes:
            assert episode.metrics["missed_deadlines"] == pytest.approx(-missed[episode.env], abs=1e-5)
            missed[episode.env] = 0.0
        episodes += step.episodes


def test_a_curriculum_cannot_add_what_is_not_observed() -> None:
    env = JobsEnv(parse_spec(JobsSpec, TIGHT | {"workload": {"num_jobs": 40}}, "env"), 1)
    with pytest.raises(InputError, match=r"difficulty\.deadline_slack = .*: env\.workload has none"):
        env.set_difficulty({"deadline_slack": SLACK})
    JobsEnv(make_spec(), 1).set_difficulty({"deadline_slack": [20.0, 30.0]})


def test_the_trainer_is_told_of_misses() -> None:
    select = JobsSelection(make_spec(evaluation={"blocks": 2, "episodes": 3}))
    assert "earliest-deadline" in select.baselines
    assert "earliest-deadline" not in JobsSelection(JobsSpec(evaluation={"episodes": 1})).baselines
