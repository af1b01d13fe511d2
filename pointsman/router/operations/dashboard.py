"""The live page of the router: one HTML page without data, and the state it asks for about once a second.

What clients and servers say (request ids, names of models) reaches the page as JSON, and the page only ever
writes it as text. The policy of the page forbids everything but its own script and this server.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter, defaultdict
from functools import cache
from importlib import resources
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from pointsman import __version__
from pointsman.router.http.messages import Answer
from pointsman.router.replicas.registry import Replica
from pointsman.router.requests.decisions import HELD
from pointsman.router.telemetry.history import Reading, by_replica, num_errors, over_all, quantile

if TYPE_CHECKING:
    from pointsman.router.server import Router

_NUM_DECISIONS = 12
_SHARES = {"p50_s": 0.5, "p95_s": 0.95, "p99_s": 0.99}


@cache
def page() -> Answer:
    files = resources.files("pointsman.router.operations")
    script, style, html = (
        files.joinpath(f"dashboard.{kind}").read_text("utf-8") for kind in ("js", "css", "html")
    )
    style = resources.files("pointsman.report").joinpath("page.css").read_text("utf-8") + style
    body = html.replace("/* style */", style).replace("/* script */", script)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = (
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cache-control", b"no-store"),
    )
    return Answer(200, body.encode(), b"text/html; charset=utf-8", headers)


class Dashboard:
    def __init__(self, router: Router) -> None:
        self._router = router
        self._started_at = monotonic()

    def state(self) -> dict[str, Any]:
        router, now = self._router, monotonic()
        decisions, metrics = router.decisions, router.metrics
        over_s, lately = router.history.lately(now)
        return {
            "time": time(),
            "version": __version__,
            "up_s": now - self._started_at,
            "over_s": over_s,  # counts and percentiles below are of so many seconds
            "policy": decisions.policy,
            "replicas": self._replicas(lately, now),
            "latencies": {kind: _percentiles(over_all(lately[kind])) for kind in ("ttft_s", "e2e_s")},
            "curves": [point._asdict() | {"at": point.at - now} for point in router.history.points],
            "answers": _answers(lately),
            "clients": metrics.all_clients,
            "held": {
                "now": metrics.all_held,
                "limit": router.settings.holding.max_held,
                "requests": lately["events"]["holds"],
                "waited": _percentiles(lately["hold_s"]),
            },
            "decisions": {
                "by": _nested(lately["decisions"]),
                "fallbacks": lately["fallbacks"],
                "retries": lately["retries"],
            },
            "shadow": self._shadow(lately),
            "last": [decision._asdict() for decision in list(decisions.last)[-_NUM_DECISIONS:]],
            "explained": decisions.explain(),
        }

    def _replicas(self, lately: Reading, now: float) -> list[dict[str, Any]]:
        sent, ttft_s, e2e_s = _sent(lately), by_replica(lately["ttft_s"]), by_replica(lately["e2e_s"])
        return [
            replica.as_json()
            | self._signals(replica, now)
            | {
                "share": sent[replica.name] / (sent.total() or 1),
                "ttft_s": _percentiles(ttft_s[replica.name]),
                "e2e_s": _percentiles(e2e_s[replica.name]),
            }
            for replica in self._router.registry
        ]

    def _signals(self, replica: Replica, now: float) -> dict[str, Any]:
        known = self._router.proxy.books.replica_signals(replica.slot)
        return {
            "waiting": known["waiting"],
            "decoding": known["decoding"],
            "prefill_backlog_s": known["pending_prefill_tokens"] * known["prefill_s_per_token"],
            "kv_use": known["scraped_kv_use"],
            "step_s": known["step_s"] or None,  # 0: none seen yet
            "token_rate": known["token_rate"],
            "signals_age_s": now - known["scraped_at"],
        }

    def _shadow(self, lately: Reading) -> dict[str, Any] | None:
        if self._router.decisions.shadow is None:
            return None
        return {
            "policy": self._router.decisions.shadow,
            "agreed": lately["shadow_agreement"][True],
            "differed": lately["shadow_agreement"][False],
            "failures": lately["events"]["shadow_failures"],
            "decisions": lately["shadow_decisions"],
        }


def _percentiles(buckets: Counter[int]) -> dict[str, Any]:
    shares = {name: quantile(buckets, share) for name, share in _SHARES.items()}
    return {"count": buckets.total(), **shares}


def _sent(lately: Reading) -> Counter[str]:
    """Requests sent, by replica; the count of holds among the decisions is left out."""
    sent: Counter[str] = Counter()
    for (_, replica), count in lately["decisions"].items():
        sent[replica] += count
    del sent[HELD]
    return sent


def _nested(decisions: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    by: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for (policy, replica), count in decisions.items():
        by[policy][replica] = count
    return by


def _answers(lately: Reading) -> dict[str, Any]:
    statuses: Counter[int] = Counter()
    for (_, status), count in lately["answers"].items():
        statuses[status] += count
    return {
        "all": statuses.total(),
        "errors": num_errors(lately),
        "too_many": statuses[429],
        "cancelled": lately["events"]["cancelled"],
        "by_status": {str(status): count for status, count in sorted(statuses.items())},
    }
