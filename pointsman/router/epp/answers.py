"""What a picker answers to Envoy, as bytes. Most answers are always the same, so they are written once."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from functools import lru_cache

from pointsman.router.epp.wire import OVERWRITE, ProcessingResponse
from pointsman.router.http.messages import Answer

DESTINATION = "x-gateway-destination-endpoint"
NAMESPACE = "envoy.lb"
_CHUNK_BYTES = 64_000  # Envoy's advice is 64 KiB at most

CONTINUE = {
    phase: ProcessingResponse(**{phase: {}}).SerializeToString()
    for phase in (
        "request_headers",
        "request_body",
        "request_trailers",
        "response_headers",
        "response_body",
        "response_trailers",
    )
}


@lru_cache(maxsize=4096)
def destination(phase: str, endpoints: str) -> bytes:
    """Go on to these endpoints: in a header and in the metadata, as the protocol wants it."""
    response = ProcessingResponse()
    header = getattr(response, phase).response.header_mutation.set_headers.add()
    header.header.key, header.header.raw_value = DESTINATION, endpoints.encode()
    header.append_action = OVERWRITE
    response.dynamic_metadata.update({NAMESPACE: {DESTINATION: endpoints}})
    return bytes(response.SerializeToString())


def refused(answer: Answer) -> bytes:
    """Envoy answers the client itself."""
    response = ProcessingResponse()
    immediate = response.immediate_response
    immediate.status.code = answer.status
    immediate.body = answer.body
    immediate.details = "pointsman"
    for name, value in ((b"content-type", answer.content_type), *answer.headers):
        header = immediate.headers.set_headers.add()
        header.header.key, header.header.raw_value = name.decode(), value
        header.append_action = OVERWRITE
    return bytes(response.SerializeToString())


def streamed(phase: str, body: bytes, is_end: bool) -> Iterator[bytes]:
    """A body, or a piece of one, passed on as it is."""
    for start in range(0, max(1, len(body)), _CHUNK_BYTES):
        response = ProcessingResponse()
        piece = getattr(response, phase).response.body_mutation.streamed_response
        piece.body = body[start : start + _CHUNK_BYTES]
        piece.end_of_stream = is_end and start + _CHUNK_BYTES >= len(body)
        yield response.SerializeToString()


def more_time(seconds: float) -> bytes:
    """Do not give up on us yet; heard where `max_message_timeout` is set."""
    response = ProcessingResponse()
    response.override_message_timeout.FromTimedelta(timedelta(seconds=seconds))
    return bytes(response.SerializeToString())
