"""Where a server is: URLs as people write them, and what they mean."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from pointsman.errors import InputError
from pointsman.spec import Spec

_UNSENDABLE = re.compile(r"[^!-~]")  # in a path
_TAIL = re.compile(r"(?<!/)(/v1)?/*$")  # of a URL; not of http://v1, which is a host


class Address(Spec):
    scheme: str
    host: str
    port: int
    prefix: str  # of every path

    @property
    def netloc(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def server_url(url: str) -> str:
    """Drop the `/v1` that OpenAI clients want at the end: the path of a request brings its own."""
    return _TAIL.sub("", url)


def can_be_name(host: str) -> bool:
    """Whether a host can have this name: for others, the socket library raises what is no OSError."""
    try:
        return b"\0" not in host.encode("idna")
    except UnicodeError:
        return False


def parse_url(url: str, field: str = "--backend") -> Address:
    remedy = "write it as http://host:port"
    try:
        parts = urlsplit(server_url(url))
    except ValueError:
        raise InputError(field, url, "is not a URL", remedy) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError(field, url, "is not a URL of a server", remedy)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise InputError(field, url, "has more than a host, a port and a path", remedy)
    if _UNSENDABLE.search(parts.path):
        raise InputError(
            field, url, "has a path that no request can name", "write what is odd as %20, %C3%A9 …"
        )
    if "/v1/" in parts.path:
        raise InputError(field, url, "is the URL of one endpoint of a server", remedy)
    if not can_be_name(parts.hostname):
        raise InputError(field, url, "has a host name that cannot be", remedy)
    default_port = 443 if parts.scheme == "https" else 80
    try:
        port = default_port if parts.port is None else parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise InputError(field, url, "has an impossible port", "use a port from 1 to 65535")
    return Address(scheme=parts.scheme, host=parts.hostname, port=port, prefix=parts.path)
