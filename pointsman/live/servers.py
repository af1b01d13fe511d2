"""What live servers and routers say of themselves: models, and counters in Prometheus' format."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pointsman.errors import InputError, reason_of
from pointsman.router.http.address import Address, parse_url
from pointsman.router.http.fetching import FetchError, fetch
from pointsman.router.http.limits import Limits
from pointsman.router.http.upstream import Pool
from pointsman.router.keys import BACKEND_KEY
from pointsman.router.replicas.reports import read_models

OPTION = "--live"
_TIMEOUT_S = 10.0
_SAMPLE = re.compile(rb"^([a-zA-Z_:][\w:]*)(?:\{([^\n]*)\})? ([0-9.eE+-]+)", re.MULTILINE)


class Served(NamedTuple):
    model: str
    max_tokens: int | None  # prompt and output together, if the servers say so


class Scraped:
    """The samples of one /metrics page."""

    def __init__(self, text: bytes) -> None:
        self._samples: dict[str, list[float]] = {}
        for name, _, value in _SAMPLE.findall(text):
            self._samples.setdefault(name.decode(), []).append(float(value))

    def values(self, name: str) -> list[float]:
        return self._samples.get(name, [])

    def total(self, name: str) -> float:
        return sum(self.values(name))


def key_header() -> bytes:
    """The header with the key that the servers want, from the environment; empty if they want none."""
    key = os.environ.get(BACKEND_KEY)
    return b"authorization: Bearer %b\r\n" % key.encode() if key else b""


async def scrape(address: Address, headers: bytes = b"") -> Scraped:
    """What cannot be read counts for nothing."""
    try:
        answer = await fetch(Pool(address, Limits()), "/metrics", _TIMEOUT_S, headers)
    except FetchError:
        return Scraped(b"")
    return Scraped(answer.body if answer.status == 200 else b"")


async def ask_servers(urls: Sequence[str], headers: bytes = b"") -> Served:
    """What all of them serve; refuses those that do not answer, or serve nothing in common."""
    found: list[Mapping[str, Mapping[str, object]]] = []
    for url in urls:
        try:
            answer = await fetch(Pool(parse_url(url, OPTION), Limits()), "/v1/models", _TIMEOUT_S, headers)
        except FetchError as error:
            remedy = "start it, or correct the address"
            raise InputError(OPTION, url, f"does not answer ({reason_of(error)})", remedy) from None
        models = read_models(answer.body) if answer.status == 200 else None
        if not models:
            problem = f"names no model (status {answer.status} of /v1/models)"
            raise InputError(OPTION, url, problem, "give the address of an OpenAI-compatible server")
        found.append(models)
    shared = [name for name in found[0] if all(name in models for models in found)]
    if not shared:
        problem = f"serves no model that {urls[0]} serves"
        raise InputError(OPTION, urls[-1], problem, "give servers of the same model")
    limits = [models[shared[0]].get("max_model_len") for models in found]
    known = [limit for limit in limits if isinstance(limit, int)]
    return Served(shared[0], min(known, default=None))


def imbalance(outstanding: Sequence[float]) -> float | None:
    """Spread of the replicas' outstanding requests over their mean; None while nobody has any."""
    counts = np.array(outstanding)
    return float(counts.std() / counts.mean()) if counts.sum() > 0 else None
