"""Costs from layer tables: the shipped ones, and what becomes of a table."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pointsman.errors import InputError
from pointsman.simulator.cost import RooflineCost, cost_tables
from pointsman.simulator.hardware import Deployment, load_catalogue
from pointsman.simulator.layers import LayersCost
from pointsman.simulator.measured import MeasuredReplica, find_measured, measured_replicas
from pointsman.simulator.plan import plan_replicas
from pointsman.spec import parse_spec

from .factories import ROOT, Run, make_cluster, make_workload

RAW = json.loads((ROOT / "benchmarks" / "gpu" / "h200" / "layers" / "replayed.json").read_text())["models"]
BY_LAYERS = {one.model: one for one in measured_replicas() if one.measured_on == "layers"}
TINY: dict[str, Any] = {
    "kind": "layers",
    "model": "Llama-3-8B",
    "overhead_s": 1e-3,
    "products": [[1, 1e-4], [100, 2e-4], [200, 4e-4]],
    "head": [[1, 1e-4], [8, 2e-4]],
    "prompt": [[256, 1e-5], [1024, 4e-5]],
    "decode": [[1, 256, 1e-5], [8, 256, 2e-5], [1, 1024, 3e-5], [8, 1024, 6e-5]],
}


def deployment(model: str = "Llama-3-8B", tensor_parallel: int = 1, **options: Any) -> Deployment:
    known = load_catalogue()
    return Deployment(known.device("H200"), known.model(model), tensor_parallel, **options)


def tiny(**changes: Any) -> LayersCost:
    return parse_spec(LayersCost, TINY | changes, "cluster.cost")


FALLING = (
    {"products": [[1, 2e-4], [64, 3e-4], [128, 2e-4]]},
    {"head": [[1, 1e-4], [8, 5e-5]]},
    {"prompt": [[256, 4e-5], [1024, 1e-5]]},
    {"decode": [[1, 256, 2e-5], [8, 256, 1e-5], [1, 1024, 6e-5], [8, 1024, 3e-5]]},
    {"decode": [[1, 256, 3e-5], [8, 256, 6e-5], [1, 1024, 1e-5], [8, 1024, 2e-5]]},
    {"decode": [[1, 256, 1e-5], [8, 256, 3e-5], [1, 1024, 3e-5], [8, 1024, 3.1e-5]]},  # falls in neither
)


@pytest.mark.parametrize("falling", FALLING)
def test_tables_that_fall_at_their_ends_go_on_level(falling: dict[str, Any]) -> None:
    """Continued with their last slope, they would make steps take less than no time."""
    tables = cost_tables(tiny(**falling), deployment())
    for far in (300, 3000, 30_000):
        assert tables.stage_s(far) > 1e-3
        assert tables.stage_s(1, num_seqs=far) > 1e-3
        assert tables.stage_s(0, 1, far) > 1e-3
        assert tables.stage_s(0, far, 64 * far) > 1e-3
        assert tables.stage_s(0, far, far * far) > 1e-3
        assert tables.stage_s(1, kv_tokens=far) > 1e-3
        assert tables.stage_s(1, kv_tokens=far, squares=float(far) ** 2) > 1e-3
    assert cost_tables(tiny(), deployment()).decode_s.shape == (9, 17)  # those that rise stay as they are


def test_which_pairs_are_measured_and_how() -> None:
    found = {(one.model, one.tensor_parallel): one.measured_on for one in measured_replicas()}
    assert found == {
        ("Llama-3-8B", 1): "server",
        ("Llama-3-70B", 4): "layers",
        ("Qwen2.5-7B", 1): "layers",
        ("Qwen3-30B-A3B", 1): "layers",
    }
    for one in BY_LAYERS.values():
        assert isinstance(one.cost, LayersCost)
        assert (one.cost.model, one.cost.tensor_parallel) == (one.model, one.tensor_parallel)
        assert "torch 2.11.0+cu130" in one.source


@pytest.mark.parametrize("name", BY_LAYERS)
def test_a_step_is_what_was_timed(name: str) -> None:
    """At the sizes that were timed, from the raw file and arithmetic only."""
    shape, tables = RAW[name]["shape"], RAW[name]["tables"]
    num_layers, parallel = shape["num_layers"], RAW[name]["tensor_parallel"]
    products = {row["tokens"]: row["seconds"] for row in tables["products"]}
    head = {row["tokens"]: row["seconds"] for row in tables["head"]}
    assert isinstance(BY_LAYERS[name].cost, LayersCost)
    overhead_s = BY_LAYERS[name].cost.overhead_s
    plan = plan_replicas(
        make_cluster(replicas=1, device="H200", model=name, tensor_parallel=parallel, cost="auto")
    )

    def fixed_s(tokens: int, num_seqs: int) -> float:
        # A ring of NVLinks of 450 GB/s, 0.6 of it used, and 15 us, twice a layer.
        sent_bytes = 2 * (parallel - 1) / parallel * tokens * shape["hidden_size"] * 2
        ring_s = 15e-6 + sent_bytes / (450e9 * 0.6) if parallel > 1 else 0.0
        return float(overhead_s + num_layers * (products[tokens] + 2 * ring_s) + head[num_seqs])

    for row in tables["decode"]:
        num_seqs, context = row["num_seqs"], row["context"]
        step_s = plan[0].costs.stage_s(
            num_decodes=num_seqs, context_tokens=num_seqs * context, num_seqs=num_seqs
        )
        expected_s = fixed_s(num_seqs, num_seqs) + num_layers * row["seconds"]
        assert step_s == pytest.approx(expected_s, rel=1e-3)  # the files hold four digits
    for row in tables["prompt"]:
        tokens = row["tokens"]
        step_s = plan[0].costs.stage_s(tokens, pairs=tokens**2 / 2, squares=float(tokens**2))
        assert step_s == pytest.approx(fixed_s(tokens, 1) + num_layers * row["seconds"], rel=1e-3)


def test_a_simulated_prompt_takes_its_step() -> None:
    scheduler = {"kind": "vllm-v1", "max_num_batched_tokens": 8192}
    cluster = make_cluster(replicas=1, device="H200", model="Qwen2.5-7B", cost="auto", scheduler=scheduler)
    run = Run(cluster, make_workload([0.0], [2048], [1])).to_end()
    tables = RAW["Qwen2.5-7B"]["tables"]
    layer_s = tables["products"][9]["seconds"] + tables["prompt"][2]["seconds"]
    assert tables["products"][9]["tokens"] == tables["prompt"][2]["tokens"] == 2048
    expected_s = 4e-4 + 28 * layer_s + tables["head"][0]["seconds"]
    assert run.requests["completed_at"][0] == pytest.approx(expected_s, rel=1e-3)


def test_between_and_beyond_the_sizes() -> None:
    tables = cost_tables(tiny(), deployment())

    def decode_s(num_seqs: int, context: int) -> float:
        return tables.stage_s(num_decodes=num_seqs, context_tokens=num_seqs * context, num_seqs=num_seqs)

    fixed_s = 1e-3 + 32 * 1e-4 + 1e-4
    assert decode_s(1, 640) == pytest.approx(fixed_s + 32 * 2e-5)
    assert decode_s(1, 64) == decode_s(1, 256)
    assert decode_s(1, 1792) == pytest.approx(fixed_s + 32 * 5e-5)
    prompt_s = tables.stage_s(300, squares=256.0**2)  # products go on as between 100 and 200 tokens
    assert prompt_s == pytest.approx(1e-3 + 32 * (6e-4 + 1e-5) + 1e-4)
    # 512 tokens behind 768 have as many pairs as a prompt of 1,024: 512 * (768 + 256) = 1,024 ** 2 / 2.
    chunk_s = tables.stage_s(100, kv_tokens=768, squares=512.0**2)
    assert chunk_s == pytest.approx(1e-3 + 32 * (2e-4 + 4e-5) + 1e-4)


@pytest.mark.parametrize(
    ("used", "message"),
    [
        (
            deployment(tensor_parallel=2),
            "tensor_parallel = 2: .* timed with tensor_parallel 1.*use 1, time these",
        ),
        (deployment("Qwen2.5-7B"), "model = 'Qwen2.5-7B': .* timed with model Llama-3-8B"),
        (deployment(dtype="fp8"), "dtype = 'fp8': .* timed with dtype fp16"),
    ],
)
def test_other_shapes_are_refused(used: Deployment, message: str) -> None:
    with pytest.raises(InputError, match=message):
        cost_tables(tiny(), used)


@pytest.mark.parametrize("tensor_parallel", [2, 8])
def test_other_tensor_parallel_is_computed(tensor_parallel: int) -> None:
    """`auto` never uses the shard of 4 for another number of devices."""
    used = deployment("Llama-3-70B", tensor_parallel)
    assert find_measured(used) is None
    group = {"device": "H200", "model": "Llama-3-70B", "tensor_parallel": tensor_parallel}
    plan = plan_replicas(make_cluster(replicas=1, cost="auto", **group))[0]
    assert plan.costs.stage_s(512) == cost_tables(RooflineCost(kind="roofline"), used).stage_s(512)
    with pytest.raises(InputError, match=f"tensor_parallel = {tensor_parallel}: .* tensor_parallel 4"):
        cost_tables(BY_LAYERS["Llama-3-70B"].cost, used)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"products": [[8, 1e-4], [1, 1e-4]]}, "cost.products = .* sizes do not rise"),
        ({"decode": TINY["decode"][:3]}, "cost.decode = '3 rows': is not every number of sequences"),
        ({"head": [[1, 0.0]]}, "a layer takes no time"),
    ],
)
def test_bad_tables(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tiny(**change)


def test_a_shipped_file_of_another_kind_is_refused() -> None:
    data = {"device": "H200", "model": "Llama-3-8B", "source": "", "cost": {"kind": "linear", "a": 1.0}}
    with pytest.raises(InputError, match="kinds: steps, layers"):
        parse_spec(MeasuredReplica, data, "x.yaml")
