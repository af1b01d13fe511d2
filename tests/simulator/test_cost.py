from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pointsman.errors import InputError
from pointsman.simulator.cost import (
    MAX_SEQS,
    MAX_TOKENS,
    PROFILE,
    CostSpec,
    CostTables,
    LinearCost,
    RooflineCost,
    cost_tables,
    stage_time,
)
from pointsman.simulator.hardware import Deployment, load_catalogue
from pointsman.simulator.steps import StepsCost
from pointsman.spec import Spec, parse_spec

GOLDEN = LinearCost(kind="linear", a=0.0085, b=8.0e-5, c=3.0e-5, d=8.0e-8, e=3.4e-9)
stage_time_in_python = getattr(stage_time, "py_func", stage_time)  # no py_func with NUMBA_DISABLE_JIT=1


class Replica(Spec):
    cost: CostSpec


def deployment(device: str = "A100-80", model: str = "Llama-3-8B", **options: Any) -> Deployment:
    catalogue = load_catalogue()
    return Deployment(catalogue.device(device), catalogue.model(model), **options)


def roofline(device: str = "A100-80", model: str = "Llama-3-8B", **options: Any) -> CostTables:
    return cost_tables(RooflineCost(kind="roofline"), deployment(device, model, **options))


def made_up_profile(rng: np.random.Generator) -> CostTables:
    return CostTables(
        kind=PROFILE,
        coefficients=np.array([0.0, 0.0, 0.0, 0.0, 0.0, 1.1]),
        token_s=rng.random(50),
        sequence_s=rng.random(20),
        decode_s=rng.random((9, 5)),
        prefill_s=rng.random((6, 7)),
        grid=np.array([64, 64, 32]),
    )


def random_batches(rng: np.random.Generator, num_batches: int) -> list[dict[str, Any]]:
    return [
        {
            "num_prefill_tokens": int(rng.integers(0, 3 * MAX_TOKENS)) if rng.random() < 0.8 else 0,
            "num_decodes": int(rng.integers(0, 300)) if rng.random() < 0.8 else 0,
            "context_tokens": int(rng.integers(0, 10**6)),
            "pairs": float(rng.integers(0, 10**8)) / 2,
            "num_seqs": int(rng.integers(1, 2 * MAX_SEQS)),
            "kv_tokens": 64 * int(rng.integers(0, 100)),
            "squares": float(rng.integers(0, 10**7)),
        }
        for _ in range(num_batches)
    ]


def decodes(num_decodes: int, context: int = 1000) -> dict[str, Any]:
    return {"num_decodes": num_decodes, "context_tokens": num_decodes * context, "num_seqs": num_decodes}


def prefill(tokens: int) -> dict[str, Any]:
    return {"num_prefill_tokens": tokens, "pairs": tokens * tokens / 2}


def test_linear_is_the_closed_form_bit_for_bit() -> None:
    tables = cost_tables(GOLDEN, None)
    a, b, c, d, e = GOLDEN.a, GOLDEN.b, GOLDEN.c, GOLDEN.d, GOLDEN.e
    for batch in random_batches(np.random.default_rng(0), 2000):
        p, n, s, q = (batch[key] for key in ("num_prefill_tokens", "num_decodes", "context_tokens", "pairs"))
        assert tables.stage_s(**batch) == a + b * p + c * n + d * s + e * q


@pytest.mark.parametrize("kind", ["linear", "roofline", "profile"])
def test_compiled_and_plain_python_agree_bit_for_bit(kind: str) -> None:
    rng = np.random.default_rng(1)
    tables = {"linear": cost_tables(GOLDEN, None), "roofline": roofline(), "profile": made_up_profile(rng)}[
        kind
    ]
    arrays = (tables.coefficients, tables.token_s, tables.sequence_s, tables.decode_s, tables.prefill_s)
    for batch in random_batches(rng, 500):
        in_python = stage_time_in_python(tables.kind, *arrays, tables.grid, *batch.values())
        assert tables.stage_s(**batch) == in_python


def test_roofline_of_a_decode_step_by_hand() -> None:
    # Llama-3-8B on one A100-80, 4 sequences with 1,000 tokens of context each: limited by memory.
    bytes_per_s = 2039e9 * 0.8
    weight_bytes = 2 * 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336)
    head_bytes = 2 * 128256 * 4096
    kv_bytes = 4 * 1000 * 2 * 32 * 8 * 128 * 2
    expected_s = 5e-4 + (weight_bytes + head_bytes + kv_bytes) / bytes_per_s
    assert roofline().stage_s(**decodes(4)) == pytest.approx(expected_s, rel=1e-12)


def test_roofline_of_a_parallel_mixture_by_hand() -> None:
    # Mixtral-8x7B in fp8 on H100, tensor parallel 2, two stages of 16 layers; a prompt of 1,024 tokens.
    tables = roofline("H100", "Mixtral-8x7B", tensor_parallel=2, pipeline_parallel=2, dtype="fp8")
    attention, expert, router = 4096 * 128 * 2 * (16 + 4), 3 * 4096 * 14336 // 2, 4096 * 8
    flops = 1024 * 2 * 16 * (attention + router + 2 * expert)
    product_s = flops / (1979e12 * 0.55)
    pairs_s = 1024 * 512 * 4 * 16 * 128 * 16 / (989e12 * 0.55)
    head_s = 2 * (32000 * 4096 / 2) / (3350e9 * 0.8)
    send_s = 15e-6 + 1024 * 4096 * 2 / (450e9 * 0.6)
    # With two devices a ring all-reduce sends as many bytes as the activations hold; there are two a layer.
    expected_s = 5e-4 + product_s + pairs_s + head_s + 2 * 16 * send_s + send_s
    assert tables.stage_s(**prefill(1024)) == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize("model", ["Llama-3-8B", "Mixtral-8x7B", "Qwen3-30B-A3B"])
@pytest.mark.parametrize(
    "feature", ["num_prefill_tokens", "num_decodes", "context_tokens", "pairs", "num_seqs"]
)
def test_roofline_is_monotone_in_every_feature(model: str, feature: str) -> None:
    tables = roofline("H200", model, tensor_parallel=2)
    base: dict[str, Any] = {
        "num_prefill_tokens": 8,
        "num_decodes": 4,
        "context_tokens": 100,
        "pairs": 32.0,
        "num_seqs": 5,
    }
    values = [1, 2, 16, 150, 600, 2000, MAX_TOKENS, MAX_TOKENS + 1, 3 * MAX_TOKENS]
    times = [tables.stage_s(**{**base, feature: value}) for value in values]
    assert all(later >= sooner for sooner, later in pairwise(times))
    assert times[-1] > times[0]


def test_tables_continue_beyond_their_end() -> None:
    tables = roofline()
    per_token_s = 2 * 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336) / (312e12 * 0.55)
    one_s = tables.stage_s(num_prefill_tokens=1000)
    far_s = tables.stage_s(num_prefill_tokens=10 * MAX_TOKENS)
    assert far_s - one_s == pytest.approx((10 * MAX_TOKENS - 1000) * per_token_s, rel=1e-9)
    per_seq_s = 2 * 128256 * 4096 / (312e12 * 0.55)
    many_s = tables.stage_s(num_seqs=3 * MAX_SEQS) - tables.stage_s(num_seqs=500)
    assert many_s == pytest.approx((3 * MAX_SEQS - 500) * per_seq_s, rel=1e-9)


def test_tensor_parallelism_pays_less_than_its_devices() -> None:
    one, two, four = (roofline("H200", "Llama-3-70B", tensor_parallel=n) for n in (1, 2, 4))
    for batch in (decodes(1), decodes(128), prefill(2048)):
        times = [tables.stage_s(**batch) for tables in (one, two, four)]
        assert times[0] > times[1] > times[2]
        assert times[1] > times[0] / 2
        assert times[2] > times[1] / 2


def test_pipeline_parallelism_splits_layers() -> None:
    one, two = (roofline("H200", "Llama-3-70B", pipeline_parallel=n) for n in (1, 2))
    for batch in (decodes(64), prefill(2048)):
        assert one.stage_s(**batch) / 2 < two.stage_s(**batch) < one.stage_s(**batch) / 2 * 1.1
    # 80 layers in 3 stages: the largest holds 27.
    three = roofline("H200", "Llama-3-70B", pipeline_parallel=3)
    assert three.coefficients[3] == pytest.approx(one.coefficients[3] * 27 / 80, rel=1e-12)


def test_mixture_reads_more_experts_as_the_batch_grows() -> None:
    tables = roofline("H100", "Qwen3-30B-A3B")
    expert_bytes = 48 * 3 * 2048 * 768 * 2
    # One token touches 8 of 128 experts; two touch 8 + 8 * 120 / 128 on average.
    second_token_s = tables.stage_s(**decodes(2, 0)) - tables.stage_s(**decodes(1, 0))
    assert second_token_s == pytest.approx(7.5 * expert_bytes / (3350e9 * 0.8), rel=1e-9)
    assert tables.token_s[-1] > tables.token_s[1] * 5


def test_fp8_halves_weights_and_kv() -> None:
    half, whole = roofline("H100", dtype="fp8"), roofline("H100")
    assert half.token_s[1] - 5e-4 == pytest.approx((whole.token_s[1] - 5e-4) / 2, rel=1e-12)
    assert half.coefficients[3] == whole.coefficients[3]
    assert roofline("H100", kv_dtype="fp8").coefficients[3] == whole.coefficients[3] / 2


def test_efficiency_overrides() -> None:
    ideal = RooflineCost(kind="roofline", flops_efficiency=1, bandwidth_efficiency=1, overhead_s=0)
    tables = cost_tables(ideal, deployment())
    assert tables.stage_s(**decodes(1)) == pytest.approx(
        (roofline().stage_s(**decodes(1)) - 5e-4) * 0.8, rel=1e-9
    )
    assert tables.coefficients[4] == pytest.approx(roofline().coefficients[4] * 0.55, rel=1e-9)


def test_default_efficiencies_are_near_the_golden_reference() -> None:
    reference, tables = cost_tables(GOLDEN, None), roofline()
    for batch in (decodes(1), decodes(32), decodes(128), prefill(512), prefill(2048)):
        assert tables.stage_s(**batch) == pytest.approx(reference.stage_s(**batch), rel=0.15)
    for tokens in (512, 2048):
        assert 80e-6 < tables.stage_s(**prefill(tokens)) / tokens < 90e-6


def test_profile_interpolates_and_continues() -> None:
    tables = made_up_profile(np.random.default_rng(2))
    tokens, seqs, decode, chunk = tables.token_s, tables.sequence_s, tables.decode_s, tables.prefill_s
    fixed_s = tokens[3] + seqs[3]
    between_s = 0.75 * decode[3, 1] + 0.25 * decode[3, 2]
    assert tables.stage_s(num_decodes=3, context_tokens=3 * 80, num_seqs=3) == pytest.approx(
        fixed_s + between_s
    )
    # Two decodes more than the table has rows for, on a column of the table.
    beyond_s = decode[8, 2] + 2 * (decode[8, 2] - decode[7, 2])
    assert tables.stage_s(num_decodes=10, context_tokens=1280, num_seqs=10) == pytest.approx(
        tokens[10] + seqs[10] + beyond_s
    )
    one_chunk_s = 0.5 * chunk[2, 1] + 0.5 * chunk[2, 2]
    batch: dict[str, Any] = {"num_prefill_tokens": 48, "kv_tokens": 128, "squares": 48.0**2}
    assert tables.stage_s(**batch, num_seqs=1) == pytest.approx(tokens[48] + seqs[1] + one_chunk_s)
    assert tables.stage_s(**batch, num_seqs=2) == pytest.approx(tokens[48] + seqs[2] + 1.1 * one_chunk_s)
    last_s = seqs[-1] + 5 * (seqs[-1] - seqs[-2])
    assert tables.stage_s(num_seqs=24) == pytest.approx(tokens[0] + last_s)


def test_hardware_costs_need_a_deployment() -> None:
    with pytest.raises(InputError, match=r"cost.kind = 'roofline'.*set the replica's device and model"):
        cost_tables(RooflineCost(kind="roofline"), None)


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        ({"kind": "linear"}, r"cost\.a = .*missing"),
        ({"kind": "linear", "a": -1}, r"a = -1"),
        ({"kind": "linear", "a": float("nan")}, r"a = nan"),
        ({"kind": "linear", "a": 1, "f": 1}, r"f = 1: unknown key"),
        ({"kind": "roofline", "flops_efficiency": 1.5}, r"flops_efficiency = 1\.5"),
        ({"kind": "profile", "mlp": "mlp.csv"}, r"cost\.attention = .*missing"),
        (
            {"kind": "magic"},
            r"cost\.kind = 'magic': unknown kind; kinds: auto, linear, roofline, profile, layers, steps",
        ),
    ],
)
def test_bad_cost_specs(cost: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_spec(Replica, {"cost": cost})


def test_a_curve_that_falls_at_its_end_goes_on_level() -> None:
    """Continued with its last slope, a step of 4,000 tokens would take less than no time."""
    spec = parse_spec(StepsCost, {"kind": "steps", "step_s": [[1, 0.02], [64, 0.03], [128, 0.025]]})
    tables = cost_tables(spec, None)
    assert tables.stage_s(96) == pytest.approx(0.0275)
    assert [tables.stage_s(num) for num in (128, 129, 130, 4000)] == [0.025] * 4
    rising = cost_tables(parse_spec(StepsCost, {"kind": "steps", "step_s": [[1, 0.02], [64, 0.03]]}), None)
    assert rising.stage_s(127) == pytest.approx(0.04)
