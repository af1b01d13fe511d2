"""What one client, and one server behind the router, may take."""

from __future__ import annotations

from pydantic import Field

from pointsman.spec import Spec


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
