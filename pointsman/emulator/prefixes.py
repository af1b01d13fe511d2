"""Where a prompt stands in the tree of prefixes that the simulated replica caches.

A link ends with every block of vLLM's, where an answer in the prompt begins, and where it ends. An answer is
one link: the replica knows it by the key that prompt and answer have together, which the next prompt of the
chat contains.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pointsman.emulator.openai import BYTES_PER_TOKEN, Prompt, filler, word_tokens
from pointsman.routing.hashing import PromptHasher
from pointsman.routing.records import LINK

BLOCK_TOKENS = 16


class PrefixTree:
    def __init__(self) -> None:
        self._hasher = PromptHasher(BLOCK_TOKENS * BYTES_PER_TOKEN)

    def place(self, prompt: Prompt, num_output: int) -> tuple[NDArray[Any], int]:
        """The links of the prompt [n] LINK, and the key of prompt and answer; 0 if nobody can continue it."""
        links = self._links(prompt.tokens)
        for start, end in prompt.answers:
            links = links[(links["tokens"] <= start) | (links["tokens"] >= end)]
        ends = [self._last(prompt.tokens[: BYTES_PER_TOKEN * end]) for pair in prompt.answers for end in pair]
        links = np.concatenate([links, *ends])
        links = links[np.unique(links["tokens"], return_index=True)[1]]
        if not prompt.is_chat:
            return links, 0
        with_answer = prompt.tokens + word_tokens(filler(0, num_output))
        return links, int(self._last(with_answer)["key"][0])

    def _links(self, tokens: bytes) -> NDArray[Any]:
        return np.frombuffer(self._hasher.of_text(tokens, len(tokens) // BYTES_PER_TOKEN), LINK)

    def _last(self, tokens: bytes) -> NDArray[Any]:
        """[1], or [0] if there are no tokens."""
        return self._links(tokens)[-1:] if tokens else np.zeros(0, LINK)
