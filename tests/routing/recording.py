"""A simulated run as a router sees it: what it sends, each token, each end, each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from simulator.factories import Run

from pointsman.routing.books import Books
from pointsman.routing.calibration import FIGURES
from pointsman.routing.features import CONTEXT_FEATURES, ENTITY_FEATURES
from pointsman.routing.signals import SCRAPED_AT, SCRAPED_KV_USE, SCRAPED_RUNNING, SCRAPED_WAITING
from pointsman.simulator.privileged import PRIVILEGED_FEATURES
from pointsman.simulator.run import look
from pointsman.simulator.spec import ClusterSpec
from pointsman.workload import Workload

FIRST_TOKEN, TOKEN, FINISH = range(3)


@dataclass
class Decision:
    """A decision of the simulated router, and what it saw."""

    at: float
    request: int
    action: int
    arrived_at: float
    queue_size: int
    signals: np.ndarray  # [NUM_SIGNALS, R]
    entities: np.ndarray
    context: np.ndarray
    legal: np.ndarray


@dataclass
class Recording:
    plans: list[Any]
    num_prefill: np.ndarray
    num_decode: np.ndarray
    max_hold_s: float
    decisions: list[Decision] = field(default_factory=list)
    stream: list[tuple[float, int, int]] = field(default_factory=list)  # time, what, request


def record(
    cluster: ClusterSpec, workload: Workload, decide: Callable[[Decision, np.random.Generator], int]
) -> Recording:
    run = Run(cluster, workload, None, num_logged_batches=200_000)
    run.policies.rows.may_hold = True
    run.policies.rows.kv_limit = 0.95
    run.policies.rows.prefill_limit = 2048.0
    rng = np.random.default_rng(7)
    recording = Recording(
        run.plans, workload.num_prefill_tokens, workload.num_decode_tokens, cluster.hold.max_hold_s
    )
    num_replicas = cluster.num_replicas
    entities = np.zeros((1, num_replicas, len(ENTITY_FEATURES)), np.float32)
    context = np.zeros((1, len(CONTEXT_FEATURES)), np.float32)
    legal = np.zeros((1, num_replicas + 1), np.bool_)
    privileged = np.zeros((1, len(PRIVILEGED_FEATURES)), np.float32)
    sims = run.clusters.sims
    for request in run.decisions():
        look(sims, run.policies.rows, sims, entities, context, legal, privileged, 0, 1)
        at = float(run.sim.now)
        decision = Decision(
            at,
            request,
            0,
            float(run.requests["arrived_at"][request]),
            int(run.sim.router.queue_size),
            run.table.copy(),
            entities[0].copy(),
            context[0].copy(),
            legal[0].copy(),
        )
        run.action = decision.action = decide(decision, rng)
        recording.decisions.append(decision)
    assert run.sim.num_preemptions == 0, "a preempted stream pauses in ways that the batch log does not show"
    recording.stream = sorted(stream_of(run))
    return recording


def stream_of(run: Run) -> Iterator[tuple[float, int, int]]:
    """Without memory pressure every stream of a replica has a token at the end of each of its batches."""
    log = run.batch_log[: run.sim.num_logged_batches]
    for i, request in enumerate(run.requests):
        ends = log["ended_at"][log["replica"] == request.replica]
        times = ends[(ends > request.first_token_at) & (ends <= request.completed_at)]
        assert len(times) == request.num_decode - 1
        yield float(request.first_token_at), FIRST_TOKEN, i
        for time in times:
            yield float(time), TOKEN, i
        yield float(request.completed_at), FINISH, i


def replay(recording: Recording, books: Books, is_calibrated: bool = True) -> Iterator[Decision]:
    """Book everything up to each decision in turn; the decision is booked when the next one is asked for."""
    for k, plan in enumerate(recording.plans):
        told = {name: getattr(plan, name) for name in FIGURES} if is_calibrated else None
        assert books.add(f"replica {k}", told) == k
    if is_calibrated:  # the simulator does not doubt it
        books._recalibrate = lambda now: None  # type: ignore[method-assign]
    tickets: dict[int, int] = {}
    scraped_at = 0.0
    stream = iter(recording.stream)
    event = next(stream, None)
    for decision in recording.decisions:
        while event is not None and event[0] <= decision.at:
            time, what, i = event
            if what == FIRST_TOKEN:
                books.first_token(tickets[i], time)
            elif what == TOKEN:
                books.tokens(tickets[i], 1, time)
            else:
                usage = int(recording.num_prefill[i]), int(recording.num_decode[i])
                books.finished(tickets[i], time, *usage)
            event = next(stream, None)
        if decision.signals[SCRAPED_AT, 0] != scraped_at:
            scraped_at = float(decision.signals[SCRAPED_AT, 0])
            for k in range(len(recording.plans)):
                gauges = decision.signals[(SCRAPED_RUNNING, SCRAPED_WAITING, SCRAPED_KV_USE), k]
                books.scraped(k, *gauges.tolist(), scraped_at)
        yield decision
        if decision.action > 0:
            i = decision.request
            tickets[i] = books.sent(decision.action - 1, int(recording.num_prefill[i]), decision.at)
