"""Figures of policies beside each other: latencies, percentiles, changes."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from statistics import median

from pointsman.evaluation.bootstrap import Ratio
from pointsman.experiments.metrics import HitsOverTime
from pointsman.report.figure import (
    Axis,
    Bar,
    Cell,
    Figure,
    Ladder,
    Level,
    Line,
    Map,
    linear_axis,
    linear_ticks,
    log_axis,
    plain,
    row_axis,
    short,
)
from pointsman.report.tables import change, number

Curve = tuple[Sequence[float], Sequence[float]]

# The same policy looks the same in every report. Colours of middle lightness: readable on white and on black.
_STYLES = {
    "random": ("#9aa0a6", "2 3"),
    "round-robin": ("#a87c5f", "2 3"),
    "weighted-round-robin": ("#cf9a1f", "2 3"),
    "least-outstanding": ("#3f7fd0", ""),
    "vidur-lor": ("#7e8ba3", "6 3"),
    "power-of-two": ("#2ba7c9", "6 3"),
    "least-tokens": ("#37a35b", ""),
    "least-work": ("#e0514b", ""),
    "least-delay": ("#d146c0", ""),
    "least-kv": ("#8fae2a", "6 3"),
    "session-affinity": ("#5c6bc0", "6 3"),
    "hold-until-room": ("#8e5bd0", ""),
    "late-binding": ("#cf9a1f", ""),
    "gathering": ("#b0651d", ""),
    "default": ("#00897b", ""),
    "default-mean": ("#38c2ae", "6 3"),
    "cache-aware": ("#5c6bc0", ""),
    "cache-aware-nearby": ("#5c6bc0", "2 3"),
    "prefix-hash": ("#8fae2a", ""),
    "weighted-scorer": ("#2ba7c9", ""),
    "load-aware": ("#a87c5f", ""),
    "overlap-cost": ("#7e8ba3", ""),
    "linear-score": ("#f08533", ""),
    "random-feasible": ("#9aa0a6", "2 3"),
    "fifo": ("#a87c5f", "2 3"),
    "sjf": ("#3f7fd0", ""),
    "smallest-work-first": ("#2ba7c9", ""),
    "most-gpus-first": ("#8fae2a", ""),
    "wide-and-short": ("#e0514b", ""),
    "easy-backfill": ("#5c6bc0", "6 3"),
    "best-fit": ("#37a35b", "6 3"),
    "priority-first": ("#cf9a1f", "6 3"),
    "earliest-deadline": ("#d146c0", ""),
}
_OTHER_STYLES = tuple(
    (colour, "") for colour in ("#d81b60", "#6a7f00", "#ef6c00", "#00838f", "#ad1457", "#7b5ea7", "#4f7d39")
)

_LOW_TICKS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05, 0.03, 0.02, 0.01, 0.005, 0.002, 0.001)
_HIGH_TICKS = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0)
MIN_TICKS, MAX_TICKS = 3, 6
ROW_HEIGHT = 22
HITS_COLOUR = "#37a35b"
HOPELESS = 4.0  # times as long as the slowest request of the middle policy
LEAST_SHOWN = 1.5  # the ratio that a chart of changes has room for, at least

PERCENTILES = ("p50", "p90", "p95", "p99")


def styles(policies: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and dash of those that are shown together: no two alike, as long as there are enough."""
    chosen = {policy: _STYLES[policy] for policy in policies if policy in _STYLES}
    for policy in policies:
        if policy not in chosen:
            first = zlib.crc32(policy.encode())
            order = [_OTHER_STYLES[(first + step) % len(_OTHER_STYLES)] for step in range(len(_OTHER_STYLES))]
            chosen[policy] = next((one for one in order if one not in chosen.values()), order[0])
    return chosen


def survival_figure(curves: Mapping[str, Curve], thick: str, title: str, x_title: str) -> Figure:
    """Share of requests above each time, both axes logarithmic: the tail takes as much room as the body.

    Policies that take far longer than most are cut off, so that they do not press the others together.
    """
    lines, looks = [], styles(list(curves))
    for policy, (seconds, shares) in sorted(curves.items(), key=lambda item: item[0] == thick):  # on top
        colour, dash = looks[policy]
        percents = [100 * share for share in shares]
        lines.append(Line(policy, seconds, percents, colour, dash, 2.6 if policy == thick else 1.5))
    lowest = min((min(line.y) for line in lines if len(line.y)), default=0.1)
    decades = range(math.ceil(math.log10(lowest)), 3)
    ticks = [(10.0**decade, f"{10.0**decade:g} %") for decade in decades]
    y = Axis("share of requests that take longer", lowest / 1.1, 112.0, ticks, is_log=True, unit=" %")
    levels = [Level(share, name) for share, name in ((50.0, "P50"), (10.0, "P90"), (1.0, "P99"))]
    slowest = {policy: seconds[-1] for policy, (seconds, _) in curves.items() if seconds}
    limit_s = max(HOPELESS * median([*slowest.values()] or [1.0]), slowest.get(thick, 0.0))
    cut = {policy: seconds for policy, seconds in slowest.items() if seconds > limit_s}
    reach = ", ".join(f"{policy} ({number(seconds)} s)" for policy, seconds in cut.items())
    note = f"Beyond the right edge: {reach}." if cut else ""
    x = _time_axis(curves, x_title, limit_s)
    return Figure(title, x, y, [*levels, *lines], height=250, note=note)


def _time_axis(curves: Mapping[str, Curve], title: str, limit_s: float) -> Axis:
    """From where the fastest 1 % of any policy end to the slowest request, or the limit."""
    ends = []
    for seconds, shares in curves.values():
        if seconds:
            first = next((x for x, y in zip(seconds, shares, strict=True) if y <= 0.99), seconds[0])
            ends += [min(first, limit_s), min(seconds[-1], limit_s)]
    return log_axis(title, ends, " s")


def percentile_figure(
    values: Mapping[str, Mapping[str, Sequence[float]]], title: str, x_title: str
) -> Figure:
    """`values[scenario][policy]`: seconds of PERCENTILES, on a line for each policy in the scenario's row."""
    ladders = []
    for row, policies in enumerate(values.values()):
        for index, (policy, seconds) in enumerate(policies.items()):
            offset = 0.6 * ((index + 0.5) / len(policies) - 0.5)
            texts = [
                f"{policy}, {name.upper()}: {number(value)} s"
                for name, value in zip(PERCENTILES, seconds, strict=True)
            ]
            if all(map(math.isfinite, seconds)):
                ladders.append(
                    Ladder(policy, row + offset, seconds, texts, styles(list(policies))[policy][0])
                )
    x = log_axis(x_title, [value for ladder in ladders for value in ladder.values], " s")
    rows = row_axis(list(values))
    height = 12 + 2 * ROW_HEIGHT * max(len(values), 1)
    note = "Dots from left to right: P50, P90, P95, P99."
    return Figure(title, x, rows, ladders, height=min(height, 520), note=note)


def hits_figure(hits: HitsOverTime, names: Sequence[str], title: str) -> Figure:
    """A row for each replica, a column for each window of time; the more was cached, the darker."""
    cells = [
        Cell(
            (column * hits.window_s, (column + 1) * hits.window_s),
            row,
            share,
            f"{name}, {short(column * hits.window_s)} s: {100 * share:.0f} % cached",
        )
        for row, name in enumerate(names)
        for column, share in enumerate(hits.shares[row].tolist())
        if math.isfinite(share)
    ]
    end_s = hits.window_s * hits.shares.shape[1]
    x = linear_axis("time, s", [0.0, end_s], " s", low=0.0, high=end_s)
    marks = [Map(cells, HITS_COLOUR, "0 %", "100 % of the prompt tokens cached")]
    return Figure(title, x, row_axis(names), marks, height=16 * len(names) + 4)


def change_figure(ratios: Mapping[str, Ratio], against: str, title: str) -> Figure:
    """A bar a row from no change to its ratio, with the 95 % interval; logarithmic.

    Losses have about twice the room of gains: bars far beyond that are cut off and say how long they are.
    """
    shown = {name: ratio for name, ratio in ratios.items() if math.isfinite(ratio.ratio)}
    parts = [part for ratio in shown.values() for part in (ratio.ratio, ratio.low, ratio.high)]
    bounds = [part for part in parts if math.isfinite(part) and part > 0]
    low, high = min([*bounds, 0.97]), max([*bounds, 1.03])
    middle = median([ratio.ratio for ratio in shown.values()] or [1.0])
    high = min(high, max(low**-2, 1.5 * middle, LEAST_SHOWN))
    margin = (high / low) ** 0.05
    low, high = low / margin, high * margin
    bars, looks = [], styles(list(shown))
    for row, (name, ratio) in enumerate(shown.items()):
        has_interval = math.isfinite(ratio.low) and math.isfinite(ratio.high)
        interval = (ratio.low, ratio.high) if has_interval else None
        text = f"{name}: {change(ratio)}"
        label = change(Ratio(ratio.ratio, math.nan, math.nan)) if ratio.ratio > high else ""
        bars.append(Bar(row, 1.0, ratio.ratio, looks[name][0], text, interval, label))
    x = Axis(f"change against {against}", low, high, _ratio_ticks(low, high), is_log=True)
    return Figure(title, x, row_axis(list(shown)), bars, height=8 + ROW_HEIGHT * max(len(shown), 1))


def _ratio_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Round factors, thinned out from 1 on; of changes too small for those, evenly spaced percentages."""
    span = math.log10(high / low)
    chosen = [1.0]
    for side in (_LOW_TICKS, _HIGH_TICKS):
        last = 1.0
        for tick in side:
            if low <= tick <= high and abs(math.log10(tick / last)) >= span / MAX_TICKS:
                chosen.append(tick)
                last = tick
    if len(chosen) >= MIN_TICKS:
        return [(tick, _factor(tick)) for tick in sorted(chosen)]
    percents = linear_ticks(100 * (low - 1), 100 * (high - 1))
    return [(1 + value / 100, _percent(value, text)) for value, text in percents]


def _percent(value: float, text: str) -> str:
    return "0" if value == 0 else f"{'+' if value > 0 else ''}{text} %"


def _factor(ratio: float) -> str:
    if ratio >= 5:
        return f"×{ratio:g}"
    percent = round(100 * (ratio - 1), 1)
    return _percent(percent, plain(percent, 0 if percent.is_integer() else 1))
