"""Whether the policy in training may go on: what its requests cost beside others, and how many failed."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from pointsman.live.costs import Tally
from pointsman.plain import in_percent

NUM_STANDARD_ERRORS = 3.0  # that a difference must exceed: it is looked at after every request


def price(tally: Tally) -> tuple[float, float]:
    """What a token of its answers cost, and the relative standard error of that.

    Not a request: most of what requests cost is how long their answers are, which no policy can change.
    """
    costs, tokens = np.array(tally.spent.copy(), np.float64).T
    value = costs.sum() / tokens.sum()
    spread = np.std(costs - value * tokens, ddof=1) / math.sqrt(len(costs))
    return float(value), float(spread / costs.mean())


def excess(learner: Tally, control: Tally) -> tuple[float, float]:
    """How much more the learner's requests cost, as a share; and the standard error of its logarithm."""
    (mine, my_error), (theirs, their_error) = price(learner), price(control)
    return mine / theirs - 1.0, math.hypot(my_error, their_error)


def objection(learner: Tally, control: Tally, window: int, margin: float) -> str | None:
    """Why the policy in training must not decide any more; None while it may."""
    if min(len(learner.spent), len(control.spent)) < window:
        return None
    more, error = excess(learner, control)
    least = (1.0 + more) * math.exp(-NUM_STANDARD_ERRORS * error) - 1.0
    if least <= margin:
        return None
    return (
        f"its last {window} requests cost {in_percent(more)} (at least {in_percent(least)}) more a token "
        f"than those of the policy it started from, limit {in_percent(margin)}: that one has taken over"
    )


def too_many_failed(outcomes: deque[str | None], share: float) -> str | None:
    """`outcomes`: why each of the last requests failed, None where it did not."""
    assert outcomes.maxlen is not None
    problems = [one for one in outcomes.copy() if one is not None]
    if len(problems) <= share * outcomes.maxlen:
        return None
    return f"{len(problems)} of the last {outcomes.maxlen} requests failed, the last one by: {problems[-1]}"
