"""Why a request went where it went, in one sentence.

While it decides, a policy compares the servers; what matters for people is the one that it took, the one that
it would have taken instead, what it compares them by, and in what else the two differ. Compiled code notes
these few numbers after every decision, so that reasons of past decisions can be kept however many servers
there are; the sentence is made when somebody asks. It always has something that speaks for the choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from pointsman.compiled import jit
from pointsman.compiled.jit import kernel
from pointsman.compiled.memory import byte_list, float_list, single_list
from pointsman.routing.booking import signals_of
from pointsman.routing.deciding import HOLD, decider_at
from pointsman.routing.heuristics import (
    FORBIDDEN,
    GATHERING,
    HOLD_UNTIL_ROOM,
    LATE_BINDING,
    LEARNED,
    LEAST_DELAY,
    LEAST_KV,
    LEAST_OUTSTANDING,
    LEAST_TOKENS,
    LEAST_WORK,
    POWER_OF_TWO,
    PREFIX_HASH,
    RANDOM,
    ROUND_ROBIN,
    SESSION_AFFINITY,
    VIDUR_LOR,
    WEIGHTED_ROUND_ROBIN,
)
from pointsman.routing.legality import can_take
from pointsman.routing.records import NOBODY, policy_at, router_at
from pointsman.routing.signals import (
    ACCEPTING,
    CONTEXT_TOKENS,
    DECODE_S_PER_TOKEN,
    DECODING,
    EXPECTED_HIT_TOKENS,
    KV_CAPACITY_TOKENS,
    OUTSTANDING,
    PENDING_PREFILL_TOKENS,
    PREFILL_S_PER_TOKEN,
    STEP_FLOOR_S,
    STEP_S,
    TTFT_S,
)

entry_point = partial(jit.entry_point, keeps_gil=True)

NUM_ABOUT = 7  # figures of a server: those of `About`
NUM_NOTED = 3 + 2 * NUM_ABOUT  # kind of policy, how many may take it, column of the other, chosen, other
MAX_NAME = 32
SAME = 1.1  # figures that differ by less are the same to people
NUM_POINTS = 3  # for the choice, and against it


@entry_point
def note(deciders, action, noted):
    """Write what `Reason` is made of into noted [NUM_NOTED] f8, right after the decision; by address."""
    decider = decider_at(deciders, 0)
    router = router_at(decider.router, 0)
    policy = policy_at(decider.policy, 0)
    own_signals = router.signals
    if router.num_books > 1:
        router.signals = decider.merged
    numbers = float_list(noted, NUM_NOTED)
    num_takers = 0
    for k in range(router.num_replicas):
        num_takers += can_take(router, k, decider.ask)
    if action == HOLD:
        other = least_busy(router)
    elif policy.kind == LEARNED:
        other = next_by_logit(router, policy, action)
    elif (policy.kind == SESSION_AFFINITY and decider.ask.session >= 0) or (
        policy.kind == PREFIX_HASH and decider.ask.num_links > 0
    ):
        other = NOBODY
    else:
        other = next_by_score(router, decider.memory, action)
    numbers[0] = policy.kind
    numbers[1] = num_takers
    numbers[2] = other
    for k, first in ((action - 1, 3), (other, 3 + NUM_ABOUT)):
        if k >= 0:
            write_about(router, decider.ask, k, numbers, first)
            numbers[first + NUM_ABOUT - 1] = score_of(router, policy, decider.memory, k)
    router.signals = own_signals


@kernel
def score_of(router, policy, memory, k):
    """What the policy compares servers by, the lower the better."""
    if policy.kind == LEARNED:
        return -float(single_list(policy.logits, router.num_replicas + 1)[k + 1])
    return float_list(memory.scores, router.num_replicas)[k]


@kernel
def least_busy(router):
    signals = signals_of(router)
    best = NOBODY
    for k in range(router.num_replicas):
        if signals[ACCEPTING, k] > 0.0 and (
            best == NOBODY or signals[OUTSTANDING, k] < signals[OUTSTANDING, best]
        ):
            best = k
    return best


@kernel
def next_by_logit(router, policy, action):
    """The best replica but the chosen one, by the network."""
    logits = single_list(policy.logits, router.num_replicas + 1)
    legal = byte_list(policy.legal, router.num_replicas + 1)
    best = 0
    for other in range(1, router.num_replicas + 1):
        if other != action and legal[other] and (best == 0 or logits[other] > logits[best]):
            best = other
    return best - 1


@kernel
def next_by_score(router, memory, action):
    """The best replica but the chosen one; a policy that does not score leaves no numbers."""
    scores = float_list(memory.scores, router.num_replicas)
    best = NOBODY
    for other in range(router.num_replicas):
        if other != action - 1 and scores[other] < FORBIDDEN and (best < 0 or scores[other] < scores[best]):
            best = other
    return best


@kernel
def write_about(router, ask, k, numbers, first):
    signals = signals_of(router)
    booked = signals[CONTEXT_TOKENS, k] + signals[PENDING_PREFILL_TOKENS, k]
    numbers[first] = signals[OUTSTANDING, k]
    numbers[first + 1] = signals[PENDING_PREFILL_TOKENS, k] * signals[PREFILL_S_PER_TOKEN, k]
    step_s = signals[STEP_FLOOR_S, k] + signals[DECODING, k] * signals[DECODE_S_PER_TOKEN, k]
    numbers[first + 2] = signals[STEP_S, k] if signals[STEP_S, k] > 0.0 else step_s
    numbers[first + 3] = booked / signals[KV_CAPACITY_TOKENS, k]
    numbers[first + 4] = signals[TTFT_S, k]
    numbers[first + 5] = 1.0 - signals[EXPECTED_HIT_TOKENS, k] / ask.prompt_tokens


class About(NamedTuple):
    """A server when the decision was made."""

    outstanding: float
    backlog_s: float  # prompts that wait there
    step_s: float  # as measured lately, else by its speed and its streams
    kv_use: float
    ttft_s: float  # as measured lately; 0: not known
    uncached: float  # share of the request's prompt that would be computed there
    score: float  # by the policy, the lower the better; of a network the logit, less than nothing


# A `Reason` that nobody has asked for yet: one is kept of every decision, and a plain tuple is made faster.
Kept = tuple[str, Sequence[str], int, bytes]


class Reason(NamedTuple):
    """A decision and what it was about."""

    policy: str
    servers: Sequence[str]
    action: int
    noted: bytes  # [NUM_NOTED] f8, by `note`

    @property
    def chosen(self) -> str | None:
        """None: held."""
        return self.servers[self.action - 1] if self.action != HOLD else None

    @property
    def other(self) -> str | None:
        """Whom it would have been else."""
        column = int(np.frombuffer(self.noted)[2])
        return self.servers[column] if column != NOBODY else None

    def sentence(self) -> str:
        policy, chosen, other = short(self.policy), self.chosen, self.other
        kind, num_takers, _, *figures = np.frombuffer(self.noted).tolist()
        one, two = About(*figures[:NUM_ABOUT]), About(*figures[NUM_ABOUT:])
        if chosen is None:
            if other is None:
                return f"{policy} holds it: no server accepts requests."
            least = f"the least busy of {len(self.servers)}, {short(other)}, has {_load(two)}"
            return f"{policy} holds it until a server has room: {least}."
        sent = f"{policy} sent it to {short(chosen)}"
        if num_takers <= 1:
            return f"{sent}, the only one of {len(self.servers)} that may take it: {_load(one)}."
        if other is None:
            how = HOW_WITHOUT_COMPARING.get(int(kind), f"the only one of {num_takers:.0f} with room for it")
            return f"{sent}, {how}: {_load(one)}."
        rather = f"{sent} rather than {short(other)}, the next best of {num_takers:.0f}"
        if one.score >= two.score:
            return f"{rather}: they are equal to it, with {_load(one)}."
        gains, losses = _compare(one, two)
        although = f", although it has {_listed(losses)}" if losses else ""
        return f"{rather}: {_because(int(kind), one, two, gains)}{although}."


def _because(kind: int, one: About, two: About, gains: list[str]) -> str:
    """What speaks for the first: what the policy goes by, if that has a name, then all the rest."""
    if kind in GOES_BY:
        better, write = GOES_BY[kind]
        first = _better(better, one.score, two.score, write)
        return f"it has {_listed([first, *(gain for gain in gains if gain != first)])}"
    if gains:
        return f"it has {_listed(gains)}"
    if kind == LEARNED:
        times = math.exp(min(two.score - one.score, 99.0))
        return "the network prefers it " + (f"{times:.2g} to 1" if times < 99.5 else "clearly")
    return "it has the better score by the policy's rule"


def short(name: str) -> str:
    """The name of a server or a policy, as far as a sentence has room for it; its end tells it apart."""
    name = name.removeprefix("http://").removeprefix("https://")
    printable = "".join(one if one.isprintable() else "?" for one in name)
    return printable if len(printable) <= MAX_NAME else "..." + printable[3 - MAX_NAME :]


def _load(about: About) -> str:
    requests = "1 request" if about.outstanding == 1 else f"{about.outstanding:.0f} requests"
    return (
        f"{requests}, {_time(about.backlog_s)} of prompts ahead, steps of {_time(about.step_s)}, "
        f"memory {about.kv_use:.0%} full"
    )


def _compare(one: About, two: About) -> tuple[list[str], list[str]]:
    """In what the first is better, and in what the second."""
    gains: list[str] = []
    losses: list[str] = []
    for mine, yours, least, better, worse, write in (
        (one.outstanding, two.outstanding, 0.5, FEWER_REQUESTS, "more requests", _count),
        (one.backlog_s, two.backlog_s, 0.002, "less prompt work ahead", "more prompt work ahead", _time),
        (one.uncached, two.uncached, 0.02, "more of it cached", "less of it cached", _rest),
        (one.step_s, two.step_s, 0.0005, "shorter steps", "longer steps", _time),
        (one.kv_use, two.kv_use, 0.02, "emptier memory", "fuller memory", "{:.0%}".format),
        (*_both_known(one.ttft_s, two.ttft_s), 0.005, "quicker first tokens", "slower first tokens", _time),
    ):
        low, high = sorted((mine, yours))
        if high - low > least and high > SAME * low:
            (gains if mine < yours else losses).append(
                _better(better if mine < yours else worse, mine, yours, write)
            )
    return gains[:NUM_POINTS], losses[:NUM_POINTS]


def _better(words: str, mine: float, yours: float, write: Callable[[float], str]) -> str:
    if write(mine) == write(yours):
        return f"slightly {words}"
    return f"{words} ({write(mine)}, not {write(yours)})"


def _both_known(mine: float, yours: float) -> tuple[float, float]:
    return (mine, yours) if mine > 0.0 and yours > 0.0 else (0.0, 0.0)


def _listed(parts: list[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def _rest(share: float) -> str:
    return f"{1.0 - share:.0%}"


def _count(number: float) -> str:
    return f"{number:.0f}"


def _time(seconds: float) -> str:
    if seconds <= 0.0 or not math.isfinite(seconds):
        return "0 s"
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


FEWER_REQUESTS = "fewer requests"
HOW_WITHOUT_COMPARING = {
    RANDOM: "drawn at random",
    ROUND_ROBIN: "whose turn it was",
    WEIGHTED_ROUND_ROBIN: "whose turn it was",
    POWER_OF_TWO: "the less busy of two drawn at random",
    SESSION_AFFINITY: "where its session stays",
    PREFIX_HASH: "where prompts that begin like it stay",
}
# What the score of a policy means to people, and how it is written.
GOES_BY: dict[int, tuple[str, Callable[[float], str]]] = {
    LEAST_OUTSTANDING: (FEWER_REQUESTS, _count),
    SESSION_AFFINITY: (FEWER_REQUESTS, _count),
    HOLD_UNTIL_ROOM: (FEWER_REQUESTS, _count),
    PREFIX_HASH: (FEWER_REQUESTS, _count),
    VIDUR_LOR: ("a shorter queue", _count),
    LEAST_TOKENS: ("fewer tokens", _count),
    LEAST_WORK: ("less work ahead", _time),
    LEAST_DELAY: ("less waiting for it and the rest", _time),
    LATE_BINDING: ("less waiting for it and the rest", _time),
    GATHERING: ("less waiting for it and the rest", _time),
    LEAST_KV: ("emptier memory by its last report", "{:.1%}".format),
}
