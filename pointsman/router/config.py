"""The settings of `pointsman serve`, each with its unit; `--set KEY=VALUE` changes any of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from pointsman.errors import InputError
from pointsman.router.http.address import can_be_name, server_url
from pointsman.router.http.limits import Limits
from pointsman.spec import Spec


class Holding(Spec):
    """Requests that wait at the router because the policy says so."""

    max_held: int = Field(default=1000, ge=0, description="beyond it new ones get 429")
    max_hold_s: float = Field(default=30.0, gt=0, description="then a request is sent, policy or not")
    recheck_s: float = Field(
        default=1.0, gt=0, description="held requests are decided anew at least so often"
    )
    overtake_s: float = Field(
        default=0.0,
        ge=0,
        description="smaller requests that arrived up to so much later go first; 0: in order of arrival",
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
    prefix_index_mib: int = Field(
        default=64, ge=0, description="memory for which prefixes of prompts were sent where; 0: none is kept"
    )
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

    @field_validator("tls_name")
    @classmethod
    def _can_be(cls, name: str | None) -> str | None:
        if name is not None and not can_be_name(name):
            raise InputError(
                "tls_name", name, "cannot be the name of a host", "write it as in the certificate"
            )
        return name
