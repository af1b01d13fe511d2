"""Why a request went where it went, in one sentence.

While it decides, a policy compares the servers; what matters for people is the one that it took, the one that
it would have taken instead, what it compares them by, and in what else the two differ. Compiled code notes
these few numbers with every decision (noting.py), so that reasons of past decisions can be kept however many
servers there are; the sentence is made when somebody asks. There is always something that speaks for the
choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from pointsman.routing.deciding import HOLD
from pointsman.routing.heuristics import (
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
from pointsman.routing.noting import NUM_ABOUT
from pointsman.routing.records import NOBODY

MAX_NAME = 32
SAME = 1.1  # figures that differ by less are the same to people
NUM_POINTS = 3  # for the choice, and against it


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
        """The server that it would have been otherwise."""
        column = int(np.frombuffer(self.noted)[2])
        return self.servers[column] if column != NOBODY else None

    def sentence(self) -> str:
        policy, chosen, other = short(self.policy), self.chosen, self.other
        kind, num_takers, _, *figures = np.frombuffer(self.noted).tolist()
        one, two = About(*figures[:NUM_ABOUT]), About(*figures[NUM_ABOUT:])
        if chosen is None:
            if other is None:
                return f"{policy} holds the request: no server accepts requests."
            least = f"the least busy of {len(self.servers)}, {short(other)}, has {_load(two)}"
            return f"{policy} holds the request until a server has room: {least}."
        sent = f"{policy} sent the request to {short(chosen)}"
        if num_takers <= 1:
            return f"{sent}, the only one of {len(self.servers)} that may take it: {_load(one)}."
        if other is None:
            how = HOW_WITHOUT_COMPARING.get(int(kind), f"the only one of {num_takers:.0f} with room")
            return f"{sent}, {how}: {_load(one)}."
        rather = f"{sent} rather than {short(other)}, the next best of {num_takers:.0f}"
        if one.score >= two.score:
            return f"{rather}: both score the same, and {short(chosen)} has {_load(one)}."
        gains, losses = _compare(one, two)
        although = f", although it has {_listed(losses)}" if losses else ""
        return f"{rather}: {_because(int(kind), short(chosen), one, two, gains)}{although}."


def _because(kind: int, chosen: str, one: About, two: About, gains: list[str]) -> str:
    """What speaks for the chosen one: what the policy goes by, if that has a name, then all the rest."""
    if kind in GOES_BY:
        better, write = GOES_BY[kind]
        first = _better(better, one.score, two.score, write)
        return f"{chosen} has {_listed([first, *(gain for gain in gains if gain != first)])}"
    if gains:
        return f"{chosen} has {_listed(gains)}"
    if kind == LEARNED:
        times = math.exp(min(two.score - one.score, 99.0))
        if times < 1.05:
            return f"the network hardly prefers either, {chosen} a little"
        return f"the network prefers {chosen} " + (f"{times:.2g} to 1" if times < 99.5 else "clearly")
    return f"{chosen} has the better score by the policy's rule"


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
    """What speaks for the first server, and what for the second."""
    gains: list[str] = []
    losses: list[str] = []
    for mine, yours, least, better, worse, write in (
        (one.outstanding, two.outstanding, 0.5, FEWER_REQUESTS, "more requests", _count),
        (one.backlog_s, two.backlog_s, 0.002, "less prompt work ahead", "more prompt work ahead", _time),
        (one.uncached, two.uncached, 0.02, "more of the prompt cached", "less of the prompt cached", _rest),
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
    SESSION_AFFINITY: "where its session belongs",
    PREFIX_HASH: "where prompts with this beginning go",
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
    LEAST_DELAY: ("less waiting for all requests", _time),
    LATE_BINDING: ("less waiting for all requests", _time),
    GATHERING: ("less waiting for all requests", _time),
    LEAST_KV: ("emptier memory by its last report", "{:.1%}".format),
}
