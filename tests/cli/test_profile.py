"""`pointsman profile` on a CPU, with a model so small that it takes a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pointsman.errors import InputError
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
    cost = data["replica"]["cost"]
    sizes = {"products": 7, "head": 2, "prompt": 1, "decode": 2}
    assert {name: len(cost[name]) for name in sizes} == sizes

    def planned(**group: Any) -> Any:
        scheduler = {"kind": "vllm-v1", "num_blocks": 100}
        group = {"description": str(out), "scheduler": scheduler, **group}
        catalogue = tmp_path / "models.yaml"
        return plan_replicas(make_cluster(replicas=[group], catalogue=str(catalogue)))[0]

    two_layers_s = 2 * (cost["products"][0][1] + cost["decode"][0][2])
    step_s = planned().costs.stage_s(num_decodes=1, context_tokens=256, num_seqs=1)
    # Two collectives a layer, of the latency of an A100's links.
    collectives_s = 0.0 if tensor_parallel == 1 else 4 * 15e-6
    assert step_s == pytest.approx(two_layers_s + cost["head"][0][1] + collectives_s, rel=1e-3)
    other = 2 if tensor_parallel == 1 else 1
    with pytest.raises(
        InputError, match=f"tensor_parallel = {other}.* timed with tensor_parallel {tensor_parallel}"
    ):
        planned(tensor_parallel=other)


def test_a_device_that_there_is_not(cli: Cli) -> None:
    result = cli("profile", "--model", "Llama-3-8B", "--device", "gpu")
    assert (result.status, result.err) == (
        2,
        "error: --device = 'gpu': is not a device of PyTorch; use cuda or cpu\n",
    )
