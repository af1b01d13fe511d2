"""The searches of `pointsman plan`, on functions that are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pointsman.evaluation.goodput import HIGHEST_LOAD, Goodput, Planner, _crossings, _Search, first_met
from pointsman.experiments.scenarios import find_scenario
from pointsman.routing.policy import PolicySpec


@pytest.mark.parametrize("crossing", [0.003, 0.02, 0.2, 0.65, 0.85, 0.95, 0.995])
def test_a_load_is_found_to_a_hundredth(crossing: float) -> None:
    search = searched(_Search(0.99, HIGHEST_LOAD), crossing)
    lowest = 0.0 if crossing < 0.005 else search.low
    assert lowest <= crossing and search.high - search.low <= 0.0101
    assert crossing <= search.high or search.high == HIGHEST_LOAD
    assert all(0 < load < HIGHEST_LOAD for load in search.tried)
    assert len(search.tried) <= 9


@pytest.mark.parametrize("crossing", [0.5, 1.4, 3.3, 20.0])
def test_without_a_bound_it_goes_up_until_it_fails(crossing: float) -> None:
    search = searched(_Search(0.99, math.inf), crossing)
    assert search.low <= crossing <= search.high <= search.low + 0.01 * max(1.0, search.low) + 1e-9


def searched(search: _Search, crossing: float) -> _Search:
    while (load := search.next_load()) is not None:
        search.note(load, np.array([1.0 if load <= crossing else 0.5]))
    return search


def test_it_goes_on_until_an_interval_has_a_lower_end() -> None:
    """Blocks of a trace differ: one of them was late at 0.6, the lowest tried, and intervals began at 0."""
    search = _Search(0.99, HIGHEST_LOAD)
    while (load := search.next_load()) is not None:
        search.note(load, np.where(load > np.array([0.4, *[0.61] * 5]), 0.95, 1.0))
    assert search.low <= 0.61 <= search.high
    assert min(search.tried) <= 0.4


@pytest.mark.parametrize("guess", [-9, 0, 3, 49, 60, 400])
@pytest.mark.parametrize("fewest", [-3, 1, 49, 50, 300, 512])
def test_the_fewest_servers_are_found_from_any_guess(guess: int, fewest: int) -> None:
    """A search of twelve steps from the guess gave up before it was there."""
    tried: list[int] = []

    def is_met(number: int) -> bool:
        tried.append(number)
        return number >= fewest

    assert first_met(is_met, -4, guess, 512) == fewest
    assert len(tried) <= 20 and min(tried) > -4 and max(tried) <= 512


def test_more_than_the_most_are_no_answer() -> None:
    assert first_met(lambda _: False, -4, 3, 512) is None
    assert first_met(lambda _: True, -4, 513, 512) is None
    assert first_met(lambda _: True, 0, 0, 0) is None, "those there are were tried"


def test_no_number_of_servers_serves_more_than_their_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 servers were said to serve 798 requests/s, of which they can do 733: their run was too short."""
    config = find_scenario("steady-chat").config(0)
    planner = Planner(config, 0.99, [1000], None, 1)
    one_s = planner.capacity(config) / 4
    monkeypatch.setattr(Planner, "good_shares", lambda self, cases, rates, num_seeds: [np.ones(1)])
    now, one_more = (goodput(count * one_s) for count in (4, 5))
    for count in (1, 3, 4, 9, 100):
        target_rps = 0.9 * HIGHEST_LOAD * one_s + (count - 1) * HIGHEST_LOAD * one_s
        more = planner.servers_for(target_rps, 0, PolicySpec(kind="round-robin"), now, one_more)
        assert more == count - 4


def goodput(capacity_rps: float) -> Goodput:
    nothing = np.empty(0)
    return Goodput(0.9 * capacity_rps, 0.0, 0.0, capacity_rps, nothing, nothing, nothing, 1, False)


def test_a_rate_that_nothing_tried_serves_is_not_made_up() -> None:
    """It was interpolated from 100 % at no traffic at all."""
    rates = np.array([1.0, 2.0, 4.0])
    shares = np.array([[0.98, 0.97, 0.9], [1.0, 0.98, 0.5], [1.0, 1.0, 0.995]])
    assert _crossings(rates, shares, 0.99).tolist() == pytest.approx([0.0, 1.5, 4.0])
