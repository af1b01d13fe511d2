"""Why a request went where it went: the sentence, and what it says of the books."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.routing.books import Books
from pointsman.routing.core import Request
from pointsman.routing.decider import Decider
from pointsman.routing.hashing import PromptHasher
from pointsman.routing.heuristics import HEURISTICS, LEARNED
from pointsman.routing.policy import PolicySpec
from pointsman.routing.reasons import NUM_ABOUT, Reason
from pointsman.routing.records import NOBODY

from .asking import decide
from .learned import make_run

TOLD = {
    "step_floor_s": 0.01,
    "decode_s_per_token": 1e-4,
    "prefill_s_per_token": 1e-4,
    "kv_capacity_tokens": 10_000.0,
}


def make_books(num_replicas: int = 3) -> Books:
    books = Books(now=0.0)
    for k in range(num_replicas):
        books.add(f"http://gpu-{k}:8000", TOLD)
    return books


def test_the_sentence_names_both_and_in_what_they_differ() -> None:
    books = make_books(2)
    for _ in range(3):
        books.sent(0, 1000, 1.0)
    books.first_token(books.sent(1, 2000, 1.0), 1.1)
    decider = Decider(books, "least-outstanding")
    decide(decider, 100, 2.0)
    assert decider.reason().sentence() == (
        "least-outstanding sent the request to gpu-1:8000 rather than gpu-0:8000, the next best of 2: "
        "gpu-1:8000 has fewer requests (1, not 3), less prompt work ahead (0 s, not 300 ms) and emptier "
        "memory (20%, not 30%)."
    )


def test_what_speaks_against_the_choice_is_said_too() -> None:
    books = make_books(2)
    books.first_token(books.sent(0, 5000, 1.0), 1.1)
    for _ in range(2):
        books.first_token(books.sent(1, 100, 1.0), 1.1)
    decider = Decider(books, "least-outstanding")
    decide(decider, 100, 2.0)
    assert (
        decider.reason()
        .sentence()
        .endswith("gpu-0:8000 has fewer requests (1, not 2), although it has fuller memory (50%, not 2%).")
    )


def test_what_was_measured_lately_counts() -> None:
    """A server that is slower than its speed says may be empty for that reason."""
    books = make_books(2)
    for slot, slowness in ((0, 1.0), (1, 4.0)):
        ticket = books.sent(slot, 1000, 1.0)
        books.first_token(ticket, 1.0 + 0.1 * slowness)
        for n in range(1, 20):
            books.tokens(ticket, 1, 1.0 + 0.1 * slowness + 0.01 * n * slowness)
    decider = Decider(books, "default")
    assert decide(decider, 100, 2.0) == 1
    assert (
        decider.reason()
        .sentence()
        .endswith(
            "gpu-0:8000 has shorter steps (10 ms, not 40 ms) and quicker first tokens (100 ms, not 400 ms)."
        )
    )


def test_what_is_cached_is_a_reason() -> None:
    books, links = make_books(2), PromptHasher().of_text(b"word " * 800, 1000)
    books.finished(books.sent(1, 1000, 1.0, links=links), 1.5, output_tokens=1)
    books.sent(1, 10, 1.6)
    decider = Decider(books, "cache-aware")
    assert decider.decide(Request(1000, arrived_at=2.0, links=links), 1, 2.0) == 2
    reason = decider.reason().sentence()
    assert "has more of the prompt cached (100%, not 0%), although it has more requests (1, not 0)" in reason
    decide(decider, 1000, 2.0)
    assert "cached" not in decider.reason().sentence()


def test_policies_that_do_not_compare_say_so_and_a_lonely_server_is_the_only_one() -> None:
    books = make_books()
    decider = Decider(books, "round-robin")
    decide(decider, 100, 1.0)
    assert decider.reason().sentence() == (
        "round-robin sent the request to gpu-0:8000, whose turn it was: "
        "0 requests, 0 s of prompts ahead, steps of 10 ms, memory 0% full."
    )
    decide(decider, 100, 1.0, excluded=[0, 1])
    assert (
        "sent the request to gpu-2:8000, the only one of 3 that may take it:" in decider.reason().sentence()
    )


def test_a_session_does_not_borrow_the_scores_of_the_request_before() -> None:
    decider = Decider(make_books(), "session-affinity")
    decide(decider, 100, 1.0)
    assert "rather than" in decider.reason().sentence()
    decide(decider, 100, 1.0, session=5)
    assert ", where its session belongs: " in decider.reason().sentence()


@pytest.mark.parametrize("policy", ["default", "hold-until-room"])
def test_a_hold_says_how_busy_the_servers_are(policy: str) -> None:
    books = make_books(2)
    for slot in (0, 1):
        for _ in range(4 - slot):
            books.sent(slot, 3300, 1.0)
    decider = Decider(books, policy)
    assert decide(decider, 4000, 1.0) == 0
    assert decider.reason().sentence() == (
        f"{policy} holds the request until a server has room: the least busy of 2, gpu-1:8000, has 3 "
        "requests, 990 ms of prompts ahead, steps of 10 ms, memory 99% full."
    )


def test_the_network_would_have_taken_the_next_by_logit() -> None:
    books = make_books()
    for slot, num_sent in ((0, 1), (1, 6), (2, 3)):
        for _ in range(num_sent):
            books.first_token(books.sent(slot, 800, 1.0), 1.1)
    decider = Decider(books, "default")
    action = decide(decider, 300, 2.0)
    logits = {one["name"]: one["logit"] for one in decider.explain()["replicas"]}
    best, second, _ = sorted(logits, key=lambda name: -logits[name])
    reason = decider.reason()
    assert (reason.chosen, reason.other) == (best, second)
    assert reason.chosen == f"http://gpu-{action - 1}:8000"


def test_a_preference_of_next_to_nothing_is_called_that() -> None:
    """`1 to 1` would be no preference."""
    same = (1.0, 0.1, 0.01, 0.5, 0.1, 0.0)

    def sentence(lead: float) -> str:
        noted = np.array([LEARNED, 2, 1, *same, -lead, *same, 0.0]).tobytes()
        return Reason("default", ["http://a", "http://b"], 1, noted).sentence()

    assert sentence(0.01).endswith("the network hardly prefers either, a a little.")
    assert sentence(1.0).endswith("the network prefers a 2.7 to 1.")


def test_a_sentence_is_short_however_many_servers_and_however_long_their_names() -> None:
    books = Books(now=0.0)
    for k in range(200):
        books.add("http://" + 20 * "very-long-name." + f"{k}:8000", TOLD)
    decider = Decider(books, "least-outstanding")
    decide(decider, 100, 1.0)
    assert len(decider.reason().sentence()) < 400
    names = "policy-" * 9, ["chosen-" * 9, "other-" * 9, *["more"] * 998]
    best = (100.0, 0.123, 0.0123, 0.5, 0.123, 0.1, 1.0)
    worst = (2000.0, 12.3, 0.123, 1.5, 12.3, 1.0, 2.0)
    for kind in (LEARNED, *range(len(HEURISTICS))):
        for noted in (best + worst, (*worst[:-1], 0.0, *best), best[:3] + worst[3:] + worst[:3] + best[3:]):
            written = Reason(*names, 1, np.array([kind, 1000, 1, *noted]).tobytes()).sentence()
            assert 200 < len(written) < 400
    noted = np.array([0.0, 5.0, NOBODY, *[0.0] * 2 * NUM_ABOUT])
    odd = Reason("a\r\nb: c", ["http://x"], 1, noted.tobytes()).sentence()
    assert odd.isprintable()


# A figure that is better, a name for how it was taken, or that there was nothing to choose.
SPEAKS_FOR_IT = re.compile(
    r"holds the request( until a server has room)?: (the least busy of|no server accepts requests)"
    r"|, (the only one of|drawn at random|whose turn|the less busy of two|where (its session|prompts))"
    r"|, the next best of \d+: (both score the same, and \S+ has|the network (hardly )?prefers"
    r"|gpu-\d has [a-z])"
)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    odd = make_run(tmp_path_factory.mktemp("odd") / "run") / "checkpoints" / "best.safetensors"
    return [*HEURISTICS, "default", str(odd)]


@settings(max_examples=150)
@given(data=st.data())
def test_every_sentence_speaks_for_the_choice(policies: list[str], data: st.DataObject) -> None:
    """Whatever the servers are, whatever they have to do, and however little a policy minds it."""
    draw = data.draw
    books, now = Books(now=0.0), 1.0
    for k in range(draw(st.integers(1, 4), label="servers")):
        speed = draw(st.sampled_from([0.2, 0.5, 1.0]), label="speed")
        memory = draw(st.sampled_from([1_000.0, 10_000.0, 100_000.0]), label="memory")
        told = {name: value / speed for name, value in TOLD.items()}
        books.add(f"gpu-{k}", told | {"kv_capacity_tokens": memory})
    slots = st.sampled_from(books.slots)
    prompts = st.integers(1, 4000)
    for slot, prompt, stage in draw(st.lists(st.tuples(slots, prompts, st.integers(0, 3)), max_size=30)):
        links = PromptHasher().of_text(b"word " * prompt, prompt)
        ticket = books.sent(slot, prompt, now, links=links)
        if stage >= 1:
            books.first_token(ticket, now + 0.01 * prompt**0.5)
        if stage == 2:
            books.tokens(ticket, 10, now + 2.0)
        if stage == 3:
            books.finished(ticket, now + 2.0, output_tokens=50)
    prompt = draw(prompts)
    request = Request(prompt, arrived_at=4.0, links=PromptHasher().of_text(b"word " * prompt, prompt))
    excluded = draw(st.sets(slots, max_size=2))
    for policy in policies:
        weights = {"weights": {"outstanding": -1.0}} if policy == "linear-score" else {}
        decider = Decider(books, PolicySpec.model_validate({"kind": policy} | weights))
        decider.decide(request, 1, 4.0, excluded)
        sentence = decider.reason().sentence()
        assert SPEAKS_FOR_IT.search(sentence), sentence
