"""The request router of Ray Serve: what it makes of what Ray Serve tells it. No cluster is started."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve")
pytestmark = pytest.mark.filterwarnings("default")  # of Ray's own imports

from pointsman.integrations.ray_serve import PointsmanRequestRouter, prompt_text  # noqa: E402


class Router(PointsmanRequestRouter):
    """Without what Ray Serve needs to reach replicas."""

    num_pending_requests = 1

    def __init__(self, names: str, **settings: Any) -> None:
        self.initialize_state(**settings)
        self.replicas = [
            SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats={}) for name in names
        ]
        self.full: set[str] = set()

    def select_available_replicas(self, candidates: Any = None) -> Any:
        return [one for one in candidates if one.replica_id.unique_id not in self.full]

    def choose(self, pending: Any) -> str | None:
        """-> the name of the replica, None: held"""
        chosen = asyncio.run(self.choose_replicas(self.replicas, pending))
        return chosen[0][0].replica_id.unique_id if chosen else None

    def outstanding(self, name: str) -> float:
        return self._state.core.signals(name)["outstanding"]


def request(number: int, prompt: str = "word " * 100) -> Any:
    return SimpleNamespace(
        args=[{"prompt": prompt}],
        kwargs={},
        metadata=SimpleNamespace(internal_request_id=str(number)),
        future=SimpleNamespace(cancelled=lambda: False),
        routing_context=SimpleNamespace(should_backoff=False),
    )


def test_every_decision_knows_of_those_before() -> None:
    router = Router("abcd", policy="least-outstanding")
    assert sorted(filter(None, (router.choose(request(i)) for i in range(4)))) == list("abcd")


def test_a_long_prompt_counts_for_more() -> None:
    router = Router("ab", policy="least-work")
    long = router.choose(request(0, "word " * 3000))
    short = [router.choose(request(i)) for i in range(1, 5)]
    assert long not in short


def test_an_answer_closes_the_books() -> None:
    router = Router("ab", policy="least-outstanding")
    one = request(0)
    name = router.choose(one)
    assert name is not None and router.outstanding(name) == 1
    replica_id = SimpleNamespace(unique_id=name)
    router.on_request_routed(one, replica_id, None)
    router.on_request_completed(replica_id, "0")
    assert router.outstanding(name) == 0
    assert not router._state.placed


def test_a_replica_that_refuses() -> None:
    """Ray Serve says that the request has ended there, and asks again."""
    router = Router("ab", policy="least-outstanding")
    one = request(0)
    first = router.choose(one)
    assert first is not None
    router.on_request_completed(SimpleNamespace(unique_id=first), "0")
    router.full.add(first)
    second = router.choose(one)
    assert second is not None and second != first
    assert (router.outstanding(first), router.outstanding(second)) == (0, 1)


def test_asked_twice_is_booked_once() -> None:
    router = Router("ab", policy="least-outstanding")
    one = request(0)
    router.choose(one)
    router.choose(one)
    assert router.outstanding("a") + router.outstanding("b") == 1


def test_full_replicas_are_left_out_and_held_requests_back_off() -> None:
    router = Router("ab")
    router.full = {"a", "b"}
    one = request(0)
    assert router.choose(one) is None
    assert one.routing_context.should_backoff
    router.full = {"a"}
    assert router.choose(one) == "b"


def test_a_client_that_gives_up_before_it_is_served() -> None:
    router = Router("ab", policy="least-outstanding")
    gone = request(0)
    name = router.choose(gone)
    gone.future.cancelled = lambda: True
    router.choose(request(1))
    assert name is not None and router.outstanding("a") + router.outstanding("b") == 1


def test_replicas_come_and_go_and_say_how_busy_they_are() -> None:
    router = Router("ab")
    router.choose(request(0))
    router.replicas = [one for one in router.replicas if one.replica_id.unique_id == "b"]
    router.replicas[0].routing_stats = {"running": 7, "waiting": 2, "kv_use": 0.5}
    assert router.choose(request(1)) == "b"
    assert router._state.core.replicas == ("b",)
    assert router._state.core.signals("b")["scraped_running"] == 7


def test_a_replica_that_says_how_fast_it_is() -> None:
    router = Router("ab", policy="least-delay")
    first = request(0)
    name = router.choose(first)  # at first nobody knows
    router.on_request_routed(first, SimpleNamespace(unique_id=name), None)
    router.on_request_completed(SimpleNamespace(unique_id=name), "0")
    for replica, slowness in zip(router.replicas, (8.0, 1.0), strict=True):
        replica.routing_stats = {
            "prefill_s_per_token": 1e-4 * slowness,
            "decode_s_per_token": 1e-4 * slowness,
            "step_floor_s": 0.01 * slowness,
        }
    assert {router.choose(request(i)) for i in range(1, 4)} == {"b"}


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("abc", "abc"),
        ({"prompt": "abc"}, "abc"),
        ({"messages": [{"role": "user", "content": "ab"}, {"role": "user", "content": "c"}]}, "abc"),
        (SimpleNamespace(messages=[{"content": [{"type": "text", "text": "abc"}]}]), "abc"),
        (SimpleNamespace(prompt="abc"), "abc"),
        (SimpleNamespace(other=1), ""),
    ],
)
def test_prompts(argument: Any, text: str) -> None:
    assert prompt_text((argument,)) == text
