"""Blocks of `router_blocks.py` beside what `predict_blocks.py` had said: is it within a third?

    python benchmarks/gpu/judge_blocks.py benchmarks/gpu/h200/shares/blocks three two \
        --predicted benchmarks/gpu/h200/shares

A change is the geometric mean over the rounds, each against least-outstanding on the same arrivals. Where
nothing was predicted, what was measured is printed.
Intervals (95 %) come from resampling stretches of five seconds of arrivals, the same ones for both
policies.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray
from predict_blocks import MEASURES, measures

Floats = NDArray[np.float64]

BASELINE = "least-outstanding"
JUDGED = ("ttft_mean_s", "ttft_p99_s", "e2e_mean_s")
STRETCH_S, NUM_RESAMPLED = 5.0, 2000
TIMES = ("arrived_at", "first_token_at", "completed_at")


def change(pairs: list[tuple[pl.DataFrame, pl.DataFrame]], rng: np.random.Generator | None = None) -> Floats:
    """Of a policy against the baseline, [measures]; of resampled stretches if there is an `rng`."""
    logs = []
    for ours, theirs in pairs:
        rows = np.arange(len(ours))
        if rng is not None:
            stretch = (ours["due_at"] // STRETCH_S).to_numpy().astype(int)
            drawn = rng.integers(0, stretch.max() + 1, stretch.max() + 1)
            rows = np.concatenate([np.flatnonzero(stretch == one) for one in drawn])
        found, base = (
            measures(*(table[name].to_numpy()[rows] for name in TIMES)) for table in (ours, theirs)
        )
        logs.append(np.log(found / base))
    return np.exp(np.mean(logs, axis=0)) - 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("blocks", type=Path, help="folder of the blocks' CSV and JSON files")
    parser.add_argument("kinds", nargs="+", help="how their names begin")
    parser.add_argument("--predicted", type=Path, required=True, help="folder of predicted-KIND.json")
    parser.add_argument("--rounds", default=None, help="only these, with commas")
    asked = parser.parse_args()
    for kind in asked.kinds:
        said = asked.predicted / f"predicted-{kind}.json"
        predicted = json.loads(said.read_text())["policies"] if said.exists() else None
        tables: dict[tuple[str, str], pl.DataFrame] = {}
        reports = []
        for path in sorted(asked.blocks.glob(f"{kind}_*.csv.gz")):
            _, which, policy = path.name.removesuffix(".csv.gz").split("_")
            if asked.rounds is not None and which not in asked.rounds.split(","):
                continue
            tables[which, policy] = pl.read_csv(path)
            reports.append(json.loads(path.with_name(path.name.replace(".csv.gz", ".json")).read_text()))
        num_requests, num_failed = (sum(one[name] for one in reports) for name in ("requests", "failed"))
        is_equal = all(one["books_are_equal"] for one in reports)
        counts = f"{num_requests} requests in {len(reports)} blocks, {num_failed} failed"
        print(f"{kind}: {counts}, books equal: {is_equal}")
        for policy in dict.fromkeys(policy for _, policy in tables):
            if policy == BASELINE:
                continue
            pairs = [
                (table, tables[which, BASELINE]) for (which, one), table in tables.items() if one == policy
            ]
            found = change(pairs)
            rng = np.random.default_rng(0)
            again = np.array([change(pairs, rng) for _ in range(NUM_RESAMPLED)])
            low, high = np.quantile(again, (0.025, 0.975), axis=0)
            told = predicted and predicted["default" if policy == "told" else policy]
            cells = []
            for k, name in enumerate(MEASURES):
                if told is None:
                    cells.append(" ".join(f"{100 * one:+.1f}" for one in (found[k], low[k], high[k])))
                    continue
                expected = told[name]["change"]
                is_close = expected * found[k] > 0 and abs(found[k] - expected) <= abs(expected) / 3
                verdict = ("yes" if is_close else "NO") if name in JUDGED else "–"
                values = " ".join(f"{100 * one:+.1f}" for one in (expected, found[k], low[k], high[k]))
                cells.append(f"{values} {verdict}")
            print(f"  {policy:15} " + " | ".join(cells))
        if predicted is None:
            continue
        base = [
            measures(*(table[name].to_numpy() for name in TIMES))
            for (_, one), table in tables.items()
            if one == BASELINE
        ]
        seconds = np.exp(np.mean(np.log(base), axis=0))
        print(
            "  least-outstanding, s, predicted and measured:",
            [
                f"{predicted[BASELINE][name]['seconds']:.3f} {s:.3f}"
                for name, s in zip(MEASURES, seconds, strict=True)
            ],
        )


if __name__ == "__main__":
    main()
