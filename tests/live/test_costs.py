from __future__ import annotations

import time

import numpy as np
import pytest

from pointsman.experiments.objective import find_objective
from pointsman.live.costs import CostBooks, Tally


def test_costs_are_integrals_over_time() -> None:
    books = CostBooks(find_objective("balanced"))
    slot = books.add("a")
    opened_at = time.monotonic()
    tally = Tally()
    # arrival, sent, first token, end; the third one fails before its first token
    times = [(0.0, 0.5, 1.25, 4.0), (1.0, 1.0, 3.0, 3.5), (2.0, 2.0, 2.75, 2.75)]
    events: list[tuple[float, int, int]] = []
    for number, (_, *moments) in enumerate(times):
        events += [(at, number, kind) for kind, at in enumerate(moments)]
    tickets: dict[int, int] = {}
    before = books.totals(opened_at)
    for at, number, kind in sorted(events):
        if kind == 0:
            books.announce(tally, opened_at + times[number][0])
            tickets[number] = books.sent(slot, 10, opened_at + at)
        elif kind == 1 and number != 2:
            books.first_token(tickets[number], opened_at + at)
        elif kind == 2:
            if number == 2:
                books.failed(tickets[number], opened_at + at)
            else:
                books.finished(tickets[number], opened_at + at, output_tokens=7)
        if at == 3.0:
            middle = books.totals(opened_at + 3.0)
    after = books.totals(opened_at + 9.0)
    # By hand, on a grid: what was there in the middle of each hundredth of a second.
    for totals, until in ((middle, 3.0), (after, 9.0)):
        grid = np.arange(0.0005, until, 0.001)
        here = [(grid > arrival) & (grid < end) for arrival, _, _, end in times]
        unstarted = [(grid > arrival) & (grid < first) for arrival, _, first, _ in times]
        ages = [np.where(mask, grid - times[i][0], 0.0) for i, mask in enumerate(unstarted)]
        wanted = [np.sum(one) * 0.001 for one in (here, unstarted, ages)]
        found = np.subtract(totals[1:], before[1:])
        assert found == pytest.approx(wanted, abs=2e-3)
    weights = find_objective("balanced")
    costs = [
        weights.outstanding * (end - arrival)
        + weights.waiting * (first - arrival)
        + weights.age * (first - arrival) ** 2 / 2
        for arrival, _, first, end in times[:2]
    ]
    assert sorted(one.cost for one in tally.spent) == pytest.approx(sorted(costs))
    assert [one.num_tokens for one in tally.spent] == [7, 7]
    assert tally.num_open == 0
