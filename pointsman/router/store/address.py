"""Where the store is that routers share: redis://[USER:PASSWORD@]HOST[:PORT]/NAME, rediss:// with TLS."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pointsman.errors import InputError

OPTION, ENVIRONMENT = "--share", "POINTSMAN_SHARE"
_PORT = 6379
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
_REMEDY = "write it as redis://host:6379/name, or rediss:// for TLS; routers of one name share their books"


@dataclass(frozen=True)
class StoreAddress:
    host: str
    port: int
    name: str  # routers of one name share their books
    is_tls: bool
    ca: Path | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """The address without its password."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"redis{'s' if self.is_tls else ''}://{host}:{self.port}/{self.name}"

    @property
    def channel(self) -> str:
        return f"pointsman:{self.name}"

    def client_options(self) -> dict[str, Any]:
        """What the client library wants to know."""
        options: dict[str, Any] = {
            "host": self.host,
            "port": self.port,
            "username": self.user,
            "password": self.password,
        }
        if self.is_tls:
            options |= {"ssl": True, "ssl_cert_reqs": "required", "ssl_check_hostname": True}
            if self.ca is not None:
                options["ssl_ca_certs"] = str(self.ca)
        return options


def parse_store(url: str, ca: Path | None = None) -> StoreAddress:
    """Errors show nothing that may hold a password."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InputError(OPTION, "…", f"is no URL ({error})", _REMEDY) from None
    shown = f"…@{url.rpartition('@')[2]}" if "@" in url else url
    if parts.scheme not in ("redis", "rediss") or not parts.hostname or parts.query or parts.fragment:
        raise InputError(OPTION, shown, "is not the address of a Redis or Valkey store", _REMEDY)
    name = parts.path.removeprefix("/")
    if not _NAME.match(name):
        raise InputError(OPTION, shown, "names no group of routers", _REMEDY)
    is_tls = parts.scheme == "rediss"
    if ca is not None and not is_tls:
        raise InputError("--share-ca", str(ca), "given for a store without TLS", "use rediss://")
    if ca is not None and not ca.is_file():
        raise InputError("--share-ca", str(ca), "is not a file", "name a PEM file")
    return StoreAddress(
        host=parts.hostname,
        port=_PORT if port is None else port,
        name=name,
        is_tls=is_tls,
        ca=ca,
        user=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
    )
