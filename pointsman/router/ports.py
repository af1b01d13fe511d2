"""Where a router or a picker listens, who can reach it there, and what they have to show."""

from __future__ import annotations

import errno
import ipaddress
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from pointsman.errors import InputError, reason_of
from pointsman.router.http.address import Address
from pointsman.router.http.tls import HTTP_1, HTTP_2, client_side_tls
from pointsman.router.keys import ADMIN, CLIENT, Keys, read_keys

_ADDRESSES = "use 127.0.0.1, or 0.0.0.0 for all interfaces"


@dataclass(frozen=True)
class Listening:
    """One port. `is_local`: only this machine can reach it; `tls` None: nothing is encrypted."""

    host: str
    port: int
    keys: Keys
    is_local: bool
    tls: ssl.SSLContext | None

    def url(self, port: int) -> str:
        """The URL, with the port that was found if ours is 0."""
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://{Address(scheme=scheme, host=self.host, port=port, prefix='').netloc}"


@dataclass(frozen=True)
class Ports:
    """What the command line says about ports and about who may use them.

    `port` is for clients. Where `metrics_port` is given, it is for Envoy, which asks a picker over gRPC, and
    what is left for clients is the state of the picker on `metrics_port`.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    admin_host: str = "127.0.0.1"
    admin_port: int = 8081
    api_keys: Path | None = None
    admin_keys: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    metrics_port: int | None = None

    @property
    def by_option(self) -> dict[str, tuple[str, int]]:
        """Host and port by the option that sets the port."""
        named = {"--port": (self.host, self.port), "--admin-port": (self.admin_host, self.admin_port)}
        if self.metrics_port is not None:
            named["--metrics-port"] = self.host, self.metrics_port
        return named

    def check(self) -> tuple[Listening, Listening, Listening | None]:
        """Where clients, admins and, if this is a picker, Envoy connect.

        Raises InputError for an admin port that strangers could use, and for keys and files that are none.
        """
        is_local = _is_local(resolve(self.host, "--host"))
        is_admin_local = _is_local(resolve(self.admin_host, "--admin-host"))
        keys, admin_keys = read_keys(self.api_keys, CLIENT), read_keys(self.admin_keys, ADMIN)
        if not admin_keys and not is_admin_local:
            problem = "lets others than this machine switch policies and drain servers, without a key"
            remedy = f"give {ADMIN.option} FILE or ${ADMIN.environment}, or leave it at 127.0.0.1"
            raise InputError("--admin-host", self.admin_host, problem, remedy)
        if keys.shares_one_with(admin_keys):
            remedy = f"take it out of {CLIENT.option} or ${CLIENT.environment}"
            raise InputError(ADMIN.option, "…", "an admin key is the key of a client, too", remedy)
        tls = client_side_tls(self.tls_cert, self.tls_key, HTTP_1)
        admin_tls = None if is_admin_local else tls
        admin = Listening(self.admin_host, self.admin_port, admin_keys, is_admin_local, admin_tls)
        if self.metrics_port is None:
            return Listening(self.host, self.port, keys, is_local, tls), admin, None
        grpc_tls = client_side_tls(self.tls_cert, self.tls_key, HTTP_2)
        envoy = Listening(self.host, self.port, keys, is_local, grpc_tls)
        return Listening(self.host, self.metrics_port, keys, is_local, None), admin, envoy


def resolve(host: str, option: str) -> list[str]:
    """The addresses of a host to listen on; of all interfaces if it is empty."""
    try:
        found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        problem = f"is not an address of this machine ({getattr(error, 'strerror', None) or error})"
        raise InputError(option, host, problem, _ADDRESSES) from None
    return [str(entry[4][0]) for entry in found]


def cannot_listen(option: str, host: str, port: int, error: OSError) -> InputError:
    """What to say of a port that could not be bound. `option` is the one that names the port."""
    if error.errno == errno.EADDRNOTAVAIL:
        option = "--admin-host" if option == "--admin-port" else "--host"
        return InputError(option, host, "is not an address of this machine", _ADDRESSES)
    return InputError(option, port, f"cannot listen ({reason_of(error)})", "name another port or address")


def _is_local(addresses: list[str]) -> bool:
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)
