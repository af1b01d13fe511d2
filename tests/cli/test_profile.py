"""`pointsman profile` on a CPU, with a model so small that it takes a second."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pointsman.cli.profile import steps_cost
from pointsman.simulator.plan import plan_replicas
from tests.cli.conftest import Cli
from tests.simulator.factories import make_cluster

MODELS = """
models:
  tiny: {num_layers: 2, hidden_size: 64, num_heads: 4, num_kv_heads: 2, head_dim: 16, intermediate_size: 128,
         vocab_size: 256, max_context_tokens: 512}
  tiny-moe: {num_layers: 2, hidden_size: 64, num_heads: 4, num_kv_heads: 2, head_dim: 16,
             intermediate_size: 32, num_experts: 4, num_experts_per_token: 2, vocab_size: 256,
             max_context_tokens: 512}
"""


@pytest.mark.parametrize(("model", "tensor_parallel"), [("tiny", 1), ("tiny", 2), ("tiny-moe", 1)])
def test_profile(cli: Cli, tmp_path: Path, model: str, tensor_parallel: int) -> None:
    (tmp_path / "models.yaml").write_text(MODELS)
    out = tmp_path / "profile.yaml"
    limits = ("--max-tokens", 256, "--max-seqs", 8, "--repeats", 2)
    options = ("--device", "cpu", "--catalogue", tmp_path / "models.yaml", "--out", out, *limits)
    cli("profile", "--model", model, "--tensor-parallel", tensor_parallel, *options)
    data = yaml.safe_load(out.read_text())
    assert {name: len(rows) for name, rows in data["tables"].items()} == {
        "products": 7,
        "head": 2,
        "prompt": 1,
        "decode": 2,
    }
    scheduler = {"kind": "vllm-v1", "num_blocks": 100}
    plan = plan_replicas(make_cluster(replicas=[{"description": str(out), "scheduler": scheduler}]))[0]
    assert 0 < plan.costs.stage_s(1) <= plan.costs.stage_s(256)


def test_cost_of_known_times() -> None:
    """3 layers of 2 ms and 10 µs a token; a head of 1 ms and 20 µs a sequence; attention in proportion."""
    tables = {
        "products": [{"tokens": t, "seconds": 2e-3 + 1e-5 * t} for t in (1, 100)],
        "head": [{"tokens": t, "seconds": 1e-3 + 2e-5 * t} for t in (1, 50)],
        "prompt": [{"tokens": t, "seconds": 1e-9 * t * t / 2} for t in (256, 1024)],
        "decode": [{"num_seqs": n, "context": 100, "seconds": 1e-8 * n * 100} for n in (1, 8)],
    }
    cost = steps_cost(tables, 3)
    assert cost["step_s"][0][1] == pytest.approx(3 * 2.01e-3 + 1.02e-3)
    assert cost["step_s"][1][1] == pytest.approx(3 * 3e-3 + 1.02e-3)
    assert cost["sequence_s"] == pytest.approx(2e-5)
    assert cost["pair_s"] == pytest.approx(3e-9)
    assert cost["context_s"] == pytest.approx(3e-8)
