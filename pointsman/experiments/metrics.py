"""What a run is judged by: one vocabulary for tables, JSON, plots and reports.

Times are seconds and end in `_s`. Every request of the workload counts; a run is drained before it is judged.

- `ttft`: arrival to first token; `e2e`: arrival to last token; `queueing`: arrival to first scheduled.
- `tpot`: (last - first token) / (output tokens - 1), per request with at least two output tokens.
- `tbt`: time between two tokens of a stream, per token, from a histogram with bins 1 to 1.6 % wide; stalls of
  preempted requests count.
- `slo_excess`: seconds by which the first token came after its limit, and the stream ended after its own.
- `hit_share`: share of the prompt tokens that were cached where they went; only where prompts share prefixes.
- `work_peak`: the most work that a replica got in a minute, over its fair share; only there, too.
- `ttft_square`: TTFT squared, what the age of waiting requests adds up to (objective.py).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pointsman.config import SloSpec
from pointsman.routing.signals import DECODE_S_PER_TOKEN, PREFILL_S_PER_TOKEN
from pointsman.simulator.cluster import Clusters
from pointsman.simulator.state import TBT_BINS_PER_OCTAVE, TBT_LOWEST_EXPONENT

PERCENTILES = (50, 90, 95, 99)
CLIENT_LATENCIES = ("ttft", "tpot", "e2e")  # those that a client can measure
WORK_WINDOW_S = 60.0
NUM_HIT_WINDOWS = 60
OF_A_WHOLE_RUN = ("duration_s", "requests_per_s", "tokens_per_s", "goodput_per_s")
Floats = NDArray[np.float64]


def latency(requests: Any, name: str) -> Floats:
    """[num_finished] seconds of `ttft`, `tpot`, `e2e` or `queueing`, in order of arrival.

    `tpot` is NaN where there is only one output token.
    """
    # Column by column: a copy of the whole table would double the memory of a long run.
    is_done = requests["completed_at"] >= 0
    if name == "tpot":
        num_gaps = requests["num_decode"][is_done] - 1
        tpot: Floats = requests["completed_at"][is_done] - requests["first_token_at"][is_done]
        np.divide(tpot, num_gaps, out=tpot, where=num_gaps > 0)
        tpot[num_gaps == 0] = np.nan
        return tpot
    end = {"ttft": "first_token_at", "e2e": "completed_at", "queueing": "scheduled_at"}[name]
    seconds: Floats = requests[end][is_done]
    seconds -= requests["arrived_at"][is_done]
    return seconds


def slo_excess(requests: Any, slo: SloSpec) -> Floats:
    """[num_finished] seconds by which the first token and then the stream were late."""
    is_done = requests["completed_at"] >= 0
    allowed_s = slo.tpot_s * (requests["num_decode"][is_done] - 1)
    streamed_s = requests["completed_at"][is_done] - requests["first_token_at"][is_done]
    excess: Floats = np.maximum(0.0, latency(requests, "ttft") - slo.ttft_s)
    excess += np.maximum(0.0, streamed_s - allowed_s)
    return excess


def in_time(requests: Any, slo: SloSpec) -> NDArray[np.bool_]:
    """[N] whether both limits were kept; without a second token there is only one."""
    is_good: NDArray[np.bool_] = requests["completed_at"] >= 0
    kept = latency(requests, "ttft") <= slo.ttft_s
    kept &= ~(latency(requests, "tpot") > slo.tpot_s)
    is_good[is_good] = kept
    return is_good


def measure(clusters: Clusters, i: int, slo: SloSpec) -> dict[str, float]:
    """All metrics of cluster i after its run."""
    sim, requests = clusters.sims[i], clusters.requests[i]
    is_drained = sim.num_completed == sim.num_requests
    metrics = measure_requests(requests, slo, None if is_drained else float(sim.now))
    duration_s = metrics["duration_s"]
    metrics |= summary("queueing", latency(requests, "queueing"))
    metrics |= _tbt_summary(clusters.tbt_histograms[i])
    replicas = clusters.replicas[i]
    shares = replicas["num_sent"] / max(1, replicas["num_sent"].sum())
    if sim.prefixes != 0:
        metrics["hit_share"] = float(replicas["hit_tokens"].sum() / max(1, replicas["prompt_tokens"].sum()))
        speeds = clusters.signals[i][[PREFILL_S_PER_TOKEN, DECODE_S_PER_TOKEN]]
        metrics["work_peak"] = work_peak(work_over_time(requests, *speeds))
    return metrics | {
        "imbalance_cv": float(sim.imbalance_area / sim.busy_span) if sim.busy_span > 0 else 0.0,
        "share_min": float(shares.min()),
        "share_max": float(shares.max()),
        "kv_use_mean": float((replicas["kv_area"] / replicas["num_blocks"]).mean() / duration_s),
        "busy_share": float(replicas["busy_s"].mean() / duration_s),
        "preemptions": float(sim.num_preemptions),
        "resent": float(sim.num_resent),
        "held_share": float(sim.num_held / sim.num_requests),
        "held_mean_s": float(sim.held_s / max(1, sim.num_held)),
        "batches": float(sim.num_batches),
        "decisions": float(sim.num_decisions),
    }


class HitsOverTime(NamedTuple):
    """The share of the prompt tokens scheduled in each window that was cached."""

    window_s: float
    shares: Floats  # [R, windows], NaN where a replica began to serve nobody

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        rows = [[None if math.isnan(share) else share for share in row] for row in self.shares.tolist()]
        return {"window_s": self.window_s, "hit_share": rows}


def hits_over_time(requests: Any, num_replicas: int, num_windows: int = NUM_HIT_WINDOWS) -> HitsOverTime:
    """Count a request that was sent twice where it was finished."""
    requests = requests[requests["completed_at"] >= 0]
    begun_s = requests["scheduled_at"]
    window_s = max(float(begun_s.max()) / num_windows, 1e-12)
    window = np.minimum((begun_s / window_s).astype(int), num_windows - 1)
    at = requests["replica"] * num_windows + window
    hit, asked = (
        np.bincount(at, requests[name], num_replicas * num_windows) for name in ("hit_tokens", "num_prefill")
    )
    shares = np.divide(hit, asked, out=np.full(len(hit), np.nan), where=asked > 0)
    return HitsOverTime(window_s, shares.reshape(num_replicas, num_windows))


def work_over_time(requests: Any, prefill_s_per_token: Floats, decode_s_per_token: Floats) -> Floats:
    """[R, minutes] seconds of work that each replica began in each minute.

    Work are the prompt tokens that were not cached and the output tokens, at the replica's own speed, so that
    replicas with as much of it are loaded alike. A begun minute counts as the one before it.
    """
    requests = requests[requests["completed_at"] >= 0]
    replica, begun_s = requests["replica"], requests["scheduled_at"]
    num_replicas = len(prefill_s_per_token)
    num_windows = max(1, int(begun_s.max() / WORK_WINDOW_S))
    window = np.minimum((begun_s / WORK_WINDOW_S).astype(int), num_windows - 1)
    computed = requests["num_prefill"] - requests["hit_tokens"]
    work_s: Floats = computed * prefill_s_per_token[replica]
    work_s += requests["num_decode"] * decode_s_per_token[replica]
    total: Floats = np.zeros((num_replicas, num_windows))
    np.add.at(total, (replica, window), work_s)
    return total


def work_peak(work_s: Floats) -> float:
    """The most of [R, minutes] over the mean of its minute; quiet minutes, with less than half as much work
    as usual, do not count: a few requests cannot be shared out evenly."""
    means = work_s.mean(axis=0)
    is_busy = means >= 0.5 * means.mean()
    return float((work_s[:, is_busy].max(axis=0) / means[is_busy]).max())


def measure_requests(requests: Any, slo: SloSpec, ended_at: float | None = None) -> dict[str, float]:
    """What the times of requests tell by themselves, simulated or not; until the last end if not told."""
    is_done = requests["completed_at"] >= 0
    num_done = int(np.count_nonzero(is_done))
    ended_at = float(requests["completed_at"].max()) if ended_at is None else ended_at
    duration_s = max(ended_at - float(requests["arrived_at"].min()), 1e-12)
    num_tokens = float(requests["num_decode"].sum(where=is_done))
    num_good = int(np.count_nonzero(in_time(requests, slo)))
    metrics = {
        "num_requests": float(len(requests)),
        "num_unfinished": float(len(requests) - num_done),
        "duration_s": duration_s,
    }
    for name in CLIENT_LATENCIES:  # one at a time, to keep the memory of a long run low
        metrics |= summary(name, latency(requests, name))
    return metrics | {
        "ttft_square_mean_s2": _mean(np.square(latency(requests, "ttft"))),
        "slo_excess_mean_s": _mean(slo_excess(requests, slo)),
        "requests_per_s": num_done / duration_s,
        "tokens_per_s": num_tokens / duration_s,
        "goodput_per_s": num_good / duration_s,
        "good_share": num_good / len(requests),
    }


def measure_blocks(requests: Any, slo: SloSpec, num_blocks: int) -> dict[str, Floats]:
    """[num_blocks] what the requests of each block tell, which are blocks of equal size in order of arrival.

    Rates are not among it: work of one block is done while the next arrives.
    """
    blocks = []
    for block in np.array_split(requests, num_blocks):
        metrics = measure_requests(block, slo) | summary("queueing", latency(block, "queueing"))
        blocks.append({name: value for name, value in metrics.items() if name not in OF_A_WHOLE_RUN})
    return {name: np.array([block[name] for block in blocks]) for name in blocks[0]}


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else float("nan")


def summary(name: str, values: Floats) -> dict[str, float]:
    if np.isnan(values).any():
        values = values[~np.isnan(values)]
    if len(values) == 0:
        return {f"{name}_{part}_s": float("nan") for part in ("mean", *(f"p{p}" for p in PERCENTILES))}
    mean = float(values.mean())
    quantiles = np.percentile(values, PERCENTILES, overwrite_input=True)
    return {f"{name}_mean_s": mean} | {
        f"{name}_p{p}_s": float(q) for p, q in zip(PERCENTILES, quantiles, strict=True)
    }


def _tbt_summary(histogram: NDArray[np.int64]) -> dict[str, float]:
    total = int(histogram.sum())
    if total == 0:
        return summary("tbt", np.empty(0))
    octave, part = np.divmod(np.arange(len(histogram)) + 0.5, TBT_BINS_PER_OCTAVE)
    centres = np.ldexp(1 + part / TBT_BINS_PER_OCTAVE, octave.astype(int) + TBT_LOWEST_EXPONENT)
    cumulated = histogram.cumsum()
    positions = np.searchsorted(cumulated, np.array(PERCENTILES) / 100 * total)
    return {"tbt_mean_s": float(histogram @ centres / total)} | {
        f"tbt_p{p}_s": float(centres[position]) for p, position in zip(PERCENTILES, positions, strict=True)
    }
