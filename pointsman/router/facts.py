"""What the router reads from bodies: model, streaming, prompt length and session of a request; usage.

Prompt lengths are estimated from text without a tokenizer; the ledger corrects them by what servers report.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from pointsman.router.messages import Answer, Request, refusal

_BYTES_PER_TOKEN = 4  # of English text
_TOKENS_PER_MESSAGE = 4  # of the chat template
_decode = json.JSONDecoder().decode
_USAGE = b'"usage":'
_PROMPT_TOKENS = re.compile(rb'"(?:prompt|input)_tokens":\s*(\d+)')
_OUTPUT_TOKENS = re.compile(rb'"(?:completion|output)_tokens":\s*(\d+)')
_PROMPT_KEYS = {
    b"/v1/chat/completions": "messages",
    b"/v1/completions": "prompt",
    b"/v1/embeddings": "input",
    b"/v1/responses": "input",
}


class Facts(NamedTuple):
    model: str | None = None
    is_stream: bool = False
    prompt_tokens: int = 1
    session: str | None = None


def read_facts(request: Request) -> Facts | Answer:
    """Answer: why the request is refused."""
    session = request.special.get(b"x-session-id")
    session_text = session.decode("latin-1") if session else None
    if request.method != b"POST":
        return Facts(session=session_text)
    prompt_key = _PROMPT_KEYS.get(request.path)
    if prompt_key is None and not (request.get(b"content-type") or b"").startswith(b"application/json"):
        return Facts(prompt_tokens=1 + len(request.body) // _BYTES_PER_TOKEN, session=session_text)
    try:
        body = _decode(request.body.decode())
    except (ValueError, RecursionError):
        return refusal(400, "the body is not valid JSON in UTF-8")
    if not isinstance(body, dict):
        return refusal(400, "the body is not a JSON object")
    model, stream = body.get("model"), body.get("stream")
    if model is not None and not isinstance(model, str):
        return refusal(400, "`model` is not a string")
    if stream is not None and not isinstance(stream, bool):
        return refusal(400, "`stream` is neither true nor false")
    prompt = body.get(prompt_key or "prompt")
    if prompt_key is not None and (prompt is None or not isinstance(prompt, str | list)):
        return refusal(400, f"`{prompt_key}` is missing or neither text nor a list")
    if prompt_key == "messages" and not isinstance(prompt, list):
        return refusal(400, "`messages` is not a list")
    try:
        num_bytes, num_tokens = _size(prompt) if prompt_key else (len(request.body), 0)
    except (RecursionError, UnicodeEncodeError):
        return refusal(400, "the prompt is not text")
    user = body.get("user")
    if session_text is None and isinstance(user, str):
        session_text = user
    return Facts(model, stream is True, 1 + num_tokens + num_bytes // _BYTES_PER_TOKEN, session_text)


def _size(prompt: Any) -> tuple[int, int]:
    """Bytes of text, and tokens besides, of a prompt, a list of prompts, messages or token ids."""
    if isinstance(prompt, str):
        return len(prompt) if prompt.isascii() else len(prompt.encode()), 0
    if isinstance(prompt, int):
        return 0, 1
    if isinstance(prompt, dict):  # a message, or a part of one
        text = prompt.get("content", prompt.get("text", ""))
        num_bytes, num_tokens = _size(text)
        return num_bytes, num_tokens + _TOKENS_PER_MESSAGE
    num_bytes = num_tokens = 0
    if isinstance(prompt, list):
        for part in prompt:
            part_bytes, part_tokens = _size(part)
            num_bytes += part_bytes
            num_tokens += part_tokens
    return num_bytes, num_tokens


def read_usage(tail: bytes) -> tuple[int | None, int | None]:
    """Tokens of prompt and output as the server counted them, from the end of its answer.

    Within text its quotes would be escaped, so that `"usage":` is a key and nothing else.
    """
    start = tail.rfind(_USAGE)
    if start < 0:
        return None, None
    prompt = _PROMPT_TOKENS.search(tail, start)
    output = _OUTPUT_TOKENS.search(tail, start)
    return int(prompt[1]) if prompt else None, int(output[1]) if output else None
