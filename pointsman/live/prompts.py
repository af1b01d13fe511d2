"""The prompts of a workload as text: what requests share is the same text, everything else differs.

Texts are common words of three letters, one token and four bytes each with their space, so that servers count
about as many tokens as the workload has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from pointsman.workload import Workload

WORDS = (
    " the and for are but not you all any can had her was one our out day get has him his how man new now old"
    " see two way who boy did its let put say she too use far few got own run sun ten top try yes yet big end"
)
BYTES_PER_TOKEN = 4
TOKENS_PER_MESSAGE = 4  # what a chat template adds to each
_NUM_POOL_WORDS = 1 << 18
_ROLES = {"system": " sys", "user": " ask", "assistant": " bot"}  # of BYTES_PER_TOKEN each

Message = dict[str, str]


class Prompts:
    """Texts of any number of tokens, each a piece of a long random one."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._rng = np.random.default_rng([seed, 0x70AD])
        words = np.array([f" {word}".encode() for word in WORDS.split()])  # all of BYTES_PER_TOKEN
        self._text = self._rng.choice(words, _NUM_POOL_WORDS).tobytes().decode()

    def draw(self, num_tokens: int) -> str:
        """Another one each time."""
        return self._piece(self._rng, num_tokens)

    def of(self, key: int, num_tokens: int) -> str:
        """Always the same for a key."""
        return self._piece(np.random.default_rng([self._seed, key & 0xFFFFFFFFFFFFFFFF]), num_tokens)

    def _piece(self, rng: np.random.Generator, num_tokens: int) -> str:
        start = int(rng.integers(_NUM_POOL_WORDS)) * BYTES_PER_TOKEN
        text = self._text[start : start + num_tokens * BYTES_PER_TOKEN]
        while len(text) < num_tokens * BYTES_PER_TOKEN:
            text += self._text[: num_tokens * BYTES_PER_TOKEN - len(text)]
        return text


class Chats:
    """The requests of a workload with shared prefixes, as chats.

    What the first turn of a session shares with others is its system message. A later turn has all messages
    of the turn before it, the answer that was really given, and a question of its own.
    """

    def __init__(self, workload: Workload, prompts: Prompts) -> None:
        self._workload = workload
        self._prompts = prompts
        self._messages: dict[int, list[Message]] = {}  # of turns that are to be continued, by row

    def is_continued(self, row: int) -> bool:
        return len(self._workload.next_turn) > 0 and self._workload.next_turn[row] >= 0

    def first_turn(self, row: int) -> list[Message]:
        shared, messages = "".join(self._shared_texts(row)), []
        if shared:
            messages.append({"role": "system", "content": shared})
        num_tokens = int(self._workload.num_prefill_tokens[row])
        return self._asked(row, messages, num_tokens - len(shared) // BYTES_PER_TOKEN - _added(messages))

    def next_turn(self, row: int, answer: str) -> tuple[int, list[Message]]:
        """The row of the turn after this one, and its messages."""
        later, prompts = int(self._workload.next_turn[row]), self._workload.num_prefill_tokens
        num_before = int(prompts[row] + self._workload.num_decode_tokens[row])
        messages = [*self._messages.pop(row), {"role": "assistant", "content": answer}]
        return later, self._asked(later, messages, int(prompts[later]) - num_before)

    def _asked(self, row: int, messages: list[Message], num_tokens: int) -> list[Message]:
        question = self._prompts.draw(max(1, num_tokens - TOKENS_PER_MESSAGE))
        messages.append({"role": "user", "content": question})
        if self.is_continued(row):
            self._messages[row] = messages
        return messages

    def _shared_texts(self, row: int) -> Iterator[str]:
        start, before = int(self._workload.chain_start[row]), TOKENS_PER_MESSAGE
        for link in range(start, start + int(self._workload.chain_length[row])):
            tokens = int(self._workload.link_tokens[link])
            if tokens > self._workload.num_prefill_tokens[row]:
                return  # of a prompt that was cut
            if tokens > before:
                yield self._prompts.of(int(self._workload.link_key[link]), tokens - before)
                before = tokens


def _added(messages: list[Message]) -> int:
    return TOKENS_PER_MESSAGE * len(messages)


def plain_text(messages: list[Message]) -> str:
    """A chat as the prompt of a completion: each message begins with its role, TOKENS_PER_MESSAGE times."""
    return "".join(TOKENS_PER_MESSAGE * _ROLES[message["role"]] + message["content"] for message in messages)


def streamed_text(body: bytes) -> str:
    """What the events of a streamed completion say, put together."""
    texts = []
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            choices: list[dict[str, Any]] = json.loads(line[6:]).get("choices") or []
            texts += [one.get("text") or one.get("delta", {}).get("content") or "" for one in choices]
    return "".join(texts)
