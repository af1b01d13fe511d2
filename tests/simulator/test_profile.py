from __future__ import annotations

import csv
import math
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from pointsman.errors import InputError
from pointsman.simulator.cost import CostTables, cost_tables
from pointsman.simulator.hardware import Deployment, Model, load_catalogue
from pointsman.simulator.profile import ProfileCost
from pointsman.simulator.profile_tables import CPU_COLUMNS, TOKEN_OPERATORS

VIDUR_PROFILES = Path(__file__).parents[3] / "shared" / "vidur" / "profiles"

TINY = Model(
    name="Tiny",
    aliases=("me/tiny",),
    num_layers=4,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=1000,
    max_context_tokens=128,
)
CODELLAMA_34B = Model(
    name="CodeLlama-34B",
    aliases=("codellama/CodeLlama-34b-Instruct-hf",),
    num_layers=48,
    hidden_size=8192,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=22016,
    vocab_size=32000,
    max_context_tokens=16384,
)

Row = dict[str, Any]


def column(operator: str) -> str:
    return f"time_stats.{operator}.median"


def mlp_rows(tensor_parallel: int, base_ms: float) -> list[Row]:
    """Operator number i takes (i + 1) * base_ms * tokens / 8; one outlier that a median must ignore."""
    shape = {"n_embd": 64, "n_head": 4, "n_kv_head": 2, "n_expanded_embd": 128, "use_gated_mlp": True}
    rows = []
    for tokens in (8, 16, 32):
        for noise in (1.0, 1.0, 100.0):
            times = {
                column(operator): (i + 1) * base_ms * tokens / 8 * noise
                for i, operator in enumerate(TOKEN_OPERATORS)
            }
            rows.append(
                {**shape, "num_tokens": tokens, "num_tensor_parallel_workers": tensor_parallel, **times}
            )
    return rows


def attention_rows(tensor_parallel: int) -> list[Row]:
    shape = {
        "n_embd": 64,
        "n_q_head": 4,
        "n_kv_head": 2,
        "block_size": 16,
        "num_tensor_parallel_workers": tensor_parallel,
    }
    decode = {(1, 64): 1.0, (1, 128): 2.0, (2, 64): 3.0, (2, 128): 5.0, (4, 64): 6.0, (4, 128): 9.0}
    prefill = {(32, 0): 0.25, (32, 64): 1.0, (64, 0): 2.0}
    rows = []
    for (batch_size, kv), ms in decode.items():
        times = {column("attn_decode"): ms, column("attn_prefill"): "", column("attn_kv_cache_save"): 0.5}
        rows.append(
            {**shape, "batch_size": batch_size, "prefill_chunk_size": 0, "kv_cache_size": kv, **times}
        )
    for (chunk, kv), ms in prefill.items():
        times = {column("attn_decode"): "", column("attn_prefill"): ms, column("attn_kv_cache_save"): 0.5}
        rows.append({**shape, "batch_size": 1, "prefill_chunk_size": chunk, "kv_cache_size": kv, **times})
    return rows


def network_rows(collective: str, ms_per_token: float) -> list[Row]:
    return [
        {
            "collective": collective,
            "num_workers": 2,
            "devices_per_node": 2,
            "size": tokens * 64 * 2,
            column(collective): tokens * ms_per_token,
        }
        for tokens in (8, 32)
    ]


def cpu_rows() -> list[Row]:
    return [
        {
            "model_name": "ME/tiny",
            "tensor_parallel_degree": 2,
            "batch_size": n,
            **dict.fromkeys(CPU_COLUMNS, ms),
        }
        for n, ms in ((2, 1.0), (4, 3.0))
    ]


def write(path: Path, rows: list[Row]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return {
        "attention": write(tmp_path / "attention.csv", attention_rows(1) + attention_rows(2)),
        "mlp": write(tmp_path / "mlp.csv", mlp_rows(1, 0.2) + mlp_rows(2, 0.1)),
        "all_reduce": write(tmp_path / "all_reduce.csv", network_rows("all_reduce", 0.01)),
        "send_recv": write(tmp_path / "send_recv.csv", network_rows("send_recv", 0.02)),
        "cpu_overheads": write(tmp_path / "cpu_overheads.csv", cpu_rows()),
    }


def tiny(tensor_parallel: int = 1, pipeline_parallel: int = 1) -> Deployment:
    return Deployment(load_catalogue().device("A100"), TINY, tensor_parallel, pipeline_parallel)


def tables(files: dict[str, Path], deployment: Deployment, *names: str, **options: Any) -> CostTables:
    paths: dict[str, Any] = {name: files[name] for name in ("attention", "mlp", *names)}
    return cost_tables(ProfileCost(kind="profile", **paths, **options), deployment)


def test_a_decode_step_is_composed_from_its_operators(files: dict[str, Path]) -> None:
    # 45 = 1 + 2 + ... + 9 operators; 3 tokens are looked up as 8; 4 layers; 10 % for a batch.
    layer_ms = 45 * 0.2 + 0.5 + 1.1 * (3.0 + 6.0) / 2
    actual_s = tables(files, tiny()).stage_s(num_decodes=3, context_tokens=3 * 64, num_seqs=3)
    assert actual_s == pytest.approx(4 * layer_ms * 1e-3, rel=1e-12)


def test_a_single_decode_has_no_batching_overhead(files: dict[str, Path]) -> None:
    layer_ms = 45 * 0.2 + 0.5 + 1.25
    actual_s = tables(files, tiny()).stage_s(num_decodes=1, context_tokens=80, num_seqs=1)
    assert actual_s == pytest.approx(4 * layer_ms * 1e-3, rel=1e-12)


def test_tensor_and_pipeline_parallel_and_cpu(files: dict[str, Path]) -> None:
    # 32 prompt tokens: four times the 8-token times of the rows for two devices; 2 of 4 layers.
    layer_ms = 45 * 0.1 * 4 + 0.5 + 0.25 + 2 * (0.32 + 0.02)
    expected_ms = 2 * layer_ms + 0.64 + 5 * 2.0
    names = ("all_reduce", "send_recv", "cpu_overheads")
    actual_s = tables(files, tiny(2, 2), *names).stage_s(num_prefill_tokens=32, squares=32.0**2, num_seqs=3)
    # Three sequences, 32 tokens: several chunks, so 10 % on prefill attention.
    assert actual_s == pytest.approx((expected_ms + 2 * 0.1 * 0.25) * 1e-3, rel=1e-12)


def test_cpu_overhead_is_constant_outside_what_was_measured(files: dict[str, Path]) -> None:
    cost = tables(files, tiny(2), "all_reduce", "cpu_overheads")
    assert cost.sequence_s[0] == cost.sequence_s[2] == pytest.approx(5e-3)
    low_s = cost.stage_s(num_seqs=4) - cost.stage_s(num_seqs=100)
    assert low_s == 0


def test_the_unmeasurable_corner_grows_with_work(files: dict[str, Path]) -> None:
    prefill_s = tables(files, tiny()).prefill_s
    # Chunk 64 was measured without context only (2 ms); with 64 tokens it covers 3 times the pairs.
    assert prefill_s[0, 2] == pytest.approx(4 * 2.0e-3)
    assert prefill_s[1, 2] == pytest.approx(4 * 2.0e-3 * 3)
    # A chunk of 128 without context: 4 times the pairs of one of 64.
    assert prefill_s[0, 4] == pytest.approx(4 * 2.0e-3 * 4)


def test_beyond_the_tables_time_grows_in_proportion(files: dict[str, Path]) -> None:
    cost = tables(files, tiny())
    at_end_s, far_s = cost.stage_s(num_prefill_tokens=32), cost.stage_s(num_prefill_tokens=320)
    prefill_attention_s = cost.prefill_s[0, 0]
    assert far_s - prefill_attention_s == pytest.approx(10 * (at_end_s - prefill_attention_s), rel=1e-9)
    layer_ms = 45 * 0.2 * 2 + 0.5
    eight_s = cost.stage_s(num_decodes=16, context_tokens=16 * 256, num_seqs=16) - 4 * layer_ms * 1e-3
    assert eight_s == pytest.approx(4 * 1.1 * 9.0e-3 * (16 / 4) * (256 / 128), rel=1e-9)


def test_older_tables_without_optional_columns(tmp_path: Path, files: dict[str, Path]) -> None:
    optional = [column("attn_kv_cache_save"), column("add")]
    for name, rows in (("attention", attention_rows(1)), ("mlp", mlp_rows(1, 0.2))):
        kept = [{key: value for key, value in row.items() if key not in optional} for row in rows]
        files[name] = write(tmp_path / f"old_{name}.csv", kept)
    layer_ms = 36 * 0.2 + 1.0
    actual_s = tables(files, tiny()).stage_s(num_decodes=1, context_tokens=64, num_seqs=1)
    assert actual_s == pytest.approx(4 * layer_ms * 1e-3, rel=1e-12)


@pytest.mark.parametrize(
    ("tensor_parallel", "pipeline_parallel", "names", "message"),
    [
        (2, 1, (), r"cost\.all_reduce = None: is needed"),
        (1, 2, (), r"cost\.send_recv = None: is needed"),
        (1, 3, (), r"pipeline_parallel = 3: does not divide the 4 layers"),
        (4, 1, (), r"cost\.attention.*no rows with num_tensor_parallel_workers = 4; it has 1, 2"),
        (1, 1, ("cpu_overheads",), r"cost\.cpu_overheads.*tensor_parallel_degree = 1; it has 2"),
    ],
)
def test_tables_that_do_not_cover_the_replica(
    files: dict[str, Path], tensor_parallel: int, pipeline_parallel: int, names: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        tables(files, tiny(tensor_parallel, pipeline_parallel), *names)


def test_block_size_and_model_are_filtered(files: dict[str, Path]) -> None:
    with pytest.raises(InputError, match=r"no rows with block_size = 32; it has 16"):
        tables(files, tiny(), block_size=32)
    other = Deployment(load_catalogue().device("A100"), TINY.model_copy(update={"hidden_size": 32}))
    with pytest.raises(InputError, match=r"no rows with n_embd = 32; it has 64"):
        tables(files, other)
    unknown = TINY.model_copy(update={"name": "Other", "aliases": ()})
    with pytest.raises(InputError, match=r"no rows for Other; it has ME/tiny"):
        tables(files, Deployment(load_catalogue().device("A100"), unknown, 2), "all_reduce", "cpu_overheads")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mlp", lambda row: row.pop("n_embd"), r"cost\.mlp.*has no column n_embd"),
        ("mlp", lambda row: row.pop(column("attn_rope")), r"attn_rope.*is missing"),
        ("mlp", lambda row: row.update({column("mlp_act"): "nan"}), r"mlp_act.*holds no times"),
        ("mlp", lambda row: row.update({column("mlp_act"): -1}), r"mlp_act.*holds no times"),
        ("mlp", lambda row: row.update({"n_embd": "wide"}), r"no rows with n_embd = 64; it has wide"),
        ("attention", lambda row: row.update({"prefill_chunk_size": 0}), r"attn_prefill.*holds no times"),
        ("attention", lambda row: row.update({"prefill_chunk_size": 8}), r"attn_decode.*holds no times"),
    ],
)
def test_malformed_tables(
    tmp_path: Path, files: dict[str, Path], name: str, change: Any, message: str
) -> None:
    rows = mlp_rows(1, 0.2) if name == "mlp" else attention_rows(1)
    for row in rows:
        change(row)
    files[name] = write(tmp_path / "bad.csv", rows)
    with pytest.raises(InputError, match=message):
        tables(files, tiny())


def test_unreadable_tables(tmp_path: Path, files: dict[str, Path]) -> None:
    with pytest.raises(InputError, match=r"cost\.mlp.*cannot be read"):
        tables({**files, "mlp": tmp_path / "none.csv"}, tiny())
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(InputError, match=r"cost\.mlp.*cannot be read"):
        tables({**files, "mlp": tmp_path / "empty.csv"}, tiny())


@pytest.fixture(scope="module")
def vidur_tables() -> CostTables:
    if not VIDUR_PROFILES.exists():
        pytest.skip("Vidur's profiles are not here")
    spec = ProfileCost(
        kind="profile",
        attention=VIDUR_PROFILES / "a100_attention_ee3dec7.csv",
        mlp=VIDUR_PROFILES / "a100_codellama34b_mlp.csv",
        all_reduce=VIDUR_PROFILES / "a100_pairwise_all_reduce.csv",
        cpu_overheads=VIDUR_PROFILES / "a100_cpu_overheads_bf10618.csv",
    )
    return cost_tables(spec, Deployment(load_catalogue().device("A100"), CODELLAMA_34B, 2))


def vidur_ms(name: str, operator: str, **wanted: str) -> float:
    """Median over the rows of one of Vidur's tables, read without polars."""
    with (VIDUR_PROFILES / name).open() as file:
        rows = [
            row for row in csv.DictReader(file) if all(row[key] == value for key, value in wanted.items())
        ]
    return median(float(row[column(operator)]) for row in rows)


def vidur_layer_ms(tokens: int) -> float:
    mlp = {"num_tokens": str(tokens), "num_tensor_parallel_workers": "2"}
    products_ms = sum(vidur_ms("a100_codellama34b_mlp.csv", operator, **mlp) for operator in TOKEN_OPERATORS)
    with (VIDUR_PROFILES / "a100_pairwise_all_reduce.csv").open() as file:
        sizes = sorted(
            (float(row["size"]) / 8192 / 2, float(row[column("all_reduce")]))
            for row in csv.DictReader(file)
            if row["num_workers"] == row["devices_per_node"] == "2"
        )
    below = max(point for point in sizes if point[0] <= tokens)
    above = min(point for point in sizes if point[0] >= tokens)
    share = (tokens - below[0]) / (above[0] - below[0]) if above[0] > below[0] else 0.0
    return products_ms + 2 * (below[1] + share * (above[1] - below[1]) + 0.02)


def test_vidur_prefill_from_its_rows(vidur_tables: CostTables) -> None:
    attention_ms = vidur_ms(
        "a100_attention_ee3dec7.csv", "attn_prefill", prefill_chunk_size="512", kv_cache_size="1024"
    )
    cpu_ms = vidur_tables.sequence_s[1] * 1e3
    expected_ms = 48 * (vidur_layer_ms(512) + attention_ms) + cpu_ms
    actual_s = vidur_tables.stage_s(num_prefill_tokens=512, kv_tokens=1024, squares=512.0**2, num_seqs=1)
    assert actual_s == pytest.approx(expected_ms * 1e-3, rel=1e-9)


def test_vidur_decode_from_its_rows(vidur_tables: CostTables) -> None:
    attention_ms = vidur_ms(
        "a100_attention_ee3dec7.csv",
        "attn_decode",
        prefill_chunk_size="0",
        batch_size="32",
        kv_cache_size="1024",
    )
    with (VIDUR_PROFILES / "a100_cpu_overheads_bf10618.csv").open() as file:
        (cpu,) = [
            row
            for row in csv.DictReader(file)
            if (row["model_name"], row["batch_size"]) == (CODELLAMA_34B.aliases[0], "32")
            and row["tensor_parallel_degree"] == "2"
        ]
    cpu_ms = math.fsum(float(cpu[name]) for name in CPU_COLUMNS)
    expected_ms = 48 * (vidur_layer_ms(32) + 1.1 * attention_ms) + cpu_ms
    actual_s = vidur_tables.stage_s(num_decodes=32, context_tokens=32 * 1024, num_seqs=32)
    assert actual_s == pytest.approx(expected_ms * 1e-3, rel=1e-9)


def test_vidur_tables_are_whole(vidur_tables: CostTables) -> None:
    for table in (
        vidur_tables.token_s,
        vidur_tables.sequence_s,
        vidur_tables.decode_s,
        vidur_tables.prefill_s,
    ):
        assert np.all(np.isfinite(table))
        assert np.all(table >= 0)
    assert len(vidur_tables.token_s) == 4096 + 2
    assert vidur_tables.decode_s.shape == (128 + 2, 65)
    # Noise of the measurement may dip, but never far.
    assert np.all(np.diff(vidur_tables.prefill_s, axis=0) > -0.25 * vidur_tables.prefill_s[:-1])
