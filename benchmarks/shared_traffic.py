"""Random traffic with shared prefixes, as links and as tokens, to compare with what knows only tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pointsman.workload import Workload

Chain = list[tuple[int, int]]  # (key, tokens of the whole prefix)


class Row(NamedTuple):
    at_s: float  # arrival, or the pause before a later turn
    num_prompt: int
    num_output: int
    links: Chain
    answer_key: int


class Traffic:
    """Requests as a workload of links, and the tokens of each."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.tokens: list[list[int]] = []  # of prompt and output
        self.next_turn: list[int] = []
        self._num_tokens = 0

    def fresh(self, count: int) -> list[int]:
        self._num_tokens += count
        return list(range(self._num_tokens - count, self._num_tokens))

    def add(
        self, at_s: float, shared: list[int], links: Chain, num_own: int, num_output: int, answer_key: int
    ) -> int:
        """`shared` are the tokens of the links; -> its row."""
        self.rows.append(Row(at_s, len(shared) + num_own, num_output, links, answer_key))
        self.tokens.append(shared + self.fresh(num_own) + self.fresh(num_output))
        self.next_turn.append(-1)
        return len(self.rows) - 1

    def workload(self) -> Workload:
        times, prompts, outputs, links, answers = zip(*self.rows, strict=True)
        is_later = np.isin(np.arange(len(times)), self.next_turn)
        lengths = np.array([len(chain) for chain in links])
        flat = [link for chain in links for link in chain]
        return Workload(
            np.where(is_later, np.max(np.where(is_later, 0.0, times)), times),
            np.array(prompts, np.int32),
            np.array(outputs, np.int32),
            np.full(len(times), -1, np.int32),
            np.arange(len(times)),
            think_s=np.array(times, np.float64),
            next_turn=np.array(self.next_turn, np.int32),
            chain_start=np.cumsum(lengths) - lengths,
            chain_length=lengths.astype(np.int32),
            answer_key=np.array(answers, np.int64),
            link_key=np.array([key for key, _ in flat], np.int64),
            link_tokens=np.array([tokens for _, tokens in flat], np.int32),
        )


def draw_traffic(rng: np.random.Generator, count: int, longest: int, unit_s: float) -> Traffic:
    """Requests along the paths of a random tree of prefixes, and sessions that continue their answers."""
    traffic = Traffic()
    nodes: list[tuple[list[int], Chain]] = [([], [])]
    for key in range(int(rng.choice((1, 3, 11)))):
        tokens, chain = nodes[int(rng.integers(len(nodes)))]
        tokens = tokens + traffic.fresh(int(rng.integers(1, longest)))
        nodes.append((tokens, [*chain, (1000 + key, len(tokens))]))
    num_later = int((rng.random(count - 1) < rng.choice((0.0, 0.3, 0.7))).sum())
    now_s = 0.0
    for row in range(count - num_later):
        tokens, chain = nodes[int(rng.integers(len(nodes)))]
        now_s += unit_s * float(rng.choice((0, 0, 0, 1, 1, 2, 7, 40)))
        num_own = int(rng.choice((0, 1, 5, 20))) or (0 if tokens else 1)
        answer_key = 10_000 + row if rng.random() < 0.7 else 0
        traffic.add(now_s, tokens, chain, num_own, int(rng.integers(1, longest)), answer_key)
    for _ in range(num_later):
        _add_turn(traffic, rng, longest, unit_s)
    return traffic


def _add_turn(traffic: Traffic, rng: np.random.Generator, longest: int, unit_s: float) -> None:
    """Somebody who may continues an answer that nobody has continued."""
    open_rows = [i for i, row in enumerate(traffic.rows) if row.answer_key and traffic.next_turn[i] < 0]
    if not open_rows:
        return
    i = int(rng.choice(open_rows))
    row = traffic.rows[i]
    links = [*row.links, (row.answer_key, row.num_prompt + row.num_output)]
    think_s = unit_s * float(rng.choice((1, 2, 5)))
    num_own, num_output = int(rng.integers(0, 12)), int(rng.integers(1, longest))
    answer_key = 20_000 + len(traffic.rows)
    traffic.next_turn[i] = traffic.add(think_s, traffic.tokens[i], links, num_own, num_output, answer_key)
