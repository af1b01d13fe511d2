"""An emulator on ports of its own, and a client that reads raw answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, NamedTuple

import uvloop

from pointsman.emulator.cluster import Emulator, EmulatorSpec
from pointsman.emulator.engine import load_engine
from pointsman.spec import parse_spec

MODEL = "Llama-3-8B"
_numbers = count(1)


def with_emulator(test: Callable[[Emulator], Awaitable[None]], **spec: Any) -> None:
    """Run the test against an emulator; what it leaves open is closed."""
    load_engine()
    fields = {"model": MODEL, "devices": ["A100-80"], "lengths": "azure-conv", "time_scale": 20.0}

    async def run() -> None:
        emulator = Emulator(parse_spec(EmulatorSpec, fields | {"port": 0, "admin_port": 0} | spec))
        await emulator.open()
        try:
            await asyncio.wait_for(test(emulator), 60)
        finally:
            emulator.close()
            await asyncio.sleep(0.01)

    uvloop.run(run())


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


def request_bytes(method: str, path: str, body: Any = None, **headers: str) -> bytes:
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: emulator", f"content-length: {len(data)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + data


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    if headers.get("transfer-encoding") == "chunked":
        body = b"".join([chunk async for chunk in chunks(reader)])
    else:
        body = await reader.readexactly(int(headers["content-length"]))
    return Answer(int(head[0].split(" ")[1]), headers, body)


async def chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)


async def ask(url: str, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    async with connected(url) as (reader, writer):
        writer.write(request_bytes(method, path, body, **headers))
        return await read_answer(reader)


def completion(num_prompt: int = 10, num_output: int = 5, **fields: Any) -> dict[str, Any]:
    """Every one begins with a token of its own, so that nothing is cached."""
    prompt = [next(_numbers), *[1] * (num_prompt - 1)]
    return {"model": MODEL, "prompt": prompt, "max_tokens": num_output, "ignore_eos": True} | fields


def events(body: bytes) -> list[Any]:
    """The JSON of each server-sent event; the last must be [DONE]."""
    *some, done, end = body.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in some]
