"""Answers of clients that came and went: how they ran beside each other, and the same requests simulated.

Under load a server may be slower than single probes say: engine, API server and clients share cores, and
processes that wait for each other are put on the same one; or clocks fall. What an answer took from its first
token to its last is a sum over its steps, which is linear in what steps cost, given who ran beside it. What
a first token waited for beside its steps is not, so the requests are simulated: the API server's time for a
request and for a token of its prompt is set to what first tokens came later than the engine alone explains.
Whether scheduling is asynchronous shows in how they differ between few clients and many: what comes closer
is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pointsman.live.least_squares import nonnegative
from pointsman.live.probing import Mixed
from pointsman.live.replaying import simulated
from pointsman.simulator.measured import ServerTimes
from pointsman.simulator.steps import StepsCost
from pointsman.workload import Workload

Floats = NDArray[np.float64]

NUM_ROUNDS = 4  # in which the API server's time settles
MIN_MIXED = 20
MIN_TOKENS = 8  # of an answer whose steps are counted
SAME_STEP = 0.5  # first tokens less than this share of a step apart are of one step


@dataclass(frozen=True)
class TimedAnswer:
    """An answer from its first token to its last, and what ran beside it."""

    num_steps: int
    seconds: float
    num_seqs: float  # itself included, on average
    mean_context: float
    joined: tuple[tuple[int, ...], ...]  # prompts that were taken in meanwhile, step by step


def timed_answers(mixed: Sequence[Mixed], least_step_s: float) -> list[TimedAnswer]:
    """`least_step_s`: no step is shorter."""
    found = []
    apart_s = SAME_STEP * least_step_s
    steps = _joined_steps(mixed, apart_s)
    for one in mixed:
        began, ended = one.first_token_at, one.ended_at
        if one.num_tokens < MIN_TOKENS or ended <= began:
            continue
        shared = [
            (
                other.num_prompt + other.num_tokens / 2,
                max(0.0, min(ended, other.ended_at) - max(began, other.first_token_at)),
            )
            for other in mixed
        ]
        total_s = sum(both_s for _, both_s in shared)
        found.append(
            TimedAnswer(
                one.num_tokens - 1,
                ended - began,
                total_s / (ended - began),
                sum(context * both_s for context, both_s in shared) / total_s,
                tuple(step.prompts for step in steps if began < step.began_at <= ended + apart_s),
            )
        )
    return found


class _JoinedStep(NamedTuple):
    """Prompts whose first tokens came of one step."""

    began_at: float  # the first of these tokens
    prompts: tuple[int, ...]


def _joined_steps(mixed: Sequence[Mixed], apart_s: float) -> list[_JoinedStep]:
    """Prompts of one step cost what their sum does: below some 200 tokens, one more is free, the next is not.

    First tokens of one step are read one after the other; those of two steps are a step apart.
    """
    steps: list[_JoinedStep] = []
    last_at = -math.inf
    for one in sorted(mixed, key=lambda one: one.first_token_at):
        if one.first_token_at - last_at > apart_s:
            steps.append(_JoinedStep(one.first_token_at, ()))
        steps[-1] = steps[-1]._replace(prompts=(*steps[-1].prompts, one.num_prompt))
        last_at = one.first_token_at
    return steps


@dataclass(frozen=True)
class Waits:
    """What first tokens waited for beside their steps, and how well that explains them."""

    times: ServerTimes
    miss: float  # of first tokens, on average, quantile by quantile: logarithm of simulated over measured
    errors: dict[str, float]  # of means, as a share: simulated against measured


class ClientLoad:
    """The requests of clients, to be simulated."""

    def __init__(self, mixed: Sequence[Mixed], scheduler: dict[str, Any]) -> None:
        rows = sorted(mixed, key=lambda one: one.sent_at)
        self._scheduler = scheduler
        self._num_clients = np.array([one.num_clients for one in rows])
        sent_at = np.array([one.sent_at for one in rows])
        self._ttft_s = np.array([one.first_token_at for one in rows]) - sent_at
        self._e2e_s = np.array([one.ended_at for one in rows]) - sent_at
        num = len(rows)
        self._workload = Workload(
            arrived_at=sent_at - sent_at[0],
            num_prefill_tokens=np.array([one.num_prompt for one in rows], np.int32),
            num_decode_tokens=np.array([one.num_tokens for one in rows], np.int32),
            session=np.full(num, -1, np.int32),
            request_id=np.arange(num, dtype=np.int64),
        )

    def waits(self, cost: StepsCost, times: ServerTimes) -> Waits:
        """How long requests wait with these costs; `times` say where to begin."""
        num_prompt = self._workload.num_prefill_tokens.astype(np.float64)
        table = np.column_stack([np.ones_like(num_prompt), num_prompt])
        first_s, all_s = self._simulated(cost, times)
        for _ in range(NUM_ROUNDS):
            engine_s = first_s - table @ (times.api_s, times.api_s_per_token)
            weight = 1.0 / np.sqrt(first_s)
            found = nonnegative(table * weight[:, None], (self._ttft_s - engine_s) * weight)
            times = times.model_copy(update={"api_s": float(found[0]), "api_s_per_token": float(found[1])})
            first_s, all_s = self._simulated(cost, times)
        errors = {
            "ttft_mean": float(first_s.mean() / self._ttft_s.mean() - 1),
            "e2e_mean": float(all_s.mean() / self._e2e_s.mean() - 1),
        }
        return Waits(times, self._miss(first_s), errors)

    def _simulated(self, cost: StepsCost, times: ServerTimes) -> tuple[Floats, Floats]:
        """Seconds until the first token, and until the last."""
        arrived_at = self._workload.arrived_at
        found = simulated(cost.model_dump(exclude_none=True), self._scheduler | dict(times), self._workload)
        return found[0] - arrived_at, found[1] - arrived_at

    def _miss(self, first_s: Floats) -> float:
        """Within the answers of as many clients; which step a single prompt just missed is chance.

        As a ratio: in seconds, prompts that wait long for others would decide, and their times say how exact
        the costs are. One step more or less shows in prompts that hardly wait.
        """
        total = 0.0
        for num in np.unique(self._num_clients):
            same = self._num_clients == num
            total += float(np.abs(np.log(np.sort(first_s[same]) / np.sort(self._ttft_s[same]))).sum())
        return total / len(first_s)
