"""Keys of clients and keys of admins. Only digests are kept, so that no key can end in a log or a dump."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path
from typing import NamedTuple

from pointsman.errors import InputError, reason_of
from pointsman.router.http.messages import Answer, RequestHead, refusal
from pointsman.router.logs import Log

BACKEND_KEY = "POINTSMAN_BACKEND_KEY"  # the environment's name of the key that the servers want
_BEARER = b"bearer "
_MAX_PATH = 100  # characters of a path in the log: whoever has no key must not fill it


class KeySource(NamedTuple):
    """Where keys of one kind come from."""

    name: str
    option: str  # a file, one key a line
    environment: str  # separated by commas


CLIENT = KeySource("API key", "--api-keys", "POINTSMAN_API_KEYS")
ADMIN = KeySource("admin key", "--admin-keys", "POINTSMAN_ADMIN_KEYS")


class Keys:
    def __init__(self, keys: list[str], name: str = CLIENT.name) -> None:
        self._name = name
        self._digests = frozenset(_digest(key.encode()) for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def shares_one_with(self, other: Keys) -> bool:
        return not self._digests.isdisjoint(other._digests)

    def refusal(self, head: RequestHead, client: str, log: Log) -> Answer | None:
        """Why this request may not pass; `client` is its address."""
        if not self._digests:
            return None
        given = head.special.get(b"authorization", b"")
        if self._has(given):
            return None
        path = head.path[:_MAX_PATH].decode("latin-1")
        what = f"{'wrong' if given else 'no'} {self._name}"
        log.note("refused", status=401, problem=what, path=path, client=client)
        answer = refusal(
            401, f"missing or wrong {self._name}", "authentication_error", code="invalid_api_key"
        )
        return answer._replace(headers=((b"www-authenticate", b"Bearer"),))

    def _has(self, authorization: bytes) -> bool:
        """Takes as long for a wrong key as for a right one, whichever it is."""
        digest = _digest(authorization[len(_BEARER) :].strip())
        are_same = [hmac.compare_digest(digest, ours) for ours in self._digests]
        return any(are_same) and authorization[: len(_BEARER)].lower() == _BEARER


def read_keys(file: Path | None, source: KeySource = CLIENT) -> Keys:
    """From a file, one key a line, and from the environment."""
    keys = os.environ.get(source.environment, "").split(",")
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                source.option, str(file), f"cannot be read ({reason_of(error)})", "name a text file"
            ) from None
        named = [line for line in lines if not line.lstrip().startswith("#")]
        if not any(line.strip() for line in named):
            raise InputError(source.option, str(file), "holds no key", "write one key a line")
        keys += named
    return Keys([key.strip() for key in keys if key.strip()], source.name)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
