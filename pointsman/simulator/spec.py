"""The `cluster:` section of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from pointsman.errors import InputError
from pointsman.routing.policy import HoldSpec
from pointsman.simulator.cost import AutoCost, CostSpec
from pointsman.simulator.hardware import Dtype
from pointsman.spec import Spec, one_of

MAX_REPLICAS = 16_384  # each takes memory whether it gets requests or not
Amount = Annotated[int, Field(gt=0, le=2_000_000)]  # as many blocks of 1,024 tokens are counted in 32 bits


class VllmV1Scheduler(Spec):
    """Today's vLLM: one token budget a step, running requests first, preemption by recomputation."""

    kind: Literal["vllm-v1"] = "vllm-v1"
    max_num_seqs: Amount = Field(default=256, description="sequences a step, at most")
    max_num_batched_tokens: Amount = Field(default=2048, description="tokens a step, at most")
    long_prefill_token_threshold: int = Field(
        default=0, ge=0, description="prompt tokens of one request a step, at most; 0 = no limit"
    )
    block_size: PositiveInt = Field(default=16, le=1024, description="tokens a KV block")
    num_blocks: Amount | None = Field(default=None, description="KV blocks; absent = from memory")
    watermark: float = Field(default=0.0, ge=0, lt=1, description="share of blocks admission leaves free")
    pipeline_stages: PositiveInt = Field(default=1, le=64, description="pipeline parallelism")
    prefix_caching: bool | None = Field(
        default=None, description="keep computed prefixes for later requests; absent = if prompts share any"
    )
    async_scheduling: bool | None = Field(
        default=None, description="the next step is planned while one runs; absent = as measured, else off"
    )
    api_s: float | None = Field(
        default=None, ge=0, description="API server: seconds a request; absent = as measured, else 0"
    )
    api_s_per_token: float | None = Field(
        default=None, ge=0, description="API server: seconds a prompt token; absent = as measured, else 0"
    )
    api_s_per_stream: float | None = Field(
        default=None, ge=0, description="API server: seconds a token of answers; absent = as measured, else 0"
    )

    @model_validator(mode="after")
    def _async_has_one_stage(self) -> VllmV1Scheduler:
        if self.async_scheduling and self.pipeline_stages > 1:
            raise InputError(
                "cluster.scheduler.async_scheduling",
                True,
                f"is not simulated with {self.pipeline_stages} pipeline stages",
                "use one stage or leave it out",
            )
        return self

    @model_validator(mode="after")
    def _budget_covers_decodes(self) -> VllmV1Scheduler:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InputError(
                "cluster.scheduler.max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"is below max_num_seqs ({self.max_num_seqs}), which vLLM refuses",
                "raise it or lower max_num_seqs",
            )
        return self


class VidurScheduler(Spec):
    """A replica scheduler with exactly Vidur's behaviour, its quirks included."""

    kind: Literal["vllm", "sarathi", "orca"]
    max_batch_size: Amount = Field(default=128, description="sequences on a replica, at most")
    chunk_size: Amount = Field(default=512, description="sarathi: tokens a step")
    max_tokens_in_batch: Amount = Field(default=4096, description="vllm: padded prompt tokens a step")
    max_sequence_tokens: Amount = Field(default=4096, description="orca: tokens reserved a sequence")
    block_size: PositiveInt = Field(default=16, le=1024, description="tokens a KV block")
    num_blocks: Amount | None = Field(default=None, description="KV blocks; absent = Vidur's planner")
    watermark: float = Field(default=0.01, ge=0, lt=1, description="share of blocks admission leaves free")
    pipeline_stages: PositiveInt = Field(default=1, le=64, description="pipeline parallelism")


AnyScheduler = VllmV1Scheduler | VidurScheduler
SchedulerSpec = Annotated[
    AnyScheduler, BeforeValidator(one_of("cluster.scheduler", get_args(AnyScheduler), "vllm-v1"))
]


class ReplicaGroup(Spec):
    """Replicas of one kind; what is not given is taken from the cluster."""

    count: PositiveInt = Field(default=1, description="replicas of this kind")
    description: Path | None = Field(
        default=None, description="file of `pointsman calibrate`: its cost and scheduler"
    )
    device: str | None = None
    model: str | None = None
    tensor_parallel: PositiveInt | None = None
    dtype: Dtype | None = None
    scheduler: SchedulerSpec | None = None
    cost: CostSpec | None = None
    kv_memory_share: float | None = Field(default=None, gt=0, le=1)
    slowdown: float = Field(default=1.0, gt=0, description="every step takes this many times as long")
    card: str | None = Field(
        default=None,
        description="the first replicas of all groups with this name share one card, so do the second, …",
    )
    neighbour_step_s: float | None = Field(
        default=None,
        ge=0,
        description="seconds a step takes longer for each step that ends on the same card meanwhile",
    )


class ClusterEvent(Spec):
    """Something that happens to a replica during the run."""

    at_s: float = Field(ge=0, description="time, seconds")
    kind: Literal["slow", "fail", "recover", "join", "drain"]
    replica: int = Field(ge=0, description="replica id, from 0")
    factor: float = Field(
        default=1.0, gt=0, description="slow: steps take this many times as long; 1 = normal"
    )


class SignalsSpec(Spec):
    """How late the router sees the servers' gauges."""

    scrape_interval_s: float = Field(default=0.1, gt=0, description="time between two scrapes")
    scrape_delay_s: float = Field(
        default=0.05, ge=0, description="age of a scrape when it reaches the router"
    )
    oracle: bool = Field(
        default=False, description="see the servers' state of this instant: upper bounds only"
    )

    @model_validator(mode="after")
    def _one_scrape_under_way(self) -> SignalsSpec:
        if self.scrape_delay_s > self.scrape_interval_s:
            raise InputError(
                "cluster.signals.scrape_delay_s",
                self.scrape_delay_s,
                f"is longer than the scrape interval ({self.scrape_interval_s})",
                "raise scrape_interval_s: a router does not send a scrape before the last one returned",
            )
        return self


class ClusterSpec(Spec):
    replicas: PositiveInt | tuple[ReplicaGroup, ...] = 4
    device: str = "A100-80"
    model: str = "Llama-3-8B"
    tensor_parallel: PositiveInt = 1
    dtype: Dtype = "fp16"
    memory_utilization: float = Field(
        default=0.9, gt=0, le=1, description="share of device memory vLLM takes"
    )
    kv_memory_share: float = Field(
        default=1.0, gt=0, le=1, description="share of the computed KV memory to use"
    )
    scheduler: SchedulerSpec = VllmV1Scheduler()
    cost: CostSpec = AutoCost(kind="auto")
    signals: SignalsSpec = SignalsSpec()
    hold: HoldSpec = HoldSpec()
    events: tuple[ClusterEvent, ...] = ()
    catalogue: Path | None = Field(default=None, description="file with your own devices and models")

    @property
    def groups(self) -> tuple[ReplicaGroup, ...]:
        return (ReplicaGroup(count=self.replicas),) if isinstance(self.replicas, int) else self.replicas

    @property
    def num_replicas(self) -> int:
        return sum(group.count for group in self.groups)

    @model_validator(mode="after")
    def _consistent(self) -> ClusterSpec:
        if self.num_replicas == 0:
            raise InputError("cluster.replicas", [], "a cluster needs a replica", "list at least one group")
        if self.num_replicas > MAX_REPLICAS:
            problem, remedy = "more than can be simulated", f"at most {MAX_REPLICAS:,}"
            raise InputError("cluster.replicas", self.num_replicas, problem, remedy)
        for index, event in enumerate(self.events):
            if event.replica >= self.num_replicas:
                raise InputError(
                    f"cluster.events.{index}.replica",
                    event.replica,
                    f"the cluster has {self.num_replicas} replicas",
                    f"use 0 to {self.num_replicas - 1}",
                )
        return self
