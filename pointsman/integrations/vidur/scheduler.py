"""Any of our policies as a global scheduler of unmodified Vidur.

    scheduler.register()
    config.cluster_config.global_scheduler_config = PointsmanGlobalSchedulerConfig(policy="default")
    Simulator(config).run()

Vidur tells a global scheduler of arrivals only. What a router sees besides, first tokens, further tokens and
ends, is taken from the replica schedulers: each has an `on_batch_end`, which we call through. Gauges are read
every `scrape_interval_s`, as a router reads /metrics.

Vidur asks a global scheduler at arrivals only, too. A request that the policy holds is decided anew when a
batch ends, and goes into the queue of a replica there and then. A replica that runs a batch looks into its
queue when that ends, and so does the one whose batch ended just now; one that is idle would not wake up, so
it is left out until the next arrival. If nothing runs anywhere, nothing may be held.

Written against Vidur of PyPI (0.0.26) and of its repository (7d47513); the tests run in both.

Vidur makes options of the fields, by their types: annotations are not postponed here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vidur.config.config import BaseGlobalSchedulerConfig
from vidur.scheduler.global_scheduler.base_global_scheduler import BaseGlobalScheduler
from vidur.scheduler.global_scheduler.global_scheduler_registry import GlobalSchedulerRegistry
from vidur.types.base_int_enum import BaseIntEnum

from pointsman.routing.core import Core, Request
from pointsman.routing.policy import HoldSpec


class SchedulerType(BaseIntEnum):
    """One more kind, beside Vidur's GlobalSchedulerType, which has 1 to 3."""

    POINTSMAN = 1001
    STEPPED = 1002  # cluster.py


@dataclass
class PointsmanGlobalSchedulerConfig(BaseGlobalSchedulerConfig):
    policy: str = field(
        default="default", metadata={"help": "A heuristic, `default`, a run directory or a checkpoint."}
    )
    max_hold_s: float = field(
        default=HoldSpec().max_hold_s, metadata={"help": "A request is sent after this at the latest."}
    )
    scrape_interval_s: float = field(
        default=0.1, metadata={"help": "Seconds between two looks at the replicas' gauges."}
    )

    @staticmethod
    def get_type() -> Any:
        return SchedulerType.POINTSMAN


class PointsmanGlobalScheduler(BaseGlobalScheduler):
    def __init__(self, config: Any, replicas: dict[Any, Any]) -> None:
        super().__init__(config, replicas)
        settings = config.cluster_config.global_scheduler_config
        self._by_name = {str(replica_id): replica_id for replica_id in replicas}
        self._core = Core(
            settings.policy,
            {str(replica): _figures(engine) for replica, engine in self._replica_schedulers.items()},
            seed=config.seed,
            max_hold_s=settings.max_hold_s,
            now=0.0,
        )
        self._scrape_interval_s = settings.scrape_interval_s
        self._scraped_at = 0.0
        self._asked: dict[int, Request] = {}  # by request, until it is sent
        self._tickets: dict[int, int] = {}  # by request, while it runs
        self._streaming: set[int] = set()  # those that had their first token
        for replica_id, engine in self._replica_schedulers.items():
            engine.on_batch_end = self._listen(replica_id, engine.on_batch_end)

    def schedule(self) -> list[tuple[Any, Any]]:
        """Vidur asks at an arrival: the newest request has arrived now."""
        if not self._request_queue:
            return []
        self.sort_requests()
        now = self._request_queue[-1].arrived_at
        self._scrape(now)
        return self._place(now, excluded=[])

    def _listen(self, replica_id: Any, on_batch_end: Callable[[Any], None]) -> Callable[[Any], None]:
        def heard(batch: Any) -> None:
            on_batch_end(batch)
            now = batch.completed_at
            for request in batch.requests:
                self._book(request, now)
            self._scrape(now)
            if self._request_queue:
                asleep = [
                    str(other)
                    for other, engine in self._replica_schedulers.items()
                    if other != replica_id and _is_asleep(engine)
                ]
                for chosen, request in self._place(now, excluded=asleep):
                    self._replica_schedulers[chosen].add_request(request)

        return heard

    def _book(self, request: Any, now: float) -> None:
        """A batch with this request in it has ended: a token, unless its prompt is not done yet."""
        if not request.is_prefill_complete:
            return
        ticket = self._tickets[request.id]
        if request.id in self._streaming:
            self._core.tokens(ticket, 1, now)
        else:
            self._core.first_token(ticket, now)
            self._streaming.add(request.id)
        if request.completed:
            del self._tickets[request.id]
            self._streaming.discard(request.id)
            self._core.finished(ticket, now=now)

    def _scrape(self, now: float) -> None:
        if now - self._scraped_at < self._scrape_interval_s:
            return
        self._scraped_at = now
        for replica_id, engine in self._replica_schedulers.items():
            self._core.scraped(
                str(replica_id),
                running=len(engine._allocation_map),
                waiting=engine.num_pending_requests,
                kv_use=engine.memory_usage_percent / 100,
                now=now,
            )

    def _place(self, now: float, excluded: list[str]) -> list[tuple[Any, Any]]:
        """In the order that the policy wants, as many as it does not hold."""
        placed: list[tuple[Any, Any]] = []
        for request in self._request_queue:
            if request.id not in self._asked:
                self._asked[request.id] = Request(
                    int(request.num_prefill_tokens), arrived_at=request.arrived_at
                )
        while self._request_queue:
            asked = self._core.next_of(self._asked.values(), now)
            place = next(i for i, one in enumerate(self._request_queue) if self._asked[one.id] is asked)
            request = self._request_queue[place]
            name = self._core.decide(asked, len(self._request_queue), excluded, now)
            if name is None:
                if placed or not all(_is_asleep(engine) for engine in self._replica_schedulers.values()):
                    break
                name = next(name for name in self._by_name if name not in excluded)
            del self._request_queue[place], self._asked[request.id]
            self._tickets[request.id] = self._core.sent(asked, name, now=now)
            placed.append((self._by_name[name], request))
        return placed


def register() -> None:
    """Make `pointsman` a choice of Vidur's --global_scheduler_config_type."""
    GlobalSchedulerRegistry.register(SchedulerType.POINTSMAN, PointsmanGlobalScheduler)


def _figures(engine: Any) -> dict[str, float]:
    """What is known of a replica before any traffic: its memory. Its speed shows itself."""
    cache = getattr(engine, "_cache_config", engine._config)  # in the repository, the scheduler's own section
    return {"kv_capacity_tokens": float(cache.num_blocks * cache.block_size)}


def _is_asleep(engine: Any) -> bool:
    return bool(engine._num_running_batches == 0)
