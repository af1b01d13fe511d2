"""Fit the table of a named length distribution to a trace, and say how good it is.

    python -m pointsman.workload.fit AzureLLMInferenceTrace_conv.csv --name azure-conv
    python -m pointsman.workload.fit --name long-summarization

`long-summarization` has no trace to fit. It follows the figures of the arXiv summarisation set cut at 16,384
tokens (Sarathi-Serve, OSDI 2024, table 2; quoted from memory): prompt median 7,059, P90 12,985, standard
deviation 3,638; output 208, 371, 265. Vidur ships the same set cut at 4,096 tokens; from there comes the
shape of the output's tail: a few records hold a text of thousands of tokens in place of the abstract.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from pointsman.errors import InputError
from pointsman.workload.readers import read_trace
from pointsman.workload.spec import NamedDistribution, TraceFile
from pointsman.workload.tables import LEVELS, NUM_CELLS, LengthTable

DATA_DIR = Path(__file__).parent / "data"
Tokens = NDArray[np.int32]


def fit_table(prompt: Tokens, output: Tokens, source: str) -> LengthTable:
    """Lengths [N] of the source to the table that `LengthTable.sample` draws from."""
    # Equal lengths get their ranks at random: an atom then spreads over its cells as it should.
    rng = np.random.default_rng(0)
    cell = _cell(prompt, rng) * NUM_CELLS + _cell(output, rng)
    return LengthTable(
        source=source,
        num_requests=len(prompt),
        prompt_tokens=np.rint(np.quantile(prompt, LEVELS, method="hazen")),
        output_tokens=np.rint(np.quantile(output, LEVELS, method="hazen")),
        cell_counts=np.bincount(cell, minlength=NUM_CELLS * NUM_CELLS),
    )


def published_summarization(num_requests: int = 400_000) -> tuple[Tokens, Tokens]:
    """Lengths that have the published figures once pairs above 16,384 tokens are left out, as there."""
    rng = np.random.default_rng(0)
    prompt = np.rint(7850 * np.exp(0.64 * rng.standard_normal(num_requests)))
    abstract = 207 * np.exp(0.44 * rng.standard_normal(num_requests))
    long_text = rng.uniform(1000, 4000, num_requests)
    output = np.rint(np.where(rng.random(num_requests) < 0.010, long_text, abstract))
    is_kept = (prompt + output <= 16_384) & (prompt >= 1) & (output >= 1)
    return prompt[is_kept].astype(np.int32), output[is_kept].astype(np.int32)


def length_figures(prompt: Tokens, output: Tokens) -> dict[str, float]:
    """Mean, P50, P90, P99 of both lengths in tokens, and their rank correlation."""
    figures = {}
    for name, tokens in (("prompt", prompt), ("output", output)):
        figures[f"{name} mean"] = float(tokens.mean())
        for percentile in (50, 90, 99):
            figures[f"{name} P{percentile}"] = float(np.percentile(tokens, percentile))
    figures["rank correlation"] = float(np.corrcoef(_mean_rank(prompt), _mean_rank(output))[0, 1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m pointsman.workload.fit", description="Fit a length table."
    )
    parser.add_argument("trace", nargs="?", help="trace file; none for long-summarization")
    parser.add_argument("--name", required=True, choices=get_args(NamedDistribution))
    parser.add_argument(
        "--out", type=Path, default=DATA_DIR, help="folder of the table (default: the package's)"
    )
    args = parser.parse_args()
    if args.trace is None and args.name != "long-summarization":
        parser.error(f"--name {args.name} needs a trace to fit")
    if args.trace is None:
        prompt, output = published_summarization()
        source = "figures of the arXiv summarisation set in Sarathi-Serve (OSDI 2024)"
    else:
        try:
            trace = read_trace(TraceFile(path=args.trace), needs_times=False)
        except InputError as error:
            parser.error(str(error))
        prompt, output = trace.num_prefill_tokens, trace.num_decode_tokens
        source = Path(args.trace).name
    table = fit_table(prompt, output, source)
    path = args.out / f"{args.name}.json"
    path.write_text(table.to_json(), encoding="utf-8")
    _report(path, length_figures(prompt, output), table)


def _report(path: Path, wanted: dict[str, float], table: LengthTable) -> None:
    got = length_figures(*table.sample(300_000, np.random.default_rng(1)))
    shown = Table("figure", "source", "table", title=path.name)
    for name, value in wanted.items():
        digits = 3 if name == "rank correlation" else 1
        shown.add_row(name, f"{value:,.{digits}f}", f"{got[name]:,.{digits}f}")
    Console().print(shown)


def _cell(tokens: Tokens, rng: np.random.Generator) -> NDArray[np.int64]:
    order = np.lexsort((rng.random(len(tokens)), tokens))
    cell = np.empty(len(tokens), dtype=np.int64)
    cell[order] = np.arange(len(tokens)) * NUM_CELLS // len(tokens)
    return cell


def _mean_rank(tokens: Tokens) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2.0)[inverse])


if __name__ == "__main__":
    main()
