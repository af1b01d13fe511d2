"""Blocks of requests through `pointsman serve` in front of real servers, and the books afterwards.

    python router_blocks.py block two-5.jsonl --name two_5_default --policy default --router 8110 \
        --admin 8111 --servers 8101,8102 --out results
    python router_blocks.py busy 8102,8103 --trace AzureLLMInferenceTrace_conv.csv --streams 45 --seconds 40
    python router_blocks.py wait 8101,8102

`block` waits until nothing runs any more, switches the policy, sends the rows of `block_traffic.py` when
they are due, and compares what vLLM counted with what the router booked, server by server. `busy` keeps so
many streams running on each server: a neighbour on the same card. Prompts are token ids; no two blocks have
any in common, so that no block finds the last one's in a prefix cache. Needs only the standard library.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import json
import random
import re
import signal
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from block_traffic import BLOCK_TOKENS, lengths

VOCABULARY = range(10, 120_000)
EVENT = b'"choices":[{"index":0'
SETTLE_S, PATIENCE_S = 0.8, 90.0
COUNTED = {
    "requests": "vllm:request_success_total",
    "prompt": "vllm:prompt_tokens_total",
    "output": "vllm:generation_tokens_total",
}
SPEEDS = ("step_floor_seconds", "decode_seconds_per_token", "prefill_seconds_per_token")


@dataclass
class Answer:
    sent_at: float
    first_at: float = 0.0
    done_at: float = 0.0
    num_tokens: int = 0
    num_cached: int = 0
    problem: str = ""


@dataclass
class Port:
    """One HTTP server on this machine."""

    number: int
    model: str = ""

    async def get(self, path: str, body: bytes | None = None) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.number, limit=1 << 24)
        what = b"GET" if body is None else b"POST"
        head = b"%b %b HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n" % (what, path.encode())
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body or b"") + (body or b""))
        head, _, text = (await reader.read(-1)).partition(b"\r\n\r\n")
        writer.close()
        if b" 200 " not in head[:16]:
            raise RuntimeError(f"{path} of {self.number}: {head[:16]!r} {text[:300]!r}")
        return text

    async def counters(self) -> dict[str, float]:
        found = {}
        for line in (await self.get("/metrics")).decode().splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith(("vllm:", "pointsman_")):
                found[name] = float(value)
        return found

    async def find_model(self) -> None:
        """Ask for the model until there is one: a router lists none before its servers have answered it."""
        began_at = time.perf_counter()
        while not self.model:
            try:
                self.model = json.loads(await self.get("/v1/models"))["data"][0]["id"]
            except (OSError, RuntimeError, ValueError, LookupError):
                if time.perf_counter() - began_at > PATIENCE_S:
                    raise SystemExit(f"{self.number} lists no model") from None
                await asyncio.sleep(0.2)

    async def ask(self, ids: Sequence[int], num_output: int, name: str) -> Answer:
        asked = {"model": self.model, "prompt": ids, "max_tokens": num_output, "ignore_eos": True}
        asked |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps(asked).encode()
        answer = Answer(time.perf_counter())
        try:
            await self._stream(body, name, answer)
        except (OSError, asyncio.IncompleteReadError, RuntimeError) as error:
            answer.problem = repr(error)[:300]
        return answer

    async def _stream(self, body: bytes, name: str, answer: Answer) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.number, limit=1 << 20)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        head += b"Connection: close\r\nx-request-id: %b\r\n" % name.encode()
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        try:
            status = (await reader.readuntil(b"\r\n\r\n"))[9:12]
            tail = b""
            while piece := await reader.read(1 << 16):
                answer.done_at = time.perf_counter()
                tail = (tail + piece)[-8192:]
                if not answer.first_at and EVENT in tail:
                    answer.first_at = answer.done_at
        finally:
            writer.close()
        if status != b"200" or b"[DONE]" not in tail:
            raise RuntimeError(f"{status.decode()}: {tail[-200:].decode(errors='replace')}")
        counts = re.findall(rb'"completion_tokens": ?(\d+)', tail)
        cached = re.findall(rb'"cached_tokens": ?(\d+)', tail)
        answer.num_tokens = int(counts[-1]) if counts else 0
        answer.num_cached = int(cached[-1]) if cached else 0


def total(counters: dict[str, float], name: str, *labels: str) -> float:
    return sum(
        value
        for key, value in counters.items()
        if key.partition("{")[0] == name and all(label in key for label in labels)
    )


async def drained(servers: Sequence[Port]) -> None:
    began_at = time.perf_counter()
    while True:
        pages = [await server.counters() for server in servers]
        if not sum(
            total(page, f"vllm:num_requests_{kind}") for page in pages for kind in ("running", "waiting")
        ):
            return
        if time.perf_counter() - began_at > PATIENCE_S:
            raise SystemExit("the servers do not come to rest")
        await asyncio.sleep(0.2)


def prompt_ids(row: dict[str, Any], salt: str, number: int) -> list[int]:
    """Equal as far as the hashes of two rows are."""
    if "block_hashes" not in row:
        return random.Random(f"{salt} {number}").choices(VOCABULARY, k=row["num_prefill_tokens"])
    return [
        token
        for name in row["block_hashes"]
        for token in random.Random(f"{salt} block {name}").choices(VOCABULARY, k=BLOCK_TOKENS)
    ]


async def block(asked: argparse.Namespace) -> None:
    rows = [json.loads(line) for line in asked.requests.read_text().splitlines()]
    prompts = [prompt_ids(row, asked.name, number) for number, row in enumerate(rows)]
    router, admin = Port(asked.router), Port(asked.admin)
    servers = [Port(int(port)) for port in asked.servers.split(",")]
    await drained(servers)
    await router.find_model()
    await admin.get("/admin/policy", json.dumps({"policy": asked.policy}).encode())
    before = [await one.counters() for one in (router, *servers)]
    began_at, tasks = time.perf_counter() + 0.3, []
    for number, (row, ids) in enumerate(zip(rows, prompts, strict=True)):
        await asyncio.sleep(max(0.0, began_at + row["arrived_at"] - time.perf_counter()))
        tasks.append(asyncio.create_task(router.ask(ids, row["num_decode_tokens"], f"{asked.name}-{number}")))
    answers = await asyncio.gather(*tasks)
    await asyncio.sleep(SETTLE_S)
    after = [await one.counters() for one in (router, *servers)]
    books = compared(servers, before, after)
    estimates = {
        f"{server.number}": {
            name: total(after[0], f"pointsman_replica_{name}", f':{server.number}"') for name in SPEEDS
        }
        for server in servers
    }
    write(asked, rows, answers, began_at, books, estimates)


def compared(
    servers: Sequence[Port], before: Sequence[dict[str, float]], after: Sequence[dict[str, float]]
) -> list[dict[str, Any]]:
    """What a server counted and what the router booked for it."""
    found = []
    for server, first, last in zip(servers, before[1:], after[1:], strict=True):
        for what, name in COUNTED.items():
            metric, label = ("requests", 'code="200"') if what == "requests" else ("tokens", f'kind="{what}"')
            key = (f"pointsman_{metric}_total", f':{server.number}"', label)
            its, ours = total(last, name) - total(first, name), total(after[0], *key) - total(before[0], *key)
            found.append({"server": server.number, "what": what, "vllm": its, "router": ours})
        preempted = total(last, "vllm:num_preemptions_total") - total(first, "vllm:num_preemptions_total")
        found.append({"server": server.number, "what": "preemptions", "vllm": preempted, "router": preempted})
    return found


def write(
    asked: argparse.Namespace,
    rows: Sequence[dict[str, Any]],
    answers: Sequence[Answer],
    began_at: float,
    books: list[dict[str, Any]],
    estimates: dict[str, Any],
) -> None:
    good = [(row, one) for row, one in zip(rows, answers, strict=True) if not one.problem]
    with (asked.out / f"{asked.name}.csv").open("w", newline="") as file:
        table = csv.writer(file)
        names = ("due_at", "arrived_at", "first_token_at", "completed_at")
        table.writerow((*names, "prompt_tokens", "output_tokens", "cached_tokens"))
        for row, one in good:
            times = (f"{at - began_at:.5f}" for at in (one.sent_at, one.first_at, one.done_at))
            table.writerow(
                (row["arrived_at"], *times, row["num_prefill_tokens"], one.num_tokens, one.num_cached)
            )
    ttft_s = sorted(one.first_at - one.sent_at for _, one in good)
    e2e_s = sorted(one.done_at - one.sent_at for _, one in good)
    prompt_tokens = sum(row["num_prefill_tokens"] for row, _ in good)
    summary = {
        "name": asked.name,
        "policy": asked.policy,
        "began": time.strftime("%H:%M:%S", time.gmtime(time.time() - time.perf_counter() + began_at)),
        "requests": len(good),
        "failed": len(answers) - len(good),
        "wrong_length": sum(one.num_tokens != row["num_decode_tokens"] for row, one in good),
        "ttft_mean_s": round(statistics.mean(ttft_s), 4),
        "ttft_p99_s": round(ttft_s[int(0.99 * len(ttft_s))], 4),
        "e2e_mean_s": round(statistics.mean(e2e_s), 4),
        "e2e_p99_s": round(e2e_s[int(0.99 * len(e2e_s))], 4),
        "cached_share": round(sum(one.num_cached for _, one in good) / prompt_tokens, 4),
        "latest_sent_s": round(max(one.sent_at - began_at - row["arrived_at"] for row, one in good), 4),
        "books_are_equal": all(row["vllm"] == row["router"] for row in books),
    }
    problems = [one.problem for one in answers if one.problem][:10]
    report = {**summary, "books": books, "estimates": estimates, "problems": problems}
    (asked.out / f"{asked.name}.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(summary), problems[:2], flush=True)
    print(
        "  estimates",
        {port: [f"{1e6 * v:.0f}" for v in one.values()] for port, one in estimates.items()},
        "µs",
    )


async def busy(asked: argparse.Namespace) -> None:
    """Closed loops until the time is over; prints what each server did a second."""
    drawn = list(lengths(asked.trace))
    dice = random.Random(5)
    finished: Counter[int] = Counter()

    async def loop(server: Port, number: int) -> None:
        share = dice.random()  # of the first answer: they would all end together otherwise
        while True:
            prompt, output = dice.choice(drawn)
            name = f"busy {server.number} {number} {dice.random()}"
            ids = random.Random(name).choices(VOCABULARY, k=prompt)
            answer = await server.ask(ids, max(1, round(share * output)), "busy")
            if answer.problem:
                raise SystemExit(f"a neighbour fails: {answer.problem}")
            finished[server.number] += 1
            share = 1.0

    servers = [Port(int(port)) for port in asked.servers.split(",")]
    for server in servers:
        await server.find_model()
    tasks = [
        asyncio.create_task(loop(server, number)) for server in servers for number in range(asked.streams)
    ]
    began_at, over = time.perf_counter(), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, over.set)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(over.wait(), asked.seconds)
    seconds = time.perf_counter() - began_at
    print({port: round(count / seconds, 2) for port, count in finished.items()}, "answers/s", flush=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def wait(asked: argparse.Namespace) -> None:
    began_at = time.perf_counter()
    for server in (Port(int(port)) for port in asked.servers.split(",")):
        while True:
            try:
                await server.get("/health")
                break
            except (OSError, RuntimeError):
                if time.perf_counter() - began_at > asked.seconds:
                    raise SystemExit(f"no answer from {server.number}") from None
                await asyncio.sleep(0.3)
        print(f"{server.number} answers after {time.perf_counter() - began_at:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    whats = parser.add_subparsers(required=True)
    one = whats.add_parser("block")
    one.add_argument("requests", type=Path, help="rows of block_traffic.py")
    one.add_argument("--name", required=True)
    one.add_argument("--policy", required=True)
    one.add_argument("--router", type=int, required=True, help="its port")
    one.add_argument("--admin", type=int, required=True, help="its admin port")
    one.add_argument("--servers", required=True, help="ports, with commas")
    one.add_argument("--out", type=Path, required=True, help="folder of NAME.csv and NAME.json")
    one.set_defaults(run=block)
    one = whats.add_parser("busy")
    one.add_argument("servers")
    one.add_argument("--trace", type=Path, required=True)
    one.add_argument("--streams", type=int, default=45, help="on each server")
    one.add_argument("--seconds", type=float, default=40.0)
    one.set_defaults(run=busy)
    one = whats.add_parser("wait")
    one.add_argument("servers")
    one.add_argument("--seconds", type=float, default=240.0)
    one.set_defaults(run=wait)
    asked = parser.parse_args()
    asyncio.run(asked.run(asked))


if __name__ == "__main__":
    main()
