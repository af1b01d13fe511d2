"""The OpenAI API as vLLM speaks it: what a request asks for, and what the answers look like.

There is no tokenizer and no model. A prompt given as token ids has that many tokens, a text one for every
four bytes; the answer is filler, one word a token, also where a later prompt quotes it.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

BYTES_PER_TOKEN = 4
TOKENS_PER_MESSAGE = 4  # what a chat template adds
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
WORDS = [
    "",
    "the",
    "train",
    "took",
    "one",
    "more",
    "track",
    "and",
    "then",
    "the",
    "next",
    "as",
    "the",
    "signal",
    "said",
    "so",
][1:]
_ERROR_TYPES = {400: "BadRequestError", 404: "NotFoundError", 405: "MethodNotAllowedError"}


class ApiError(Exception):
    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(status, "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass(frozen=True)
class Prompt:
    """The tokens of a prompt, four bytes each."""

    tokens: bytes
    answers: tuple[tuple[int, int], ...] = ()  # where the answers in it begin and end, in tokens
    is_chat: bool = False

    def __len__(self) -> int:
        return len(self.tokens) // BYTES_PER_TOKEN


@dataclass(frozen=True)
class Ask:
    """A completion that is asked for."""

    prompt: Prompt
    max_tokens: int
    min_tokens: int
    ignores_eos: bool  # the answer has exactly max_tokens
    streams: bool
    includes_usage: bool


def read_ask(path: bytes, body: bytes, model: str, max_model_tokens: int) -> Ask:
    """Raises ApiError for what vLLM would refuse."""
    fields = _fields(body)
    asked_model = fields.get("model", model)
    if asked_model != model:
        raise ApiError(HTTPStatus.NOT_FOUND, f"The model `{asked_model}` does not exist.", "model")
    is_chat = path.endswith(b"/chat/completions")
    prompt = _chat_prompt(fields) if is_chat else _plain_prompt(fields)
    num_prompt = len(prompt)
    if num_prompt >= max_model_tokens:
        message = f"This model's maximum context length is {max_model_tokens} tokens. "
        raise ApiError(400, message + f"However, your prompt has {num_prompt} tokens.", "prompt")
    room = max_model_tokens - num_prompt
    default = room if is_chat else DEFAULT_COMPLETION_TOKENS
    limit = _integer(fields, "max_completion_tokens", None, 1) or _integer(fields, "max_tokens", None, 1)
    if limit is not None and limit > room:
        message = f"max_tokens is too large: {limit}. This model's maximum context length is "
        raise ApiError(
            400, message + f"{max_model_tokens} tokens, and the prompt has {num_prompt}.", "max_tokens"
        )
    if _integer(fields, "n", 1, 1) != 1:
        raise ApiError(400, "n: the emulator answers with one choice", "n")
    max_tokens = min(limit or default, room)
    options = fields.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise ApiError(400, "stream_options: must be an object", "stream_options")
    streams = _flag(fields, "stream")
    if options and not streams:
        raise ApiError(400, "Stream options can only be defined when `stream=True`.", "stream_options")
    return Ask(
        prompt=prompt,
        max_tokens=max_tokens,
        min_tokens=min(max_tokens, _integer(fields, "min_tokens", 0, 0) or 0),
        ignores_eos=_flag(fields, "ignore_eos"),
        streams=streams,
        includes_usage=_flag(options, "include_usage"),
    )


def _fields(body: bytes) -> Mapping[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError(400, "The request body is not valid JSON.") from None
    if not isinstance(fields, Mapping):
        raise ApiError(400, "The request body must be a JSON object.")
    return fields


def _integer(fields: Mapping[str, Any], name: str, default: int | None, lowest: int) -> int | None:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        raise ApiError(400, f"{name}: must be a whole number of at least {lowest}", name)
    return value


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(400, f"{name}: must be true or false", name)
    return bool(value)


def _text_tokens(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return raw + bytes(-len(raw) % BYTES_PER_TOKEN)


def word_tokens(text: str) -> bytes:
    """One a word, as answers have them."""
    return b"".join(zlib.crc32(word.encode()).to_bytes(BYTES_PER_TOKEN) for word in text.split())


def _plain_prompt(fields: Mapping[str, Any]) -> Prompt:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        tokens = _text_tokens(prompt)
    elif isinstance(prompt, list) and all(type(token) is int and 0 <= token < 2**32 for token in prompt):
        tokens = array("I", prompt).tobytes()
    elif isinstance(prompt, list):
        raise ApiError(400, "prompt: the emulator takes one prompt a request", "prompt")
    else:
        raise ApiError(400, "prompt: must be a text or a list of token ids", "prompt")
    if not tokens:
        raise ApiError(400, "prompt: must not be empty", "prompt")
    return Prompt(tokens)


def _chat_prompt(fields: Mapping[str, Any]) -> Prompt:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages: must be a list that is not empty", "messages")
    tokens = b""
    answers = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ApiError(400, "messages: each must be an object with a role", "messages")
        content = _content(message.get("content"))
        if message["role"] == "assistant":  # what the template adds is part of the prompt that was answered
            start = len(tokens) // BYTES_PER_TOKEN
            tokens += word_tokens(content)
            answers.append((start, len(tokens) // BYTES_PER_TOKEN))
        else:
            role = zlib.crc32(message["role"].encode()).to_bytes(BYTES_PER_TOKEN)
            tokens += TOKENS_PER_MESSAGE * role + _text_tokens(content)
    return Prompt(tokens, tuple(answers), is_chat=True)


def _content(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        return "".join(part["text"] for part in content if isinstance(part.get("text"), str))
    raise ApiError(400, "messages: content must be a text or a list of parts", "messages")


def filler(first: int, last: int) -> str:
    """The words of tokens first..last-1."""
    return "".join(" " + WORDS[n % len(WORDS)] for n in range(first, last))


class Completion:
    """The text of one answer, whole or in pieces."""

    def __init__(self, ask: Ask, answer_id: str, model: str, created: int) -> None:
        self._ask = ask
        kind = "chat.completion" if ask.prompt.is_chat else "text_completion"
        prefix = "chatcmpl-" if ask.prompt.is_chat else "cmpl-"
        self._head = {"id": prefix + answer_id, "object": kind, "created": created, "model": model}
        chunk_head = self._head | {"object": "chat.completion.chunk" if ask.prompt.is_chat else kind}
        self._chunk_head = json.dumps(chunk_head)[:-1]

    def usage(self, num_output: int, num_cached: int) -> dict[str, Any]:
        """Usage, with what vLLM says about its cache under --enable-prompt-tokens-details."""
        prompt = len(self._ask.prompt)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": num_output,
            "total_tokens": prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def whole(self, num_output: int, num_cached: int, reason: str) -> dict[str, Any]:
        text = filler(0, num_output)
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
        choice |= (
            {"message": {"role": "assistant", "content": text}}
            if self._ask.prompt.is_chat
            else {"text": text}
        )
        return self._head | {"choices": [choice], "usage": self.usage(num_output, num_cached)}

    def piece(self, first: int, last: int, reason: str | None) -> bytes:
        """Tokens first..last-1 as server-sent events; `reason` if they are the last."""
        events = b""
        if self._ask.prompt.is_chat and first == 0:
            events = self._event('"delta":{"role":"assistant","content":""}', None)
        content = json.dumps(filler(first, last))
        what = f'"delta":{{"content":{content}}}' if self._ask.prompt.is_chat else f'"text":{content}'
        return events + self._event(what, reason)

    def _event(self, what: str, reason: str | None) -> bytes:
        said = "null" if reason is None else f'"{reason}"'
        choice = f'{{"index":0,{what},"logprobs":null,"finish_reason":{said}}}'
        return f'data: {self._chunk_head}, "choices":[{choice}]}}\n\n'.encode()

    def last_events(self, num_output: int, num_cached: int) -> bytes:
        done = b"data: [DONE]\n\n"
        if not self._ask.includes_usage:
            return done
        usage = json.dumps(self.usage(num_output, num_cached))
        return f'data: {self._chunk_head}, "choices":[], "usage":{usage}}}\n\n'.encode() + done
