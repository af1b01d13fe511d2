"""Execution times measured operator by operator, read from the CSV tables of Vidur's profiler.

Stage time is composed as Vidur composes it: the operators of one layer, times the layers of a stage, plus
the send to the next stage and the CPU overhead of a step. What differs:

- Vidur fits random forests to the medians; here they are interpolated linearly between measured points.
- Vidur rounds the mean context of the decodes up to 64 and the effective prefill chunk to a whole number;
  here both are interpolated. Token counts are rounded up to 8 in both.
- Vidur stops where its tables end; here time grows in proportion to the work beyond what was measured. The
  same rule fills the corner no profiler can visit, chunk + context > model length, which is reached when
  several chunks share a batch.
- Every stage is charged the send, the last one too.
- The vocabulary is not compared: none of the operators used depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pointsman.errors import InputError, reason_of
from pointsman.simulator.hardware import Deployment
from pointsman.simulator.profile import CHUNK_STEP_TOKENS, KV_STEP_TOKENS, ProfileCost

Floats = NDArray[np.float64]

TOKEN_ROUNDING = 8

TOKEN_OPERATORS = (
    "attn_pre_proj",
    "attn_post_proj",
    "attn_rope",
    "mlp_up_proj",
    "mlp_down_proj",
    "mlp_act",
    "input_layernorm",
    "post_attention_layernorm",
    "add",
)
# Some models and older profiles lack these; they count as 0, as in Vidur.
OPTIONAL_OPERATORS = ("input_layernorm", "post_attention_layernorm", "add", "attn_kv_cache_save")
CPU_OPERATOR = "cpu_overhead"  # the sum of these, which the tables hold one by one
CPU_COLUMNS = (
    "schedule_median",
    "sampler_e2e_median",
    "prepare_inputs_e2e_median",
    "process_model_outputs_median",
    "ray_comm_time_mean",
)
NCCL_LAUNCH_MS = 0.02  # Vidur's nccl_cpu_launch_overhead_ms
BATCHING_FACTOR = 1.1  # Vidur's attention_*_batching_overhead_fraction, grouped-query models only


@dataclass(frozen=True)
class Profile:
    """The rows that describe one deployment. Times in the tables are milliseconds a layer."""

    deployment: Deployment
    attention: pl.DataFrame
    mlp: pl.DataFrame
    all_reduce: pl.DataFrame | None
    send_recv: pl.DataFrame | None
    cpu_overheads: pl.DataFrame | None

    @property
    def batching_factor(self) -> float:
        """The factor on attention time when a batch holds several sequences of the same kind."""
        model = self.deployment.model
        return BATCHING_FACTOR if model.num_heads > model.num_kv_heads else 1.0

    def token_s(self) -> Floats:
        """[tokens + 1] what depends on the number of tokens in the batch, for one stage."""
        # One entry more than was measured, so that the kernel's extrapolation goes on in proportion.
        most_tokens = int(self.mlp["num_tokens"].to_numpy().max())
        max_tokens = max(1, most_tokens // TOKEN_ROUNDING) * TOKEN_ROUNDING
        tokens = np.arange(max_tokens + 1, dtype=np.float64)
        rounded = np.ceil(tokens / TOKEN_ROUNDING) * TOKEN_ROUNDING
        layer_ms = np.zeros(max_tokens + 1)
        for operator in TOKEN_OPERATORS:
            layer_ms += _interpolate(rounded, *_curve(self.mlp, "mlp", "num_tokens", operator))
        num_tokens = pl.max_horizontal("prefill_chunk_size", "batch_size").alias("num_tokens")
        with_tokens = self.attention.with_columns(num_tokens)
        layer_ms += _interpolate(
            tokens, *_curve(with_tokens, "attention", "num_tokens", "attn_kv_cache_save")
        )
        if self.all_reduce is not None:
            sizes_bytes, all_reduce_ms = _curve(self.all_reduce, "all_reduce", "size", "all_reduce")
            layer_ms += 2 * (
                _interpolate(rounded, self._as_tokens(sizes_bytes), all_reduce_ms) + NCCL_LAUNCH_MS
            )
        stage_ms = layer_ms * self._num_stage_layers
        if self.send_recv is not None:
            sizes_bytes, send_ms = _curve(self.send_recv, "send_recv", "size", "send_recv")
            stage_ms += _interpolate(rounded, self._as_tokens(sizes_bytes), send_ms)
        one_more = stage_ms[-1] * (max_tokens + 1) / max_tokens
        return np.append(stage_ms, one_more) * 1e-3

    def sequence_s(self) -> Floats:
        """[sequences + 1] CPU overhead of one stage; constant beyond what was measured."""
        if self.cpu_overheads is None:
            return np.zeros(1)
        num_seqs, overhead_ms = _curve(self.cpu_overheads, "cpu_overheads", "batch_size", CPU_OPERATOR)
        overhead_s: Floats = np.interp(np.arange(num_seqs[-1] + 2), num_seqs, overhead_ms) * 1e-3
        return overhead_s

    def decode_s(self) -> Floats:
        """[decodes + 1, context / KV_STEP_TOKENS + 1] attention of the decodes, all layers of one stage."""
        rows = _curves(self.attention.filter(pl.col("prefill_chunk_size") == 0), "attn_decode", "batch_size")
        contexts = _steps(max(float(context[-1]) for context, _ in rows.values()), KV_STEP_TOKENS)
        by_batch = np.array([_interpolate(contexts, context, ms) for context, ms in rows.values()])
        measured = np.array(list(rows), dtype=np.float64)
        num_decodes = np.arange(measured[-1] + 2)
        layer_ms = _interpolate_columns(num_decodes, measured, by_batch)
        layer_ms[2:] *= self.batching_factor
        layer_ms[0] = 0.0
        return layer_ms * self._num_stage_layers * 1e-3

    def prefill_s(self) -> Floats:
        """[context / KV_STEP_TOKENS + 1, chunk / CHUNK_STEP_TOKENS + 1] attention of one prefill chunk."""
        prefills = self.attention.filter(pl.col("prefill_chunk_size") > 0)
        rows = _curves(prefills, "attn_prefill", "prefill_chunk_size")
        contexts = _steps(max(float(context[-1]) for context, _ in rows.values()), KV_STEP_TOKENS)
        measured = np.array(list(rows), dtype=np.float64)
        by_chunk = np.empty((len(rows), len(contexts)))
        for i, (context, ms) in enumerate(rows.values()):
            # Attention of a chunk covers chunk * (context + chunk / 2) pairs of tokens.
            by_chunk[i] = _interpolate(contexts + measured[i] / 2, context + measured[i] / 2, ms)
        # Twice the largest chunk: several chunks of that size in one batch stay on the grid.
        chunks = _steps(2 * measured[-1], CHUNK_STEP_TOKENS)
        layer_ms = np.empty((len(contexts), len(chunks)))
        for j, context in enumerate(contexts):
            ms = np.interp(chunks, measured, by_chunk[:, j])
            pairs = chunks * (context + chunks / 2)
            pairs_measured = measured[-1] * (context + measured[-1] / 2)
            layer_ms[j] = ms * np.maximum(1.0, pairs / pairs_measured)
        return layer_ms * self._num_stage_layers * 1e-3

    @property
    def _num_stage_layers(self) -> int:
        return self.deployment.model.num_layers // self.deployment.pipeline_parallel

    def _as_tokens(self, sizes_bytes: Floats) -> Floats:
        return sizes_bytes / (2 * self.deployment.model.hidden_size)


def read_profile(spec: ProfileCost, deployment: Deployment) -> Profile:
    """Read the tables and keep the rows of this model, tensor parallelism and block size."""
    model, tensor_parallel = deployment.model, deployment.tensor_parallel
    if model.num_layers % deployment.pipeline_parallel:
        problem = f"does not divide the {model.num_layers} layers of {model.name}, as measured tables need"
        raise InputError("pipeline_parallel", deployment.pipeline_parallel, problem, "use a divisor")
    attention = {
        "n_embd": model.hidden_size,
        "n_q_head": model.num_heads,
        "n_kv_head": model.num_kv_heads,
        "block_size": spec.block_size,
        "num_tensor_parallel_workers": tensor_parallel,
    }
    mlp = {
        "n_embd": model.hidden_size,
        "n_head": model.num_heads,
        "n_kv_head": model.num_kv_heads,
        "n_expanded_embd": model.intermediate_size,
        "use_gated_mlp": model.is_mlp_gated,
        "num_tensor_parallel_workers": tensor_parallel,
    }
    all_reduce = {
        "collective": "all_reduce",
        "num_workers": tensor_parallel,
        "devices_per_node": tensor_parallel,
    }
    send_recv = {"collective": "send_recv", "devices_per_node": 1 if spec.is_multi_node else 2}
    measured = ("batch_size", "prefill_chunk_size", "kv_cache_size")
    return Profile(
        deployment=deployment,
        attention=_rows("attention", spec.attention, attention, measured),
        mlp=_rows("mlp", spec.mlp, mlp, ("num_tokens",)),
        all_reduce=_rows("all_reduce", spec.all_reduce, all_reduce, ("size",))
        if tensor_parallel > 1
        else None,
        send_recv=_rows("send_recv", spec.send_recv, send_recv, ("size",))
        if deployment.pipeline_parallel > 1
        else None,
        cpu_overheads=_cpu_rows(spec.cpu_overheads, deployment) if spec.cpu_overheads else None,
    )


def _rows(
    name: str,
    path: Path | None,
    wanted: Mapping[str, object],
    counts: tuple[str, ...],
    others: tuple[str, ...] = (),
) -> pl.DataFrame:
    """Rows whose columns hold what is `wanted`; `counts` become whole numbers, `others` must exist."""
    field = f"cost.{name}"
    if path is None:
        problem = "is needed with this tensor_parallel or pipeline_parallel"
        raise InputError(field, None, problem, "name the CSV table of Vidur's network profile")
    try:
        table = pl.read_csv(path, infer_schema_length=None)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise InputError(
            field, str(path), f"cannot be read ({reason_of(error)})", "give one of Vidur's tables"
        ) from None
    missing = [column for column in (*wanted, *counts, *others) if column not in table.columns]
    if missing:
        problem = f"has no column {', '.join(missing)}"
        raise InputError(field, str(path), problem, "give the matching table of Vidur's profiler")
    table = table.with_columns(pl.col(counts).cast(pl.Int64, strict=False)).drop_nulls(counts)
    for column, value in wanted.items():
        # Compared as text: a malformed table may hold any type here.
        found = table.filter(pl.col(column).cast(pl.String).str.to_lowercase() == str(value).lower())
        if found.is_empty():
            there = ", ".join(str(other) for other in table[column].unique().sort())
            problem = f"has no rows with {column} = {value}"
            raise InputError(field, str(path), problem, f"it has {there}; measure it, or change the replica")
        table = found
    return table


def _cpu_rows(path: Path, deployment: Deployment) -> pl.DataFrame:
    wanted = {"tensor_parallel_degree": deployment.tensor_parallel}
    table = _rows("cpu_overheads", path, wanted, ("batch_size",), ("model_name", *CPU_COLUMNS))
    names = [name.lower() for name in (deployment.model.name, *deployment.model.aliases)]
    found = table.filter(pl.col("model_name").cast(pl.String).str.to_lowercase().is_in(names))
    if found.is_empty():
        there = ", ".join(str(name) for name in table["model_name"].unique().sort())
        problem, remedy = (
            f"has no rows for {deployment.model.name}",
            f"it has {there}; add an alias to the model",
        )
        raise InputError("cost.cpu_overheads", str(path), problem, remedy)
    times = pl.col(CPU_COLUMNS).cast(pl.Float64, strict=False)
    return found.with_columns(pl.sum_horizontal(times, ignore_nulls=False).alias(_column(CPU_OPERATOR)))


def _column(operator: str) -> str:
    return f"time_stats.{operator}.median"


def _medians(table: pl.DataFrame, name: str, keys: tuple[str, ...], operator: str) -> pl.DataFrame:
    """Measured points of one operator: `keys`, sorted and distinct, and the median of their times, `ms`."""
    column = _column(operator)
    times = pl.col(column).cast(pl.Float64, strict=False).alias("ms")
    if operator in OPTIONAL_OPERATORS:
        times = times.fill_null(0.0) if column in table.columns else pl.lit(0.0).alias("ms")
    elif column not in table.columns:
        raise InputError(f"cost.{name}", column, "is missing", "give the matching table of Vidur's profiler")
    is_time = pl.col("ms").is_finite() & (pl.col("ms") >= 0)
    points = table.select(*keys, times).drop_nulls().filter(is_time).group_by(keys).agg(pl.col("ms").median())
    if points.is_empty():
        raise InputError(f"cost.{name}", column, "holds no times for this model", "measure it again")
    return points.sort(keys)


def _curve(table: pl.DataFrame, name: str, key: str, operator: str) -> tuple[Floats, Floats]:
    points = _medians(table, name, (key,), operator)
    return _floats(points[key]), _floats(points["ms"])


def _curves(table: pl.DataFrame, operator: str, row_key: str) -> dict[float, tuple[Floats, Floats]]:
    """For each measured value of `row_key`, in order: the contexts measured and their times, ms."""
    points = _medians(table, "attention", (row_key, "kv_cache_size"), operator)
    rows = points.partition_by(row_key, as_dict=True, maintain_order=True)
    return {float(key): (_floats(row["kv_cache_size"]), _floats(row["ms"])) for (key,), row in rows.items()}


def _floats(column: pl.Series) -> Floats:
    return column.to_numpy().astype(np.float64)


def _steps(last: float, step: int) -> Floats:
    """0, step, 2 * step, ... up to one point beyond `last`, from which the kernel extrapolates."""
    return np.arange(last // step + 2) * step


def _interpolate(at: Floats, points: Floats, values: Floats) -> Floats:
    """Linear between the points, constant before the first, proportional to `at` after the last."""
    last = points[-1]
    growth = np.maximum(1.0, at / last) if last > 0 else np.ones_like(at)
    return np.interp(at, points, values) * growth


def _interpolate_columns(at: Floats, points: Floats, table: Floats) -> Floats:
    return np.stack([_interpolate(at, points, column) for column in table.T], axis=1)
