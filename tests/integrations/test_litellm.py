"""Our policies as a strategy of a real LiteLLM router; its deployments answer by LiteLLM's own mocks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

litellm = pytest.importorskip("litellm")
pytestmark = pytest.mark.filterwarnings("default")  # of LiteLLM's own imports

from pointsman.integrations import litellm as strategies  # noqa: E402
from pointsman.integrations.litellm import PointsmanStrategy  # noqa: E402
from pointsman.routing.core import Core  # noqa: E402

MESSAGES = [{"role": "user", "content": "word " * 50}]


@pytest.fixture(autouse=True)
def no_callbacks() -> Iterator[None]:
    yield
    litellm.callbacks.clear()


def router(num_deployments: int = 3, **parameters: Any) -> Any:
    return litellm.Router(
        model_list=[
            {
                "model_name": "m",
                "litellm_params": {"model": "openai/m", "api_key": "none", "mock_response": "hello"}
                | parameters,
                "model_info": {"id": f"replica {number}"},
            }
            for number in range(num_deployments)
        ],
        num_retries=0,
    )


def test_a_model_has_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def core(*arguments: Any, **options: Any) -> Core:
        made.append(Core(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(strategies, "Core", core)

    async def play() -> None:
        routed = router()
        PointsmanStrategy.install(routed, policy="least-outstanding")
        await asyncio.gather(*(routed.acompletion(model="m", messages=MESSAGES) for _ in range(3)))

    asyncio.run(play())
    assert len(made) == 1


async def ended(strategy: PointsmanStrategy) -> None:
    """LiteLLM tells of ends in the background."""
    for _ in range(200):
        if not strategy._open:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{len(strategy._open)} requests never ended")


def outstanding(strategy: PointsmanStrategy) -> dict[str, float]:
    core = strategy._groups["m"].core
    return {name: core.signals(name)["outstanding"] for name in core.replicas}


def test_requests_are_spread_and_their_ends_are_heard() -> None:
    async def play() -> None:
        routed = router(mock_delay=0.2)
        strategy = PointsmanStrategy.install(routed, policy="least-outstanding")
        asked = [routed.acompletion(model="m", messages=MESSAGES) for _ in range(6)]
        answers = await asyncio.gather(*asked)
        used = Counter(answer._hidden_params["model_id"] for answer in answers)
        assert used == {"replica 0": 2, "replica 1": 2, "replica 2": 2}
        await ended(strategy)
        assert set(outstanding(strategy).values()) == {0.0}

    asyncio.run(play())


def test_a_request_that_fails_is_taken_off_the_books() -> None:
    async def play() -> None:
        routed = router(1, mock_response="litellm.InternalServerError")
        strategy = PointsmanStrategy.install(routed, policy="least-outstanding")
        with pytest.raises(litellm.InternalServerError):
            await routed.acompletion(model="m", messages=MESSAGES)
        await ended(strategy)
        assert outstanding(strategy) == {"replica 0": 0.0}

    asyncio.run(play())


def test_a_held_request_is_sent_when_another_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        routed = router(1)
        strategy = PointsmanStrategy.install(routed, policy="least-outstanding")
        first = await routed.async_get_available_deployment(model="m", messages=MESSAGES, request_kwargs={})
        assert first["model_info"]["id"] == "replica 0"
        group = strategy._groups["m"]
        decide = group.core.decide
        monkeypatch.setattr(
            group.core, "decide", lambda *given: decide(*given) if not strategy._open else None
        )
        waiting = asyncio.create_task(
            routed.async_get_available_deployment(model="m", messages=MESSAGES, request_kwargs={})
        )
        await asyncio.sleep(0.1)
        assert not waiting.done()
        (number,) = strategy._open
        strategy._ended({"litellm_params": {"metadata": {"pointsman_ticket": number}}}, None)
        second = await asyncio.wait_for(waiting, 5)
        assert second["model_info"]["id"] == "replica 0"

    asyncio.run(play())
