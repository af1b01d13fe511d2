"""Anonymised traffic, as JSON lines that `simulate`, `compare` and `train` read back as a trace.

Arrival, lengths, the outcome, where it went, how long it took and for how much of that the router held it
(`calibrate --traffic` reads that), what the router took that server's speed to be (where that is not as in
the server's line before), and hashes that mean nothing outside this file: of the session, and of every block
of the prompt (512 bytes of text, about 128 tokens) with all that is before it, so that a trace shows which
prompts begin alike. A request that brought no output is written with 1 token, the least a trace can hold;
`outcome` tells it apart.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from os import SEEK_END
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pointsman.errors import InputError, reason_of
from pointsman.router.telemetry.ended import (
    ARRIVED_AT,
    CACHED_TOKENS,
    E2E_S,
    HELD_S,
    KIND,
    NUM_LINK_BYTES,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    SESSION,
    SPEED,
    TTFT_S,
    EndedRequests,
    Kind,
)
from pointsman.router.telemetry.lines import Lines

_MAX_BUFFERED = 1000


class Speed(NamedTuple):
    """How fast a server is, as the router takes it to be."""

    step_floor_s: float | None
    decode_s_per_token: float | None
    prefill_s_per_token: float | None
    error: float | None  # relative standard error of a typical step; None: not known


_SPEED_NAMES = (*Speed._fields[:3], "speed_error")


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
        raise InputError(
            "--record", str(path), f"cannot be written ({reason_of(error)})", "name another file"
        ) from None
    return TrafficRecording(path, monotonic(), secrets.token_bytes(16))


class Recorder:
    def __init__(self, recording: TrafficRecording) -> None:
        # Unbuffered, to the end of the file, whole lines at once: another process may do the same.
        self._file = recording.path.open("ab", buffering=0)
        self._started_at = recording.started_at
        self._salt = recording.salt
        low, high = np.frombuffer(recording.salt, np.int64).tolist()
        self._key = low, high
        self._lines = _lines()
        self._encoded: list[bytes] = []
        self._num_lines = 0  # in there
        self._speeds: dict[str, Speed] = {}  # by server, as last written
        self._num_lost = 0

    def add(self, ended: EndedRequests, speed_of: Callable[[str], Speed]) -> None:
        """Write a line for each that asked for text. `speed_of`: how fast a server is taken to be."""
        rows = ended.rows.copy()
        rows[:, ARRIVED_AT] -= self._started_at
        tokens = rows[:, PROMPT_TOKENS : OUTPUT_TOKENS + 1]
        np.maximum(tokens, 1.0, out=tokens)
        kinds = ended.kinds
        groups = (
            ["written" if generates else "" for *_, generates in kinds],
            ["null", *map(self._hash, ended.sessions)],
            list(map(_before, kinds)),
            self._changed_speeds(ended, rows, speed_of),
        )
        self._encoded.append(self._lines.write(rows, groups, ended.links, NUM_LINK_BYTES, self._key))
        self._num_lines += len(rows)
        if self._num_lines > _MAX_BUFFERED:
            self.flush()

    def _changed_speeds(
        self, ended: EndedRequests, rows: NDArray[np.float64], speed_of: Callable[[str], Speed]
    ) -> list[str]:
        """What rows say of their server's speed: nothing, but for the first of a server where it has changed.

        Column SPEED of a row tells which.
        """
        texts = [""]
        servers: set[str] = set()
        for (*_, server, _, _, generates), first in zip(ended.kinds, ended.firsts, strict=True):
            if not generates or server in servers:
                continue
            servers.add(server)
            speed = speed_of(server)
            if self._speeds.get(server) != speed:
                self._speeds[server] = speed
                rows[first, SPEED] = len(texts)
                texts.append(_speed_text(speed))
        return texts

    def flush(self) -> None:
        if self._encoded:
            encoded, self._encoded = b"".join(self._encoded), []
            self._num_lines = 0
            num_written = 0
            with suppress(OSError):  # a full disk must not stop the router
                num_written = self._file.write(encoded)
            if num_written < len(encoded):
                num_whole = encoded.rfind(b"\n", 0, num_written) + 1
                with suppress(OSError):  # a line without its end would spoil the next one, too
                    end = self._file.tell()
                    if self._file.seek(0, SEEK_END) == end:  # no other process has written there
                        self._file.truncate(end - (num_written - num_whole))
                self._num_lost += encoded.count(b"\n", num_whole)
                self._speeds.clear()

    def take_lost(self) -> int:
        """How many requests could not be written since this was last called."""
        num_lost, self._num_lost = self._num_lost, 0
        return num_lost

    def close(self) -> None:
        self.flush()
        self._file.close()

    def _hash(self, session: str) -> str:
        return f'"{blake2b(session.encode(), digest_size=8, key=self._salt).hexdigest()}"'


def _lines() -> Lines:
    lines = Lines()
    lines.only_if(KIND)
    lines.text('{"arrived_at":')
    lines.seconds(ARRIVED_AT)
    lines.text(',"num_prefill_tokens":')
    lines.integer(PROMPT_TOKENS)
    lines.text(',"num_decode_tokens":')
    lines.integer(OUTPUT_TOKENS)
    lines.text(',"session_id":')
    lines.one_of(SESSION)
    lines.one_of(KIND)
    lines.seconds(TTFT_S)
    lines.text(',"e2e_s":')
    lines.seconds(E2E_S)
    lines.text(',"held_s":')
    lines.seconds(HELD_S)
    lines.one_of(SPEED)
    lines.integer_if_known(',"num_cached_tokens":', CACHED_TOKENS)
    lines.hashes(',"block_hashes":[', PROMPT_TOKENS)
    lines.text("}\n")
    return lines


def _speed_text(speed: Speed) -> str:
    known = {name: figure for name, figure in zip(_SPEED_NAMES, speed, strict=True) if figure is not None}
    return f",{_plain(known)}" if known else ""


@lru_cache
def _before(kind: Kind) -> str:
    """What stands between the session and the next number."""
    _, _, outcome, replica, policy, *_ = kind
    return f',{_plain({"outcome": outcome, "policy": policy, "server": replica or None})},"ttft_s":'


def _plain(about: dict[str, Any]) -> str:
    """The fields as JSON writes them, without brackets."""
    return json.dumps(about, separators=(",", ":"))[1:-1]
