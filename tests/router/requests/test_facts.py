"""What is read from bodies: the text of a prompt as a server would cache it, and usage."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from pointsman.router.http.messages import Answer, RequestHead
from pointsman.router.requests.facts import RequestFacts, read_facts, read_usage, read_wish
from pointsman.routing.hashing import PromptHasher
from pointsman.routing.records import LINK

CHAT, COMPLETION = b"/v1/chat/completions", b"/v1/completions"


def facts_of(path: bytes, **body: Any) -> RequestFacts:
    headers = [(b"content-type", b"application/json")]
    head = RequestHead(b"POST", path, headers, is_http_10=False, keep_alive=True)
    facts = read_facts(read_wish(head, b""), json.dumps(body, ensure_ascii=False).encode())
    assert isinstance(facts, RequestFacts)
    return facts


def keys(facts: RequestFacts) -> list[int]:
    links = PromptHasher().of_text(facts.text, facts.prompt_tokens, *facts.marks)
    found: list[int] = np.frombuffer(links, LINK)["key"].tolist()
    return found


def say(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


@pytest.mark.parametrize("letter", ["x", "ü"])
def test_next_turn_contains_the_turn_before(letter: str) -> None:
    """The key of a whole prompt is among those of the prompt that goes on with its answer."""
    turns = [say("system", letter * 700), say("user", "first question")]
    for n in range(3):
        before = keys(facts_of(CHAT, model="m", messages=turns))
        turns = [*turns, say("assistant", f"answer {letter} {n}"), say("user", f"question {n}")]
        now = keys(facts_of(CHAT, model="m", messages=turns))
        assert before[-1] in now
    # And so is a system prompt with other questions.
    other = keys(facts_of(CHAT, model="m", messages=[turns[0], say("user", "else")]))
    num_common = len(set(other) & set(keys(facts_of(CHAT, model="m", messages=[turns[0], say("user", "x")]))))
    assert num_common == len(other) - 1


def test_what_a_server_reads_tells_prompts_apart() -> None:
    turns = [say("user", "a question")]
    same = facts_of(CHAT, model="m", messages=turns, temperature=0.5, user="u")
    assert same.text == facts_of(CHAT, model="m", messages=turns).text
    others = [
        facts_of(CHAT, model="n", messages=turns),
        facts_of(CHAT, model="m", messages=[say("system", "a question")]),
        facts_of(CHAT, model="m", messages=turns, tools=[{"type": "function"}]),
        facts_of(CHAT, model="m", messages=[say("user", [{"type": "text", "text": "a question"}])]),
        facts_of(CHAT, model="m", messages=[say("user", "a question", tool_calls=[{"id": "1"}])]),
        facts_of(COMPLETION, model="m", prompt="a question"),
        facts_of(COMPLETION, model="m", prompt=[1, 2, 3]),
        facts_of(COMPLETION, model="m", prompt=["a question", "another"]),
    ]
    texts = [same.text, *(one.text for one in others)]
    assert len(set(texts)) == len(texts)


def test_token_ids_are_counted_and_hashed() -> None:
    ids = list(range(300))
    one, other = (
        facts_of(COMPLETION, model="m", prompt=ids),
        facts_of(COMPLETION, model="m", prompt=[*ids, 7]),
    )
    assert (one.is_counted, one.prompt_tokens) == (True, 300)
    assert keys(one)[:2] == keys(other)[:2] and keys(one)[2] != keys(other)[2]
    links = PromptHasher().of_text(one.text, one.prompt_tokens, *one.marks)
    assert np.frombuffer(links, LINK)["tokens"].tolist() == [127, 255, 300]
    batch = facts_of(COMPLETION, model="m", prompt=[ids, ids])
    assert (batch.is_counted, batch.prompt_tokens) == (True, 600) and batch.text


def test_what_stands_in_the_place_of_a_prompt_is_taken() -> None:
    """vLLM embeds chats, and reads prompts that are embedded already; a response may have a stored prompt."""
    embedded = facts_of(b"/v1/embeddings", model="m", messages=[say("user", "x" * 400)])
    assert (embedded.model, embedded.prompt_tokens) == ("m", 105)
    assert facts_of(COMPLETION, model="m", prompt_embeds="A" * 33_000).prompt_tokens == 4
    assert facts_of(COMPLETION, model="m", prompt=None, prompt_embeds="AAAA").model == "m"
    assert facts_of(b"/v1/responses", model="m", prompt={"id": "pmpt_1"}).model == "m"


@pytest.mark.parametrize("path", [COMPLETION, b"/v1/embeddings", b"/v1/responses"])
def test_a_request_without_any_prompt_is_refused(path: bytes) -> None:
    head = RequestHead(b"POST", path, [], is_http_10=False, keep_alive=True)
    answer = read_facts(read_wish(head, b""), b'{"model": "m"}')
    assert isinstance(answer, Answer) and b"missing required field" in answer.body


def form(*parts: tuple[bytes, bytes], boundary: bytes = b"X-1") -> bytes:
    opened = [b"--%b\r\n%b\r\n\r\n%b\r\n" % (boundary, head, value) for head, value in parts]
    return b"".join(opened) + b"--%b--\r\n" % boundary


FIELD = b'Content-Disposition: form-data; name="%b"'
FILE = FIELD % b"file" + b'; filename="model.wav"\r\nContent-Type: audio/wav'
SOUND = b'RIFF\xff\x00\r\nContent-Disposition: form-data; name="model"\r\n\r\nno\r\n--X-2\r\n'
FORMS = {
    "the file first": (form((FILE, SOUND), (FIELD % b"model", b"whisper")), "whisper"),
    "the model first": (form((FIELD % b"model", b"whisper"), (FILE, SOUND)), "whisper"),
    "without quotes": (
        form((b"content-type: text/plain\r\ncontent-disposition: form-data; name=model", b"w")),
        "w",
    ),
    "other names": (form((FIELD % b"models", b"no"), (FIELD % b"my-model", b"no")), None),
    "no value": (form((FIELD % b"model", b"")), None),
    "cut short": (form((FIELD % b"model", b"whisper"))[:-12], None),
    "nothing": (b"", None),
}


@pytest.mark.parametrize(("raw", "model"), FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(
    "content_type", [b"multipart/form-data; boundary=X-1", b'Multipart/Form-Data;boundary="X-1"']
)
def test_the_model_of_a_form(raw: bytes, model: str | None, content_type: bytes) -> None:
    head = RequestHead(b"POST", b"/v1/audio/transcriptions", [(b"content-type", content_type)], False, True)
    facts = read_facts(read_wish(head, b""), raw)
    assert isinstance(facts, RequestFacts) and facts.model == model


def test_json_is_read_however_its_type_is_written() -> None:
    head = RequestHead(b"POST", b"/tokenize", [(b"content-type", b"Application/JSON")], False, True)
    facts = read_facts(read_wish(head, b""), b'{"model": "m"}')
    assert isinstance(facts, RequestFacts) and facts.model == "m"


def test_no_text_is_hashed_where_none_is_asked_for() -> None:
    assert facts_of(b"/v1/embeddings", model="m", input="a question").text == b""


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 5, "completion_tokens": 7}, (5, 7, None)),
        ({"prompt_tokens": 5, "completion_tokens": 7, "prompt_tokens_details": None}, (5, 7, None)),
        (
            {"prompt_tokens": 5, "total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 3}},
            (5, None, 3),
        ),
        (
            {
                "prompt_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": 3, "audio_tokens": 0},
                "completion_tokens": 7,
                "completion_tokens_details": {"reasoning_tokens": 0},
            },
            (5, 7, 3),
        ),
        ({"input_tokens": 5, "input_tokens_details": {"cached_tokens": 3}, "output_tokens": 7}, (5, 7, 3)),
    ],
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_usage_with_details(usage: Any, expected: Any, separators: tuple[str, str]) -> None:
    tail = json.dumps({"text": "…", "usage": usage, "id": {"a": {}}}, separators=separators).encode()
    assert read_usage(tail) == expected
