"""What the emulated servers answer: the OpenAI API, vLLM's metrics, errors, and clients that leave."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import openai
import pytest

from pointsman.emulator.cluster import Emulator

from .serving import MODEL, ask, completion, connected, events, read_answer, request_bytes, with_emulator


def test_completions_whole_and_streamed() -> None:
    async def test(emulator: Emulator) -> None:
        url = emulator.replicas[0].url
        whole = await ask(url, "POST", "/v1/completions", completion(12, 7))
        assert whole.status == 200
        body = whole.json()
        assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
        counts = {"prompt_tokens": 12, "completion_tokens": 7, "total_tokens": 19}
        assert body["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 0}}
        choice = body["choices"][0]
        assert len(choice["text"].split()) == 7 and choice["finish_reason"] == "length"

        streamed = await ask(url, "POST", "/v1/completions", completion(12, 7, stream=True))
        assert streamed.headers["content-type"].startswith("text/event-stream")
        parts = events(streamed.body)
        assert "".join(part["choices"][0]["text"] for part in parts) == choice["text"]
        assert [part["choices"][0]["finish_reason"] for part in parts][-1] == "length"
        assert all("usage" not in part for part in parts)

        options = {"stream": True, "stream_options": {"include_usage": True}}
        with_usage = events((await ask(url, "POST", "/v1/completions", completion(12, 7, **options))).body)
        assert with_usage[-1]["choices"] == [] and with_usage[-1]["usage"] == body["usage"]

    with_emulator(test)


def test_the_official_client_works() -> None:
    async def test(emulator: Emulator) -> None:
        messages: Any = [{"role": "user", "content": "x" * 400}]
        async with openai.AsyncOpenAI(base_url=emulator.replicas[0].url + "/v1", api_key="any") as client:
            assert [model.id async for model in client.models.list()] == [MODEL]
            whole = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=5)
            assert whole.choices[0].message.role == "assistant"
            assert whole.usage is not None and whole.usage.prompt_tokens == 104
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=messages,
                max_completion_tokens=6,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            parts = [part async for part in stream]
            assert parts[0].choices[0].delta.role == "assistant"
            text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
            assert len(text.split()) == 6
            assert parts[-1].usage is not None and parts[-1].usage.completion_tokens == 6
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await client.chat.completions.create(model="other", messages=messages)

    with_emulator(test)


def test_lengths_are_drawn_and_seeded() -> None:
    async def lengths(emulator: Emulator) -> list[tuple[int, str]]:
        url = emulator.replicas[0].url
        found = []
        for _ in range(6):
            chat = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 200}
            body = (await ask(url, "POST", "/v1/chat/completions", chat)).json()
            found.append((body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]))
        return found

    drawn = []

    async def test(emulator: Emulator) -> None:
        drawn.append(await lengths(emulator))

    for seed in (1, 1, 2):
        with_emulator(test, seed=seed, time_scale=200.0)
    assert drawn[0] == drawn[1] != drawn[2]
    assert all((count < 200) == (reason == "stop") for count, reason in drawn[0])


BAD: list[tuple[str, Any, int, str | None]] = [
    ("/v1/completions", b"{not json", 400, None),
    ("/v1/completions", b"[" * 100_000, 400, None),
    ("/v1/completions", b"\xff\xfe", 400, None),
    ("/v1/completions", [1, 2], 400, None),
    ("/v1/completions", {"model": MODEL}, 400, "prompt"),
    ("/v1/completions", completion() | {"prompt": ""}, 400, "prompt"),
    ("/v1/completions", completion() | {"prompt": ["a", "b"]}, 400, "prompt"),
    ("/v1/completions", completion() | {"prompt": 5}, 400, "prompt"),
    ("/v1/completions", completion() | {"model": "gpt-9"}, 404, "model"),
    ("/v1/completions", completion(num_prompt=200_000), 400, "prompt"),
    ("/v1/completions", completion(num_output=200_000), 400, "max_tokens"),
    ("/v1/completions", completion() | {"max_tokens": 0}, 400, "max_tokens"),
    ("/v1/completions", completion() | {"max_tokens": "many"}, 400, "max_tokens"),
    ("/v1/completions", completion() | {"stream": "yes"}, 400, "stream"),
    ("/v1/completions", completion() | {"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ("/v1/completions", completion() | {"n": 3}, 400, "n"),
    ("/v1/chat/completions", {"model": MODEL, "messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"model": MODEL, "messages": ["hello"]}, 400, "messages"),
    ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": 3}]}, 400, "messages"),
    ("/v1/nothing", {}, 404, None),
]


def test_bad_requests_are_refused_as_openai_does() -> None:
    async def test(emulator: Emulator) -> None:
        replica = emulator.replicas[0]
        for path, body, status, param in BAD:
            answer = await ask(replica.url, "POST", path, body)
            assert answer.status == status, (body, answer.body)
            error = answer.json()["error"]
            assert error["code"] == status and error["param"] == param and error["message"]
        assert (await ask(replica.url, "GET", "/v1/completions")).status == 405
        async with connected(replica.url) as (reader, writer):
            writer.write(b"NONSENSE\r\n\r\n")
            assert (await read_answer(reader)).status == 400
            assert await reader.read() == b""
        async with connected(replica.url) as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\nx: " + b"y" * 100_000 + b"\r\n\r\n")
            assert (await read_answer(reader)).status == 431
        assert replica.state()["outstanding"] == 0

    with_emulator(test)


def test_one_connection_serves_many_even_at_once() -> None:
    async def test(emulator: Emulator) -> None:
        async with connected(emulator.replicas[0].url) as (reader, writer):
            for count in (3, 2, 1):  # sent before any is answered; answered in order
                writer.write(request_bytes("POST", "/v1/completions", completion(5, count)))
            writer.write(request_bytes("GET", "/health", connection="close"))
            counts = [(await read_answer(reader)).json()["usage"]["completion_tokens"] for _ in range(3)]
            assert counts == [3, 2, 1]
            last = await read_answer(reader)
            assert last.status == 200 and last.headers["connection"] == "close"
            assert await reader.read() == b""

    with_emulator(test)


def value_of(text: str, name: str) -> float:
    found = re.search(rf"^vllm:{name}{{.*}} (\S+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def test_metrics_have_the_names_of_vllm_and_their_lateness() -> None:
    async def test(emulator: Emulator) -> None:
        url = emulator.replicas[0].url

        async def metric(name: str) -> float:
            return value_of((await ask(url, "GET", "/metrics")).body.decode(), name)

        await ask(url, "POST", "/v1/completions", completion(100, 20))
        text = (await ask(url, "GET", "/metrics")).body.decode()
        assert value_of(text, "prompt_tokens_total") == 100
        assert value_of(text, "generation_tokens_total") == 20
        assert value_of(text, "time_to_first_token_seconds_count") == 1
        assert value_of(text, "e2e_request_latency_seconds_count") == 1
        assert value_of(text, "num_preemptions_total") == 0
        assert 'finished_reason="length"' in text and 'num_gpu_blocks="' in text
        assert value_of(text, "kv_cache_usage_perc") == value_of(text, "gpu_cache_usage_perc") == 0
        assert f'model_name="{MODEL}"' in text

        # A long prompt: the request is there, and the gauges know nothing until its first step ends.
        answer = asyncio.create_task(ask(url, "POST", "/v1/completions", completion(2000, 60)))
        await asyncio.sleep(0.05)
        assert emulator.replicas[0].state()["outstanding"] == 1
        assert await metric("num_requests_running") == 0
        await asyncio.sleep(0.4)
        assert await metric("num_requests_running") == 1
        assert await metric("kv_cache_usage_perc") > 0
        await answer

    with_emulator(test, time_scale=0.6)


def test_load_is_reported_to_those_who_ask() -> None:
    async def test(emulator: Emulator) -> None:
        url = emulator.replicas[0].url
        for streams in (False, True):
            body = completion(stream=streams)
            plain = await ask(url, "POST", "/v1/completions", body)
            assert "endpoint-load-metrics" not in plain.headers
            text = await ask(url, "POST", "/v1/completions", body, endpoint_load_metrics_format="TEXT")
            assert text.headers["endpoint-load-metrics"].startswith("text named_metrics.kv_cache_usage_perc=")
            answer = await ask(url, "POST", "/v1/completions", body, endpoint_load_metrics_format="json")
            assert '"num_requests_waiting": 0.0' in answer.headers["endpoint-load-metrics"]

    with_emulator(test)


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_frees_its_request(streams: bool) -> None:
    async def test(emulator: Emulator) -> None:
        replica = emulator.replicas[0]
        async with connected(replica.url) as (_, writer):
            writer.write(request_bytes("POST", "/v1/completions", completion(50, 4000, stream=streams)))
            while replica.state()["running"] == 0:
                await asyncio.sleep(0.005)
        for _ in range(200):
            if replica.state()["running"] == 0:
                break
            await asyncio.sleep(0.005)
        assert replica.state()["running"] == replica.state()["outstanding"] == 0
        assert replica.state()["kv_use"] == 0
        text = (await ask(replica.url, "GET", "/metrics")).body.decode()
        assert re.search(r'request_success_total{.*finished_reason="abort".*} 1.0', text)

    with_emulator(test)
