"""What servers say of themselves: vLLM's gauges, load reports in answers, models."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any, NamedTuple

_RUNNING = ("vllm:num_requests_running",)
_WAITING = ("vllm:num_requests_waiting",)
# Prompt tokens looked up in the server's cache, and found there. A counter's name ends in _total.
_QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
_HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
_KV_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")  # today's name, and the one before


_NUM_BLOCKS = re.compile(rb'^vllm:cache_config_info\{[^\n]*num_gpu_blocks="(\d{1,12})"', re.MULTILINE)
_BLOCK_SIZE = re.compile(rb'^vllm:cache_config_info\{[^\n]*block_size="(\d{1,6})"', re.MULTILINE)


class ScrapedGauges(NamedTuple):
    running: float
    waiting: float
    kv_use: float


class ScrapedCounters(NamedTuple):
    """What a server counted of its prefix cache since it was started."""

    queries: float
    hits: float


def read_gauges(text: bytes) -> ScrapedGauges | None:
    """From vLLM's /metrics; several engines of a server are added up, their KV use is averaged."""
    running, waiting, kv_use = (_values(text, names) for names in (_RUNNING, _WAITING, _KV_USE))
    if not running or not waiting:
        return None
    return ScrapedGauges(sum(running), sum(waiting), sum(kv_use) / len(kv_use) if kv_use else 0.0)


def read_counters(text: bytes) -> ScrapedCounters | None:
    """From vLLM's /metrics; several engines of a server are added up."""
    queries, hits = (_values(text, names) for names in (_QUERIES, _HITS))
    return ScrapedCounters(sum(queries), sum(hits)) if queries and hits else None


def read_capacity(text: bytes) -> float | None:
    """Tokens that the server's KV memory holds, from vLLM's /metrics; several engines are added up."""
    blocks = _NUM_BLOCKS.findall(text)
    sizes = _BLOCK_SIZE.findall(text)
    found = [float(number) * float(size) for number, size in zip(blocks, sizes, strict=False)]
    return sum(found) or None


_LOAD_REPORT = re.compile(rb'(kv_cache_usage_perc|num_requests_waiting)"?\s*[=:]\s*([0-9.eE+-]+)')


def read_load(report: bytes) -> tuple[float | None, float | None]:
    """Waiting requests and KV use from the header `endpoint-load-metrics` (ORCA), as TEXT or JSON."""
    found: dict[bytes, float] = {}
    for name, value in _LOAD_REPORT.findall(report):
        with suppress(ValueError):
            found[name] = float(value)
    return found.get(b"num_requests_waiting"), found.get(b"kv_cache_usage_perc")


def _values(text: bytes, names: tuple[str, ...]) -> list[float]:
    for name in names:
        pattern = rb"^" + re.escape(name.encode()) + rb"(?:\{[^\n]*\})? ([0-9.eE+-]+)"
        found = re.findall(pattern, text, re.MULTILINE)
        with suppress(ValueError):  # "1.2.3"
            if found:
                return [float(value) for value in found]
    return []


def read_models(body: bytes) -> dict[str, Any] | None:
    try:
        data = json.loads(body)["data"]
        return {str(model["id"]): model for model in data}
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
