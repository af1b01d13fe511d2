"""`/metrics` with vLLM's names. The gauges are those of the simulated engine: they move when a step ends.

Times are those a client measures, so they shrink with the time scale. Beside `kv_cache_usage_perc` stands the
older `gpu_cache_usage_perc`, as in the vLLM versions that had both.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from pointsman.emulator.engine import CacheCounts, Gauges

CONTENT_TYPE = CONTENT_TYPE_LATEST
_FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)

disable_created_metrics()  # type: ignore[no-untyped-call]


class VllmMetrics:
    def __init__(
        self,
        model: str,
        read_gauges: Callable[[], Gauges],
        read_cache: Callable[[], CacheCounts],
        block_size: int,
        num_blocks: int,
    ) -> None:
        self._registry = CollectorRegistry()
        labels = {"model_name": model, "engine": "0"}

        def gauge(name: str, what: str, read: Callable[[Gauges], float]) -> None:
            one = Gauge(f"vllm:{name}", what, tuple(labels), registry=self._registry)
            one.labels(**labels).set_function(lambda: read(read_gauges()))

        def counter(name: str, what: str) -> Counter:
            return Counter(f"vllm:{name}", what, tuple(labels), registry=self._registry).labels(**labels)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            one = Histogram(f"vllm:{name}", what, tuple(labels), registry=self._registry, buckets=buckets)
            return one.labels(**labels)

        gauge("num_requests_running", "Requests in model execution batches.", lambda now: now.running)
        gauge("num_requests_waiting", "Requests waiting to be processed.", lambda now: now.waiting)
        gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", lambda now: now.kv_use)
        gauge("gpu_cache_usage_perc", "The same under its old name.", lambda now: now.kv_use)
        info = {"block_size": str(block_size), "num_gpu_blocks": str(num_blocks)} | labels
        config = Gauge("vllm:cache_config_info", "The engine's cache.", tuple(info), registry=self._registry)
        config.labels(**info).set(1)
        self.prompt_tokens = counter("prompt_tokens", "Prefill tokens processed.")
        self.generation_tokens = counter("generation_tokens", "Generation tokens processed.")
        self._read_cache, self._counted = read_cache, CacheCounts(0, 0)
        self._queries = counter("prefix_cache_queries", "Prefix cache queries, in tokens.")
        self._hits = counter("prefix_cache_hits", "Prefix cache hits, in tokens.")
        self.preemptions = counter("num_preemptions", "Preemptions by the engine.")
        self.ttft_s = histogram("time_to_first_token_seconds", "Time to first token.", _FIRST_TOKEN_S)
        self.token_s = histogram("inter_token_latency_seconds", "Time between tokens.", _TOKEN_S)
        self.e2e_s = histogram("e2e_request_latency_seconds", "End to end latency.", _REQUEST_S)
        success = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            (*labels, "finished_reason"),
            registry=self._registry,
        )
        self._success = {
            reason: success.labels(**labels, finished_reason=reason) for reason in ("stop", "length", "abort")
        }

    def ended(self, reason: str) -> None:
        self._success[reason].inc()

    def text(self) -> bytes:
        before, self._counted = self._counted, self._read_cache()
        self._queries.inc(self._counted.queries - before.queries)
        self._hits.inc(self._counted.hits - before.hits)
        return bytes(generate_latest(self._registry))
