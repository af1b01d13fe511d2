"""The live router's books against the simulator's, and what only happens to live ones."""

from __future__ import annotations

import numpy as np
import pytest
from simulator.factories import make_cluster, make_workload

from pointsman.errors import InputError
from pointsman.routing.books import FIRST_CAPACITY, Books
from pointsman.routing.core import Request
from pointsman.routing.decider import Decider
from pointsman.routing.signals import NUM_SIGNALS, OUTSTANDING, SIGNALS, SUM

from .asking import decide
from .recording import Decision, Recording, record, replay

OWN = [index for index, signal in enumerate(SIGNALS) if signal.source == "own"]
VISIBLE = [index for index, signal in enumerate(SIGNALS) if signal.source != "oracle"]


def any_legal(decision: Decision, rng: np.random.Generator) -> int:
    return int(rng.choice(np.flatnonzero(decision.legal)))


@pytest.fixture(scope="module")
def recording() -> Recording:
    """Unequal replicas, bursts in which holding is legal, memory that is never full."""
    rng = np.random.default_rng(3)
    arrived_at = np.sort(np.repeat(6.0 * np.arange(12), 60) + rng.exponential(0.05, 720))
    lengths = 1 + rng.exponential([[400.0], [150.0]], (2, 720)).astype(int)
    cluster = make_cluster(
        replicas=[{"count": 2}, {"count": 1, "slowdown": 2.5}],
        scheduler={"kind": "vllm-v1", "num_blocks": 20_000},
        hold={"max_hold_s": 0.7},
    )
    return record(cluster, make_workload(arrived_at, *lengths), any_legal)


def test_a_recorded_run_gives_the_observations_of_the_simulator(recording: Recording) -> None:
    """Signals to 1e-9: the two add the same times, but the live books forget rounding errors now and then.

    Observations are float32, so a difference of 1e-9 before rounding may be one unit of the last place.
    """
    books = Books(now=0.0)
    decider = Decider(books, "default", max_hold_s=recording.max_hold_s)
    num_holds = 0
    for decision in replay(recording, books):
        request = Request(int(recording.num_prefill[decision.request]), arrived_at=decision.arrived_at)
        entities, context, legal = decider.observe(request, decision.queue_size, decision.at)
        np.testing.assert_allclose(
            books.signals[VISIBLE], decision.signals[VISIBLE], rtol=1e-9, atol=1e-9, err_msg=str(decision.at)
        )
        np.testing.assert_allclose(entities, decision.entities, rtol=3e-7, atol=3e-7)
        np.testing.assert_allclose(context, decision.context, rtol=3e-7, atol=3e-7)
        np.testing.assert_array_equal(legal, decision.legal)
        num_holds += decision.action == 0
    assert num_holds > 100 and len(recording.decisions) == 720 + num_holds
    assert max(decision.signals[OUTSTANDING].max() for decision in recording.decisions) > 20


def test_a_lost_token_shows(recording: Recording) -> None:
    """The comparison above would find a single token that is not booked."""
    lost = next(n for n, (_, what, _) in enumerate(recording.stream) if what == 1 and n > 500)
    stream = recording.stream[:lost] + recording.stream[lost + 1 :]
    broken = Recording(
        recording.plans,
        recording.num_prefill,
        recording.num_decode,
        recording.max_hold_s,
        recording.decisions,
        stream,
    )
    books = Books(now=0.0)
    decider = Decider(books, "least-outstanding")
    with pytest.raises(AssertionError):
        for decision in replay(broken, books):
            decider.observe(Request(1, arrived_at=decision.at), 1, decision.at)
            np.testing.assert_allclose(books.signals[OWN], decision.signals[OWN], rtol=1e-9, atol=1e-9)


def make_books(num_replicas: int = 2, **calibration: float) -> Books:
    books = Books(now=0.0)
    for k in range(num_replicas):
        books.add(f"replica {k}", calibration or None)
    return books


def own_of(books: Books, slot: int) -> dict[str, float]:
    return books.replica_signals(slot)


# What adds up over requests, and so is zero without any; rates fade, and totals stay.
COUNTS = [
    signal.name
    for signal in SIGNALS
    if signal.across == SUM and signal.unit not in ("tokens/s", "share", "tokens in all")
]


def brought_up_to_date(books: Books, now: float) -> None:
    Decider(books, "least-outstanding").observe(Request(1, arrived_at=now), 1, now)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("end", ["finished", "more than seen", "less than seen", "no usage", "failed"])
def test_nothing_is_left_on_the_books_of_a_request_that_ended(streams: bool, end: str) -> None:
    books = make_books()
    tickets = [books.sent(0, 100, 0.01 * n, streams) for n in range(5)]
    for n, ticket in enumerate(tickets):
        if streams and n != 3:
            books.first_token(ticket, 0.2)
            books.tokens(ticket, 2, 0.3)
    brought_up_to_date(books, 0.35)
    assert own_of(books, 0)["outstanding"] == 5
    for ticket in reversed(tickets):
        if end == "failed":
            books.failed(ticket, 1.0)
        else:
            output = {"finished": 3, "more than seen": 10, "less than seen": 2, "no usage": None}[end]
            books.finished(ticket, 1.0, 100, output)
    brought_up_to_date(books, 1.1)
    assert {name: own_of(books, 0)[name] for name in COUNTS} == dict.fromkeys(COUNTS, 0.0)


def test_an_end_is_booked_once() -> None:
    books = make_books()
    ticket = books.sent(1, 10, 0.0)
    books.failed(ticket, 1.0)
    books.finished(ticket, 1.0, 10, 10)
    books.first_token(ticket, 2.0)
    books.tokens(ticket, 1, 2.0)
    brought_up_to_date(books, 3.0)
    assert own_of(books, 1)["outstanding"] == 0
    assert len({books.sent(0, 10, 4.0) for _ in range(10)}) == 10


def test_a_request_that_does_not_stream_is_taken_to_start_when_its_prompt_can_be_done() -> None:
    books = make_books(
        1, prefill_s_per_token=0.001, step_floor_s=0.01, decode_s_per_token=1e-4, kv_capacity_tokens=1e6
    )
    books.sent(0, 1000, 0.0, streams=False)
    books.sent(0, 1000, 0.0, streams=False)
    for now, waiting in ((1.0, 2), (1.02, 1), (2.0, 1), (2.02, 0)):
        brought_up_to_date(books, now)
        assert own_of(books, 0)["waiting"] == waiting
        assert own_of(books, 0)["pending_prefill_tokens"] == 1000 * waiting
    assert own_of(books, 0)["decoding"] == 2
    assert own_of(books, 0)["ttft_s"] == 0


def test_the_oldest_wait_is_that_of_the_oldest_left() -> None:
    books = make_books()
    first, second, third = (books.sent(0, 10, at) for at in (1.0, 2.0, 4.0))
    books.first_token(second, 5.0)
    brought_up_to_date(books, 6.0)
    assert own_of(books, 0)["oldest_wait_s"] == 5.0 and own_of(books, 0)["mean_wait_s"] == 3.5
    books.failed(first, 6.0)
    brought_up_to_date(books, 7.0)
    assert own_of(books, 0)["oldest_wait_s"] == 3.0
    books.first_token(third, 7.0)
    brought_up_to_date(books, 8.0)
    assert own_of(books, 0)["oldest_wait_s"] == 0.0


def test_replicas_come_and_go_and_keep_their_books() -> None:
    books = make_books(3)
    tickets = [books.sent(slot, 100 * (slot + 1), 1.0) for slot in (0, 1, 1, 2, 2, 2)]
    books.remove(1)
    assert books.slots == (0, 2) and books.signals.shape == (NUM_SIGNALS, 2)
    assert own_of(books, 0)["outstanding"] == 1 and own_of(books, 2)["outstanding"] == 3
    assert books.add("new", None) == 1
    assert own_of(books, 1)["outstanding"] == 0
    for ticket in tickets:  # those of the removed replica count for nothing
        books.first_token(ticket, 2.0)
        books.tokens(ticket, 1, 2.1)
    brought_up_to_date(books, 2.2)
    assert own_of(books, 1)["context_tokens"] == 0
    assert own_of(books, 2)["context_tokens"] == 3 * (300 + 2)
    for ticket in tickets:
        books.finished(ticket, 3.0, None, None)
    brought_up_to_date(books, 3.1)
    assert all(own_of(books, slot)["outstanding"] == 0 for slot in books.slots)
    for slot in (0, 1, 2):
        books.remove(slot)
    assert decide(Decider(books, "least-outstanding"), 1, 4.0) == 0


def test_room_for_requests_grows() -> None:
    books = make_books()
    tickets = [books.sent(0, 10, 0.0) for _ in range(3 * FIRST_CAPACITY)]
    assert len(set(tickets)) == len(tickets) and own_of(books, 0)["outstanding"] == len(tickets)
    for ticket in tickets:
        books.first_token(ticket, 1.0)
        books.finished(ticket, 2.0, 10, 1)
    brought_up_to_date(books, 3.0)
    assert {name: own_of(books, 0)[name] for name in COUNTS} == dict.fromkeys(COUNTS, 0.0)


def test_what_is_told_of_an_idle_replica_is_zero_at_once() -> None:
    """Tokens of the last instant are booked with the next event; whoever asks before must not see less."""
    books = make_books()
    ticket = books.sent(0, 10, 1.0)
    books.first_token(ticket, 2.0)
    books.tokens(ticket, 3, 2.5)
    books.finished(ticket, 3.0, 10, 4)
    known = books.replica_signals(0)
    assert {name: known[name] for name in COUNTS} == dict.fromkeys(COUNTS, 0.0)


def test_prompt_lengths_are_corrected_by_what_servers_count() -> None:
    books = make_books()
    for n in range(500):
        books.finished(books.sent(0, books.prompt_length(100), n), n + 0.5, 130, 10)
    assert books.prompt_length(1000) == pytest.approx(1300, rel=0.02)


def test_without_gauges_the_books_stand_in_for_them() -> None:
    books = make_books(1, kv_capacity_tokens=1000.0)
    books.scraped(0, 7.0, 3.0, float("nan"), 1.0)
    books.first_token(books.sent(0, 100, 1.0), 1.5)
    brought_up_to_date(books, 2.0)
    assert own_of(books, 0)["scraped_running"] == 7 and own_of(books, 0)["scraped_kv_use"] == 0
    brought_up_to_date(books, 10.0)
    assert own_of(books, 0)["scraped_running"] == 1 and own_of(books, 0)["scrape_age_s"] == 0
    assert own_of(books, 0)["scraped_kv_use"] == pytest.approx(0.101)


def test_a_hiccup_is_forgotten_when_there_was_nothing_to_do_for_long() -> None:
    books = make_books()
    ticket = books.sent(0, 100, 1.0)
    books.first_token(ticket, 3.0)
    books.tokens(ticket, 1, 5.0)
    brought_up_to_date(books, 20.0)
    assert own_of(books, 0)["step_slow_s"] == 2.0, "not while it has work"
    books.finished(ticket, 20.0, 100, 2)
    brought_up_to_date(books, 21.0)
    assert own_of(books, 0)["step_slow_s"] == 0.0 and own_of(books, 0)["ttft_s"] == 0.0


@pytest.mark.parametrize("known", [{"step_floor_s": -1.0}, {"step_floor_s": float("nan")}, {"speed": 3.0}])
def test_calibration_that_makes_no_sense_is_refused(known: dict[str, float]) -> None:
    with pytest.raises(InputError, match="calibration"):
        Books(now=0.0).add("replica", known)
