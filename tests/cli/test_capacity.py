from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Cli
from .factories import config_file


def test_capacity_is_the_sum_over_replicas(cli: Cli) -> None:
    result = cli("capacity", "--scenario", "mixed-hardware", "--json").json
    fast, slow = result["kinds"]
    assert (fast["device"], slow["device"]) == ("A100-80", "A40")
    assert 2 <= fast["requests_per_s"] / slow["requests_per_s"] <= 3
    total = sum(kind["replicas"] * kind["requests_per_s"] for kind in result["kinds"])
    assert result["requests_per_s"] == pytest.approx(total)
    text = cli("capacity", "--scenario", "mixed-hardware").out
    assert f"{total:.2f} requests/s" in text


def test_capacity_of_a_configuration(cli: Cli, tmp_path: Path) -> None:
    """A prompt token costs 80 µs and an output token at least 30 µs, which bounds the rate from above."""
    config = config_file(tmp_path, "0,1000,10", "1,1000,10")
    result = cli("capacity", config, "--json").json
    bound = 4 / (1000 * 80e-6 + 10 * 30e-6)
    assert 0.5 * bound < result["requests_per_s"] < bound
    double = cli("capacity", config, "--set", "cluster.replicas=8", "--json").json
    assert double["requests_per_s"] == pytest.approx(2 * result["requests_per_s"])
