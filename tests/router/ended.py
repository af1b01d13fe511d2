"""Requests that are over, without a router that has served them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from pointsman.router.telemetry.ended import EndedRequests


@dataclass
class Over:
    request_id: str = "id"
    path: str = "/v1/chat/completions"
    status: int = 200
    outcome: str = "completed"
    replica_name: str = "a"
    decided_by: str = "p"
    num_retries: int = 0
    generates: bool = True
    session_name: str | None = None
    arrived_at: float = 0.0
    held_s: float = -1.0
    ttft_s: float | None = None
    e2e_s: float = 0.5
    prompt_tokens: int = 7
    output_tokens: int = 5
    cached_tokens: int | None = None
    links: bytes = b""

    @property
    def request(self) -> Any:
        return SimpleNamespace(head=SimpleNamespace(wish=SimpleNamespace(path=self.path)))

    @property
    def first_byte_at(self) -> float | None:
        return None if self.ttft_s is None else self.arrived_at + self.ttft_s


def ended(*ones: Over) -> EndedRequests:
    found = EndedRequests()
    for one in ones:
        ended_at = one.arrived_at + one.e2e_s
        exchange: Any = one
        found.add(exchange, one.status, one.outcome, one.prompt_tokens, one.output_tokens, ended_at)
    return found
