"""The `workload:` section of a configuration.

Either a trace is replayed, `workload: {trace: trace.csv}`, or requests are made up,
`workload: {arrivals: {kind: poisson, load: 0.85}, lengths: azure-conv, requests: 20000}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from pointsman.errors import InputError
from pointsman.spec import Spec, one_of, parse_spec

MAX_REQUESTS = 100_000_000
NamedDistribution = Literal["azure-conv", "azure-code", "mooncake-conv", "long-summarization"]
FormatName = Literal["auto", "azure", "vidur", "mooncake", "burstgpt", "generic"]
# Mooncake's conversation trace (kvcache-ai/Mooncake, Apache-2.0): times, lengths and the hashes that two
# requests share.
ShippedTrace = Literal["mooncake-conversation"]
TimeUnit = Literal["s", "ms", "us", "ns"]


class Rated(Spec):
    """A mean rate of arrivals, absolute or relative to what the cluster can serve."""

    load: float | None = Field(
        None, gt=0, description="mean rate as a share of the cluster's capacity (1 = saturated); or give rate"
    )
    rate: float | None = Field(None, gt=0, description="mean rate in requests/s; or give load")

    @model_validator(mode="after")
    def _exactly_one_rate(self) -> Self:
        if (self.load is None) == (self.rate is None):
            problem = (
                "neither load nor rate is given" if self.load is None else "both load and rate are given"
            )
            remedy = "set exactly one of load (share of capacity) and rate (requests/s)"
            raise InputError("workload.arrivals", self.load, problem, remedy)
        return self

    @property
    def peak_share(self) -> float:
        """The highest sustained rate as a multiple of `load` or `rate`."""
        return 1.0

    @property
    def mean_share(self) -> float:
        """The mean rate as a multiple of `load` or `rate`."""
        return 1.0


class PoissonArrivals(Rated):
    kind: Literal["poisson"] = Field("poisson", description="independent arrivals")


class GammaArrivals(Rated):
    kind: Literal["gamma"] = Field("gamma", description="independent gaps, gamma distributed")
    cv: float = Field(
        2.0,
        ge=0,
        le=100,
        description="coefficient of variation of the gaps: 0 even, 1 Poisson, above 1 bursty",
    )


class MmppArrivals(Rated):
    kind: Literal["mmpp"] = Field(
        "mmpp", description="Poisson that alternates between a calm and a burst rate"
    )
    burst_factor: float = Field(5.0, ge=1, description="rate in a burst over rate in a calm")
    burst_s: float = Field(10.0, ge=0.001, description="mean duration of a burst, s (exponential)")
    calm_s: float = Field(50.0, ge=0.001, description="mean duration of a calm, s (exponential)")


class DiurnalArrivals(Rated):
    kind: Literal["diurnal"] = Field("diurnal", description="Poisson whose rate follows a sinusoid")
    period_s: float = Field(3600.0, gt=0, description="length of one day, s")
    amplitude: float = Field(0.5, ge=0, le=1, description="swing of the rate as a share of its mean")


class RampArrivals(Rated):
    kind: Literal["ramp"] = Field("ramp", description="Poisson whose rate changes evenly over the workload")
    start: float = Field(0.2, ge=0, description="rate at the start as a share of load or rate")
    end: float = Field(1.0, gt=0, description="rate at the end as a share of load or rate")

    @property
    def peak_share(self) -> float:
        return max(self.start, self.end)

    @property
    def mean_share(self) -> float:
        return (self.start + self.end) / 2.0


class ClosedArrivals(Spec):
    kind: Literal["closed"] = Field(
        "closed", description="users who wait for their answer, pause, and ask again"
    )
    users: int = Field(ge=1, le=1_000_000, description="number of users")
    think_s: float = Field(5.0, ge=0, description="mean pause between an answer and the next request, s")


class TraceColumns(Spec):
    """Which column of a generic file holds what; what is absent is found by the usual names."""

    arrived_at: str | None = Field(None, description="column of arrival times")
    num_prefill_tokens: str | None = Field(None, description="column of prompt lengths, tokens")
    num_decode_tokens: str | None = Field(None, description="column of output lengths, tokens")
    session: str | None = Field(None, description="column of session names")
    block_hashes: str | None = Field(None, description="column of the hashes of the prompt's blocks")


class TraceFile(Spec):
    path: str = Field(
        min_length=1, description="CSV, JSONL or Parquet file, plain or gzip; or mooncake-conversation"
    )
    format: FormatName = Field("auto", description="auto recognises the columns")
    columns: TraceColumns | None = Field(None, description="column names of a generic file")
    time_unit: TimeUnit | None = Field(None, description="unit of numeric times; default: recognised")
    block_tokens: int | None = Field(
        None, ge=1, le=1_000_000, description="tokens a block of block hashes; default: 512 for Mooncake"
    )
    start_at_zero: bool = Field(
        True, description="shift times so that the first is 0 s; false keeps numbers as they are"
    )

    @model_validator(mode="after")
    def _columns_are_generic(self) -> Self:
        if self.columns is not None and self.format not in ("auto", "generic"):
            remedy = "set format: generic, or leave columns out"
            raise InputError(
                "workload.trace.columns", self.format, "this format names its own columns", remedy
            )
        return self


class TraceReplay(TraceFile):
    load: float | None = Field(
        None, gt=0, description="stretch the time axis to this share of the cluster's capacity"
    )
    rate: float | None = Field(None, gt=0, description="stretch the time axis to this mean rate, requests/s")
    repeat: int = Field(
        1,
        ge=0,
        le=MAX_REQUESTS,
        description="passes over the trace; 0 = as many as requests or duration_s need",
    )
    begin: float = Field(0.0, ge=0, lt=1, description="share of its requests to leave out at the beginning")
    part: tuple[float, float] = Field(
        (0.0, 1.0), description="from and to which share of its requests: [0.8, 1] is the last fifth"
    )

    @model_validator(mode="after")
    def _at_most_one_rate(self) -> Self:
        if self.load is not None and self.rate is not None:
            remedy = "set at most one of load (share of capacity) and rate (requests/s)"
            raise InputError("workload.trace.load", self.load, "both load and rate are given", remedy)
        return self

    @model_validator(mode="after")
    def _part_in_order(self) -> Self:
        first, last = self.part
        if not 0 <= first < last <= 1:
            remedy = "give two shares in order, for example [0.8, 1]"
            raise InputError("workload.trace.part", list(self.part), "is not a part of a trace", remedy)
        return self


class TraceArrivals(TraceReplay):
    kind: Literal["trace"] = Field("trace", description="the times of a trace file")


class NamedLengths(Spec):
    kind: NamedDistribution = Field(description="joint prompt and output lengths fitted to a public trace")


class LognormalLengths(Spec):
    kind: Literal["lognormal"] = Field("lognormal", description="prompt and output lognormal")
    prompt_mean: float = Field(ge=1, description="mean prompt, tokens")
    prompt_cv: float = Field(1.0, ge=0, le=100, description="standard deviation over mean of the prompt")
    output_mean: float = Field(ge=1, description="mean output, tokens")
    output_cv: float = Field(1.0, ge=0, le=100, description="standard deviation over mean of the output")
    correlation: float = Field(0.0, ge=-1, le=1, description="correlation of the two logarithms")


class ZipfLengths(Spec):
    kind: Literal["zipf"] = Field(
        "zipf", description="total length Zipf, split at a fixed ratio (as in Vidur)"
    )
    theta: float = Field(0.6, ge=0, description="exponent: the k-th shortest total has weight k^-theta")
    min_total: int = Field(1024, ge=2, le=10_000_000, description="shortest prompt + output, tokens")
    max_total: int = Field(4096, ge=2, le=10_000_000, description="longest prompt + output, tokens")
    prompt_to_output: float = Field(20.0, gt=0, description="prompt tokens per output token")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        _check_order("zipf total", self.min_total, self.max_total)
        return self


class UniformLengths(Spec):
    kind: Literal["uniform"] = Field("uniform", description="prompt and output uniform, bounds included")
    prompt_min: int = Field(ge=1, le=10_000_000, description="shortest prompt, tokens")
    prompt_max: int = Field(ge=1, le=10_000_000, description="longest prompt, tokens")
    output_min: int = Field(ge=1, le=10_000_000, description="shortest output, tokens")
    output_max: int = Field(ge=1, le=10_000_000, description="longest output, tokens")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        _check_order("prompt", self.prompt_min, self.prompt_max)
        _check_order("output", self.output_min, self.output_max)
        return self


class FixedLengths(Spec):
    kind: Literal["fixed"] = Field("fixed", description="every request the same")
    prompt: int = Field(ge=1, le=10_000_000, description="prompt, tokens")
    output: int = Field(ge=1, le=10_000_000, description="output, tokens")


class TraceLengths(TraceFile):
    kind: Literal["trace"] = Field("trace", description="rows of a trace file, drawn with replacement")


class MixturePart(Spec):
    weight: float = Field(gt=0, description="relative share of the requests")
    lengths: Lengths = Field(description="their length distribution")


class MixtureLengths(Spec):
    kind: Literal["mixture"] = Field("mixture", description="each request from one of several distributions")
    parts: tuple[MixturePart, ...] = Field(min_length=1, description="the distributions and their weights")


AnyArrivals = (
    PoissonArrivals
    | GammaArrivals
    | MmppArrivals
    | DiurnalArrivals
    | RampArrivals
    | ClosedArrivals
    | TraceArrivals
)
AnyLengths = (
    NamedLengths
    | LognormalLengths
    | ZipfLengths
    | UniformLengths
    | FixedLengths
    | TraceLengths
    | MixtureLengths
)
Arrivals = Annotated[AnyArrivals, BeforeValidator(one_of("workload.arrivals", get_args(AnyArrivals)))]
Lengths = Annotated[AnyLengths, BeforeValidator(one_of("workload.lengths", get_args(AnyLengths)))]


def _trace(value: Any) -> Any:
    data = {"path": value} if isinstance(value, str) else value
    return parse_spec(TraceReplay, data, "workload.trace") if isinstance(data, Mapping) else data


class SharedTexts(Spec):
    """Texts that stand at the beginning of many prompts; a few of them of most."""

    count: int = Field(ge=1, le=1_000_000, description="how many there are")
    tokens: float = Field(ge=1, le=10_000_000, description="their mean length, tokens")
    cv: float = Field(0.0, ge=0, le=100, description="standard deviation over mean of their lengths")
    zipf: float = Field(1.0, ge=0, description="popularity: the k-th has weight k^-zipf; 0 = all alike")


class Documents(SharedTexts):
    per_request: int = Field(1, ge=1, le=64, description="documents a prompt, each another one, in any order")


class PrefixesSpec(Spec):
    """What made-up prompts have in common: system prompt, documents, and what was said before, in this order.

    `lengths` is then about what a request adds to that, and about its output.
    """

    systems: SharedTexts | None = Field(None, description="system prompts, agents or few-shot templates")
    documents: Documents | None = Field(None, description="documents that a session is about")
    turns: float = Field(
        1.0, ge=1, description="mean requests a session (geometric); each contains what came before it"
    )
    think_s: float = Field(
        10.0, ge=0, description="mean time from an answer to the session's next request, s (exponential)"
    )
    context_tokens: int = Field(
        16_384, ge=2, le=10_000_000, description="prompt and output at most; a session that outgrows it ends"
    )

    @model_validator(mode="after")
    def _shares_something(self) -> Self:
        if self.systems is None and self.documents is None and self.turns == 1.0:
            remedy = "give systems, documents or turns above 1, or leave prefixes out"
            raise InputError("workload.prefixes", {}, "nothing is shared", remedy)
        return self


class WorkloadSpec(Spec):
    """Requests to serve: a trace, or arrivals and lengths."""

    trace: Annotated[TraceReplay, BeforeValidator(_trace)] | None = Field(
        None, description="file to replay: its path, or a mapping with path and options"
    )
    arrivals: Arrivals | None = Field(None, description="when requests come")
    lengths: Lengths | None = Field(None, description="how long prompts and outputs are")
    requests: int | None = Field(
        None,
        ge=1,
        le=MAX_REQUESTS,
        description="number of requests; default 20000, or until duration_s, or the whole trace",
    )
    duration_s: float | None = Field(None, gt=0, description="no arrivals after this time, s")
    max_tokens: int | None = Field(
        None,
        ge=2,
        description="bound on prompt + output, tokens; the prompt is cut (Vidur's rule); default none",
    )
    sessions: float | None = Field(
        None, ge=1, description="mean requests per session of a synthetic workload; default no sessions"
    )
    session_gap_s: float = Field(
        30.0, gt=0, description="mean time between two requests of a session, s; needs sessions"
    )

    prefixes: PrefixesSpec | None = Field(
        None, description="what prompts of a synthetic workload share; default nothing"
    )

    @model_validator(mode="after")
    def _prefixes_fit(self) -> Self:
        if self.prefixes is None:
            return self
        for name in ("trace", "sessions", "max_tokens"):
            value = getattr(self, name)
            if value is not None:
                remedy = (
                    f"leave one of them out{'; prefixes has context_tokens' if name == 'max_tokens' else ''}"
                )
                raise InputError(f"workload.{name}", str(value), "given beside prefixes", remedy)
        if self.prefixes.turns > 1.0 and (
            not isinstance(self.arrivals, Rated) or self.duration_s is not None
        ):
            problem = "sessions of several turns need a rate of arrivals and a number of requests"
            remedy = "use an open-loop kind of arrivals and workload.requests, or turns: 1"
            raise InputError("workload.prefixes.turns", self.prefixes.turns, problem, remedy)
        return self

    @model_validator(mode="after")
    def _trace_or_synthetic(self) -> Self:
        if self.trace is None and (self.arrivals is None or self.lengths is None):
            missing = "workload.lengths" if self.arrivals else "workload.arrivals"
            remedy = "set workload.trace, or both workload.arrivals and workload.lengths"
            raise InputError(missing, None, "missing", remedy)
        if self.trace is not None and (self.arrivals is not None or self.lengths is not None):
            remedy = "leave out arrivals and lengths, or use {kind: trace, path: …} in one of them"
            raise InputError("workload.trace", self.trace.path, "given beside arrivals or lengths", remedy)
        return self

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        is_closed = isinstance(self.arrivals, ClosedArrivals)
        if is_closed and self.duration_s is not None:
            remedy = "set workload.requests instead"
            raise InputError("workload.duration_s", self.duration_s, "a closed loop has no set times", remedy)
        if self.sessions is not None and (is_closed or self.trace is not None):
            problem = "only for synthetic open-loop workloads"
            remedy = "leave it out; a trace names sessions in a column session_id"
            raise InputError("workload.sessions", self.sessions, problem, remedy)
        replay = self.arrivals if isinstance(self.arrivals, TraceArrivals) else self.trace
        if replay is not None and replay.repeat == 0 and self.requests is None and self.duration_s is None:
            remedy = "set workload.requests or workload.duration_s, or repeat to 1 or more"
            raise InputError("workload.trace.repeat", 0, "an endless trace", remedy)
        return self


def _check_order(what: str, low: int, high: int) -> None:
    if low > high:
        remedy = "swap or correct the two bounds"
        raise InputError(
            "workload.lengths", f"{low}..{high}", f"the {what} minimum is above its maximum", remedy
        )


MixturePart.model_rebuild()
MixtureLengths.model_rebuild()
WorkloadSpec.model_rebuild()
