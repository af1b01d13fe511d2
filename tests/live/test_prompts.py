from __future__ import annotations

import numpy as np

from pointsman.live import prompts as prompts_module
from pointsman.live.prompts import BYTES_PER_TOKEN, TOKENS_PER_MESSAGE, Prompts, plain_text, streamed_text


def test_prompts_differ_and_are_as_long_as_asked_for() -> None:
    prompts = Prompts(seed=0)
    texts = [prompts.draw(64) for _ in range(200)]
    assert {len(text) for text in texts} == {64 * BYTES_PER_TOKEN}
    assert len({text[: 16 * BYTES_PER_TOKEN] for text in texts}) > 195, "no block of a prefix cache is shared"
    assert len(prompts.draw(300_000)) == 300_000 * BYTES_PER_TOKEN, "longer than the text they are cut from"
    assert np.unique([len(word) for word in prompts_module.WORDS.split()]) == [3]


def test_what_is_shared_is_the_same_text_unless_the_seed_differs() -> None:
    assert Prompts(0).of(-7, 30) == Prompts(0).of(-7, 30)
    assert len({Prompts(0).of(1, 30), Prompts(0).of(2, 30), Prompts(1).of(1, 30)}) == 3


def test_the_text_of_a_stream() -> None:
    body = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    body += b'data: {"choices":[{"delta":{"content":" a"}}]}\n\ndata: {"choices":[{"delta":{}}]}\n\n'
    body += b'data: {"choices":[{"delta":{"content":" b\\n"}}]}\n\ndata: {"choices":[],"usage":{}}\n\n'
    assert streamed_text(body + b"data: [DONE]\n\n") == " a b\n"


def test_the_text_of_a_stream_that_is_no_chat() -> None:
    body = b'data: {"choices":[{"text":" a"}]}\n\ndata: {"choices":[{"text":" b","delta":{}}]}\n\n'
    assert streamed_text(body + b"data: [DONE]\n\n") == " a b"


def test_a_chat_as_plain_text_has_as_many_tokens_as_with_its_template() -> None:
    chat = [
        {"role": "system", "content": " one"},
        {"role": "user", "content": " two"},
        {"role": "assistant", "content": " who"},
    ]
    assert len(plain_text(chat)) == BYTES_PER_TOKEN * 3 * (TOKENS_PER_MESSAGE + 1)
    assert plain_text(chat).startswith(plain_text(chat[:2]))
