"""What the router and the picker read of a request, from its head and its body; usage, from an answer.

Prompt lengths are estimated from text without a tokenizer; the books correct them by what servers report.
Prompts of token ids are counted. Servers cache the prefixes of prompts, so the text is laid out as they read
it: tools, then messages.
"""

from __future__ import annotations

import re
import zlib
from array import array
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from pointsman.router.http.messages import Answer, RequestHead, refusal
from pointsman.routing.records import UNKNOWN

PRIORITIES = {b"high": 0, b"normal": 1, b"low": 2}
NORMAL = PRIORITIES[b"normal"]
MAX_TOKENS = 2**31 - 1
_BYTES_PER_TOKEN = 4  # of English text
_BYTES_PER_EMBEDDING = 11_000  # of a token: 4096 numbers of two bytes, in base64
_TOKENS_PER_MESSAGE = 4  # of the chat template
_USAGE = b'"usage":'
_DETAILS = b'_details":{'
_FORM = re.compile(rb'multipart/form-data *;.*boundary="?([^";]+)', re.IGNORECASE)
_OF_MODEL = re.compile(
    rb'\r\ncontent-disposition: *form-data *;.*\bname="?model"?(?= *[;\r]|$)', re.IGNORECASE
)
_HEAD_END = b"\r\n\r\n"
_MAX_PART_HEAD = 4096
_MAX_PARTS = 100  # of a form
_BETWEEN = "\0"  # the parts of a prompt's text
_PROMPT_TOKENS = re.compile(rb'"(?:prompt|input)_tokens":\s*(\d{1,12})(?!\d)')
_CACHED_TOKENS = re.compile(rb'"cached_tokens":\s*(\d{1,12})(?!\d)')
_OUTPUT_TOKENS = re.compile(rb'"(?:completion|output)_tokens":\s*(\d{1,12})(?!\d)')


class RequestFacts(msgspec.Struct, frozen=True, gc=False):
    model: str | None = None
    is_stream: bool = False
    prompt_tokens: int = 1
    session: str | None = None
    generates: bool = False  # text is asked for
    max_tokens: int = UNKNOWN  # of output
    text: bytes = b""  # of the prompt; empty if no text is asked for
    # Lengths of what other prompts may begin with: the first message, and all before the last answer.
    marks: tuple[int, int] = (0, 0)
    is_counted: bool = False  # the prompt is token ids, and its length no estimate
    priority: int = NORMAL


# Of a body only these fields are read; the rest is checked to be JSON and skipped. JSON has no cycles (gc).


class _Message(msgspec.Struct, gc=False):
    content: str | list[Any] | None = None
    role: str | None = None
    tool_calls: Any = None


class _Body(msgspec.Struct, gc=False):
    model: str | None = None
    stream: bool | None = None
    user: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None


class _Chat(_Body, kw_only=True):
    messages: list[_Message]
    tools: msgspec.Raw = msgspec.Raw()


class _Completion(_Body, kw_only=True):
    prompt: str | list[Any] | None = None
    prompt_embeds: msgspec.Raw = msgspec.Raw()  # in its place (vLLM)


class _Input(_Body, kw_only=True):
    input: str | list[Any] | None = None
    messages: list[Any] | None = None  # in its place, of embeddings (vLLM)
    prompt: Any = None  # in its place, of responses: one that is stored


_Count = Annotated[int, msgspec.Meta(ge=0, lt=10**12)]


class _Details(msgspec.Struct, gc=False):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: _Count
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None


_encode = msgspec.json.Encoder().encode
_decode_usage = msgspec.json.Decoder(_Usage).decode
_decode_body = msgspec.json.Decoder(_Body).decode
_decoders = {
    b"/v1/chat/completions": msgspec.json.Decoder(_Chat).decode,
    b"/v1/completions": msgspec.json.Decoder(_Completion).decode,
    b"/v1/embeddings": msgspec.json.Decoder(_Input).decode,
    b"/v1/responses": msgspec.json.Decoder(_Input).decode,
}

_NO_PRIORITY = refusal(400, f"x-pointsman-priority is none of {', '.join(map(bytes.decode, PRIORITIES))}")
_GENERATING = _decoders.keys() - {b"/v1/embeddings"}


class Wish(msgspec.Struct, frozen=True, gc=False):
    """What the head of a request says of it."""

    path: str
    decode: Callable[[bytes], Any] | None  # its body; None: that is not JSON
    boundary: bytes | None  # between the fields of its body, if that is a form
    generates: bool
    session: str | None
    request_id: bytes | None
    priority: int | None  # one of PRIORITIES; None: the client named none of them
    is_explained: bool  # the decision, in the answer
    passed_on: bytes  # the header lines that replicas get


def read_wish(head: RequestHead, passed_on: bytes) -> Wish:
    get = head.special.get
    decode = boundary = None
    if head.method == b"POST":
        content_type = get(b"content-type", b"")
        is_json = content_type.lower().startswith(b"application/json")
        decode = _decoders.get(head.path) or (_decode_body if is_json else None)
        is_form = _FORM.match(content_type)
        boundary = is_form[1] if is_form else None
    session = get(b"x-session-id")
    priority = get(b"x-pointsman-priority")
    return Wish(
        head.path.decode("latin-1"),
        decode,
        boundary,
        decode is not None and head.path in _GENERATING,
        session.decode("latin-1") if session else None,
        get(b"x-request-id"),
        NORMAL if priority is None else PRIORITIES.get(priority.lower()),
        b"x-pointsman-decision" in head.special,
        passed_on,
    )


def unread_facts(wish: Wish, num_bytes: int, model: str | None = None) -> RequestFacts | Answer:
    """What is known of a request whose body of so many bytes is not read; or why it is refused."""
    priority = wish.priority
    if priority is None:
        return _NO_PRIORITY
    return RequestFacts(
        model=model,
        prompt_tokens=1 + num_bytes // _BYTES_PER_TOKEN,
        session=wish.session,
        generates=wish.generates,
        priority=priority,
    )


def read_facts(wish: Wish, raw: bytes) -> RequestFacts | Answer:
    """What head and body say of a request; or, as an Answer, why it is refused."""
    decode, priority = wish.decode, wish.priority
    if priority is None:
        return _NO_PRIORITY
    if decode is None:
        model = None if wish.boundary is None else _model_of_form(raw, wish.boundary)
        return unread_facts(wish, len(raw), model)
    is_counted = False
    try:
        if not raw.isascii():
            raw.decode()  # what is skipped is not checked to be UTF-8 otherwise
        body: Any = decode(raw)
        if type(body) is _Chat:
            prompt_tokens, text, marks = _read_chat(body)
        else:
            prompt_tokens, text, is_counted = _read_other(body, raw, wish.generates)
            marks = (0, 0)
    except msgspec.ValidationError as error:
        return refusal(400, f"the body is wrong: {error}")
    except (ValueError, RecursionError):  # a DecodeError is a ValueError
        return refusal(400, "the body is not valid JSON in UTF-8")
    session = wish.session
    if session is None and type(body.user) is str:
        session = body.user
    limit = body.max_tokens or body.max_completion_tokens or body.max_output_tokens
    max_tokens = limit if type(limit) is int and 0 < limit <= MAX_TOKENS else UNKNOWN
    return RequestFacts(
        body.model,
        body.stream is True,
        prompt_tokens,
        session,
        wish.generates,
        max_tokens,
        text,
        marks,
        is_counted,
        priority,
    )


def _model_of_form(raw: bytes, boundary: bytes) -> str | None:
    """The field `model`; a file may come before it, but not hundreds of other fields."""
    mark = b"--" + boundary.strip()
    at = raw.find(mark)
    for _ in range(_MAX_PARTS):
        head_end = raw.find(_HEAD_END, at, at + _MAX_PART_HEAD)
        end = raw.find(b"\r\n" + mark, head_end + 2)
        if head_end < 0 or end < 0:
            return None
        if _OF_MODEL.search(raw, at, head_end):
            return raw[head_end + len(_HEAD_END) : end].decode("utf-8", "replace") or None
        at = end + 2
    return None


def _read_other(body: Any, raw: bytes, generates: bool) -> tuple[int, bytes, bool]:
    """Tokens and text of a prompt that is no chat, and whether those tokens were counted."""
    kind = type(body)
    if kind is _Body:
        return 1 + len(raw) // _BYTES_PER_TOKEN, b"", False
    prompt = body.prompt if kind is _Completion else body.input
    if prompt is None:
        return _length_without_text(body), b"", False
    text = _prompt_text(body.model or "", prompt) if generates else b""
    num_counted = _num_ids(prompt)
    if num_counted is not None:
        return num_counted, text, True
    return 1 + _tokens(prompt), text, False


def _length_without_text(body: _Completion | _Input) -> int:
    """Tokens of what stands in the place of a prompt. Raises ValidationError if nothing does."""
    if type(body) is _Input:
        if body.messages is None and body.prompt is None:
            raise msgspec.ValidationError("Object missing required field `input`")
        return 1 + _tokens(body.messages)
    assert type(body) is _Completion
    if not body.prompt_embeds:
        raise msgspec.ValidationError("Object missing required field `prompt`")
    return 1 + len(bytes(body.prompt_embeds)) // _BYTES_PER_EMBEDDING


def _num_ids(prompt: Any) -> int | None:
    """How many tokens a prompt of token ids has, or a list of such prompts; None: it is something else."""
    if type(prompt) is not list or not prompt:
        return None
    if type(prompt[0]) is int:
        return len(prompt)
    is_batch = all(type(one) is list and one and type(one[0]) is int for one in prompt)
    return sum(map(len, prompt)) if is_batch else None


def _prompt_text(model: str, prompt: str | list[Any]) -> bytes:
    if type(prompt) is str:
        return f"{model}{_BETWEEN}{prompt}".encode()
    try:
        return array("I", [zlib.crc32(model.encode()), *prompt]).tobytes()
    except (TypeError, OverflowError):  # no token ids
        return model.encode() + _encode(prompt)


def _read_chat(body: _Chat) -> tuple[int, bytes, tuple[int, int]]:
    """Tokens and text of a chat's prompt, and the lengths of what others may begin with."""
    messages = body.messages
    parts = [body.model or ""]
    if body.tools:
        parts.append(bytes(body.tools).decode())
    num_first = len(parts) + 2
    num_before_answer = num_characters = 0
    num_tokens = 1 + _TOKENS_PER_MESSAGE * len(messages)
    for message in messages:
        content, role = message.content, message.role or ""
        if type(content) is str and message.tool_calls is None:
            num_characters += len(content)
        else:
            content, more = _as_text(message)
            num_tokens += more
        if role == "assistant":
            num_before_answer = len(parts)
        parts.append(role)
        parts.append(content)
    joined = _BETWEEN.join(parts)
    text = joined.encode()
    num_bytes = len(text)
    num_tokens += (num_characters + num_bytes - len(joined)) // _BYTES_PER_TOKEN
    if len(parts) <= num_first:
        return num_tokens, text, (num_bytes, 0)
    is_ascii = num_bytes == len(joined)
    marks = _length(parts[:num_first], is_ascii), _length(parts[:num_before_answer], is_ascii)
    return num_tokens, text, marks


def _as_text(message: _Message) -> tuple[str, int]:
    """What else a message may have in it than text, and about how many tokens that is."""
    content = message.content
    num_tokens = 0 if content is None else _tokens(content)
    if content is None:
        content = ""
    elif type(content) is not str:
        content = _encode(content).decode()
    if message.tool_calls is not None:
        content += _encode(message.tool_calls).decode()
    return content, num_tokens


def _length(parts: list[str], is_ascii: bool) -> int:
    """How long the text is up to the end of these parts, in bytes."""
    if not parts:
        return 0
    return len(parts) - 1 + (sum(map(len, parts)) if is_ascii else len("".join(parts).encode()))


def _tokens(prompt: Any) -> int:
    """The length of a prompt, a list of prompts, messages or their parts."""
    if isinstance(prompt, str):
        return _text_tokens(prompt)
    if isinstance(prompt, dict):
        return _TOKENS_PER_MESSAGE + _tokens(prompt.get("content", prompt.get("text")))
    return sum(map(_tokens, prompt)) if isinstance(prompt, list) else 0


def _text_tokens(text: str) -> int:
    return (len(text) if text.isascii() else len(text.encode())) // _BYTES_PER_TOKEN


def read_usage(tail: bytes) -> tuple[int | None, int | None, int | None]:
    """Tokens of prompt, output and prompt found in a cache as the server counted them, from its answer's end.

    Within text its quotes would be escaped, so that `"usage":` is a key and nothing else.
    """
    start = tail.rfind(_USAGE)
    if start < 0:
        return None, None, None
    if tail.find(_DETAILS, start) >= 0:  # the objects within it end before it does
        end = tail.find(b"}}", start) + 2
    else:
        end = tail.find(b"}", start) + 1
    try:
        usage = _decode_usage(tail[start + len(_USAGE) : end])
    except msgspec.DecodeError:  # it holds other objects, or is not all there
        pass
    else:
        details = usage.prompt_tokens_details
        num_cached = None if details is None else details.cached_tokens
        return usage.prompt_tokens, usage.completion_tokens, num_cached
    prompt = _PROMPT_TOKENS.search(tail, start)
    output = _OUTPUT_TOKENS.search(tail, start)
    cached = _CACHED_TOKENS.search(tail, start)
    return (
        int(prompt[1]) if prompt else None,
        int(output[1]) if output else None,
        int(cached[1]) if cached else None,
    )
