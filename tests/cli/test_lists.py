from __future__ import annotations

from pathlib import Path

import pytest

from pointsman.experiments.scenarios import PREFIXES, SATURATED, SCENARIOS, UNSEEN
from pointsman.routing.heuristics import HEURISTICS
from pointsman.routing.signals import SIGNAL_INDEX

from .conftest import Cli


def test_scenarios(cli: Cli) -> None:
    listed = cli("scenarios", "--json").json
    known = {**SCENARIOS, **SATURATED, **UNSEEN}
    assert [one["name"] for one in listed] == list(known)
    assert [one["name"] for one in listed if "all" in one["suites"]] + list(PREFIXES) == list(SCENARIOS)
    assert {one["name"] for one in listed if "generalisation" in one["suites"]} > set(UNSEEN)
    text = cli("scenarios").out
    for name, one in known.items():
        assert f"{name} " in text
        assert one.what in text, "one line each, in 100 columns"


def test_policies(cli: Cli) -> None:
    listed = cli("policies", "--json").json
    assert [one["name"] for one in listed] == [*HEURISTICS, "default", "default-mean"]
    text = cli("policies").out
    for name in HEURISTICS:
        assert f"{name} " in text


def test_signals(cli: Cli) -> None:
    listed = cli("policies", "--signals", "--json").json
    assert [one["name"] for one in listed] == list(SIGNAL_INDEX)
    assert set(listed[0]) == {"name", "unit", "source", "across", "meaning"}
    text = cli("policies", "--signals").out
    assert "prefill_backlog_s" in text
    assert "derived  same" not in text, "as many columns as titles"


def test_hardware(cli: Cli) -> None:
    listed = cli("hardware", "--json").json
    device = next(one for one in listed["devices"] if one["name"] == "A100-80")
    assert device["bandwidth_gb_s"] == 2039
    model = next(one for one in listed["models"] if one["name"] == "Llama-3-8B")
    assert model["num_parameters"] == pytest.approx(8.03e9, rel=1e-3)
    assert model["kv_bytes_per_token"] == 131072
    fits = {one["model"]: one["devices"] for one in listed["kv_capacity"]}
    assert fits["Llama-3-8B"]["A100-80"]["tensor_parallel"] == 1
    assert fits["Llama-3-8B"]["A100-80"]["tokens"] == pytest.approx(450_000, rel=0.02)
    assert fits["Llama-3-70B"]["A100-80"]["tensor_parallel"] == 2
    text = cli("hardware").out
    assert "MI300X" in text and "Mixtral-8x7B" in text
    assert max(map(len, text.splitlines())) <= 100


def test_hardware_says_what_was_measured(cli: Cli) -> None:
    listed = {
        (one["model"], one["tensor_parallel"]): one for one in cli("hardware", "--json").json["measured"]
    }
    assert listed["Llama-3-8B", 1]["measured_on"] == "server"
    assert listed["Llama-3-70B", 4]["measured_on"] == "layers"
    text = " ".join(cli("hardware").out.split())
    assert "H200 Llama-3-70B/4 layers" in text and "H200 Llama-3-8B server" in text
    assert "All other pairs, and other tensor_parallel, are computed" in text


def test_own_hardware(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    figures = "{fp16_tflops: 50, memory_gb: 8, usable_memory_gib: 7.5, bandwidth_gb_s: 100}"
    path.write_text(f"devices: {{Toy: {figures}}}\n")
    listed = cli("hardware", "--catalogue", path, "--json").json
    assert "Toy" in [device["name"] for device in listed["devices"]]
    fits = {one["model"]: one["devices"]["Toy"] for one in listed["kv_capacity"]}
    assert fits["Llama-3-70B"] is None
    assert cli("hardware", "--catalogue", tmp_path / "absent.yaml").status == 2
