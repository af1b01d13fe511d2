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
from pointsman.router.telemetry.history import (
    Reading,
    by_policy,
    by_replica,
    num_errors,
    over_all,
    quantile,
)
from pointsman.router.telemetry.metrics import NO_POLICY
from pointsman.routing.reasons import short
from pointsman.routing.streams import SCRAPE_LIMIT_S

if TYPE_CHECKING:
    from pointsman.router.server import Router

_NUM_DECISIONS = 12
_MANY_ERRORS = 0.01  # of the answers
_FIGURES = ("step_floor_s", "decode_s_per_token", "prefill_s_per_token", "kv_capacity_tokens")
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
        replicas = self._replicas(lately, now)
        return {
            "problems": self._problems(replicas, lately),
            "time": time(),
            "version": __version__,
            "up_s": now - self._started_at,
            "over_s": over_s,  # counts and percentiles below are of so many seconds
            "policy": decisions.policy,
            "replicas": replicas,
            "latencies": {kind: _percentiles(over_all(lately[kind])) for kind in ("ttft_s", "e2e_s")},
            "by_policy": _by_policy(lately),
            "curves": [point._asdict() | {"at": point.at - now} for point in router.history.points],
            "answers": _answers(lately),
            "clients": metrics.all_clients,
            "held": {
                "now": metrics.all_held,
                "limit": router.settings.holding.max_held,
                "requests": lately["events"]["holds"],
                "waited": _percentiles(over_all(lately["hold_s"])),
            },
            "decisions": {
                "by": _nested(lately["decisions"]),
                "fallbacks": lately["fallbacks"],
                "retries": lately["retries"],
            },
            "shadow": self._shadow(lately),
            "last": [decision._asdict() for decision in decisions.last(_NUM_DECISIONS)],
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
        """None where a figure is too old to be shown as one of now."""
        books = self._router.proxy.books
        known, estimate = books.replica_signals(replica.slot), books.estimate(replica.slot)
        age_s = now - known["scraped_at"] if replica.has_gauges else None
        is_streaming = now - known["tokens_at"] < SCRAPE_LIMIT_S
        return {
            "waiting": known["waiting"],
            "decoding": known["decoding"],
            "prefill_backlog_s": known["pending_prefill_tokens"] * known["prefill_s_per_token"],
            "kv_use": known["scraped_kv_use"] if age_s is not None and age_s < SCRAPE_LIMIT_S else None,
            "step_s": known["step_s"] or None if is_streaming else None,  # 0: none seen yet
            "token_rate": known["token_rate"] if is_streaming else None,
            "signals_age_s": age_s,
            "for_s": now - replica.changed_at,
            "speed": {name: known[name] for name in _FIGURES},
            "speed_source": estimate.source,
            "speed_errors": dict(estimate.errors),
        }

    def _problems(self, replicas: list[dict[str, Any]], lately: Reading) -> list[dict[str, Any]]:
        """What somebody should look at, the worst first."""
        router = self._router
        severe, others = [], []
        if not router.registry.accepting:
            severe.append("no server gets requests; clients are answered 503")
        for replica, state in zip(router.registry, replicas, strict=True):
            name, since = short(replica.name), f"for {_ago(state['for_s'])}"
            if state["state"] == "unhealthy":
                severe.append(f"{name} {replica.problem or 'is not well'}; no requests go there, {since}")
            elif state["state"] in ("broken", "probing"):
                severe.append(f"{name} fails requests; it gets none but trials, {since}")
            elif state["state"] == "draining":
                others.append(f"{name} is draining, {since}")
            elif state["signals_age_s"] is not None and state["signals_age_s"] > SCRAPE_LIMIT_S:
                age = _ago(state["signals_age_s"])
                others.append(
                    f"{name} has not said for {age} how busy it is; the router's own books stand in"
                )
        if router.decisions.trouble is not None:
            severe.append(router.decisions.trouble)
        if router.metrics.all_held >= router.settings.holding.max_held:
            severe.append("the router holds as many requests as it may; new ones are answered 429")
        num_answers, errors = lately["answers"].total(), num_errors(lately)
        if errors > _MANY_ERRORS * num_answers:
            others.append(f"{errors} of the last {num_answers} answers were errors (5xx)")
        return [
            {"text": text, "is_severe": is_severe}
            for texts, is_severe in ((severe, True), (others, False))
            for text in texts
        ]

    def _shadow(self, lately: Reading) -> dict[str, Any] | None:
        shadow = self._router.decisions.shadow
        if shadow is None:
            return None
        decisions = {
            where: count for (by, where), count in lately["shadow_decisions"].items() if by == shadow
        }
        return {
            "policy": shadow,
            "agreed": lately["shadow_agreement"][shadow, True],
            "differed": lately["shadow_agreement"][shadow, False],
            "failures": lately["shadow_failures"][shadow],
            "decisions": decisions,
        }


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _by_policy(lately: Reading) -> dict[str, dict[str, Any]]:
    times = {kind: by_policy(lately[kind]) for kind in ("ttft_s", "e2e_s")}
    policies = [policy for policy in times["e2e_s"] if policy != NO_POLICY]
    return {
        policy: {kind: _percentiles(grouped[policy]) for kind, grouped in times.items()}
        for policy in policies
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
    for (*_, status), count in lately["answers"].items():
        statuses[status] += count
    return {
        "all": statuses.total(),
        "errors": num_errors(lately),
        "too_many": statuses[429],
        "cancelled": lately["events"]["cancelled"],
        "by_status": {str(status): count for status, count in sorted(statuses.items())},
    }
