"""Questions to a decider, with defaults for everything a test doesn't care about."""

from __future__ import annotations

from collections.abc import Collection

from pointsman.routing.core import Request
from pointsman.routing.decider import Decider
from pointsman.routing.records import NOBODY, UNKNOWN


def decide(
    decider: Decider,
    prompt_tokens: int,
    now: float,
    *,
    waited_s: float = 0.0,
    session: int = NOBODY,
    max_tokens: int = UNKNOWN,
    excluded: Collection[int] = (),
) -> int:
    """The action for a request that is asked about for the first time, and is alone at the router."""
    request = Request(prompt_tokens, max_tokens, session, now - waited_s)
    return decider.decide(request, 1, now, excluded)
