from __future__ import annotations

from collections import deque

import numpy as np

from pointsman.live.costs import Spent, Tally
from pointsman.live.guard import objection, too_many_failed


def tally_of(mean: float, spread: float, count: int = 50) -> Tally:
    """Costs of a token; lengths of answers vary much more."""
    rng = np.random.default_rng(0)
    tally = Tally(count)
    for value in mean + spread * rng.standard_normal(count):
        num_tokens = int(rng.integers(1, 1000))
        tally.spent.append(Spent(value * num_tokens, num_tokens))
    return tally


def test_a_policy_is_taken_back_beyond_doubt_only() -> None:
    fine = tally_of(1.0, 0.3)
    assert objection(tally_of(1.2, 0.3), fine, 50, 0.3) is None  # within the margin
    assert objection(tally_of(1.4, 3.0), fine, 50, 0.3) is None  # may be luck
    assert objection(tally_of(9.0, 0.3, 49), fine, 50, 0.3) is None  # too few
    why = objection(tally_of(2.0, 0.3), fine, 50, 0.3)
    assert why is not None and "more a token than those of the policy it started from" in why


def test_failures_are_counted_over_the_last_requests() -> None:
    outcomes: deque[str | None] = deque([None] * 90 + ["status 500"] * 10, maxlen=100)
    assert too_many_failed(outcomes, 0.1) is None
    outcomes.append("status 503")
    assert "11 of the last 100 requests failed, the last one by: status 503" in (
        too_many_failed(outcomes, 0.1) or ""
    )
