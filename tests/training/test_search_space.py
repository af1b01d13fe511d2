"""What a sweep tries."""

from __future__ import annotations

import numpy as np
import pytest

from pointsman.errors import InputError
from pointsman.training.config import load_train_config
from pointsman.training.search_space import Choice, Range, as_overrides, draw_values, parse_search


def test_ranges_and_lists_are_told_apart() -> None:
    assert parse_search("ppo.learning_rate=3e-4..3e-3") == Range("ppo.learning_rate", 3e-4, 3e-3, False)
    assert parse_search("run.evaluate_every=1..4") == Range("run.evaluate_every", 1.0, 4.0, True)
    assert parse_search("network.width=32,64,128") == Choice("network.width", (32, 64, 128))
    assert parse_search("ppo.learning_rate=3e-4,1e-3").at(0.0) == 3e-4  # in YAML, 3e-4 is a word
    assert parse_search("warm_start=null,{smoothing: 0.1}").at(0.9) == {"smoothing": 0.1}


@pytest.mark.parametrize(
    "text", ["ppo.learning_rate", "a=", "a=1..1", "a=2..1", "a=x..2", "a=5", "a=7,7", "a=[1"]
)
def test_what_cannot_be_searched_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="for example"):
        parse_search(text)


def test_wide_ranges_are_searched_by_factors() -> None:
    assert parse_search("a=0.001..0.1").at(0.5) == 0.01
    assert parse_search("a=1.0..3.0").at(0.5) == 2.0
    assert parse_search("a=-1..1").at(0.999) == 1
    wide = parse_search("a=8..128")
    assert {type(wide.at(share)) for share in (0.0, 0.3, 0.999)} == {int}


def test_trials_leave_small_gaps() -> None:
    """Every key by itself; the largest gap between 24 random values is 0.15 on average."""
    keys = [parse_search(f"{name}=0.0..1.0") for name in "abc"]
    drawn = [draw_values(keys, 24, seed) for seed in range(20)]
    values = np.array([[list(one.values()) for one in trials] for trials in drawn])  # [20, 24, 3]
    gaps = np.diff(np.sort(values, axis=1), axis=1, prepend=0.0, append=1.0).max(axis=1)
    assert gaps.mean() < 0.1


def test_more_trials_begin_with_the_same_ones() -> None:
    keys = [parse_search("a=0.1..1.0"), parse_search("b=x,y,z")]
    assert draw_values(keys, 20, seed=3)[:7] == draw_values(keys, 7, seed=3)
    assert draw_values(keys, 7, seed=4) != draw_values(keys, 7, seed=3)
    lists = [parse_search("a=1,2"), parse_search("b=x,y,z")]
    assert draw_values(lists, 4, seed=0) == draw_values(lists, 20, seed=0)[:4]


def test_lists_give_every_combination_once() -> None:
    drawn = draw_values([parse_search("a=1,2"), parse_search("b=x,y,z")], 20, seed=0)
    assert sorted((one["a"], one["b"]) for one in drawn) == [(a, b) for a in (1, 2) for b in "xyz"]


def test_values_arrive_in_the_configuration() -> None:
    values = {"ppo.learning_rate": 2.5e-5, "network.width": 32, "warm_start": None, "run.seed": 7}
    config = load_train_config("quick", as_overrides(values))
    assert config.ppo.learning_rate.value(0.5) == 2.5e-5
    assert (config.network.width, config.warm_start, config.run.seed) == (32, None, 7)
