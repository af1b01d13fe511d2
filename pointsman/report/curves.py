"""Figures of a training run over its updates: what it learned, how it explored, what it earned, what it took.

Of long runs a point is the mean of several updates. A column that a run does not have gives no figure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pointsman.diagnosis.curves import Array
from pointsman.report.figure import Axis, Band, Dots, Figure, Flags, Line, Mark, linear_axis, log_axis, short
from pointsman.report.plots import styles
from pointsman.report.record import RunRecord
from pointsman.training.logs import rival_of

MAX_POINTS = 240
OF_REPLICAS = ("routing", "live", "vidur")  # problems (env.kind) whose actions are replicas
FEW_POINTS = 40  # are drawn as dots, too
LIMITS = {"ttft_p99": "P99 TTFT", "e2e_p99": "P99 end-to-end"}
LARGEST_FACTOR = 1e5  # on a logarithmic axis
FAR = 1.5  # spreads of the policy's scores beyond which a rival is named rather than drawn
POLICY, SOFT, ALERT, INTERVENTION = "#00897b", "#8a9097", "#d81b60", "#cf7a00"
PALETTE = ("#3f7fd0", "#f08533", "#37a35b", "#d146c0", "#cf9a1f", "#8e5bd0", "#2ba7c9", "#a87c5f")


def learning_figures(record: RunRecord, baseline: str) -> list[Figure]:
    """Scores of the evaluations beside baselines; what training itself earns."""
    figures = [_score_figure(record, baseline), _return_figure(record)]
    costs = record.group("eval_cost")
    if len(costs) > 1:
        figures.append(_cost_figure(record, costs, baseline))
    figures.append(_frontier_figure(record, baseline))
    return [figure for figure in figures if figure is not None]


def exploration_figures(record: RunRecord) -> list[Figure]:
    """Entropy, KL, temperature, what was chosen, and how well the critic foresees."""
    target_kl = record.log.facts.setting("ppo.target_kl")
    shares = {"entropy_frac": "entropy"}
    chosen = {
        "action_frac_max": "the action chosen most",
        "action_frac_min": "the action chosen least",
        "noop_frac": "none (action 0)",
    }
    critic = {"explained_variance": "explained variance", "clip_frac": "clipped ratios"}
    kl = {"approx_kl_max": "largest minibatch", "approx_kl_mean": "mean"}
    figures = [
        _lines(record, shares, "Entropy of the policy", "share of that of a uniform choice, %", 100.0, " %"),
        _lines(record, kl, "KL of an update", "nats", log=True, level=("target", target_kl)),
        _lines(record, {"temperature": "temperature"}, "Temperature", "factor that divides the logits"),
        _lines(record, {"ent_coef": "coefficient"}, "Entropy coefficient", "weight of the bonus", low=0.0),
        _lines(record, chosen, "What is chosen", "share of decisions, %", 100.0, " %"),
        _action_figure(record),
        _lines(record, critic, "Critic, and clipping", "share, %", 100.0, " %"),
    ]
    return [figure for figure in figures if figure is not None]


def _action_figure(record: RunRecord) -> Figure | None:
    """The share of every action over time, where the log has them."""
    shares = record.group("action_frac")
    if not shares:
        return None
    kind = record.log.facts.setting("env.kind")
    named = {_action_name(action, kind): 100.0 * values for action, values in shares.items()}
    return _stack(record, named, "Actions, by entity", "share of decisions, %", unit=" %")


def _action_name(action: str, kind: Any) -> str:
    """Replicas count from 0, as everywhere else; what others choose between, as the log counts."""
    if action == "0":
        return "none"
    if kind in OF_REPLICAS:
        return f"replica {int(action) - 1}"
    return f"job {action}" if kind == "jobs" else f"action {action}"


def reward_figures(record: RunRecord) -> list[Figure]:
    """The terms that the reward is the sum of, and its distribution before any scaling."""
    figures = []
    terms = record.group("reward")
    if terms:
        figures.append(_stack(record, terms, "Reward of a decision, by term", "reward", has_total=True))
    names = [f"reward_raw_p{part}" for part in ("01", "10", "50", "90", "99")]
    if all(map(record.has, names)):
        x, *parts = _thinned(record, [record.column(name) for name in names])
        marks: list[Mark] = [
            Band("P1 to P99", x, parts[0], parts[4], PALETTE[0], 0.25),
            Band("P10 to P90", x, parts[1], parts[3], PALETTE[0], 0.55),
            Line("median", x, parts[2], PALETTE[1]),
        ]
        y = linear_axis("reward, before scaling and clipping", [*parts[0], *parts[4]])
        figures.append(Figure("Raw reward of a decision", _update_axis(record), y, marks))
    return figures + [figure for figure in _limit_figures(record) if figure is not None]


def _limit_figures(record: RunRecord) -> list[Figure | None]:
    """What the limits on tails cost, as training found it, and how far beyond them the evaluations were."""
    names = {f"price/{name}": LIMITS.get(name, name) for name in record.group("price") if "/" not in name}
    breaches = {f"eval_breach/{name.removeprefix('price/')}": label for name, label in names.items()}
    return [
        _lines(record, names, "Price of a limit", "share of the cost that twice the tail costs", log=True),
        _lines(record, breaches, "Beyond a limit", "P99 beyond it, mean over scenarios, %", 100.0, " %"),
    ]


def time_figures(record: RunRecord) -> list[Figure]:
    figures = []
    parts = time_parts(record)
    parts.pop("evaluation", None)  # not of every update
    if parts:
        figures.append(_stack(record, parts, "Time of an update", "seconds", unit=" s"))
    speed = _lines(record, {"steps_per_s": "decisions"}, "Speed", "decisions a second", low=0.0)
    return [*figures, *([speed] if speed is not None else [])]


def time_parts(record: RunRecord) -> dict[str, Array]:
    """Seconds of each update by what they went into."""
    names = {"env_s": "environment", "eval_s": "evaluation"}
    return {names.get(name, name.removesuffix("_s")): values for name, values in record.group("time").items()}


def rivals_of(record: RunRecord) -> dict[str, float]:
    """Returns of the heuristics that were evaluated beside the policy, on the same seeds."""
    found = {rival_of(name): values[np.isfinite(values)] for name, values in record.log.columns.items()}
    return {name: float(values[-1]) for name, values in found.items() if name is not None and len(values)}


def _score_figure(record: RunRecord, baseline: str) -> Figure | None:
    if not record.has("eval_score"):
        return None
    x, score = record.updates, record.column("eval_score")
    marks: list[Mark] = []
    if record.has("eval_min_block_return"):
        lowest, highest = (record.column(f"eval_{end}_block_return") for end in ("min", "max"))
        marks.append(Band("worst to best block", x, lowest, highest, POLICY, 0.2))
    if record.has("eval_mean_return"):
        marks.append(Line("mean return", x, record.column("eval_mean_return"), PALETTE[5], "6 3", 1.4))
    marks.append(Line("score", x, score, POLICY, width=2.4, has_dots=True))
    values = [value for mark in marks for value in _values(mark)]
    levels = rivals_of(record)
    if record.has("eval_baseline_score"):
        known = record.column("eval_baseline_score")
        levels = {baseline: float(known[np.isfinite(known)][-1]), **levels}
    low, high = min(values), max(values)
    reach = FAR * max(high - low, *(abs(value - levels.get(baseline, low)) for value in (low, high)), 1e-9)
    far = {name: value for name, value in levels.items() if not low - reach <= value <= high + reach}
    for name, (colour, dash) in styles(list(levels)).items():
        value = levels[name]
        if name not in far:
            marks.append(Line(name, [x[0], x[-1]], [value, value], colour, dash or "1 0", 1.6))
            values.append(value)
    best = int(np.nanargmax(score))
    marks.append(Flags("best checkpoint", [x[best]], [f"best: update {x[best]:.0f}"], POLICY))
    marks += _events(record)
    note = (
        f"Beyond the axis: {', '.join(f'{name} {short(value)}' for name, value in far.items())}."
        if far
        else ""
    )
    y = linear_axis("on selection seeds, higher is better", values)
    return Figure("Evaluations during training", _update_axis(record), y, marks, note=note)


def _frontier_figure(record: RunRecord, baseline: str) -> Figure | None:
    """Every evaluated policy of the run by its mean and its tail, and those that no other beats in both."""
    mean, tail = "eval_e2e_mean_s", "eval_ttft_p99_s"
    if not all(record.has(f"{name}{of}") for name in (mean, tail) for of in ("", f"/{baseline}")):
        return None

    def changes(of: str) -> tuple[Array, Array, Array]:
        """Updates with both, and how much each is above the baseline's, in percent."""
        found = [record.updates]
        for name in (mean, tail):
            base = record.column(f"{name}/{baseline}")
            base = np.where(base > 0, base, np.nan)
            found.append(100 * (record.column(name + of) / base - 1))
        is_known = np.isfinite(found).all(axis=0)
        at, x, y = (values[is_known] for values in found)
        return at, x, y

    updates, x, y = changes("")
    if not len(updates):
        return None
    front = [
        i for i in np.lexsort((y, x)) if not ((x <= x[i]) & (y <= y[i]) & ((x < x[i]) | (y < y[i]))).any()
    ]
    texts = [
        f"update {u:.0f}: mean {a:+.1f} %, P99 TTFT {b:+.1f} %" for u, a, b in zip(updates, x, y, strict=True)
    ]
    marks: list[Mark] = [
        Dots("evaluated", x, y, texts, SOFT, 2.0),
        Line("no other is better in both", x[front], y[front], POLICY, width=1.4),
        Dots("no other is better in both", x[front], y[front], [texts[i] for i in front], POLICY),
    ]
    shown = [(float(a), float(b)) for a, b in zip(x, y, strict=True)]
    rivals = [name for name in record.group(mean) if name != baseline]
    for name, (colour, _) in styles(rivals).items():
        _, its_x, its_y = changes(f"/{name}")
        if len(its_x) and min(its_x[-1], its_y[-1]) < 0:  # others would press the rest together
            marks.append(Dots(name, its_x[-1:], its_y[-1:], [name], colour, 4.5))
            shown.append((float(its_x[-1]), float(its_y[-1])))
    return Figure(
        "Mean against tail",
        linear_axis(f"mean end-to-end against {baseline}, %", [a for a, _ in shown], " %"),
        linear_axis(f"P99 TTFT against {baseline}, %", [b for _, b in shown], " %"),
        marks,
        note="Lower left is better. With run.keep the policies are in checkpoints/update-<number>.",
    )


def _cost_figure(record: RunRecord, costs: Mapping[str, Array], baseline: str) -> Figure:
    """Scenario by scenario; those that end worst come first."""
    ends = {name: 100 * float(values[np.isfinite(values)][-1]) for name, values in costs.items()}
    worst = sorted(ends, key=lambda name: -ends[name])[: len(PALETTE)]
    lines = [
        Line(name, record.updates, 100 * costs[name], colour, width=1.5)
        for name, colour in zip(worst, PALETTE, strict=False)
    ]
    values = [value for line in lines for value in line.y]
    y = linear_axis(f"cost against {baseline}, %", [*values, 0.0], " %")
    left_out = len(costs) - len(worst)
    note = f"The {len(worst)} that end worst of {len(costs)}." if left_out else ""
    return Figure("Evaluations, by scenario", _update_axis(record), y, lines, note=note)


def _return_figure(record: RunRecord) -> Figure | None:
    """Returns of finished episodes, or rewards of decisions where episodes are longer than the run."""
    if np.isfinite(record.column("mean_ep_return")).sum() > 1:
        names = {"mean_ep_return": "mean return"}
        figure = _lines(record, names, "Episodes in training", "return of an episode", flags=True)
    else:
        names = {"reward_mean": "mean reward"}
        figure = _lines(record, names, "Reward in training", "reward of a decision", flags=True)
    return None if figure is None else _without_a_bad_start(figure)


def _without_a_bad_start(figure: Figure) -> Figure:
    """A start far below all that follows would make the rest of the curve a straight line."""
    (curve,) = [mark for mark in figure.marks if isinstance(mark, Line)]
    values = [float(value) for value in curve.y if math.isfinite(value)]
    later = values[len(values) // 10 :]
    spread = max(later) - min(later)
    if spread == 0.0 or min(values) > min(later) - 2 * FAR * spread:
        return figure
    y = linear_axis(figure.y.title, later, figure.y.unit)
    return replace(figure, y=y, note=f"It begins at {short(min(values))}, below the axis.")


def _lines(
    record: RunRecord,
    names: Mapping[str, str],
    title: str,
    y_title: str,
    factor: float = 1.0,
    unit: str = "",
    log: bool = False,
    level: tuple[str, Any] = ("", None),
    low: float | None = None,
    flags: bool = False,
) -> Figure | None:
    """The columns there are, over updates."""
    known = [name for name in names if record.has(name)]
    if not known:
        return None
    x, *columns = _thinned(record, [record.column(name) * factor for name in known])
    marks: list[Mark] = [
        Line(names[name], x, values, colour, "", 1.6, has_dots=np.isfinite(values).sum() <= FEW_POINTS)
        for name, values, colour in zip(known, columns, PALETTE, strict=False)
    ]
    values = [float(value) for column in columns for value in column if np.isfinite(value)]
    if log:  # values that are zero but for rounding would take most of the axis
        values = [value for value in values if value > max(values) / LARGEST_FACTOR]
    name, at = level
    if isinstance(at, int | float):
        marks.append(Line(name, [float(x[0]), float(x[-1])], [at, at], SOFT, "6 3"))
        values.append(float(at))
    if unit == " %":
        low = 0.0 if min(values) >= 0 else None
    if flags:
        marks += _events(record)
    y = log_axis(y_title, values, unit) if log else linear_axis(y_title, values, unit, low=low)
    return Figure(title, _update_axis(record), y, marks)


def _stack(
    record: RunRecord,
    parts: Mapping[str, Array],
    title: str,
    y_title: str,
    unit: str = "",
    has_total: bool = False,
) -> Figure:
    """Parts on top of each other, those below zero downwards."""
    x, *columns = _thinned(record, list(parts.values()))
    up, down = np.zeros(len(x)), np.zeros(len(x))
    marks: list[Mark] = []
    for (name, values), colour in zip(
        zip(parts, map(np.nan_to_num, columns), strict=True), PALETTE * 4, strict=False
    ):
        above, below = up + np.maximum(values, 0.0), down + np.minimum(values, 0.0)
        low, high = np.where(values >= 0, up, below), np.where(values >= 0, above, down)
        marks.append(Band(name, x, low, high, colour))
        up, down = above, below
    if has_total:
        marks.append(Line("sum", x, np.nan_to_num(columns).sum(axis=0), "#6b7177", width=1.6))
    y = linear_axis(y_title, [*up, *down, 0.0], unit)
    return Figure(title, _update_axis(record), y, marks)


def _events(record: RunRecord) -> list[Mark]:
    marks: list[Mark] = []
    for name, colour in (("interventions", INTERVENTION), ("alerts", ALERT)):
        counts = np.nan_to_num(record.column(name))
        rows = np.flatnonzero(counts > 0)
        if len(rows):
            updates = record.updates[rows].tolist()
            texts = ["\n".join(record.news_of(at)) or f"update {at:.0f}: {name}" for at in updates]
            marks.append(Flags(name, updates, texts, colour))
    return marks


def _update_axis(record: RunRecord) -> Axis:
    x = record.updates
    num_averaged = -(-record.num_updates // MAX_POINTS)
    title = "update" if num_averaged == 1 else f"update (points are means of {num_averaged})"
    return linear_axis(title, x.tolist(), low=float(x[0]), high=float(x[-1]) if len(x) > 1 else None)


def _thinned(record: RunRecord, columns: Sequence[Array]) -> list[Array]:
    """Updates and columns, each point the mean of as many updates as it takes to have few."""
    size = -(-record.num_updates // MAX_POINTS)
    arrays = [record.updates, *columns]
    if size == 1:
        return arrays
    starts = np.arange(0, record.num_updates, size)
    thinned = []
    for values in arrays:
        is_known = np.isfinite(values)
        counts = np.add.reduceat(is_known.astype(float), starts)
        sums = np.add.reduceat(np.where(is_known, values, 0.0), starts)
        thinned.append(np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0))
    return thinned


def _values(mark: Mark) -> list[float]:
    values: list[float] = []
    if isinstance(mark, Line):
        values = list(mark.y)
    elif isinstance(mark, Band):
        values = [*mark.low, *mark.high]
    return [float(value) for value in values if np.isfinite(value)]
