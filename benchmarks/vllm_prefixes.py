"""How much of each prompt the router expects to be cached, against what real vLLM servers say they found.

    python benchmarks/vllm_prefixes.py --vllm /tmp/vllm-venv/bin/vllm

Two vLLM servers on CPU with prefix caching on, a tiny model without weights whose tokens are words of four
bytes, and the router before them. Chats of several turns go on with what was answered, one request at a
time, so that each decision can be read back. Half-way one server is killed and started again: its cache is
gone. Compared are sums of tokens: what the router expected of the server that it chose, and vLLM's counters
`prefix_cache_hits_total`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import openai
from real_vllm import MODEL, VLLM_ENVIRONMENT, process, router, serve_options, wait_for
from router_cost import free_port
from tiny_model import make_model, word_ids
from vllm_books import Router, get, samples

from pointsman.live.prompts import WORDS, Prompts

NUM_SERVERS, NUM_SYSTEMS = 2, 3
SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 300, (40, 160), (10, 50)
MAX_TURNS, MAX_TOKENS = 5, 2048
NUM_OPEN = 6  # chats at a time
ALLOWED = 0.10  # between what was expected and what was found


@contextmanager
def vllm(program: str, model: Path, port: int, log: Path) -> Iterator[str]:
    command = [program, "serve", str(model), "--port", str(port), *serve_options(MAX_TOKENS)]
    command += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
    with process(command, log, **VLLM_ENVIRONMENT) as child:
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/health", child, log)
        yield url


class Counted:
    """Tokens by server: what the router expected, and what vLLM looked up and found."""

    def __init__(self, made: Router) -> None:
        self._made = made
        self.expected: dict[str, float] = defaultdict(float)
        self.vllm: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.num_requests = 0

    def decided(self) -> None:
        """Read back the last decision."""
        last = json.loads(get(f"{self._made.admin_url}/admin/decisions?last=1"))["last"]
        chosen = next(one for one in last["seen"]["replicas"] if one["name"] == last["replica"])
        self.expected[last["replica"]] += chosen["expected_hit_tokens"]
        self.num_requests += 1

    def add_counters(self, url: str) -> None:
        """Of a server that is about to end, or has done all it had to do."""
        text = get(f"{url}/metrics").decode()
        for column, name in enumerate(("queries", "hits")):
            self.vllm[url][column] += sum(
                value for _, value in samples(text, f"vllm:prefix_cache_{name}_total")
            )


class Chat:
    def __init__(self, dice: random.Random, prompts: Prompts) -> None:
        self._dice, self._prompts = dice, prompts
        system = prompts.of(dice.randrange(NUM_SYSTEMS), SYSTEM_TOKENS)
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}]
        self.num_left = dice.randint(1, MAX_TURNS)

    async def turn(self, client: openai.AsyncOpenAI, words: Sequence[int]) -> None:
        question = self._prompts.draw(self._dice.randint(*QUESTION_TOKENS))
        self.messages.append({"role": "user", "content": question})
        answer: Any = await client.chat.completions.create(
            model=MODEL,
            messages=self.messages,  # type: ignore[arg-type]
            max_tokens=self._dice.randint(*ANSWER_TOKENS),
            extra_body={"ignore_eos": True, "allowed_token_ids": list(words)},
        )
        self.messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        self.num_left -= 1


class Talk:
    """Some chats at a time, whose turns come in any order."""

    def __init__(self, counted: Counted, words: Sequence[int]) -> None:
        self._counted, self._words = counted, words
        self._dice, self._prompts = random.Random(0), Prompts(seed=0)
        self._chats: list[Chat] = []

    async def go_on(self, url: str, num_requests: int) -> None:
        base_url = f"{url}/v1"
        async with openai.AsyncOpenAI(
            base_url=base_url, api_key="none", max_retries=0, timeout=300
        ) as client:
            for number in range(num_requests):
                await self._turn(client)
                if (number + 1) % 20 == 0:
                    print(f"  {number + 1} of {num_requests} requests", file=sys.stderr, flush=True)

    async def _turn(self, client: openai.AsyncOpenAI) -> None:
        while len(self._chats) < NUM_OPEN:
            self._chats.append(Chat(self._dice, self._prompts))
        chat = self._dice.choice(self._chats)
        await chat.turn(client, self._words)
        self._counted.decided()
        if chat.num_left == 0:
            self._chats.remove(chat)


def report(counted: Counted) -> bool:
    print("| server | prompt tokens looked up | found | expected by the router | difference |")
    print("|---|--:|--:|--:|--:|")
    total = [0.0, 0.0, 0.0]
    for url, (queries, hits) in counted.vllm.items():
        row = (float(queries), float(hits), counted.expected[url])
        total = [one + other for one, other in zip(total, row, strict=True)]
        print(_row(url, row))
    print(_row(f"both, {counted.num_requests} requests", total))
    return abs(total[2] / total[1] - 1) <= ALLOWED


def _row(name: str, row: Sequence[float]) -> str:
    queries, hits, expected = row
    found = f"{hits:,.0f} ({hits / queries:.1%})"
    return f"| {name} | {queries:,.0f} | {found} | {expected:,.0f} | {expected / hits - 1:+.1%} |"


def main() -> bool:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", default="vllm", help="the program; default: on the PATH")
    parser.add_argument("--requests", type=int, default=160, help="half of them before the restart")
    parser.add_argument("--policy", default="late-binding")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = folder / "model"
        make_model(model, MAX_TOKENS, WORDS.split())
        ports = [free_port() for _ in range(NUM_SERVERS)]
        logs = [folder / f"vllm-{port}.log" for port in ports]
        print("  vLLM is starting, which takes some minutes", file=sys.stderr, flush=True)
        first = stack.enter_context(ExitStack())
        urls = [first.enter_context(vllm(asked.vllm, model, ports[0], logs[0]))]
        urls.append(stack.enter_context(vllm(asked.vllm, model, ports[1], logs[1])))
        made = stack.enter_context(router(urls, folder, "router", "--policy", asked.policy))
        counted = Counted(made)
        talk = Talk(counted, word_ids(WORDS.split()))
        asyncio.run(talk.go_on(made.url, asked.requests // 2))
        counted.add_counters(urls[0])
        first.close()
        print("  one server is started again", file=sys.stderr, flush=True)
        stack.enter_context(vllm(asked.vllm, model, ports[0], logs[0]))
        asyncio.run(talk.go_on(made.url, asked.requests - asked.requests // 2))
        for url in urls:
            counted.add_counters(url)
        return report(counted)


if __name__ == "__main__":
    sys.exit(not main())
