"""TLS: how the router or picker shows itself to those who connect, and whom it trusts among servers.

Files are read once, at the start: a certificate that was renewed needs a restart.
"""

from __future__ import annotations

import ssl
from functools import cache
from pathlib import Path
from typing import Any

from pointsman.errors import InputError, reason_of
from pointsman.router.http.limits import Limits

CERT, KEY = "--tls-cert", "--tls-key"
HTTP_1, HTTP_2 = "http/1.1", "h2"


def client_side_tls(cert: Path | None, key: Path | None, protocol: str = HTTP_1) -> ssl.SSLContext | None:
    """What is shown to those who connect; None: nothing is encrypted.

    `key` None: the key is in the file of the certificate.
    """
    if cert is None:
        if key is not None:
            raise InputError(KEY, str(key), "given without a certificate", f"add {CERT} FILE")
        return None
    for option, file in ((CERT, cert), (KEY, key)):
        if file is not None:
            _check_readable(option, file)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols([protocol])
    try:
        # A password, even if it is none: OpenSSL would ask for one on the terminal.
        context.load_cert_chain(cert, key, password="")
    except (ssl.SSLError, ValueError) as error:
        remedy = f"give the certificate chain and its key in PEM, without a password; the key with {KEY}"
        problem = f"is not a certificate with its key ({reason_of(error)})"
        raise InputError(CERT, str(cert), problem, remedy) from None
    return context


def tls_options(tls: ssl.SSLContext | None, limits: Limits) -> dict[str, Any]:
    """What `create_server` wants to know."""
    if tls is None:
        return {}
    return {
        "ssl": tls,
        "ssl_handshake_timeout": limits.request_timeout_s,
        "ssl_shutdown_timeout": limits.idle_timeout_s,  # the last bytes of an answer may have to leave first
    }


@cache
def server_side_tls(ca: Path | None) -> ssl.SSLContext:
    """Which servers the router trusts. Without `ca`: those that the system trusts, or $SSL_CERT_FILE."""
    if ca is not None:
        _check_readable("CA file", ca)
    try:
        context = ssl.create_default_context(cafile=ca)
    except ssl.SSLError as error:
        problem = f"holds no certificate ({reason_of(error)})"
        raise InputError("CA file", str(ca), problem, "give certificates in PEM") from None
    context.set_alpn_protocols([HTTP_1])
    return context


def _check_readable(option: str, file: Path) -> None:
    try:
        file.open("rb").close()
    except OSError as error:
        problem = f"cannot be read ({reason_of(error)})"
        raise InputError(option, str(file), problem, "name a PEM file") from None
