"""Commands of our own, each in a process of its own for as long as it is needed.

Whoever starts them does so within `run_to_end`, so that Ctrl-C and SIGTERM end them, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

import uvloop

from pointsman.errors import InputError
from pointsman.router.keys import ADMIN, CLIENT

_START_TIMEOUT_S = 600.0  # kernels may have to be compiled
_STOP_TIMEOUT_S = 15.0
_NUM_LINES = 50
_LISTENING = re.compile(r"listening on (\S+)/v1")
_ADMIN = re.compile(r"admin on (\S+)/admin/")
_REPLICA = re.compile(r"(\S+)  replica \d+")
_FAULTS = re.compile(r"(\S+)  faults")


Result = TypeVar("Result")


class RouterProcess(NamedTuple):
    url: str
    admin_url: str


class EmulatorProcess(NamedTuple):
    urls: list[str]
    admin_url: str


class _Child:
    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self._process = process
        self._name = name
        self.lines: deque[str] = deque(maxlen=_NUM_LINES)

    async def _read(self) -> bool:
        """The next line; False if there is none."""
        assert self._process.stderr is not None
        data = await self._process.stderr.readline()
        if data:
            self.lines.append(data.decode(errors="replace").strip())
        return bool(data)

    async def says(self, *patterns: re.Pattern[str]) -> list[str]:
        """What it says about each of these, once it has said something about all."""
        found: dict[re.Pattern[str], str] = {}
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                while len(found) < len(patterns):
                    if not await self._read():
                        raise self._failure("ended")
                    for pattern in patterns:
                        if match := pattern.search(self.lines[-1]):
                            found[pattern] = match[1]
        except TimeoutError:
            raise self._failure("did not start") from None
        return [found[pattern] for pattern in patterns]

    def _failure(self, what: str) -> InputError:
        last = self.lines[-1].removeprefix("error: ") if self.lines else "it said nothing"
        return InputError(f"pointsman {self._name}", self._process.pid, f"{what} ({last})", "try it alone")

    async def drain(self) -> None:
        """A pipe that nobody reads would stop it in the end."""
        while await self._read():
            pass

    async def stop(self) -> None:
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()


def run_to_end(main: Coroutine[Any, Any, Result]) -> Result:
    """Run it on a loop of its own; a signal ends it and what it has started."""

    async def interruptible() -> Result:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await main

    try:
        return uvloop.run(interruptible())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


@asynccontextmanager
async def _child(name: str, arguments: Sequence[str]) -> AsyncIterator[_Child]:
    keys = (CLIENT.environment, ADMIN.environment)  # ours, not theirs
    environment = {name: value for name, value in os.environ.items() if name not in keys}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "pointsman",
        name,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
        start_new_session=True,  # Ctrl-C is for us; we end it
    )
    child = _Child(process, name)
    try:
        yield child
    finally:
        await asyncio.shield(child.stop())


@asynccontextmanager
async def _drained(child: _Child) -> AsyncIterator[None]:
    task = asyncio.get_running_loop().create_task(child.drain())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def router(policy: str, servers: Sequence[str]) -> AsyncIterator[RouterProcess]:
    """`pointsman serve` by this policy; `servers` are the options that name them."""
    arguments = ["--policy", policy, *servers, "--port", "0", "--admin-port", "0", "--quiet"]
    async with _child("serve", arguments) as child:
        url, admin_url = await child.says(_LISTENING, _ADMIN)
        async with _drained(child):
            yield RouterProcess(url, admin_url)


@asynccontextmanager
async def emulator(arguments: Sequence[str]) -> AsyncIterator[EmulatorProcess]:
    """`pointsman emulate` on free ports."""
    async with _child("emulate", [*arguments, "--port", "0", "--admin-port", "0"]) as child:
        (admin_url,) = await child.says(_FAULTS)
        urls = [url for line in child.lines for url in _REPLICA.findall(line)]
        async with _drained(child):
            yield EmulatorProcess(urls, admin_url)
