from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pointsman.errors import InputError
from pointsman.simulator.hardware import (
    GIB,
    Deployment,
    kv_capacity_blocks,
    load_catalogue,
    vidur_plan,
)

# Billions of parameters, in all and for one token, from the model cards.
PUBLISHED_PARAMETERS = {
    "Llama-2-7B": (6.74, 6.74),
    "Llama-2-70B": (68.98, 68.98),
    "Llama-3-8B": (8.03, 8.03),
    "Llama-3.1-8B": (8.03, 8.03),
    "Llama-3-70B": (70.6, 70.6),
    "Llama-3.1-70B": (70.6, 70.6),
    "Qwen2.5-7B": (7.61, 7.61),
    "Qwen2.5-14B": (14.7, 14.7),
    "Qwen2.5-32B": (32.5, 32.5),
    "Qwen2.5-72B": (72.7, 72.7),
    "Qwen3-8B": (8.2, 8.2),
    "Qwen3-14B": (14.8, 14.8),
    "Qwen3-32B": (32.8, 32.8),
    "Qwen3-30B-A3B": (30.5, 3.3),
    "Mistral-7B": (7.24, 7.24),
    "Mixtral-8x7B": (46.7, 12.9),
}

OWN_CATALOGUE = """
devices:
  Abacus:
    fp16_tflops: 10
    memory_gb: 8
    usable_memory_gib: 7
    bandwidth_gb_s: 100
  A10: {fp16_tflops: 1, memory_gb: 24, usable_memory_gib: 22, bandwidth_gb_s: 1}
models:
  Tiny:
    aliases: [me/tiny]
    num_layers: 2
    hidden_size: 64
    num_heads: 4
    num_kv_heads: 2
    head_dim: 16
    intermediate_size: 128
    vocab_size: 1000
    has_tied_embeddings: true
    max_context_tokens: 512
"""


def deployment(device: str = "A100-80", model: str = "Llama-3-8B", **options: Any) -> Deployment:
    catalogue = load_catalogue()
    return Deployment(catalogue.device(device), catalogue.model(model), **options)


def own_catalogue(folder: Path, text: str) -> Path:
    path = folder / "own.yaml"
    path.write_text(text)
    return path


def test_catalogue_holds_what_the_issue_asks_for() -> None:
    catalogue = load_catalogue()
    expected = {"A10", "A40", "L40S", "A100-40", "A100-80", "H100", "H200", "B200", "MI300X"}
    assert set(catalogue.devices) == expected
    assert set(catalogue.models) == set(PUBLISHED_PARAMETERS)


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_parameters_match_the_model_card(name: str) -> None:
    model = load_catalogue().model(name)
    total, active = PUBLISHED_PARAMETERS[name]
    assert model.num_parameters / 1e9 == pytest.approx(total, rel=0.01)
    assert model.num_active_parameters / 1e9 == pytest.approx(active, rel=0.02)


def test_device_figures_are_plausible() -> None:
    for device in load_catalogue().devices.values():
        assert device.source
        # The driver keeps some of what is on the label, more with ECC in ordinary memory.
        assert 0.9 * device.memory_gb < device.usable_memory_gib < device.memory_gb
        if device.fp8_tflops is not None:
            assert device.fp8_tflops == pytest.approx(2 * device.fp16_tflops, rel=0.02)


@pytest.mark.parametrize("name", ["A100-80", "a100-80gb", "A100", "nvidia a100-sxm4-80gb"])
def test_devices_are_found_by_alias_in_any_case(name: str) -> None:
    assert load_catalogue().device(name).bandwidth_gb_s == 2039


@pytest.mark.parametrize(
    ("name", "proper", "max_context_tokens"),
    [
        ("llama-3-8b", "Llama-3-8B", 8192),
        ("meta-llama/Meta-Llama-3-8B", "Llama-3-8B", 8192),
        ("Llama-3.3-70B", "Llama-3.1-70B", 131072),
        ("MISTRALAI/mixtral-8x7b-v0.1", "Mixtral-8x7B", 32768),
    ],
)
def test_models_are_found_by_alias_in_any_case(name: str, proper: str, max_context_tokens: int) -> None:
    model = load_catalogue().model(name)
    assert (model.name, model.max_context_tokens) == (proper, max_context_tokens)


def test_unknown_name_suggests_close_ones() -> None:
    with pytest.raises(InputError, match=r"device = 'H10': not in the catalogue; did you mean H100"):
        load_catalogue().device("H10")
    with pytest.raises(InputError, match=r"model = 'Llama-4-8B'.*Llama-3-8B"):
        load_catalogue().model("Llama-4-8B")


def test_unknown_name_with_nothing_close_lists_all() -> None:
    with pytest.raises(InputError, match=r"known: A10, A100-40, .*, MI300X"):
        load_catalogue().device("zzz")


def test_own_file_adds_and_overrides(tmp_path: Path) -> None:
    catalogue = load_catalogue(own_catalogue(tmp_path, OWN_CATALOGUE))
    assert catalogue.device("abacus").name == "Abacus"
    assert catalogue.device("A10").fp16_tflops == 1
    assert catalogue.device("H100").fp16_tflops == 989
    # q, k, v, o; three MLP matrices; two norms: for two layers; one embedding table.
    layer = 64 * 16 * (4 + 2 + 2 + 4) + 3 * 64 * 128 + 2 * 64
    assert catalogue.model("me/tiny").num_parameters == 2 * layer + 1000 * 64
    assert load_catalogue().device("A10").fp16_tflops == 125


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devices: [", "cannot be read"),
        ("- A100", "is not a catalogue"),
        ("gpus: {}", "is not a catalogue"),
        ("devices: [A100]", "is not a mapping of names"),
        ("devices: {X: 3}", "is not a mapping of names"),
        (
            OWN_CATALOGUE.replace("fp16_tflops: 10\n", "tflops: 10\n"),
            r"devices\.Abacus\.tflops = 10: unknown key",
        ),
        (OWN_CATALOGUE.replace("    fp16_tflops: 10\n", ""), r"devices\.Abacus\.fp16_tflops = .*missing"),
        (OWN_CATALOGUE.replace("memory_gb: 8", "memory_gb: -8"), r"devices\.Abacus\.memory_gb = -8.*greater"),
        (OWN_CATALOGUE.replace("num_kv_heads: 2", "num_kv_heads: 3"), r"num_kv_heads = 3: does not divide"),
        (OWN_CATALOGUE + "    num_experts: 4\n", r"num_experts_per_token = 0: .*num_experts = 4"),
        (OWN_CATALOGUE + "    num_experts_per_token: 4\n", r"num_experts_per_token = 4: .*num_experts = 0"),
    ],
)
def test_bad_own_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_catalogue(own_catalogue(tmp_path, text))


def test_missing_own_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_catalogue(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            "Llama-3-8B",
            {"tensor_parallel": 3},
            r"tensor_parallel = 3: does not divide the 32 attention heads",
        ),
        ("Llama-3-8B", {"tensor_parallel": 0}, "less than one device"),
        ("Qwen2.5-7B", {"tensor_parallel": 7}, r"neither divides.* 4 KV heads.*use one of \[1, 2, 4\]"),
        ("Llama-2-7B", {"tensor_parallel": 64}, "does not divide the 32 attention heads"),
        ("Qwen2.5-14B", {"tensor_parallel": 40}, r"MLP width 13824"),
        ("Llama-3-8B", {"pipeline_parallel": 33}, r"pipeline_parallel = 33: .*32 layers.*use 1 to 32"),
        ("Llama-3-8B", {"pipeline_parallel": 0}, "pipeline_parallel = 0"),
        ("Llama-3-8B", {"dtype": "fp8"}, "A100-80 has no fp8"),
    ],
)
def test_impossible_deployments(model: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        deployment(model=model, **options)


def test_kv_bytes_are_split_over_devices_and_stages() -> None:
    assert deployment().kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert deployment(tensor_parallel=4).kv_bytes_per_token == 2 * 32 * 2 * 128 * 2
    assert deployment(pipeline_parallel=3).kv_bytes_per_token == 2 * 11 * 8 * 128 * 2
    assert deployment("H100", kv_dtype="fp8").kv_bytes_per_token == 2 * 32 * 8 * 128
    # More devices than KV heads: each keeps a copy of one.
    assert deployment(tensor_parallel=16).kv_bytes_per_token == 2 * 32 * 1 * 128 * 2


def test_weights_are_split_over_devices_and_stages() -> None:
    whole = deployment().weight_bytes
    assert whole == pytest.approx(8.03e9 * 2, rel=0.001)
    assert deployment(tensor_parallel=4).weight_bytes == pytest.approx(whole / 4, rel=0.001)
    # 2 of 32 query heads and a copy of one of 8 KV heads, each with a projection in and one out.
    assert deployment().model.attention_parameters(tensor_parallel=16) == 4096 * 128 * 2 * (2 + 1)
    layers, table = 6.98e9 * 2, 128256 * 4096 * 2
    assert deployment(pipeline_parallel=2).weight_bytes == pytest.approx(layers / 2 + table, rel=0.001)
    assert deployment("H100", dtype="fp8").weight_bytes == pytest.approx(layers / 2 + 2 * table, rel=0.001)


@pytest.mark.parametrize(
    ("device", "model", "num_blocks"),
    [
        ("A100-80", "Llama-2-7B", 7351),  # vLLM pull 2031
        ("H100", "Llama-3-8B", 53.29 * GIB / (16 * 131072)),  # vLLM pull 10511
    ],
)
def test_kv_capacity_is_near_what_vllm_reports(device: str, model: str, num_blocks: float) -> None:
    assert kv_capacity_blocks(deployment(device, model)) == pytest.approx(num_blocks, rel=0.04)


def test_kv_capacity_grows_with_devices() -> None:
    one = kv_capacity_blocks(deployment())
    assert kv_capacity_blocks(deployment(tensor_parallel=2)) > 2 * one
    assert kv_capacity_blocks(deployment(pipeline_parallel=2)) > 2 * one
    assert kv_capacity_blocks(deployment(), block_size=32) == one // 2
    assert kv_capacity_blocks(deployment(), memory_utilization=0.5) < one / 2


def test_weights_that_do_not_fit_name_the_remedy() -> None:
    message = (
        r"model = 'Llama-3-70B': needs 143\.6 GB on each A100-80 .* but 76\.5 GB are available; "
        r"use tensor_parallel 2, or a device with more memory"
    )
    with pytest.raises(InputError, match=message):
        kv_capacity_blocks(deployment(model="Llama-3-70B"))
    with pytest.raises(InputError, match="use more tensor_parallel or pipeline_parallel"):
        kv_capacity_blocks(deployment("A10", "Llama-3-70B"), memory_utilization=0.5)


def test_kv_capacity_checks_its_arguments() -> None:
    with pytest.raises(InputError, match="block_size = 0"):
        kv_capacity_blocks(deployment(), block_size=0)
    with pytest.raises(InputError, match="memory_utilization = 90"):
        kv_capacity_blocks(deployment(), memory_utilization=90)


def test_vidur_plan_of_the_golden_runs() -> None:
    plan = vidur_plan(deployment(), max_tokens=4096)
    assert (plan.num_slots, plan.num_blocks) == (118, 30208)


def test_vidur_plan_with_parallelism() -> None:
    # By hand: 77,309,411,328 bytes; Llama-3-8B has 218,103,808 parameters a layer without norms.
    available_bytes = 80 * 2**30 * 0.9
    request_bytes = 4 * 128 * 8 * 4096 * 32
    slots = int((available_bytes - 2 * 16 * 218_103_808) // request_bytes)
    plan = vidur_plan(deployment(pipeline_parallel=2))
    assert (plan.num_slots, plan.num_blocks) == (slots, 2 * 256 * slots)
    slots = int((available_bytes - 32 * 218_103_808) // (request_bytes / 2))
    assert vidur_plan(deployment(tensor_parallel=2)).num_slots == slots


def test_vidur_plan_refuses_what_it_cannot_plan() -> None:
    with pytest.raises(InputError, match=r"pipeline_parallel = 3: .*32 layers"):
        vidur_plan(deployment(pipeline_parallel=3))
    with pytest.raises(InputError, match=r"Llama-3-70B.*use tensor_parallel 2"):
        vidur_plan(deployment(model="Llama-3-70B"))
