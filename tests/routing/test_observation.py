"""Every number that a policy may read is written, and says what its name says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simulator.factories import AdvisedRun, Run, make_cluster, make_policy, random_workload

from pointsman.routing import features
from pointsman.routing.books import Books
from pointsman.routing.core import Request
from pointsman.routing.decider import Decider
from pointsman.routing.features import CONTEXT_FEATURES, ENTITY_FEATURES
from pointsman.routing.heuristics import HEURISTICS
from pointsman.routing.policy import PolicySpec
from pointsman.routing.signals import DERIVED, EXPECTED_HIT_TOKENS, SCRAPED, SIGNALS, STATIC
from pointsman.simulator.privileged import PRIVILEGED_FEATURES
from pointsman.simulator.run import look
from pointsman.workload import Workload

ROWS = {
    source: [row for row, one in enumerate(SIGNALS) if one.source == source] for source in (DERIVED, SCRAPED)
}


def observed(run: Run) -> tuple[np.ndarray, ...]:
    """Entities, context, privileged features and legal actions, in arrays that were full of nonsense."""
    count = len(run.replicas)
    entities = np.full((1, count, len(ENTITY_FEATURES)), np.nan, np.float32)
    context = np.full((1, len(CONTEXT_FEATURES)), np.nan, np.float32)
    privileged = np.full((1, len(PRIVILEGED_FEATURES)), np.nan, np.float32)
    legal = np.full((1, count + 1), 7, np.uint8)
    sims = run.clusters.sims
    look(sims, run.policies.rows, sims, entities, context, legal, privileged, 0, 1)
    return entities, context, privileged, legal


def with_prefixes(workload: Workload) -> Workload:
    """Long prompts begin with one of three, of 32 tokens."""
    is_long = workload.num_prefill_tokens > 32
    num_links = int(is_long.sum())
    return replace(
        workload,
        chain_start=np.cumsum(is_long) - is_long,
        chain_length=is_long.astype(np.int32),
        answer_key=np.zeros(len(workload), np.int64),
        link_key=1 + np.arange(num_links) % 3,
        link_tokens=np.full(num_links, 32, np.int32),
    )


def test_every_feature_and_every_row_is_written() -> None:
    """At each decision of a run in which replicas fail, requests are held, and prefixes shared."""
    events = [{"at_s": 1.0, "kind": "fail", "replica": 0}, {"at_s": 2.0, "kind": "recover", "replica": 0}]
    scheduler = {"kind": "vllm-v1", "num_blocks": 40, "max_num_seqs": 8}
    cluster = make_cluster(replicas=3, scheduler=scheduler, events=events, hold={"max_hold_s": 0.5})
    run = AdvisedRun(cluster, with_prefixes(random_workload(300, 60.0)), make_policy("late-binding"))
    run.table[ROWS[SCRAPED]] = np.nan
    seen = []
    for _ in run.decisions():
        # Expected hits come with the question.
        run.table[[row for row in ROWS[DERIVED] if row != EXPECTED_HIT_TOKENS]] = np.nan
        numbers = observed(run)
        if run.sim.now > cluster.signals.scrape_interval_s + cluster.signals.scrape_delay_s:
            assert not np.isnan(run.table).any()
            for array in numbers:
                assert not np.isnan(array).any()
        assert set(np.unique(numbers[-1])) <= {0, 1}
        seen.append(run.table.copy())
        run.action = run.advice()
    values = np.array(seen)
    for row, signal in enumerate(SIGNALS):
        if signal.source == STATIC:
            assert (values[:, row] > 0).all(), signal.name
        else:
            assert len(np.unique(values[:, row])) > 1, signal.name  # it moved


def test_the_age_of_the_gauges_is_that_of_the_oldest_anybody_may_use() -> None:
    books = Books(now=0.0)
    for name in "abc":
        books.add(name)
    decider = Decider(books, "default")
    for slot, at in enumerate((9.5, 8.0, 6.0)):
        books.scraped(slot, 1.0, 1.0, 0.1, at)

    def age_s() -> float:
        context = decider.observe(Request(100, arrived_at=10.0), 1, 10.0)[1]
        return float(2.0 * (2.0 ** context[features.SCRAPE_AGE] - 1.0))

    assert age_s() == pytest.approx(4.0, rel=1e-5)
    books.set_accepting(2, False)
    assert age_s() == pytest.approx(2.0, rel=1e-5)
    books.set_accepting(1, False)
    assert age_s() == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("kind", HEURISTICS)
def test_every_heuristic_decides_something(kind: str) -> None:
    run = Run(make_cluster(replicas=3), random_workload(30, 60.0), kind).to_end()
    assert run.sim.num_completed == 30


@pytest.mark.parametrize("kind", [len(HEURISTICS), -3])
def test_a_heuristic_without_a_branch_is_an_error(kind: int) -> None:
    """And not silently another one."""
    run = Run(make_cluster(replicas=3), random_workload(30, 60.0), PolicySpec())
    run.policies.rows.kind = kind
    with pytest.raises(ValueError, match="without a score"):
        run.to_end()
