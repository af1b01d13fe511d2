"""How long the live router takes to decide and to keep its books, Python's part included.

Run: python benchmarks/decision_latency.py
The limits (P50 of a decision with the default policy: 15 µs at 4 replicas, 60 µs at 16) are of an idle core;
the lowest of several rounds is what the code takes, the rest is the machine's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np

from pointsman.routing.books import Books
from pointsman.routing.core import Request
from pointsman.routing.decider import Decider
from pointsman.simulator.calibration import known_figures

LIMITS_US = {4: 15.0, 16: 60.0}
NUM_ROUNDS, NUM_CALLS = 7, 4000
POLICIES = ("default", "least-delay", "least-outstanding", "round-robin")


def median_us(call: Callable[[], object]) -> tuple[float, float]:
    """P50 of the best round, and P99 of that round."""
    rounds = []
    for _ in range(NUM_ROUNDS):
        took = np.empty(NUM_CALLS)
        for n in range(NUM_CALLS):
            started = time.perf_counter_ns()
            call()
            took[n] = time.perf_counter_ns() - started
        rounds.append(tuple(np.percentile(took, [50, 99]) / 1000.0))
    return min(rounds)


def busy_books(num_replicas: int) -> Books:
    """Every replica with a few dozen streams and some prompts that wait."""
    books = Books(now=0.0)
    figures = known_figures({"model": "Llama-3-8B", "device": "A100-80"})
    rng = np.random.default_rng(0)
    for k in range(num_replicas):
        books.add(f"replica {k}", figures)
        for _ in range(int(rng.integers(10, 60))):
            ticket = books.sent(k, int(rng.integers(10, 4000)), float(rng.uniform(0.0, 1.0)))
            if rng.random() < 0.9:
                books.first_token(ticket, 1.5)
                books.tokens(ticket, 5, 2.0)
    return books


def main() -> int:
    is_slow = False
    for num_replicas, limit_us in LIMITS_US.items():
        books = busy_books(num_replicas)
        for policy in POLICIES:
            decider = Decider(books, policy)
            request = Request(700, arrived_at=3.0)
            p50, p99 = median_us(lambda decider=decider, request=request: decider.decide(request, 1, 3.0))
            print(f"{num_replicas:3} replicas  {policy:18} P50 {p50:6.1f} µs   P99 {p99:6.1f} µs")
            is_slow |= policy == "default" and p50 > limit_us
        ticket = books.sent(0, 100, 3.0)
        books.first_token(ticket, 3.1)
        p50, _ = median_us(lambda books=books, ticket=ticket: books.tokens(ticket, 1, 3.2))
        print(f"{num_replicas:3} replicas  a token            P50 {p50:6.2f} µs")

        def whole_request(books: Books = books) -> None:
            ticket = books.sent(0, 100, 3.3)
            books.first_token(ticket, 3.4)
            books.finished(ticket, 3.5, 100, 1)

        p50, _ = median_us(whole_request)
        print(f"{num_replicas:3} replicas  a request's books  P50 {p50:6.2f} µs")
    print("too slow" if is_slow else "within the limits")
    return int(is_slow)


if __name__ == "__main__":
    sys.exit(main())
