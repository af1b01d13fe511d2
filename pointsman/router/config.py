"""The settings of `pointsman serve`, each with its unit; `--set KEY=VALUE` changes any of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from pointsman.errors import InputError
from pointsman.spec import Spec

_TAIL = re.compile(r"(?<!/)(/v1)?/*$")  # of a URL; not of http://v1, which is a host


class Limits(Spec):
    """What one client may ask for."""

    max_body_bytes: int = Field(default=16 << 20, gt=0, description="larger requests get 413")
    max_header_bytes: int = Field(default=32 << 10, gt=0, description="all headers of a request; else 431")
    max_headers: int = Field(default=100, gt=0, description="number of headers of a request; else 431")
    max_target_bytes: int = Field(default=8 << 10, gt=0, description="path and query; else 414")
    request_timeout_s: float = Field(default=30.0, gt=0, description="to send a whole request; else 408")
    keep_alive_s: float = Field(default=75.0, gt=0, description="an idle client connection is closed then")
    idle_timeout_s: float = Field(
        default=120.0, gt=0, description="without a byte moving, to or from a client or a replica"
    )
    connect_timeout_s: float = Field(default=5.0, gt=0, description="to open a connection to a replica")
    first_byte_timeout_s: float = Field(default=300.0, gt=0, description="until a replica begins to answer")
    # vLLM's server closes idle connections after 5 s: a request sent just then would be lost.
    upstream_keep_alive_s: float = Field(default=4.0, gt=0, description="a connection to a replica is reused")
    drain_timeout_s: float = Field(default=30.0, ge=0, description="to finish requests after SIGTERM")


class Holding(Spec):
    """Requests that wait at the router because the policy says so."""

    max_held: int = Field(default=1000, ge=0, description="beyond it new ones get 429")
    max_hold_s: float = Field(default=30.0, gt=0, description="then a request is sent, policy or not")
    recheck_s: float = Field(
        default=1.0, gt=0, description="held requests are decided anew at least so often"
    )


class Reliability(Spec):
    max_retries: int = Field(default=2, ge=0, description="on other replicas, before the first byte")
    hedge_after_s: float | None = Field(
        default=None,
        gt=0,
        description="a stream without a first token for so long is asked of a second replica too; "
        "the first to answer serves it; null: never",
    )
    breaker_failures: int = Field(default=3, gt=0, description="in a row open the breaker of a replica")
    breaker_open_s: float = Field(
        default=5.0, gt=0, description="until a probe; doubles with each failed one"
    )
    breaker_max_open_s: float = Field(default=60.0, gt=0, description="the doubling ends here")
    slow_start_s: float = Field(
        default=10.0, ge=0, description="a returning replica gets its share gradually"
    )
    health_interval_s: float = Field(default=2.0, gt=0, description="between two checks of a replica")
    health_timeout_s: float = Field(default=2.0, gt=0, description="for a check")
    health_failures: int = Field(default=2, gt=0, description="failed checks in a row take a replica out")
    scrape_interval_s: float = Field(default=1.0, gt=0, description="between two reads of /metrics")
    asks_for_load: bool = Field(
        default=False,
        description="ask servers to report their load with every answer (ORCA); vLLM reads all its metrics "
        "and writes a log line for each",
    )
    models_interval_s: float = Field(default=10.0, gt=0, description="between two reads of /v1/models")
    max_decision_s: float = Field(
        default=0.05, gt=0, description="a slower decision is a failure of the policy"
    )
    policy_failures: int = Field(default=3, gt=0, description="in a row suspend the policy")
    policy_suspension_s: float = Field(default=10.0, gt=0, description="least-outstanding decides meanwhile")


class Settings(Spec):
    limits: Limits = Limits()
    holding: Holding = Holding()
    reliability: Reliability = Reliability()
    discovery_interval_s: float = Field(default=2.0, gt=0, description="between two looks for backends")


class Backend(Spec):
    """One replica: where it is, and what is known of it beforehand."""

    url: str
    calibration: Mapping[str, Any] | None = Field(
        default=None, description="model and device, or its speed; what is left out is estimated"
    )
    ca: Path | None = Field(
        default=None, description="CA file for https; default: --backend-ca, else what the system trusts"
    )
    tls_name: str | None = Field(
        default=None, description="the name in its certificate, if that is not the host of the URL"
    )

    @field_validator("url")
    @classmethod
    def _without_v1(cls, url: str) -> str:
        return server_url(url)


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
    """Without the `/v1` that OpenAI clients want at the end: the path of a request brings its own."""
    return _TAIL.sub("", url)


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
    if "/v1/" in parts.path:
        raise InputError(field, url, "is the URL of one endpoint of a server", remedy)
    try:
        parts.hostname.encode("idna")
    except UnicodeError:
        raise InputError(field, url, "has a host name that cannot be", remedy) from None
    default_port = 443 if parts.scheme == "https" else 80
    try:
        port = default_port if parts.port is None else parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise InputError(field, url, "has a port that cannot be", "use a port from 1 to 65535")
    return Address(scheme=parts.scheme, host=parts.hostname, port=port, prefix=parts.path)
