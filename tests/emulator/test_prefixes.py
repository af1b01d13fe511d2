"""Emulated servers cache prefixes: of chats, with the answers in them, and of prompts that begin alike."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from pointsman.emulator.cluster import Emulator
from pointsman.emulator.openai import Prompt, filler, word_tokens
from pointsman.emulator.prefixes import PrefixTree

from .serving import MODEL, ask, completion, with_emulator


async def chat(url: str, messages: list[dict[str, str]], num_output: int) -> tuple[int, int, str]:
    """-> prompt tokens, those of them that were cached, and the answer"""
    body = {"model": MODEL, "messages": messages, "max_tokens": num_output, "ignore_eos": True}
    answer = (await ask(url, "POST", "/v1/chat/completions", body)).json()
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], cached, answer["choices"][0]["message"]["content"]


def test_next_turn_finds_prompt_and_answer() -> None:
    async def test(emulator: Emulator) -> None:
        (replica,) = emulator.replicas
        messages = [{"role": "system", "content": "s" * 1000}, {"role": "user", "content": "hello" * 20}]
        hits = asked = known = 0
        for turn, num_output in enumerate((50, 33, 70)):
            num_prompt, cached, answer = await chat(replica.url, messages, num_output)
            assert cached == known // 16 * 16
            known = num_prompt + num_output - 1  # the last token of an answer is not computed any more
            hits += cached
            asked += num_prompt
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": f"and then? {turn}" * 10},
            ]
        other = [messages[0], {"role": "user", "content": "something else"}]
        num_prompt, cached, _ = await chat(replica.url, other, 5)
        assert cached == (4 + 250 + 4) // 16 * 16  # the system prompt, and what begins the message
        text = (await ask(replica.url, "GET", "/metrics")).body.decode()
        assert counter(text, "prefix_cache_hits") == hits + cached
        assert counter(text, "prefix_cache_queries") == asked + num_prompt

        await replica.set_fault("die")
        await replica.set_fault("none")
        assert (await chat(replica.url, other, 5))[1] == 0  # started anew
        text = (await ask(replica.url, "GET", "/metrics")).body.decode()
        assert counter(text, "prefix_cache_queries") == num_prompt

    with_emulator(test)


def test_prompts_of_token_ids_share_blocks() -> None:
    async def test(emulator: Emulator) -> None:
        url = emulator.replicas[0].url
        for prompt, cached in (([*range(100)], 0), ([*range(70), 5], 64), ([5, *range(70)], 0)):
            body: Any = (await ask(url, "POST", "/v1/completions", completion() | {"prompt": prompt})).json()
            assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == cached

    with_emulator(test)


def test_answer_is_one_link_that_the_next_prompt_contains() -> None:
    tree = PrefixTree()
    first = Prompt(bytes(range(200)), is_chat=True)
    links, answer_key = tree.place(first, 40)
    assert links["tokens"].tolist() == [16, 32, 48, 50]
    tokens = first.tokens + word_tokens(filler(0, 40))
    second = Prompt(tokens + bytes(range(100)), ((50, 90),), is_chat=True)
    later, _ = tree.place(second, 10)
    assert later["tokens"].tolist() == [16, 32, 48, 50, 90, 96, 112, 115]
    assert np.array_equal(later[:4], links)
    assert later["key"][4] == answer_key


def counter(text: str, name: str) -> float:
    (value,) = re.findall(rf"^vllm:{name}_total\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)
    return float(value)
