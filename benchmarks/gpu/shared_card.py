"""Two servers on one card: what least-outstanding's answers take if each slows the other down, or does not.

    python benchmarks/gpu/shared_card.py benchmarks/gpu/h200/policies/record-two.jsonl.gz --warm-up 3

Servers that share a card share its memory's bandwidth, and every step reads all weights: a step takes longer
by some time for every step that the other server makes meanwhile. Here costs with and without that term are
fitted to the warm-up (as in `server_errors.py`, but long answers weigh more), and the requests of all later
blocks run through two engines with these costs: under least-outstanding routed anew, under other policies on
the server that each request really got. Printed: mean end-to-end of each policy, and its change against
least-outstanding, as measured and as both costs have it. Recordings begin at the router, so what it held is
in a first token here.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np
import polars as pl
from numba import njit
from numpy.typing import NDArray
from server_errors import BASELINE, block_tables, fitted, read_blocks

Floats = NDArray[np.float64]

BUDGET, API_S, NUM_RUNS, SPREAD, POWER = 8192, 0.005, 8, 0.02, 0.5
ANY = -1


@njit
def serve(arrived, prompts, outputs, servers, cost, speed):
    """When each request ends. Asynchronous scheduling; least-outstanding where `servers` has ANY.

    cost, [2, 4]: seconds a step, a prompt token, a sequence, and a step of the other server meanwhile.
    """
    num = len(arrived)
    last = np.zeros(num)
    where, done, produced = servers.copy(), np.zeros(num, np.int64), np.zeros(num, np.int64)
    lists = np.zeros((4, 2, num), np.int64)
    queue, running, batch, sizes = lists[0], lists[1], lists[2], lists[3]
    counts = np.zeros((5, 2), np.int64)
    head, tail, num_running, num_batch, outstanding = counts[0], counts[1], counts[2], counts[3], counts[4]
    began_at, ends_at = np.zeros(2), np.full(2, np.inf)
    following = num_done = 0
    while num_done < num:
        s = 0 if ends_at[0] <= ends_at[1] else 1
        if following < num and arrived[following] <= ends_at[s]:
            i = following
            following += 1
            if where[i] == ANY:
                where[i] = 0 if outstanding[0] <= outstanding[1] else 1
            s = where[i]
            outstanding[s] += 1
            queue[s, tail[s]] = i
            tail[s] += 1
            if ends_at[s] < np.inf:
                continue
            now = arrived[i] + API_S
            planned_at = now
        else:
            now = ends_at[s]
            for entry in range(num_batch[s]):
                i = batch[s, entry]
                if done[i] < prompts[i]:
                    done[i] += sizes[s, entry]
                if done[i] >= prompts[i]:
                    produced[i] += 1
                    if produced[i] == outputs[i]:
                        last[i] = now
                        num_done += 1
                        outstanding[s] -= 1
            kept = 0
            for position in range(num_running[s]):
                i = running[s, position]
                if produced[i] < outputs[i]:
                    running[s, kept] = i
                    kept += 1
            num_running[s] = kept
            ends_at[1 - s] += cost[1 - s, 3] * speed[1 - s]
            planned_at = began_at[s]
            if kept == 0 and head[s] < tail[s]:  # idle until the next one is there
                now = max(now, arrived[queue[s, head[s]]] + API_S)
                planned_at = now
        budget, tokens, num_batch[s] = BUDGET, 0, 0
        num_known = num_running[s]
        for position in range(num_known + tail[s] - head[s]):
            if position >= num_known:
                i = queue[s, head[s]]
                if arrived[i] + API_S > planned_at or budget <= 0:
                    break
                head[s] += 1
                running[s, position] = i
                num_running[s] += 1
            i = running[s, position]
            size = 1 if done[i] >= prompts[i] else min(budget, prompts[i] - done[i])
            if size <= 0:
                continue
            tokens += size if done[i] < prompts[i] else 0
            budget -= size
            batch[s, num_batch[s]], sizes[s, num_batch[s]] = i, size
            num_batch[s] += 1
        began_at[s] = now
        step_s = cost[s, 0] + cost[s, 1] * tokens + cost[s, 2] * num_batch[s]
        ends_at[s] = now + speed[s] * step_s if num_batch[s] else np.inf
    return last


def mean_e2e_s(block: pl.DataFrame, policy: str, cost: Floats) -> float:
    """Simulated; the geometric mean of runs with servers a little slower or faster."""
    arrived, prompts, outputs = (
        block[name].to_numpy() for name in ("arrived_at", "computed", "num_decode_tokens")
    )
    arrived = arrived - arrived[0]
    names = block["server"].unique().sort().to_list()
    got = np.array([names.index(name) for name in block["server"]])
    servers = np.full(len(got), ANY) if policy == BASELINE else got
    found = []
    for run in range(NUM_RUNS):
        speed = np.exp(np.random.default_rng([7, run]).normal(0, SPREAD, 2))
        last = serve(arrived, prompts.astype(np.int64), outputs.astype(np.int64), servers, cost, speed)
        found.append((last - arrived).mean())
    return float(np.exp(np.log(found).mean()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recording", type=Path)
    parser.add_argument("--warm-up", type=int, default=1, help="how many blocks the costs are fitted to")
    parser.add_argument("--blocks", type=int, default=None, help="how many of the following are judged")
    asked = parser.parse_args()
    parts, policies = read_blocks(asked.recording)
    costs = []
    for has_neighbours in (False, True):
        found = fitted([block_tables(part, has_neighbours) for part in parts[: asked.warm_up]], POWER)
        print({name[-4:]: (1e6 * cost).round(1).tolist() for name, cost in sorted(found.items())}, "µs")
        costs.append(np.array([[*one, 0.0][:4] for _, one in sorted(found.items())]))
    end = len(parts) if asked.blocks is None else asked.warm_up + asked.blocks
    rows: dict[str, list[list[float]]] = defaultdict(list)
    for part, policy in zip(parts[asked.warm_up : end], policies[asked.warm_up : end], strict=True):
        measured = float((part["completed_at"] - part["arrived_at"]).mean())
        rows[policy].append([measured, *(mean_e2e_s(part, policy, cost) for cost in costs)])
    means = {policy: np.exp(np.log(np.array(row)).mean(axis=0)) for policy, row in rows.items()}
    print("mean end-to-end: measured, by own costs, with the neighbour's steps")
    for policy, mean in means.items():
        change = 100 * (mean / means[BASELINE] - 1)
        print(f"{policy:18}", "  ".join(f"{s:.2f} s ({c:+.1f} %)" for s, c in zip(mean, change, strict=True)))


if __name__ == "__main__":
    main()
