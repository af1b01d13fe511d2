"""What recorded traffic says about a server's speed: from when requests came, began and ended.

A request's stream lasts for its steps; each takes a fixed time, something for every stream that runs beside
it, and something for every prompt token that is computed meanwhile: what a cache held is left out. Over many
requests that is a linear regression. What a server does beside its steps is found by replaying the requests
in the simulator. Shapes beyond a line, attention, memory and limits do not show in these times.

Such a fit holds for a server among its neighbours, under the load that was recorded: where servers share a
card, a host or a power limit, a probe of one of them alone is faster. What the steps of neighbours on the
same card cost can be part of the fit (`neighbours.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pointsman.errors import InputError, no_such_file, reason_of
from pointsman.live.least_squares import nonnegative
from pointsman.live.neighbours import fit_beside, pace_beside, refitted, said_beside
from pointsman.live.replaying import replay
from pointsman.workload.dates import looks_like_date, parse_dates

Floats = NDArray[np.float64]

MIN_REQUESTS = 100
MIN_OUTPUT = 8
NUM_RESAMPLED = 40
MOST_ERROR = 1 / 3  # of a neighbour's step, as one standard deviation; beyond it is taken to cost nothing
ENDLESS_BLOCKS = 1_000_000
CACHED = "num_cached_tokens"
NAMES = {
    "prompt_tokens": "num_prefill_tokens",
    "output_tokens": "num_decode_tokens",
    "cached_tokens": CACHED,
}
TIMES = ("arrived_at", "num_prefill_tokens", "num_decode_tokens", "first_token_at", "completed_at")
NUMBERS = (*TIMES, CACHED, "ttft_s", "e2e_s", "held_s")
TOLERANCE_S = 1e-3  # times may be rounded
MOST_TOKEN_S = 1.0  # the slowest servers take half of that for an output token
UNDETERMINED = (
    "attention (cost.d, cost.e) and the shape of the step's time",
    "max_num_seqs, and budgets other than vLLM's usual ones",
    "asynchronous scheduling: the better guess; a slower API server looks much the same",
    "what was cached, where servers do not say (vLLM does with --enable-prompt-tokens-details)",
)


@dataclass(frozen=True)
class Card:
    """What a server shares with others, and what that costs it."""

    name: str
    neighbour_step_s: float
    slowdown: float  # how many times as long its steps took beside its neighbours', in all
    doubt: str | None  # about what a neighbour's step costs


@dataclass(frozen=True)
class TrafficFit:
    server: str
    num_requests: int
    cost: dict[str, float]  # of kind `linear`
    scheduler: dict[str, Any]
    errors: dict[str, float]  # one standard deviation, as a share
    replayed: dict[str, float]  # how far off means are when the same requests are simulated, as a share
    card: Card | None = None

    @property
    def replica(self) -> dict[str, Any]:
        """The replica, as in `cluster.replicas`."""
        made: dict[str, Any] = {"scheduler": self.scheduler, "cost": {"kind": "linear", **self.cost}}
        if self.card is not None:
            made |= {"card": self.card.name, "neighbour_step_s": self.card.neighbour_step_s}
        return made

    @property
    def speeds(self) -> dict[str, Any]:
        """The server, as in `serve --backends`; its steps as they are beside its neighbours'."""
        names = ("step_floor_s", "prefill_s_per_token", "decode_s_per_token")
        cost = _among_neighbours(self.cost, self.card)
        return {name: value for name, value in zip(names, cost.values(), strict=True) if value > 0}


def read_traffic(path: Path) -> pl.DataFrame:
    """JSON lines or CSV; `ttft_s` and `e2e_s` may stand for the times of the first and the last token."""
    if path.is_dir():
        raise InputError("--traffic", str(path), "is a directory", "name a file of JSON lines or CSV")
    if not path.exists():
        raise no_such_file("--traffic", path)
    is_csv = path.suffix == ".csv"
    try:
        table = pl.read_csv(path) if is_csv else pl.read_ndjson(path, infer_schema_length=None)
        found = _requests(table, path)
    except OSError as error:
        problem, remedy = f"cannot be read ({reason_of(error)})", "give JSON lines or CSV"
        raise InputError("--traffic", str(path), problem, remedy) from None
    except pl.exceptions.PolarsError:
        problem = f"cannot be read as {'CSV' if is_csv else 'JSON lines, as its name does not end in .csv'}"
        raise InputError("--traffic", str(path), problem, "give JSON lines or CSV") from None
    if found.is_empty():
        problem = f"none of its {len(table)} requests was completed by a server, with all of its times"
        raise InputError("--traffic", str(path), problem, f"record at least {MIN_REQUESTS} that were")
    _check_times(found, path)
    return found


def _requests(table: pl.DataFrame, path: Path) -> pl.DataFrame:
    """Keep those that were completed: `TIMES`, the prompt tokens that were computed, server and policy."""
    if "outcome" in table.columns:  # of the router's `--record`
        table = table.filter(pl.col("outcome").cast(pl.String) == "completed")
    table = _with_numbers(_renamed(table), path)
    if {"ttft_s", "e2e_s", "arrived_at"} <= set(table.columns):
        table = table.with_columns(
            first_token_at=pl.col("arrived_at") + pl.col("ttft_s"),
            completed_at=pl.col("arrived_at") + pl.col("e2e_s"),
        )
    missing = [name for name in TIMES if name not in table.columns]
    if missing:
        problem = f"has no column {', '.join(missing)}: arrivals and lengths alone say nothing about speed"
        raise InputError("--traffic", str(path), problem, "probe the server with --url instead")
    if "held_s" in table.columns:  # by the router, before the server knew of it
        table = table.with_columns(arrived_at=pl.col("arrived_at") + pl.col("held_s").fill_null(0.0))
    server = pl.col("server").cast(pl.String).str.strip_chars_end("/")
    server = server if "server" in table.columns else pl.lit("all")
    policy = pl.col("policy").cast(pl.String).fill_null("") if "policy" in table.columns else pl.lit("")
    cached = pl.col(CACHED).fill_null(0.0) if CACHED in table.columns else pl.lit(0.0)
    computed = pl.col("num_prefill_tokens") - cached
    return table.select(*TIMES, computed=computed, server=server, policy=policy).drop_nulls()


def _renamed(table: pl.DataFrame) -> pl.DataFrame:
    """Our names; a column that has one already is taken before another of the same meaning."""
    columns = set(table.columns)
    return table.rename({old: new for old, new in NAMES.items() if old in columns and new not in columns})


def _with_numbers(table: pl.DataFrame, path: Path) -> pl.DataFrame:
    """Tokens, and seconds since some moment; what is no number is a null."""
    found = {name: _numbers(table[name], path) for name in NUMBERS if name in table.columns}
    for name, values in found.items():
        found[name] = pl.select(pl.when(values.is_finite()).then(values)).to_series()
    return table.with_columns(**found)


def _numbers(values: pl.Series, path: Path) -> pl.Series:
    with suppress(pl.exceptions.PolarsError):
        return values.cast(pl.Float64)
    text = pl.Series(values.name, [None if one is None else str(one).strip() for one in values], pl.String)
    is_date = values.name.endswith("_at") and looks_like_date(str(text.drop_nulls().first()))
    numbers = _seconds(text) if is_date else text.cast(pl.Float64, strict=False)
    wrong = values.filter(numbers.is_null() & values.is_not_null())
    if wrong.len() > 0:
        what = "date" if is_date else "number"
        problem = f"column {values.name} holds {str(wrong.first())!r}, which is no {what}"
        raise InputError("--traffic", str(path), problem, "correct the column, or leave these rows out")
    return numbers


def _seconds(dates: pl.Series) -> pl.Series:
    """Count them since 1970."""
    return parse_dates(dates)[0].dt.epoch("us") / 1e6


def _check_times(table: pl.DataFrame, path: Path) -> None:
    """Refuse times that no server can have taken."""
    for before, after in pairwise(("arrived_at", "first_token_at", "completed_at")):
        num_wrong = table.filter(pl.col(after) < pl.col(before) - TOLERANCE_S).height
        if num_wrong:
            problem = f"{after} is before {before} in {num_wrong} of {len(table)} requests"
            raise InputError("--traffic", str(path), problem, "correct these times, or leave the rows out")
    num_beyond = table.filter(pl.col("computed") < 0).height
    if num_beyond:
        problem = f"{CACHED} is more than the prompt in {num_beyond} of {len(table)} requests"
        raise InputError("--traffic", str(path), problem, "give the cached tokens of each prompt")
    rows = _timed(table)
    streamed_s = rows["completed_at"] - rows["first_token_at"]
    token_s = (streamed_s / (rows["num_decode_tokens"] - 1)).median()
    if isinstance(token_s, float) and token_s > MOST_TOKEN_S:
        problem = f"an output token takes {token_s:.4g} s typically, as if times were not in seconds"
        raise InputError("--traffic", str(path), problem, "give times in seconds, or as dates")


def fit_traffic(table: pl.DataFrame) -> list[TrafficFit]:
    """Fit one description for each server; KV memory is no limit, since nobody says how much there is."""
    return [fit_server(table, server) for server in table["server"].unique().sort()]


def fit_server(
    table: pl.DataFrame,
    server: str,
    neighbours: Sequence[str] = (),
    num_blocks: int | None = None,
    block_size: int = 16,
) -> TrafficFit:
    """Fit the description of a server; `neighbours` are on its card."""
    memory = {} if num_blocks is None else {"num_blocks": num_blocks, "block_size": block_size}
    rows, *others = (table.filter(pl.col("server") == one) for one in (server, *neighbours))
    if len(rows) < MIN_REQUESTS:
        problem = f"has only {len(rows)} requests in it"
        raise InputError("server in --traffic", server, problem, f"record at least {MIN_REQUESTS}")
    if _timed(rows).filter(pl.col("completed_at") > pl.col("first_token_at")).is_empty():
        problem = f"none of its answers streamed {MIN_OUTPUT} tokens or more: no step can be told from them"
        raise InputError("server in --traffic", server, problem, "record answers that stream")
    streams, seconds = stream_table(rows)
    if not neighbours:
        found, errors = _fit_alone(streams, seconds)
        return _described(server, rows, found, errors, memory, None)
    timed = _timed(rows)
    pace = pace_beside(timed, [_timed(one) for one in others])
    found = fit_beside(streams, pace, seconds)
    again = refitted(streams, pace, seconds, timed["first_token_at"].to_numpy())
    errors = again.std(axis=0) / np.maximum(found, 1e-12)
    doubt = None
    if not found[3] or errors[3] > MOST_ERROR:
        found_ms, spread_ms = 1e3 * found[3], 1e3 * again[:, 3].std()
        doubt = f"{found_ms:.2f} ms, give or take {spread_ms:.2f} ms; taken as 0, more policies may tell"
        found, errors = _fit_alone(streams, seconds)
        found = np.append(found, 0.0)
    elif len(policies := table["policy"].unique()) == 1 and policies[0]:
        doubt = f"{policies[0]} alone was recorded, under which it may be far off: record several"
    slowdown = float(said_beside(streams, pace, found).sum() / (streams @ found[:3]).sum())
    card = Card(" ".join(sorted((server, *neighbours))), float(found[3]), slowdown, doubt)
    return _described(server, rows, found[:3], errors, memory, card)


def _timed(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.filter(pl.col("num_decode_tokens") >= MIN_OUTPUT)


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


def _fit_alone(table: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """[3] what a step, a prompt token and a stream cost, and one standard deviation of each, as a share."""
    weight = 1.0 / np.maximum(seconds, 1e-3)

    def fit(chosen: Any) -> Floats:
        return nonnegative(table[chosen] * weight[chosen, None], seconds[chosen] * weight[chosen])

    num = len(seconds)
    found = fit(np.arange(num))
    rng = np.random.default_rng(0)
    again = np.array([fit(rng.integers(0, num, num)) for _ in range(NUM_RESAMPLED)])
    return found, again.std(axis=0) / np.maximum(found, 1e-12)


def _described(
    server: str,
    rows: pl.DataFrame,
    found: Floats,
    errors: Floats,
    memory: dict[str, int],
    card: Card | None,
) -> TrafficFit:
    cost = dict(zip("abc", map(float, found), strict=True))
    first, last = (rows[name].to_numpy() for name in ("first_token_at", "completed_at"))
    begun_or_ended = np.repeat((1, -1), len(rows))[np.argsort(np.concatenate([first, last]))]
    most_at_once = int(np.cumsum(begun_or_ended).max())
    limits = {"kind": "vllm-v1", "max_num_seqs": 256 if most_at_once < 256 else 1024, **memory}
    again_s = replay(rows, _among_neighbours(cost, card), {"num_blocks": ENDLESS_BLOCKS} | limits)
    scheduler = limits | {"max_num_batched_tokens": again_s.max_num_batched_tokens} | dict(again_s.times)
    names = ("a", "b", "c", "neighbour_step_s")[: len(errors)]
    return TrafficFit(
        server,
        len(rows),
        cost,
        scheduler,
        dict(zip(names, map(float, errors), strict=True)),
        again_s.errors,
        card,
    )


def _among_neighbours(cost: dict[str, float], card: Card | None) -> dict[str, float]:
    """As long as steps took while the neighbours made theirs, on average."""
    return cost if card is None else {name: value * card.slowdown for name, value in cost.items()}
