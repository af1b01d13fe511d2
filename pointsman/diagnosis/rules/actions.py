"""What the policy does: the same thing always, nothing at all, anything at random."""

from __future__ import annotations

import math

import numpy as np

from pointsman.diagnosis.curves import Array, RunLog, Series
from pointsman.diagnosis.measures import (
    COLLAPSED,
    MEDIAN_ERROR,
    SIGNIFICANT,
    SLIGHTLY_LOST,
    ScoreCourse,
    and_trouble,
    by_chance,
    first_x,
    given_up,
    noise,
    progress,
    rise,
    running_median,
    since,
    stands_still,
    training_return,
)
from pointsman.diagnosis.names import FROM_START, NUM_FIRST
from pointsman.diagnosis.rule import (
    LOWER_ENTROPY,
    LOWER_LR,
    LOWER_TEMPERATURE,
    RAISE_ENTROPY,
    RAISE_LR,
    Evidence,
    Knob,
    Looked,
    Margin,
    Rule,
    Severity,
    Unclear,
)
from pointsman.plain import in_percent

NOOP_RISE = 0.1  # of all decisions
NOOP_MUCH = 0.5
NOOP_ALWAYS = 0.9
NOOP_STEP = 0.15
NOOP_GAP = 0.25
STABLE_ENTROPY = 0.05  # of that of uniform actions
ONE_ACTION = 0.8  # of what is not a no-op
ONE_ACTION_RISE = 0.25
LAST = 0.1  # of the rows: a collapse may have come late
UNIFORM = 0.95  # of the entropy of uniform actions
ABOVE_START = 1.05  # then the start was not uniform
UNIFORM_AT_FIRST = 0.96  # of the entropy of uniform actions: what training begins with
MOST_COUNTED = 16  # actions: of more, any entropy is close to that of some number of them
ROUNDING = 0.01
MANY_RETURNS = 30  # fewer say little about a rise
LARGE_RISE = 0.1  # of the return
FAR_COLLAPSED = 0.02
NO_ENTROPY = 1e-6  # at the first update: no network begins so sure of itself


def no_choice(log: RunLog) -> Looked:
    """Nothing to decide: from the first update on there is no entropy, and no update changes anything."""
    entropy = log.series("entropy_frac")
    if log.names.get("entropy_frac") == FROM_START:
        return Unclear("the number of actions is not known")
    at_first, usual = float(entropy.y[0]), float(np.median(entropy.y))
    if max(at_first, usual) > NO_ENTROPY or not stands_still(log):
        return None
    text = "entropy is 0 from the first update on, and no update changes the policy"
    noops = log.series("noop_frac")
    text += f"; {in_percent(float(np.median(noops.y)))} of the decisions are no-ops" if len(noops) else ""
    return Evidence("bad", text, {"entropy_frac": usual}, "entropy_frac")


def noop_collapse(log: RunLog) -> Looked:
    names = [name for name in ("eval_noop_frac", "noop_frac", "greedy_noop_frac") if log.has(name)]
    name = max(names, key=lambda one: _change(log.series(one)))
    series, score = log.series(name), progress(log)
    first, now = float(series.head(0.2).mean()), float(series.tail(0.2).mean())
    has_risen = now - first > NOOP_RISE and rise(series) > 3 and now > NOOP_MUCH
    if not has_risen and now < NOOP_ALWAYS:
        return _noop_collapse_before(log, names, score) or Margin(
            f"no-op share ({log.label(name)})", now, NOOP_ALWAYS
        )
    text = f"{log.label(name)} is {now:.2f} ({first:.2f} at first)"
    severity: Severity = "warning"
    if score is not None:
        if score.trouble or score.lost >= SLIGHTLY_LOST:
            severity = "bad"
            text += f", and {score.trouble or score.fall_text}"
        elif now < NOOP_ALWAYS:
            return None  # doing nothing pays here
        else:
            severity = "note"
    began = since(series, series.y > (first + now) / 2)
    return Evidence(severity, text, {name: now, "at_first": first}, name, began)


def _noop_collapse_before(log: RunLog, names: list[str], score: ScoreCourse | None) -> Evidence | None:
    """The same in a part of the run that the trainer gave up: it fell, and went back to weights before it."""
    for after, until in given_up(log):
        for name in names:
            whole = log.series(name)
            is_in = (whole.x > after) & (whole.x <= until)
            part = Series(whole.x[is_in], whole.y[is_in])
            if len(part) < 4:
                continue
            first, last = float(part.y[:2].mean()), float(part.tail(0.2).mean())
            if last < NOOP_MUCH or last - first < max(NOOP_RISE, SIGNIFICANT * noise(part.y)):
                continue
            text = (
                f"{log.label(name)} went from {first:.2f} to {last:.2f} until {log.x_name} {until:g}, when "
            )
            text += "the trainer went back to earlier weights"
            text += and_trouble(score)
            severity: Severity = "bad" if score is None or score.trouble else "warning"
            began = first_x(part, part.y > (first + last) / 2)
            return Evidence(severity, text, {name: last, "at_first": first}, name, began)
    return None


def _change(series: Series) -> float:
    return float(series.tail(0.2).mean() - series.head(0.2).mean())


def noop_jump(log: RunLog) -> Looked:
    """A step in the share of no-ops from one update to the next, where entropy makes none."""
    series, entropy = log.together("noop_frac", "entropy_frac")
    window = max(4, len(series) // 12)
    if len(series) < 4 * window:
        return Unclear(f"{len(series)} rows with both, needs {4 * window}")
    middles = range(window, len(series) - window + 1)
    changes = np.array([_step(series.y, i, window) for i in middles])
    near = middles[int(np.abs(changes).argmax())]
    around = range(max(near - window // 2, window), min(near + window // 2, len(series) - window) + 1)
    at = max(around, key=lambda place: abs(_step(series.y, place, 2)))
    change = _step(series.y, at, window)
    smooth = running_median(series.y, window)[window - 1 :]
    error = MEDIAN_ERROR * noise(series.y) * np.sqrt(2 / window)
    limit = max(NOOP_STEP, (SIGNIFICANT + by_chance(len(series) // window)) * error)
    is_sudden = abs(change) > 0.5 * float(np.ptp(smooth)) and _step(series.y, at, 2) / change > 0.7
    if abs(change) < limit or not is_sudden:
        return Margin(
            "step in the no-op share from one update to the next", abs(change) if is_sudden else 0.0, limit
        )
    if abs(_step(entropy.y, at, window)) > STABLE_ENTROPY:
        return None  # the policy itself changed its mind
    before, after = np.median(series.y[at - window : at]), np.median(series.y[at : at + window])
    stage = log.series("stage")
    is_planned = (
        len(np.unique(stage.between(float(series.x[at - 2]), float(series.x[min(at + 1, len(series) - 1)]))))
        > 1
    )
    text = f"{log.label('noop_frac')} went from {before:.2f} to {after:.2f} at once, with entropy unchanged"
    text += "; a stage of the curriculum began there" if is_planned else ""
    figures = {"before": float(before), "after": float(after)}
    return Evidence("note" if is_planned else "warning", text, figures, "noop_frac", float(series.x[at]))


def _step(y: Array, at: int, window: int) -> float:
    """How much the median after a place lies above the one before it."""
    return float(np.median(y[at : at + window]) - np.median(y[at - window : at]))


def noop_gap(log: RunLog) -> Looked:
    training, evaluated = (
        float(log.series(name).tail(0.3).mean()) for name in ("noop_frac", "eval_noop_frac")
    )
    gap, score = abs(evaluated - training), progress(log)
    if gap < NOOP_GAP:
        return Margin("no-op share, training against evaluation", gap, NOOP_GAP)
    text = f"the share of no-ops is {training:.2f} in training and {evaluated:.2f} in evaluations"
    if log.has("greedy_noop_frac"):
        greedy = float(log.series("greedy_noop_frac").tail(0.3).mean())
        is_arg_max = abs(greedy - evaluated) < abs(greedy - training)
        text += f"; the arg-max in training's own states has {greedy:.2f}: "
        text += (
            "sampling hides what the policy prefers"
            if is_arg_max
            else "what is evaluated is another workload"
        )
    is_good = score is not None and score.name.startswith("eval") and not score.trouble
    text += and_trouble(score)
    figures = {"training": training, "evaluation": evaluated}
    return Evidence("note" if is_good else "warning", text, figures, "eval_noop_frac")


def one_action(log: RunLog) -> Looked:
    if len(log.group("action_share")) > 1:
        return _one_named_action(log)
    noop = float(log.series("noop_frac").tail(0.5).mean()) if log.has("noop_frac") else 0.0

    def often(name: str) -> float:
        """Its share in the fifth of the updates where it is largest: masks may forbid what is full."""
        return float(np.quantile(log.series(name).tail(0.5), 0.8)) / max(1.0 - noop, 0.01)

    name = max((one for one in ("action_frac_max", "greedy_frac_max") if log.has(one)), key=often)
    series, score, now = log.series(name), progress(log), min(often(name), 1.0)
    at_first = float(series.y[0])
    what = "arg-max" if name.startswith("greedy") else "sampled"
    if now < ONE_ACTION or now - at_first < ONE_ACTION_RISE:
        return Margin(f"share of the most chosen entity ({what})", now, ONE_ACTION)
    trouble = score.trouble if score else ""
    text = f"one entity gets {in_percent(now)} of the {what} actions in the worst fifth of the updates "
    text += f"({in_percent(at_first)} at first)" + and_trouble(score)
    severity: Severity = "bad" if trouble else "warning"
    return Evidence(severity, text, {name: now}, name, first_x(series, series.y > ONE_ACTION * (1.0 - noop)))


def _one_named_action(log: RunLog) -> Looked:
    """Where it is known who was chosen: one may rightly be chosen most, but hardly nine times out of ten."""
    shares, score = log.group("action_share"), progress(log)
    name = max(shares, key=lambda one: shares[one].tail(LAST).mean())
    column = f"action_share/{name}"
    series = shares[name]
    if log.has("noop_frac"):
        series, noops = log.together(column, "noop_frac")
        series = Series(series.x, series.y / np.maximum(1.0 - noops.y, 0.01))
    first, overall, now = (float(part.mean()) for part in (series.head(0.2), series.y, series.tail(LAST)))
    if now < ONE_ACTION:
        return Margin(f"share of the most chosen, {name}", now, ONE_ACTION)
    text = f"{in_percent(overall)} of the decisions are for {name}, one of {len(shares)}: "
    text += f"{in_percent(first)} at first, {in_percent(now)} at last"
    has_risen = now - first >= ONE_ACTION_RISE
    is_good = score is not None and score.name.startswith("eval") and not score.trouble
    text += and_trouble(score)
    severity: Severity = "bad" if not is_good and (has_risen or now > NOOP_ALWAYS) else "warning"
    began = first_x(series, running_median(series.y, 3) > ONE_ACTION)
    return Evidence(severity, text, {column: now, "overall": overall}, column, began)


def stuck_at_uniform(log: RunLog) -> Looked:
    entropy, score = log.series("entropy_frac"), progress(log)
    now = float(np.median(entropy.tail(0.5)))
    if now < UNIFORM:
        return Margin(f"entropy, as a share of {_highest(log)}", now, UNIFORM)
    earned = training_return(log)
    has_learned = _has_learned(earned, score)
    if log.names.get("entropy_frac") == FROM_START:
        first = float(log.series("entropy").y[:NUM_FIRST].max())
        if now > ABOVE_START or not _may_be_uniform(first):
            return Unclear(
                f"no number of actions is known, and entropy, {first:.3g}, may not have been uniform"
            )
        if has_learned:
            return None  # a little surer, and better
    text = f"entropy is still {in_percent(now, 1)} of {_highest(log)}"
    if not has_learned:
        text += f", and {score.trouble if score and rise(earned) > 3 else _earned(earned)}"
    severity: Severity = "warning" if has_learned else "bad"
    return Evidence(severity, text, {"entropy_frac": now}, "entropy_frac")


def _may_be_uniform(entropy: float) -> bool:
    """Whether some small number of actions has this entropy when all are as likely."""
    if entropy > math.log(MOST_COUNTED):
        return False
    num_actions = max(2, math.ceil(math.exp(entropy) - ROUNDING))
    return entropy >= UNIFORM_AT_FIRST * math.log(num_actions)


def _has_learned(earned: Series, score: ScoreCourse | None) -> bool:
    """Where few episodes have ended, even a large rise is within their noise: there its size decides."""
    is_short = 0 < len(earned) < MANY_RETURNS
    is_evaluated = score is not None and score.name.startswith("eval")
    if score is not None and score.trouble and (is_evaluated or not is_short):
        return False
    if rise(earned) > 3:
        return True
    if not is_short:
        return False
    first, last = earned.head(0.2).mean(), earned.tail(0.2).mean()
    has_risen = bool(last - first > LARGE_RISE * max(abs(first), abs(last)))
    return has_risen or (score is not None and is_evaluated and score.has_improved)


def _earned(earned: Series) -> str:
    if not len(earned):
        return "the return is not known"
    first, last = earned.head(0.2).mean(), earned.tail(0.2).mean()
    rose = "did not clearly rise" if last > first else "did not rise"
    return f"what it earns in training {rose} ({first:.3g} at first, {last:.3g} now)"


def _highest(log: RunLog) -> str:
    return (
        "what it was at first" if log.names.get("entropy_frac") == FROM_START else "that of uniform actions"
    )


def entropy_collapse(log: RunLog) -> Looked:
    entropy, score = log.series("entropy_frac"), progress(log)
    assert score is not None
    now = float(np.median(entropy.tail(0.3)))
    if now > COLLAPSED:
        margin = Margin(f"entropy, as a share of {_highest(log)}", now, COLLAPSED, "below")
        return _entropy_collapse_before(log, entropy, score) or margin
    text = f"entropy is {in_percent(now, 2)} of {_highest(log)}"
    severity: Severity = "bad" if now < FAR_COLLAPSED or score.is_behind else "warning"
    if not score.trouble:
        severity = "warning"
        if not _is_over_early(entropy, score):
            return None  # sure of itself, and right
        text += f", and {score.label} has gained nothing since"
    else:
        text += f", and {score.trouble}"
    began = since(entropy, entropy.y < COLLAPSED)
    return Evidence(severity, text, {"entropy_frac": now}, "entropy_frac", began)


def _entropy_collapse_before(log: RunLog, entropy: Series, score: ScoreCourse) -> Evidence | None:
    """The same in a part of the run that the trainer gave up, behind the baseline or what it began with."""
    for after, until in given_up(log):
        part, scores = entropy.between(after, until), score.series.between(after, until)
        if len(part) < 4 or not len(scores):
            continue
        last = float(np.median(part[-max(3, len(part) // 5) :]))
        level = float(np.median(scores[-3:]))
        if last > FAR_COLLAPSED or level >= (score.start if score.baseline is None else score.baseline):
            continue
        text = f"entropy was {in_percent(last, 2)} of {_highest(log)} and {score.label} {level:.3g} until "
        text += f"{log.x_name} {until:g}, when the trainer went back to earlier weights"
        text += and_trouble(score)
        began = first_x(entropy, (entropy.x > after) & (entropy.y < COLLAPSED))
        return Evidence(
            "bad" if score.trouble else "warning", text, {"entropy_frac": last}, "entropy_frac", began
        )
    return None


def _is_over_early(entropy: Series, score: ScoreCourse) -> bool:
    """Exploration ended in the first half of the run, and the score stayed where it was then."""
    began = since(entropy, running_median(entropy.y, 5) < FAR_COLLAPSED)
    if began is None or began > entropy.x[0] + 0.5 * (entropy.x[-1] - entropy.x[0]):
        return False
    before = score.smooth[score.series.x <= began]
    return len(before) > 0 and score.best - before.max() < SLIGHTLY_LOST * score.unit


COLLAPSE_RULES = (
    Rule(
        "no-choice",
        "There is nothing to decide",
        ("entropy_frac", "approx_kl_mean"),
        no_choice,
        "the mask leaves one action in every decision: whatever the reward, there is nothing to learn",
        "how many actions the mask allows in a decision, and the limits that it is made of",
        (Knob("what the mask allows", "more than one action", "env.hold"),),
        min_rows=3,
    ),
    Rule(
        "noop-collapse",
        "No-op collapse",
        ("eval_noop_frac|noop_frac|greedy_noop_frac",),
        noop_collapse,
        "doing nothing is safe, or even earns something, under this reward; or the network leans to action 0",
        "what a policy that always does nothing earns, against random legal actions",
        (
            Knob("the reward of doing nothing", "lower", "env.reward"),
            RAISE_ENTROPY,
            Knob("when doing nothing is legal", "restrict", "env.hold"),
        ),
    ),
    Rule(
        "one-entity-collapse",
        "One-entity collapse",
        ("action_frac_max|greedy_frac_max",),
        one_action,
        "the reward or the features favour one entity by its place, or an arg-max of next to nothing decides",
        "whether relabelling the entities relabels the actions; the reward of a policy that always picks one",
        (
            Knob("network", "one that treats entities alike", "network.kind"),
            RAISE_ENTROPY,
        ),
    ),
)

NOOP_RULES = (
    Rule(
        "noop-jump",
        "The share of no-ops jumps",
        ("noop_frac", "entropy_frac"),
        noop_jump,
        "not the policy changed but what it meets: the workload, its seeds, the mask, the curriculum; or the "
        "reward",
        "what else changed at that update: configuration, resumed run, scenarios, share of legal no-ops",
        (Knob("changes of workload", "gradual", "curriculum"),),
        min_rows=16,
    ),
    Rule(
        "noop-gap",
        "Training and evaluation do nothing differently often",
        ("noop_frac", "eval_noop_frac"),
        noop_gap,
        "training samples, evaluation takes the arg-max: a no-op that is a little likelier everywhere wins "
        "every time; or the workloads differ",
        "the evaluation of the sampled policy; no-ops of the arg-max in the states of training",
        (
            LOWER_ENTROPY,
            Knob("training scenarios", "more like those evaluated", "env.scenarios"),
        ),
    ),
)

ENTROPY_RULES = (
    Rule(
        "stuck-at-uniform",
        "Stuck at uniform",
        ("entropy_frac",),
        stuck_at_uniform,
        "the entropy bonus or the temperature outweighs the advantages, or there is nothing to learn from",
        "entropy coefficient times entropy against the size of pg_loss",
        (LOWER_ENTROPY, LOWER_TEMPERATURE, RAISE_LR),
        min_rows=20,
        from_fraction=0.5,
    ),
    Rule(
        "entropy-collapse",
        "Entropy collapse",
        ("entropy_frac", "score"),
        entropy_collapse,
        "the policy became sure before it was right: too little entropy bonus, or steps that are too large",
        "the entropy coefficient and its sign; which actions are left",
        (RAISE_ENTROPY, Knob("target entropy", "set", "exploration.target"), LOWER_LR),
    ),
)
