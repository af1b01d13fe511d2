"""Numbers as people read them, and a comparison as rows that any table can show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pointsman.config import Config
from pointsman.evaluation.bootstrap import Ratio
from pointsman.evaluation.compare import COST, HEADLINES, Comparison
from pointsman.experiments.own import replayed
from pointsman.plain import counted
from pointsman.simulator.spec import ClusterSpec

HEADERS = {
    "ttft_mean_s": "TTFT mean",
    "ttft_p99_s": "TTFT P99",
    "e2e_mean_s": "e2e mean",
    "e2e_p99_s": "e2e P99",
    COST: "cost",
    "tpot_mean_s": "TPOT mean",
    "tbt_p99_s": "TBT P99",
    "queueing_p99_s": "queueing P99",
    "good_share": "within SLO",
    "imbalance_cv": "imbalance CV",
    "kv_use_mean": "KV use",
    "hit_share": "prompt cached",
    "work_peak": "most work in a minute",
    "preemptions": "preemptions",
    "held_share": "held",
}
MORE = tuple(name for name in HEADERS if name not in (*HEADLINES, COST, "good_share"))
_IN_PERCENT = ("good_share", "kv_use_mean", "hit_share", "held_share")

ORACLE_MARK = "†"
ORACLE_NOTE = (
    f"{ORACLE_MARK} sees the servers' queues at the instant of each decision, which no router can: "
    "not counted as best."
)


@dataclass(frozen=True)
class TableCell:
    value: str
    change: str  # against the baseline; empty for the baseline itself
    is_best: bool
    direction: int  # -1 better, 1 worse, 0 if the interval holds no change


@dataclass(frozen=True)
class Row:
    policy: str
    label: str
    good_share: str
    hit_share: str  # of the prompt tokens; empty where prompts share no prefixes
    cells: tuple[TableCell, ...]  # one for each headline of the comparison


def headline_rows(comparison: Comparison) -> list[Row]:
    best = {
        metric: min(
            (name for name in comparison.names if not comparison.is_oracle(name)),
            key=lambda name: comparison.mean(name, metric),
            default="",
        )
        for metric in comparison.headlines
    }
    return [
        Row(
            policy=name,
            label=label(comparison, name),
            good_share=percent(comparison.mean(name, "good_share")),
            hit_share=percent(comparison.mean(name, "hit_share"))
            if "hit_share" in comparison.metrics[name]
            else "",
            cells=tuple(_cell(comparison, name, metric, best[metric]) for metric in comparison.headlines),
        )
        for name in comparison.names
    ]


def _cell(comparison: Comparison, policy: str, metric: str, best: str) -> TableCell:
    value = number(comparison.mean(policy, metric))
    if policy == comparison.baseline:
        return TableCell(value, "", policy == best, 0)
    ratio = comparison.ratios[policy][metric]
    return TableCell(value, change(ratio), policy == best, direction(ratio))


def label(comparison: Comparison, policy: str) -> str:
    return f"{policy} {ORACLE_MARK}" if comparison.is_oracle(policy) else policy


def has_oracle(comparisons: Sequence[Comparison]) -> bool:
    return any(one.is_oracle(name) for one in comparisons for name in one.names)


def direction(ratio: Ratio) -> int:
    return (ratio.low > 1) - (ratio.high < 1)  # comparisons with NaN are false


def metric_text(comparison: Comparison, policy: str, metric: str) -> str:
    value = comparison.mean(policy, metric)
    return percent(value) if metric in _IN_PERCENT else number(value)


def number(value: float) -> str:
    """Three significant digits, never an exponent."""
    if math.isnan(value):
        return "–"
    if value == 0:
        return "0"
    rounded = float(f"{value:.3g}")
    decimals = max(0, 2 - math.floor(math.log10(abs(rounded))))
    text = f"{value:,.{decimals}f}"
    return text if decimals < 7 else f"{value:.2e}"


def percent(share: float) -> str:
    if math.isnan(share):
        return "–"
    return f"{100 * share:.0f} %" if share in (0.0, 1.0) else f"{100 * share:.1f} %"


def change(ratio: Ratio) -> str:
    """`−34 % [−38, −30]`; from tenfold on `×12 [10, 14]`. At most 18 characters: four fit beside a name."""
    if math.isnan(ratio.ratio):
        return ""
    parts = [part for part in (ratio.ratio, ratio.low, ratio.high) if not math.isnan(part)]
    if ratio.ratio >= 10:
        texts = [f"{part:,.0f}" if part >= 10 else f"{part:.1f}" for part in parts]
        return f"×{texts[0]}" + (f" [{texts[1]}, {texts[2]}]" if len(texts) == 3 else "")
    percents = [100 * (part - 1) for part in parts]
    decimals = 1 if max(map(abs, percents)) < 9.95 else 0
    texts = [_rounded(part, decimals) for part in percents]
    if percents[0] > 0 and float(texts[0]) != 0:
        texts[0] = f"+{texts[0]}"
    texts = [text.replace("-", "−") for text in texts]
    return f"{texts[0]} %" + (f" [{texts[1]}, {texts[2]}]" if len(texts) == 3 else "")


def _rounded(value: float, decimals: int) -> str:
    text = f"{value:.{decimals}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def replica_names(cluster: ClusterSpec) -> list[str]:
    """Number and device."""
    devices = [group.device or cluster.device for group in cluster.groups for _ in range(group.count)]
    return [f"{index} {device}" for index, device in enumerate(devices)]


def seed_range(seeds: Sequence[int]) -> str:
    is_run = len(seeds) > 1 and list(seeds) == list(range(seeds[0], seeds[-1] + 1))
    return f"{seeds[0]}–{seeds[-1]}" if is_run else ", ".join(map(str, seeds))


def samples_text(comparisons: Sequence[Comparison]) -> str:
    """What means are over: `16 seeds (1000–1015)`, `6 blocks of my-traffic.csv (8 replays of each)`."""
    texts = (sample_text(one.configs[0], one.seeds, one.num_samples, one.num_replays) for one in comparisons)
    return listed(list(dict.fromkeys(texts)))


def sample_text(config: Config, seeds: Sequence[int], count: int, num_replays: int = 1) -> str:
    trace = replayed(config)
    if trace is not None:
        if count == 1:
            return "one run" if num_replays == 1 else f"one part, replayed {num_replays} times"
        again = "" if num_replays == 1 else f" ({num_replays} replays of each)"
        return f"{count} blocks of {Path(trace.path).name}{again}"
    return f"{counted(count, 'seed')} ({seed_range(seeds)})"


def listed(names: Sequence[str]) -> str:
    """a, b and c"""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def does(names: Sequence[str]) -> str:
    return "does" if len(names) == 1 else "do"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], num_names: int = 1) -> str:
    """Columns of names left, the others right; padded so that the source reads as a table, too."""
    table = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = [
            text.rjust(width) if i >= num_names else text.ljust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = (
        "|"
        + "|".join("-" * (width + 1) + (":" if i >= num_names else "-") for i, width in enumerate(widths))
        + "|"
    )
    return "\n".join([line(table[0]), rule, *(line(row) for row in table[1:])])
