"""Anonymised traffic, as JSON lines that `simulate`, `compare` and `train` read back as a trace.

Arrival, lengths, the outcome, where it went and how long it took (`calibrate --traffic` reads that), what the
router took that server's speed to be, and hashes that mean nothing outside this file: of the session, and of
every block of the prompt (512 bytes of text, about 128 tokens) with all that is before it, so that a trace
shows which prompts begin alike. A request that brought no output is written with 1 token, the least a trace
can hold; `outcome` tells it apart.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import msgspec

from pointsman.errors import InputError
from pointsman.routing.hashing import BLOCK_BYTES, LINK_BYTES, PromptHasher

BLOCK_TOKENS = 128  # of BLOCK_BYTES, about; how long readers take a block to be
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
        self._num_lost = 0
        self._hasher = PromptHasher()

    def add(self, request: RecordedRequest, text: bytes) -> None:
        """`arrived_at` of the router's clock, `session_id` as the client gave it; `text` of the prompt."""
        request.block_hashes = self._block_hashes(text, request.num_prefill_tokens)
        request.arrived_at = int((request.arrived_at - self._started_at) * 1e6) / 1e6
        request.session_id = self._hash(request.session_id) if request.session_id else None
        request.num_prefill_tokens = request.num_prefill_tokens or 1
        request.num_decode_tokens = request.num_decode_tokens or 1
        self._lines.append(request)
        if len(self._lines) > _MAX_BUFFERED:
            self.flush()

    def flush(self) -> None:
        if self._lines:
            lines, self._lines = self._lines, []
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

    def _block_hashes(self, text: bytes, prompt_tokens: int) -> list[int]:
        """One for each full block that the prompt has tokens for; below 2^53, as JSON readers want it."""
        links = self._hasher.of_text(text, 1)
        num_blocks = min(len(text) // BLOCK_BYTES, len(links) // LINK_BYTES, prompt_tokens // BLOCK_TOKENS)
        hashes = []
        for start in range(0, num_blocks * LINK_BYTES, LINK_BYTES):
            key = links[start : start + 8]  # the first field of a LINK
            digest = hashlib.blake2b(key, digest_size=8, key=self._salt).digest()
            hashes.append(int.from_bytes(digest) >> 11)
        return hashes

    def _hash(self, session: str) -> str:
        return hashlib.blake2b(session.encode(), digest_size=8, key=self._salt).hexdigest()
