"""API keys of clients. Only digests are kept, so that no key can end in a log or a dump."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from pointsman.errors import InputError
from pointsman.router.messages import Answer, Head, refusal

ENVIRONMENT = "POINTSMAN_API_KEYS"  # separated by commas
BACKEND_KEY = "POINTSMAN_BACKEND_KEY"  # the environment's name of the key that the servers want
_BEARER = b"bearer "


class Keys:
    def __init__(self, keys: list[str]) -> None:
        self._digests = frozenset(_digest(key.encode()) for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def refusal(self, head: Head) -> Answer | None:
        """Why this request may not pass."""
        if not self._digests:
            return None
        given = head.special.get(b"authorization", b"")
        if (
            given[: len(_BEARER)].lower() == _BEARER
            and _digest(given[len(_BEARER) :].strip()) in self._digests
        ):
            return None
        answer = refusal(401, "missing or wrong API key", "authentication_error", code="invalid_api_key")
        return answer._replace(headers=((b"www-authenticate", b"Bearer"),))


def read_keys(file: Path | None) -> Keys:
    """From a file, one key a line, and from the environment."""
    keys = os.environ.get(ENVIRONMENT, "").split(",")
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                "--api-keys", str(file), f"cannot be read ({error})", "name a text file"
            ) from None
        keys += [line for line in lines if not line.lstrip().startswith("#")]
        if not any(line.strip() for line in keys):
            raise InputError("--api-keys", str(file), "holds no key", "write one key a line")
    return Keys([key.strip() for key in keys if key.strip()])


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
