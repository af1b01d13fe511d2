"""The examples for researchers, where what they need is installed."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
from simulator.factories import ROOT

SETTINGS = {"window": 8, "skip_forced": True, "workload": {"num_jobs": 40, "arrivals": "all_at_zero"}}


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("default")
def test_stable_baselines_learns() -> None:
    pytest.importorskip("sb3_contrib")
    before, after = example("stable_baselines").train("pointsman/Jobs-v0", 8000, **SETTINGS)
    assert after > before


@pytest.mark.filterwarnings("default")
def test_rllib_learns() -> None:
    pytest.importorskip("ray.rllib")
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        first, last = example("rllib_masked").train("pointsman/Jobs-v0", 6, **SETTINGS)
    finally:
        ray.shutdown()
    assert last > first
