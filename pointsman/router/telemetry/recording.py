"""Anonymised traffic, as JSON lines that `simulate`, `compare` and `train` read back as a trace.

Arrival, lengths, the outcome, where it went and how long it took (`calibrate --traffic` reads that), what the
router took that server's speed to be, and hashes that mean nothing outside this file: of the session, and of
every block of the prompt (512 bytes of text, about 128 tokens) with all that is before it, so that a trace
shows which prompts begin alike. A request that brought no output is written with 1 token, the least a trace
can hold; `outcome` tells it apart.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pointsman.errors import InputError
from pointsman.routing.hashing import BLOCK_BYTES, LINK_BYTES
from pointsman.routing.records import LINK

BLOCK_TOKENS = 128  # of a block, about; how long readers take it to be
_MAX_BUFFERED = 1000
_encode_lines = msgspec.json.Encoder().encode_lines


class RecordedRequest(msgspec.Struct, gc=False, omit_defaults=True):
    arrived_at: float  # in the file: seconds since recording began
    num_prefill_tokens: int
    num_decode_tokens: int
    session_id: str | None  # in the file: a hash
    outcome: str
    policy: str  # who sent it where it went
    server: str | None
    ttft_s: float | None  # None: it did not stream
    e2e_s: float
    # Of the server, as the router took it when the request was over.
    step_floor_s: float | None
    decode_s_per_token: float | None
    prefill_s_per_token: float | None
    speed_error: float | None  # relative standard error of a typical step; None: not known
    num_cached_tokens: int | None = None  # of the prompt, as its server counted; None: it did not say
    block_hashes: list[int] = []  # written by the recorder


@dataclass(frozen=True)
class TrafficRecording:
    """A file that several processes may write to: what they must have in common."""

    path: Path
    started_at: float
    salt: bytes


def new_recording(path: Path) -> TrafficRecording:
    try:
        path.open("xb").close()
    except FileExistsError:
        raise InputError("--record", str(path), "exists already", "name a new file") from None
    except OSError as error:
        raise InputError("--record", str(path), f"cannot be written ({error})", "name another file") from None
    return TrafficRecording(path, monotonic(), secrets.token_bytes(16))


class Recorder:
    def __init__(self, recording: TrafficRecording) -> None:
        # Unbuffered, to the end of the file, whole lines at once: another process may do the same.
        self._file = recording.path.open("ab", buffering=0)
        self._started_at = recording.started_at
        self._salt = recording.salt
        self._lines: list[RecordedRequest] = []
        self._links: list[bytes] = []  # of their prompts
        self._num_lost = 0

    def add(self, request: RecordedRequest, links: bytes) -> None:
        """`arrived_at` of the router's clock, `session_id` as the client gave it; `links` of the prompt."""
        request.arrived_at = int((request.arrived_at - self._started_at) * 1e6) / 1e6
        request.session_id = self._hash(request.session_id) if request.session_id else None
        request.num_prefill_tokens = request.num_prefill_tokens or 1
        request.num_decode_tokens = request.num_decode_tokens or 1
        self._lines.append(request)
        self._links.append(links)
        if len(self._lines) > _MAX_BUFFERED:
            self.flush()

    def flush(self) -> None:
        if self._lines:
            lines, self._lines = self._lines, []
            links, self._links = self._links, []
            self._hash_blocks(lines, links)
            try:
                self._file.write(_encode_lines(lines))
            except OSError:  # a full disk must not stop the router
                self._num_lost += len(lines)

    def take_lost(self) -> int:
        """How many requests could not be written since this was last called."""
        num_lost, self._num_lost = self._num_lost, 0
        return num_lost

    def close(self) -> None:
        self.flush()
        self._file.close()

    def _hash_blocks(self, lines: list[RecordedRequest], links: list[bytes]) -> None:
        """One for each full block that a prompt has tokens for; below 2^53, as JSON readers want it.

        Those of many requests at once: one by one they would take as long as all the rest of `add`.
        """
        table = np.frombuffer(b"".join(links), LINK)
        ends_block = table["end"] % BLOCK_BYTES == 0
        hashes = (siphash(table["key"][ends_block], self._salt) >> np.uint64(11)).tolist()
        last_links = np.cumsum([len(one) // LINK_BYTES for one in links])
        first = 0
        for line, last in zip(lines, np.append(0, np.cumsum(ends_block))[last_links].tolist(), strict=True):
            line.block_hashes = hashes[first : min(last, first + line.num_prefill_tokens // BLOCK_TOKENS)]
            first = last

    def _hash(self, session: str) -> str:
        return blake2b(session.encode(), digest_size=8, key=self._salt).hexdigest()


def siphash(words: NDArray[np.int64], key: bytes) -> NDArray[np.uint64]:
    """SipHash-2-4 of each word by itself: nobody can compute it who has not the 16 bytes of the key."""
    low, high = np.frombuffer(key, np.uint64)[:, None]  # arrays: scalars would warn when they overflow
    message = words.astype(np.uint64)
    v0, v1 = low ^ np.uint64(0x736F6D6570736575), high ^ np.uint64(0x646F72616E646F6D)
    v2, v3 = low ^ np.uint64(0x6C7967656E657261), high ^ np.uint64(0x7465646279746573) ^ message
    length = np.uint64(8 << 56)
    v0, v1, v2, v3 = _sip_rounds(2, v0, v1, v2, v3)
    v0, v1, v2, v3 = _sip_rounds(2, v0 ^ message, v1, v2, v3 ^ length)
    v0, v1, v2, v3 = _sip_rounds(4, v0 ^ length, v1, v2 ^ np.uint64(0xFF), v3)
    mixed: NDArray[np.uint64] = v0 ^ v1 ^ v2 ^ v3
    return mixed


def _sip_rounds(count: int, v0: Any, v1: Any, v2: Any, v3: Any) -> tuple[Any, Any, Any, Any]:
    for _ in range(count):
        v0 = v0 + v1
        v2 = v2 + v3
        v1 = _rotated(v1, 13) ^ v0
        v3 = _rotated(v3, 16) ^ v2
        v0 = _rotated(v0, 32) + v3
        v2 = v2 + v1
        v1 = _rotated(v1, 17) ^ v2
        v3 = _rotated(v3, 21) ^ v0
        v2 = _rotated(v2, 32)
    return v0, v1, v2, v3


def _rotated(words: Any, bits: int) -> Any:
    return words << np.uint64(bits) | words >> np.uint64(64 - bits)
