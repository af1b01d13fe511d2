"""Two policies that differ in the service level they were trained for decide otherwise, and say so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pointsman.config import load_config
from pointsman.experiments.simulate import prepare, simulate
from pointsman.inference.checkpoint import load_checkpoint

from .conftest import Cli

# A first token takes 0.26 s on one of the replicas and 0.65 s on the other.
CLUSTER = """\
workload:
  arrivals: {kind: poisson, rate: 1.0}
  lengths: {kind: fixed, prompt: 3000, output: 20}
  requests: 400
cluster: {model: Llama-3.1-8B, replicas: [{device: A100-80}, {device: A10}]}
"""
# Nothing counts but what is beyond the service level.
TRAINING = """\
env:
  kind: routing
  scenarios: [mine.yaml]
  decisions: 128
  warmup_requests: 30
  shadow: {kind: random}
  hold: {allowed: false}
  objective: slo
  reward: {terms: {slo: 1.0}, scale: none}
  evaluation: {seeds: 1}
network: {kind: pooled, width: 8}
ppo: {num_epochs: 6, minibatch_size: 128, learning_rate: 1.0e-2}
exploration: {entropy_coef: 0.0, temperature: 0.5}
run: {seed: 1, steps: 20480, num_envs: 16, rollout_steps: 32, settle_steps: 16, headroom_steps: 4,
      evaluate_every: 100}
"""


def test_a_strict_service_level_keeps_more_first_tokens_within_it(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(CLUSTER)
    Path("train.yaml").write_text(TRAINING)
    cluster = prepare(load_config(Path("mine.yaml"), ["workload.requests=2000"]))
    excess_s = {}
    for limit in ("0.5", "5"):
        trained = cli("train", "train.yaml", "--set", f"env.slo.ttft_s={limit}", "--out", limit)
        assert trained.status == 0, trained.err
        last = Path(limit, "checkpoints", "last.safetensors")
        served = simulate([cluster], policies=[load_checkpoint(last)])[0].requests
        ttft_s = served["first_token_at"] - served["arrived_at"]
        excess_s[limit] = np.maximum(0.0, ttft_s - 0.5).mean()
        said = cli("explain", last, "--scenario", "mine.yaml", "--decisions", 64).out
        assert f"Trained for a first token within {limit} s" in said
    assert excess_s["0.5"] < 0.8 * excess_s["5"]
