"""Anonymised traffic, as JSON lines that `simulate`, `compare` and `train` read back as a trace.

Arrival, lengths, the outcome, where it went and how long it took (`calibrate --traffic` reads that), what the
router took that server's speed to be (where that is not as in the server's line before), and hashes that mean
nothing outside this file: of the session, and of every block of the prompt (512 bytes of text, about 128
tokens) with all that is before it, so that a trace shows which prompts begin alike. A request that brought no
output is written with 1 token, the least a trace can hold; `outcome` tells it apart.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import msgspec
import numpy as np

from pointsman.compiled.jit import direct
from pointsman.compiled.memory import address_of, bytes_at
from pointsman.errors import InputError
from pointsman.routing.hashing import BLOCK_BYTES, LINK_BYTES, MAX_LINKS, hash_blocks

BLOCK_TOKENS = 128  # of a block, about; how long readers take it to be
_MAX_BUFFERED = 1000
_NUM_AT_ONCE = 32  # lines that become bytes together: more are no longer in the processor's cache
_encode_lines = msgspec.json.Encoder().encode_lines


class Speed(NamedTuple):
    """How fast a server is, as the router takes it to be."""

    step_floor_s: float | None
    decode_s_per_token: float | None
    prefill_s_per_token: float | None
    error: float | None  # relative standard error of a typical step; None: not known


_AS_BEFORE = Speed(None, None, None, None)


class _Line(msgspec.Struct, gc=False, omit_defaults=True):
    arrived_at: float  # seconds since recording began
    num_prefill_tokens: int
    num_decode_tokens: int
    session_id: str | None  # a hash
    outcome: str
    policy: str  # who sent it where it went
    server: str | None
    ttft_s: float | None  # None: it did not stream
    e2e_s: float
    # A `Speed`, as it was when the request was over.
    step_floor_s: float | None = None
    decode_s_per_token: float | None = None
    prefill_s_per_token: float | None = None
    speed_error: float | None = None
    num_cached_tokens: int | None = None  # of the prompt, as its server counted; None: it did not say
    block_hashes: list[int] = []


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
        self._salt_words = np.frombuffer(recording.salt, np.int64).tolist()
        self._hash_blocks = direct(hash_blocks, "iiiiiiiii")
        self._lines: list[_Line] = []
        self._links: list[bytes] = []  # of their prompts
        self._encoded: list[bytes] = []  # lines before those, some in each
        self._counts = np.zeros((2, _NUM_AT_ONCE), np.int64)
        self._hashes = np.zeros(_NUM_AT_ONCE * MAX_LINKS, np.int64)
        self._counts_at, self._hashes_at = address_of(self._counts), address_of(self._hashes)
        self._speeds: dict[str, Speed] = {}  # by server, as last written
        self._num_lost = 0

    def add(
        self,
        arrived_at: float,
        prompt_tokens: int,
        output_tokens: int,
        session: str | None,
        outcome: str,
        policy: str,
        server: str,
        ttft_s: float | None,
        e2e_s: float,
        speed: Speed,
        cached_tokens: int | None,
        links: bytes,
    ) -> None:
        """`arrived_at` of the router's clock, `session` as the client gave it, `links` of the prompt."""
        if self._speeds.get(server) == speed:
            speed = _AS_BEFORE
        else:
            self._speeds[server] = speed
        self._lines.append(
            _Line(
                int((arrived_at - self._started_at) * 1e6) / 1e6,
                prompt_tokens or 1,
                output_tokens or 1,
                self._hash(session) if session else None,
                outcome,
                policy,
                server or None,
                ttft_s,
                e2e_s,
                *speed,
                cached_tokens,
            )
        )
        self._links.append(links)
        if len(self._lines) == _NUM_AT_ONCE:
            self._encode()
            if len(self._encoded) * _NUM_AT_ONCE > _MAX_BUFFERED:
                self.flush()

    def _encode(self) -> None:
        lines, self._lines = self._lines, []
        links, self._links = self._links, []
        self._add_hashes(lines, links)
        self._encoded.append(_encode_lines(lines))

    def flush(self) -> None:
        if self._lines:
            self._encode()
        if self._encoded:
            encoded, self._encoded = b"".join(self._encoded), []
            try:
                self._file.write(encoded)
            except OSError:  # a full disk must not stop the router
                self._num_lost += encoded.count(b"\n")
                self._speeds.clear()

    def take_lost(self) -> int:
        """How many requests could not be written since this was last called."""
        num_lost, self._num_lost = self._num_lost, 0
        return num_lost

    def close(self) -> None:
        self.flush()
        self._file.close()

    def _add_hashes(self, lines: list[_Line], links: list[bytes]) -> None:
        """One for each full block that a prompt has tokens for. Of many requests at once: one by one they
        would take as long as all the rest."""
        table, num_lines, counts = b"".join(links), len(lines), self._counts
        counts[0, :num_lines] = [len(one) // LINK_BYTES for one in links]
        counts[1, :num_lines] = [line.num_prefill_tokens // BLOCK_TOKENS for line in lines]
        num_hashes = self._hash_blocks(
            bytes_at(table),
            self._counts_at,
            self._hashes_at,
            len(table) // LINK_BYTES,
            num_lines,
            _NUM_AT_ONCE,
            BLOCK_BYTES,
            *self._salt_words,
        )
        found, first = self._hashes[:num_hashes].tolist(), 0
        for line, count in zip(lines, counts[1, :num_lines].tolist(), strict=True):
            line.block_hashes = found[first : first + count]
            first += count

    def _hash(self, session: str) -> str:
        return blake2b(session.encode(), digest_size=8, key=self._salt).hexdigest()
