"""The compiled cluster does what the slow, obvious one does: every step, on any settings, by any actions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.jobs.clusters import JobPolicyTables
from pointsman.jobs.heuristics import HEURISTICS
from pointsman.jobs.observation import LOOKAHEADS
from pointsman.jobs.rollout import advise

from .factories import Pair, random_jobs, reference

MAX_STEPS = 120

pairs = st.fixed_dictionaries(
    {
        "num_jobs": st.integers(1, 40),
        "num_gpus": st.integers(1, 12),
        "window": st.integers(1, 12),
        "seed": st.integers(0, 1 << 32),
        "has_ties": st.booleans(),
        "max_steps": st.sampled_from([10, MAX_STEPS]),
        "slack": st.sampled_from([0.3, 1.3, 5.0]),
        "noop_price": st.sampled_from([0.05, -0.1]),
        "has_deadlines": st.booleans(),
    }
)


def make_pair(drawn: dict[str, Any]) -> Pair:
    kinds = {name: drawn[name] for name in ("has_ties", "has_deadlines")}
    jobs = random_jobs(drawn["num_jobs"], drawn["num_gpus"], drawn["seed"], **kinds)
    return Pair(
        jobs,
        num_gpus=drawn["num_gpus"],
        window=drawn["window"],
        max_steps=drawn["max_steps"],
        horizon_slack=drawn["slack"],
        noop_price=drawn["noop_price"],
        deadline_price=0.7,
    )


def any_action(pair: Pair, rng: np.random.Generator) -> int:
    """Mostly a job that fits, now and then nothing, or what is illegal."""
    legal = np.flatnonzero(pair.twin.legal())
    kind = rng.random()
    if kind < 0.15:
        return int(rng.integers(pair.spec.window + 1))
    return 0 if kind < 0.25 else int(legal[-1 - int(rng.integers(max(1, len(legal) - 1)))])


def assert_same_outcome(ours: Any, twins: Any) -> None:
    assert (ours.all_done, ours.cut_off, ours.invalid) == (twins.all_done, twins.cut_off, twins.invalid)
    assert ours.elapsed == pytest.approx(twins.elapsed, rel=1e-12, abs=1e-9)
    assert ours.terms == pytest.approx(twins.terms, rel=1e-9, abs=1e-12)


def assert_same_view(pair: Pair, lookahead: str, has_all: bool, has_deadlines: bool = False) -> None:
    entities, context, is_there, legal = pair.look(lookahead, has_all, has_deadlines)
    shown = pair.twin.job_rows(has_all, has_all and has_deadlines)
    rows = np.array(shown, np.float64).reshape(-1, entities.shape[1])
    assert is_there.tolist() == [slot < len(rows) for slot in range(pair.spec.window)]
    assert legal.tolist() == pair.twin.legal()
    np.testing.assert_allclose(entities[: len(rows)], rows, rtol=1e-5, atol=1e-6)
    assert not entities[len(rows) :].any()
    np.testing.assert_allclose(context, pair.twin.context(lookahead, has_all), rtol=1e-5, atol=1e-6)


@settings(max_examples=100)
@given(pairs)
def test_every_step_agrees(drawn: dict[str, Any]) -> None:
    pair, rng = make_pair(drawn), np.random.default_rng(drawn["seed"])
    modes = list(LOOKAHEADS)
    is_over = False
    while not is_over:
        has_all, has_deadlines = (bool(flag) for flag in rng.integers(2, size=2))
        assert_same_view(pair, modes[int(rng.integers(4))], has_all, has_deadlines)
        action = any_action(pair, rng)
        ours, twins = pair.step(action), pair.twin.step(action)
        assert_same_outcome(ours, twins)
        is_over = twins.all_done or twins.cut_off
    assert sorted(pair.twin.started) == np.flatnonzero(pair.clusters.jobs[0]["started_at"] >= 0).tolist()


@settings(max_examples=40)
@given(pairs)
def test_skipping_forced_steps_changes_no_return(drawn: dict[str, Any]) -> None:
    """What a policy decides is the same; what comes between two decisions adds up."""
    pair, rng = make_pair(drawn), np.random.default_rng(drawn["seed"])
    twin = pair.twin
    is_over = False
    while not is_over:
        action = any_action(pair, rng)
        ours = pair.step(action, skips_forced=True)
        outcomes = [twin.step(action)]
        while not (outcomes[-1].all_done or outcomes[-1].cut_off or any(twin.legal()[1:])):
            outcomes.append(twin.step(0))
        terms = {name: sum(one.terms[name] for one in outcomes) for name in ours.terms}
        last = outcomes[-1]
        elapsed = sum(one.elapsed for one in outcomes)
        assert_same_outcome(ours, last._replace(terms=terms, elapsed=elapsed, invalid=outcomes[0].invalid))
        is_over = last.all_done or last.cut_off


@pytest.mark.parametrize("name", list(reference.HEURISTICS))
def test_heuristics_agree(name: str) -> None:
    """Along what each leads to, and along chance."""
    tables = JobPolicyTables(name, 1, window=8)
    choose = reference.HEURISTICS[name]
    num_jobs_started = 0
    for seed in range(20):
        for follows in (True, False):
            jobs = random_jobs(30, 6, seed, has_ties=seed % 2 == 0, has_deadlines=seed % 4 < 2)
            pair, rng = Pair(jobs, num_gpus=6, window=8, max_steps=200), np.random.default_rng(seed)
            outcome = None
            while outcome is None or not (outcome.all_done or outcome.cut_off):
                ours = np.zeros(1, np.int64)
                advise(pair.clusters.sims, tables.rows, ours, 0, 1)
                assert ours[0] == choose(pair.twin)
                action = int(ours[0]) if follows else any_action(pair, rng)
                num_jobs_started += action > 0
                pair.step(action)
                outcome = pair.twin.step(action)
    assert num_jobs_started > 500


def test_all_heuristics_but_chance_have_a_twin() -> None:
    assert set(HEURISTICS) - set(reference.HEURISTICS) == {"random-feasible"}


@pytest.mark.parametrize(
    "change",
    [
        {"noop_price": 0.04},
        {"deadline_price": 0.9},
        {"num_gpus": 7},
        {"window": 5},
        {"longest": 9_999.0},
        {"slack": 1.31},
    ],
    ids=str,
)
def test_a_twin_of_another_cluster_would_be_noticed(change: dict[str, float]) -> None:
    pair = Pair(random_jobs(30, 6, 0, has_deadlines=True), num_gpus=8, window=6)
    rng = np.random.default_rng(0)
    for name, value in change.items():
        setattr(pair.twin, name, value)
    pair.twin.__post_init__()
    with pytest.raises(AssertionError):
        for _ in range(60):
            assert_same_view(pair, "sorted", has_all=True)
            action = any_action(pair, rng)
            assert_same_outcome(pair.step(action), pair.twin.step(action))
