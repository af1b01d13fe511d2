"""Figures as plotly's plain JSON. Colours of text and grid depend on the theme: page.js adds them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from pointsman.evaluation.bootstrap import Ratio

Figure = dict[str, Any]
Curve = tuple[Sequence[float], Sequence[float]]

# The same policy looks the same in every report. Colours of middle lightness: readable on white and on black.
_STYLES = {
    "random": ("#9aa0a6", "dot"),
    "round-robin": ("#a87c5f", "dot"),
    "weighted-round-robin": ("#cf9a1f", "dot"),
    "least-outstanding": ("#3f7fd0", "solid"),
    "vidur-lor": ("#7e8ba3", "dash"),
    "power-of-two": ("#2ba7c9", "dash"),
    "least-tokens": ("#37a35b", "solid"),
    "least-work": ("#e0514b", "solid"),
    "least-delay": ("#d146c0", "solid"),
    "least-kv": ("#8fae2a", "dash"),
    "session-affinity": ("#5c6bc0", "dash"),
    "hold-until-room": ("#8e5bd0", "solid"),
    "linear-score": ("#f08533", "solid"),
}
_OTHER_STYLES = (("#d81b60", "solid"), ("#00897b", "solid"), ("#b0651d", "solid"), ("#6a7f00", "solid"))

_LOW_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9)
_HIGH_TICKS = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
MAX_TICKS = 6
MAX_FINE_DECADES = 3.2


def style(policy: str) -> tuple[str, str]:
    """Colour and dash."""
    other = _OTHER_STYLES[zlib.crc32(policy.encode()) % len(_OTHER_STYLES)]
    return _STYLES.get(policy, other)


def survival_figure(curves: Mapping[str, Curve], baseline: str, title: str, x_title: str) -> Figure:
    """Share of requests above each time, both axes logarithmic: the tail takes as much room as the body."""
    traces = []
    for policy, (seconds, shares) in curves.items():
        colour, dash = style(policy)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": policy,
                "x": list(seconds),
                "y": list(shares),
                "line": {"color": colour, "dash": dash, "width": 3 if policy == baseline else 1.8},
                "hovertemplate": "%{y:.2%} above %{x:.3g} s",
            }
        )
    lowest = min((min(shares) for _, shares in curves.values() if shares), default=1e-3)
    decades = range(math.floor(math.log10(lowest)), 1)
    layout = _layout(title, height=400) | {
        "hovermode": "closest",
        "xaxis": {
            "type": "log",
            "title": {"text": x_title},
            "tickformat": "~g",
            **_x_axis(curves),
        },
        "yaxis": {
            "type": "log",
            "title": {"text": "share of requests that take longer"},
            "tickvals": [10.0**decade for decade in decades],
            "ticktext": [f"{100 * 10.0**decade:g} %" for decade in decades],
            "range": [math.log10(lowest) - 0.05, 0.05],
        },
        "shapes": [_level(share) for share in (0.5, 0.1, 0.01)],
        "annotations": [
            _level_name(share, name) for share, name in ((0.5, "P50"), (0.1, "P90"), (0.01, "P99"))
        ],
    }
    return {"data": traces, "layout": layout}


def _x_axis(curves: Mapping[str, Curve]) -> dict[str, Any]:
    """From where the fastest 1 % of any policy end to the slowest request; ticks at 1, 2, 5 or decades."""
    starts, ends = [], []
    for seconds, shares in curves.values():
        if seconds:
            starts.append(next((x for x, y in zip(seconds, shares, strict=True) if y <= 0.99), seconds[0]))
            ends.append(seconds[-1])
    if not starts:
        return {}
    low, high = math.log10(min(starts)) - 0.05, math.log10(max(ends)) + 0.05
    return {"range": [low, high], "dtick": "D2" if high - low < MAX_FINE_DECADES else 1}


def _level(share: float) -> dict[str, Any]:
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": share,
        "y1": share,
        "layer": "below",
        "line": {"width": 1, "dash": "dot", "color": "#8888"},
    }


def _level_name(share: float, name: str) -> dict[str, Any]:
    return {
        "xref": "paper",
        "x": 1,
        "xanchor": "left",
        "y": math.log10(share),
        "yanchor": "middle",
        "text": name,
        "showarrow": False,
        "font": {"size": 11},
    }


def change_figure(ratios: Mapping[str, Ratio], baseline: str, title: str) -> Figure:
    """A bar a policy from 1 (the baseline) to its ratio, with the 95 % interval; logarithmic."""
    shown = {name: ratio for name, ratio in ratios.items() if math.isfinite(ratio.ratio)}
    names = list(shown)[::-1]  # plotly draws from below
    values = [shown[name] for name in names]
    bounds = [
        part for value in values for part in (value.ratio, value.low, value.high) if math.isfinite(part)
    ]
    low, high = min([*bounds, 0.95]), max([*bounds, 1.05])
    ticks = _ratio_ticks(low, high)
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": names,
        "base": 1,
        "x": [value.ratio - 1 for value in values],
        "marker": {"color": [style(name)[0] for name in names]},
        "customdata": [_percent_text(value) for value in values],
        "hovertemplate": "%{y}: %{customdata}<extra></extra>",
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [_distance(value.high, value.ratio) for value in values],
            "arrayminus": [_distance(value.ratio, value.low) for value in values],
            "thickness": 1.4,
            "width": 3,
        },
    }
    margin = 0.04 * (math.log10(high) - math.log10(low))
    layout = _layout(title, height=110 + 24 * len(names)) | {
        "bargap": 0.35,
        "xaxis": {
            "type": "log",
            "title": {"text": f"change against {baseline}"},
            "range": [math.log10(low) - margin, math.log10(high) + margin],
            "tickvals": ticks,
            "ticktext": [_tick_text(tick) for tick in ticks],
            "zeroline": False,
        },
        "yaxis": {"automargin": True, "ticks": ""},
        "shapes": [
            {
                "type": "line",
                "yref": "paper",
                "x0": 1,
                "x1": 1,
                "y0": 0,
                "y1": 1,
                "line": {"width": 1, "color": "#888"},
            }
        ],
    }
    return {"data": [bars], "layout": layout}


def _distance(high: float, low: float) -> float:
    return max(0.0, high - low) if math.isfinite(high - low) else 0.0


def _ratio_ticks(low: float, high: float) -> list[float]:
    # Thinned out from 1 in both directions, so that the baseline keeps its tick.
    span = math.log10(high) - math.log10(low)
    chosen = [1.0]
    for side in (_HIGH_TICKS, _LOW_TICKS[::-1]):
        last = 1.0
        for tick in side:
            if low / 1.02 <= tick <= high * 1.02 and abs(math.log10(tick / last)) >= span / MAX_TICKS:
                chosen.append(tick)
                last = tick
    return sorted(chosen)


def _tick_text(ratio: float) -> str:
    if ratio >= 5:
        return f"×{ratio:g}"
    change = round(100 * (ratio - 1))
    return f"{change:+d} %".replace("-", "−") if change else "0"


def _percent_text(ratio: Ratio) -> str:
    parts = [f"{100 * (part - 1):+.1f}" for part in (ratio.ratio, ratio.low, ratio.high)]
    interval = f" [{parts[1]}, {parts[2]}]" if math.isfinite(ratio.low) else ""
    return f"{parts[0]} %{interval}".replace("-", "−")


def _layout(title: str, height: int) -> dict[str, Any]:
    return {
        "title": {"text": title, "x": 0, "xref": "paper", "font": {"size": 15}},
        "height": height,
        "margin": {"l": 72, "r": 34, "t": 44, "b": 52},
        "showlegend": False,  # the page has one legend for all figures of a section
    }
