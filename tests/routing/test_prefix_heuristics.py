"""The heuristics that know prefixes, each against its rule in NumPy, on replicas that have prompts cached."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pointsman.errors import InputError
from pointsman.routing.books import Books
from pointsman.routing.core import Request
from pointsman.routing.decider import Decider
from pointsman.routing.policy import PolicySpec
from pointsman.routing.records import LINK
from pointsman.routing.signals import EXPECTED_HIT_TOKENS, SIGNAL_INDEX
from pointsman.spec import parse_spec

R = 5
FIGURES = {
    "prefill_s_per_token": 1e-4,
    "decode_s_per_token": 1e-4,
    "step_floor_s": 0.01,
    "kv_capacity_tokens": 1e6,
}
Floats = NDArray[np.float64]
Rule = Callable[[Callable[[str], Floats], float, dict[str, float]], Floats]


def links(path: list[int]) -> bytes:
    return np.array(
        [(hash(tuple(path[: n + 1])), 100 * (n + 1), 0) for n in range(len(path))], LINK
    ).tobytes()


def random_books(seed: int, most: int) -> tuple[Books, Request]:
    """Replicas that have some of the prompt that is asked about, and up to `most` requests each."""
    rng = np.random.default_rng(seed)
    books = Books(0.0)
    asked = rng.integers(0, 9, 8).tolist()
    for k in range(R):
        books.add(f"replica {k}", FIGURES)
        for _ in range(int(rng.integers(0, most))):
            length = int(rng.integers(0, 8)) if rng.random() < 0.2 else 0
            other = [*asked[:length], -1 - int(rng.integers(0, 9))]
            ticket = books.sent(k, 100 * len(other), 0.1, links=links(other))
            if rng.random() < 0.5:
                books.first_token(ticket, 0.2)
        books.scraped(k, 1.0, float(rng.integers(0, 5)), float(rng.random()), 0.3)
    if rng.random() < 0.3:
        books.set_accepting(int(rng.integers(0, R)), False)
    return books, Request(850, arrived_at=0.4, links=links(asked))


def by_cache(signal: Any, prompt: float, p: dict[str, float], nearby: bool) -> Floats:
    load, hit, on = signal("outstanding"), signal("expected_hit_tokens"), signal("accepting") > 0
    is_apart = np.ptp(load[on]) > p["balance_abs"] and load[on].max() > p["balance_rel"] * load[on].min()
    near = on & (load <= load[on].min() + p["balance_abs"])
    if is_apart and nearby and hit[near].max() > 0:
        return np.where(near, 1e3 - hit, 1e9) + 1e-3 * load
    if is_apart or hit[on].max() <= p["cache_threshold"] * prompt:
        return np.asarray(load)
    return np.asarray(1e-3 * load - hit)


def weighted(signal: Any, prompt: float, p: dict[str, float]) -> Floats:
    waiting, on = signal("scraped_waiting"), signal("accepting") > 0
    low, high = waiting[on].min(), waiting[on].max()
    queue = (high - waiting) / (high - low) if high > low else np.ones(R)
    free = 1 - signal("scraped_kv_use")
    cached = signal("expected_hit_tokens") / prompt
    return np.asarray(-(p["prefix"] * cached + p["queue"] * queue + p["kv"] * free))


def load_aware(signal: Any, prompt: float, p: dict[str, float]) -> Floats:
    load = signal("outstanding")
    mean = load[signal("accepting") > 0].mean()
    return np.asarray(p["beta"] * (load - mean) / max(1, mean) - signal("expected_hit_tokens") / prompt)


def overlap_cost(signal: Any, prompt: float, p: dict[str, float]) -> Floats:
    in_memory = signal("context_tokens") + signal("pending_prefill_tokens") + signal("pending_cached_tokens")
    to_prefill = signal("pending_prefill_tokens") + prompt - signal("expected_hit_tokens")
    return np.asarray(p["overlap_weight"] * to_prefill + in_memory)


RULES: dict[str, tuple[Rule, dict[str, float]]] = {
    "cache-aware": (
        lambda *about: by_cache(*about, nearby=False),
        {"cache_threshold": 0.3, "balance_abs": 9, "balance_rel": 1.5},
    ),
    "cache-aware-nearby": (
        lambda *about: by_cache(*about, nearby=True),
        {"cache_threshold": 0.3, "balance_abs": 9, "balance_rel": 1.5},
    ),
    "weighted-scorer": (weighted, {"prefix": 2, "queue": 2, "kv": 1}),
    "load-aware": (load_aware, {"beta": 1.0}),
    "overlap-cost": (overlap_cost, {"overlap_weight": 1.0}),
}


@pytest.mark.parametrize("kind", RULES)
def test_score_is_the_rule(kind: str) -> None:
    rule, parameters = RULES[kind]
    policy = parse_spec(PolicySpec, {"kind": kind, "parameters": parameters}, "policy")
    for seed in range(60):
        books, request = random_books(seed, most=4 + seed % 40)
        action = Decider(books, policy, seed).decide(request, 1, 0.4)

        def signal(name: str, books: Books = books) -> Floats:
            return np.asarray(books.signals[SIGNAL_INDEX[name]])

        scores = np.where(signal("accepting") > 0, rule(signal, 850.0, parameters), np.inf)
        assert action - 1 in np.flatnonzero(np.isclose(scores, scores.min(), rtol=1e-12, atol=1e-12)), seed


def test_states_differ_in_what_matters() -> None:
    """Else the rules above would agree with anything."""
    seen = Counter[str]()
    for seed in range(60):
        books, request = random_books(seed, most=4 + seed % 40)
        Decider(books, "least-outstanding").decide(request, 1, 0.4)
        hits, load = books.signals[EXPECTED_HIT_TOKENS], books.signals[SIGNAL_INDEX["outstanding"]]
        seen["cached"] += hits.max() > 0.3 * 850
        seen["apart"] += np.ptp(load) > 9
        seen["best is busy"] += load[hits.argmax()] > load.min()
    assert min(seen.values()) > 10


def test_prompts_that_begin_alike_stay_together_up_to_a_bound() -> None:
    books = Books(0.0)
    for k in range(R):
        books.add(f"replica {k}", FIGURES)
    decider = Decider(books, PolicySpec(kind="prefix-hash", parameters={"prefix_tokens": 200}))
    first = {
        name: decider.decide(Request(900, links=links([name, name, 1, 2])), 1, 0.0) for name in range(200)
    }
    others = {name: decider.decide(Request(900, links=links([name, name, 5])), 1, 0.0) for name in range(200)}
    assert first == others
    counts = Counter(first.values())
    assert len(counts) == R
    assert max(counts.values()) < 2 * 200 / R
    # All alike: nobody gets more than load_factor times the mean, rounded up.
    for n in range(100):
        action = decider.decide(Request(900, links=links([1, 1, n])), 1, 0.0)
        books.sent(action - 1, 900, 0.0)
        load = books.signals[SIGNAL_INDEX["outstanding"]]
        assert load.max() <= math.ceil(1.25 * (n + 1) / R)


def test_temperature_is_a_softmax() -> None:
    """Costs of 0, 1/2 and 1 of the range: one more doubles the odds every log(2) temperatures."""
    books = Books(0.0)
    for k in range(3):
        books.add(f"replica {k}", FIGURES)
        if k:
            books.first_token(books.sent(k, 1000 * k, 0.0), 0.1)
    policy = PolicySpec(kind="overlap-cost", parameters={"temperature": 0.5 / math.log(3)})
    decider = Decider(books, policy)
    drawn = Counter(decider.decide(Request(100), 1, 0.2) for _ in range(4000))
    assert [drawn[k + 1] / 4000 for k in range(3)] == pytest.approx([9 / 13, 3 / 13, 1 / 13], abs=0.03)


@pytest.mark.parametrize(
    ("policy", "what"),
    [
        ({"kind": "cache-aware", "parameters": {"beta": 1}}, "no such parameter"),
        ({"kind": "load-aware", "parameters": {"beta": -1}}, "out of range"),
        ({"kind": "least-work", "parameters": {"beta": 1}}, "no such parameter"),
    ],
)
def test_wrong_parameters_are_refused(policy: dict[str, Any], what: str) -> None:
    with pytest.raises(InputError, match=what):
        parse_spec(PolicySpec, policy, "policy")


@pytest.mark.parametrize("policy", ["least-delay", "late-binding", "least-work", "default"])
def test_prompt_goes_where_it_is_cached(policy: str) -> None:
    """Whoever reckons with prefill knows what need not be computed; idle replicas alike but for that."""
    books = Books(0.0)
    for k in range(R):
        books.add(f"replica {k}", FIGURES)
    decider = Decider(books, policy)
    for n in range(20):
        path = [n, *range(40)]
        ticket = books.sent(n % R, 4100, n, links=links(path))
        books.first_token(ticket, n + 0.3)
        books.finished(ticket, n + 0.4, 4100, 10)
        assert (
            decider.decide(Request(4300, arrived_at=n + 0.5, links=links([*path, 7])), 1, n + 0.5)
            == n % R + 1
        )
