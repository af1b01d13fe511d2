"""The official client, unchanged, through the router."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.router.harness import cluster, run
from tests.router.mock import NUM_CHUNKS, hang, ok, reset

HELLO = [{"role": "user", "content": "hello"}]


def client(port: int, **options: object) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="sk-x", max_retries=0, **options
    )  # type: ignore[arg-type]


def test_plain_and_streaming() -> None:
    async def scenario() -> None:
        async with cluster(ok, reset) as c, client(c.port) as ai:
            for _ in range(3):
                chat = await ai.chat.completions.create(model="m", messages=HELLO)  # type: ignore[arg-type]
                assert chat.choices[0].message.content == "hello"
                assert chat.usage is not None
                assert chat.usage.completion_tokens == NUM_CHUNKS
                text, usage = "", None
                stream = await ai.chat.completions.create(  # type: ignore[call-overload]
                    model="m", messages=HELLO, stream=True, stream_options={"include_usage": True}
                )
                async for chunk in stream:
                    text += "".join(choice.delta.content or "" for choice in chunk.choices)
                    usage = chunk.usage or usage
                assert text == "".join(f"t{i}" for i in range(NUM_CHUNKS))
                assert usage.completion_tokens == NUM_CHUNKS
            completion = await ai.completions.create(model="m", prompt="hello")
            assert completion.choices[0].text == "hello"
            assert [model.id async for model in ai.models.list()] == ["m"]

    run(scenario)


def test_errors_are_those_the_client_knows() -> None:
    async def scenario() -> None:
        async with cluster(ok, reliability={"breaker_failures": 1}) as c, client(c.port) as ai:
            with pytest.raises(openai.NotFoundError):
                await ai.chat.completions.create(model="unknown", messages=HELLO)  # type: ignore[arg-type]
            with pytest.raises(openai.BadRequestError):
                await ai.chat.completions.create(model="m", messages="hello")  # type: ignore[arg-type]
            c.mocks[0].behaviour = reset
            for _ in range(2):
                with pytest.raises(openai.InternalServerError):
                    await ai.chat.completions.create(model="m", messages=HELLO)  # type: ignore[arg-type]

    run(scenario)


def test_a_client_that_gives_up_frees_the_server() -> None:
    async def scenario() -> None:
        async with cluster(hang) as c, client(c.port, timeout=0.1) as ai:
            with pytest.raises(openai.APITimeoutError):
                await ai.chat.completions.create(model="m", messages=HELLO)  # type: ignore[arg-type]
            async with asyncio.timeout(3):
                while not c.mocks[0].num_aborted:
                    await asyncio.sleep(0.01)

    run(scenario)
