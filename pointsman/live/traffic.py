"""What recorded traffic says about a server's speed: from when requests came, began and ended.

A request's stream lasts for its steps; each takes a fixed time, something for every stream that runs beside
it, and something for every prompt token that is computed meanwhile: what a cache held is left out. Over many
requests that is a linear regression. What a server does beside its steps is found by replaying the requests
in the simulator. Shapes beyond a line, attention, memory and limits do not show in these times.

Such a fit holds for a server among its neighbours, under the load that was recorded: where servers share a
card, a host or a power limit, a probe of one of them alone is faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pointsman.errors import InputError, no_such_file, reason_of
from pointsman.live.least_squares import nonnegative
from pointsman.live.replaying import replay

Floats = NDArray[np.float64]

MIN_REQUESTS = 100
MIN_OUTPUT = 8
NUM_RESAMPLED = 40
ENDLESS_BLOCKS = 1_000_000
CACHED = "num_cached_tokens"
NAMES = {
    "prompt_tokens": "num_prefill_tokens",
    "output_tokens": "num_decode_tokens",
    "cached_tokens": CACHED,
}
TIMES = ("arrived_at", "num_prefill_tokens", "num_decode_tokens", "first_token_at", "completed_at")
UNDETERMINED = (
    "attention (cost.d, cost.e) and the shape of the step's time",
    "max_num_seqs, and budgets other than vLLM's usual ones",
    "asynchronous scheduling: the better guess; a slower API server looks much the same",
    "what was cached, where servers do not say (vLLM does with --enable-prompt-tokens-details)",
)


@dataclass(frozen=True)
class TrafficFit:
    server: str
    num_requests: int
    cost: dict[str, float]  # of kind `linear`
    scheduler: dict[str, Any]
    errors: dict[str, float]  # one standard deviation, as a share
    replayed: dict[str, float]  # how far off means are when the same requests are simulated, as a share

    @property
    def replica(self) -> dict[str, Any]:
        """The replica, as in `cluster.replicas`."""
        return {"scheduler": self.scheduler, "cost": {"kind": "linear", **self.cost}}

    @property
    def speeds(self) -> dict[str, Any]:
        """The server, as in `serve --backends`."""
        names = ("step_floor_s", "prefill_s_per_token", "decode_s_per_token")
        return {name: value for name, value in zip(names, self.cost.values(), strict=True) if value > 0}


def read_traffic(path: Path) -> pl.DataFrame:
    """JSON lines or CSV; `ttft_s` and `e2e_s` may stand for the times of the first and the last token."""
    if path.is_dir():
        raise InputError("--traffic", str(path), "is a directory", "name a file of JSON lines or CSV")
    if not path.exists():
        raise no_such_file("--traffic", path)
    try:
        table = pl.read_csv(path) if path.suffix == ".csv" else pl.read_ndjson(path, infer_schema_length=None)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise InputError(
            "--traffic", str(path), f"cannot be read ({reason_of(error)})", "give JSON lines or CSV"
        ) from None
    if "outcome" in table.columns:  # of the router's `--record`
        table = table.filter(pl.col("outcome") == "completed")
    table = table.rename({old: new for old, new in NAMES.items() if old in table.columns})
    if {"ttft_s", "e2e_s", "arrived_at"} <= set(table.columns):
        table = table.with_columns(
            first_token_at=pl.col("arrived_at") + pl.col("ttft_s"),
            completed_at=pl.col("arrived_at") + pl.col("e2e_s"),
        )
    missing = [name for name in TIMES if name not in table.columns]
    if missing:
        problem = f"has no column {', '.join(missing)}: arrivals and lengths alone say nothing about speed"
        raise InputError("--traffic", str(path), problem, "probe the server with --url instead")
    server = pl.col("server").cast(pl.String) if "server" in table.columns else pl.lit("all")
    cached = pl.col(CACHED).cast(pl.Float64).fill_null(0.0) if CACHED in table.columns else pl.lit(0.0)
    times = [pl.col(name).cast(pl.Float64) for name in TIMES]
    return table.select(*times, computed=pl.col("num_prefill_tokens") - cached, server=server).drop_nulls()


def fit_traffic(table: pl.DataFrame, num_blocks: int | None = None, block_size: int = 16) -> list[TrafficFit]:
    """Fit one description for each server; KV memory is no limit if nobody says how much there is."""
    memory = {} if num_blocks is None else {"num_blocks": num_blocks, "block_size": block_size}
    fits = []
    for (server,), rows in sorted(table.partition_by("server", as_dict=True).items(), key=str):
        if len(rows) < MIN_REQUESTS:
            problem = f"has only {len(rows)} requests in it"
            raise InputError("server in --traffic", server, problem, f"record at least {MIN_REQUESTS}")
        fits.append(_fit_server(str(server), rows, memory))
    return fits


def stream_table(rows: pl.DataFrame) -> tuple[Floats, Floats]:
    """The answers of one server as [n, 3] steps, prompt tokens and streams of all steps; [n] seconds."""
    first, last, prompts, outputs = (
        rows[name].to_numpy() for name in ("first_token_at", "completed_at", "computed", "num_decode_tokens")
    )
    timed = np.flatnonzero(outputs >= MIN_OUTPUT)
    table = np.empty((len(timed), 3))
    for row, i in enumerate(timed):
        overlap_s = np.clip(np.minimum(last, last[i]) - np.maximum(first, first[i]), 0, None)
        num_steps = outputs[i] - 1
        num_streams = overlap_s.sum() / max(last[i] - first[i], 1e-9)
        joined = (first > first[i]) & (first <= last[i])
        table[row] = num_steps, prompts[joined].sum(), num_steps * num_streams
    return table, (last - first)[timed]


def _fit_server(server: str, rows: pl.DataFrame, memory: dict[str, int]) -> TrafficFit:
    table, seconds = stream_table(rows)
    weight = 1.0 / np.maximum(seconds, 1e-3)

    def fit(chosen: Any) -> Floats:
        return nonnegative(table[chosen] * weight[chosen, None], seconds[chosen] * weight[chosen])

    num = len(seconds)
    found = fit(np.arange(num))
    rng = np.random.default_rng(0)
    again = np.array([fit(rng.integers(0, num, num)) for _ in range(NUM_RESAMPLED)])
    errors = again.std(axis=0) / np.maximum(found, 1e-12)
    cost = dict(zip("abc", map(float, found), strict=True))
    first, last = (rows[name].to_numpy() for name in ("first_token_at", "completed_at"))
    begun_or_ended = np.repeat((1, -1), len(rows))[np.argsort(np.concatenate([first, last]))]
    most_at_once = int(np.cumsum(begun_or_ended).max())
    limits = {"kind": "vllm-v1", "max_num_seqs": 256 if most_at_once < 256 else 1024, **memory}
    again_s = replay(rows, cost, {"num_blocks": ENDLESS_BLOCKS} | limits)
    scheduler = limits | {"max_num_batched_tokens": again_s.max_num_batched_tokens} | dict(again_s.times)
    return TrafficFit(
        server,
        len(rows),
        cost,
        scheduler,
        dict(zip("abc", map(float, errors), strict=True)),
        again_s.errors,
    )
