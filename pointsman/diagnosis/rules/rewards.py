"""What the policy is taught by: rewards that say nothing, a term that drowns the others, nothing to earn."""

from __future__ import annotations

import math

import numpy as np

from pointsman.diagnosis.curves import RunLog
from pointsman.diagnosis.measures import (
    BEHIND,
    LOST,
    MIN_SCORES,
    MOSTLY_LOST,
    SIGNIFICANT,
    ScoreCourse,
    and_trouble,
    noise,
    progress,
    rise,
    since,
    stands_still,
    training_return,
)
from pointsman.diagnosis.rule import (
    SEVERITIES,
    Evidence,
    Knob,
    Looked,
    Margin,
    Rule,
    Severity,
    Unclear,
)
from pointsman.plain import in_percent

CLIPPED = 0.25  # of the rewards
ZERO = 0.9
DOMINANT = 0.97  # of the size of all terms
SMALL_GAIN = 0.05  # of the way from the worst policy to the best
NEXT_DECISIONS, FEW_DECISIONS = 4, 10  # a horizon; or a share of an episode
HORIZON_SHARE = 0.01
CLEAR_RISE = 2.5  # standard errors
NO_EVALUATION = "no evaluation to compare with"


def saturation(log: RunLog) -> Looked:
    clipped, zero = log.series("reward_clipped_frac"), log.series("reward_zero_frac")
    score = progress(log)
    for series, name, limit, what in (
        (clipped, "reward_clipped_frac", CLIPPED, "clipped or squashed flat"),
        (zero, "reward_zero_frac", ZERO, "exactly 0"),
    ):
        share = float(np.median(series.y)) if len(series) else 0.0
        if share > limit:
            is_bad = share > 2 * limit or score is None or bool(score.trouble)
            text = f"{in_percent(share)} of the rewards are {what}: better and worse look alike"
            began = since(series, series.y > limit)
            return Evidence("bad" if is_bad else "warning", text, {name: share}, name, began)
    if len(clipped):
        return Margin("rewards clipped or squashed flat", float(np.median(clipped.y)), CLIPPED)
    return Margin("rewards exactly 0", float(np.median(zero.y)), ZERO)


def dominance(log: RunLog) -> Looked:
    shares = log.group("reward_share")
    if not shares:  # other logs have the terms alone
        sizes = {name: np.abs(series.y).mean() for name, series in log.group("reward").items()}
        total = sum(sizes.values())
        medians = {name: float(size / total) for name, size in sizes.items()} if total > 0 else {}
    else:
        # At first too: a term may have faded because the policy learned to avoid what it is for.
        medians = {
            name: min(float(np.median(series.head(0.2))), float(np.median(series.tail(0.5))))
            for name, series in shares.items()
        }
    if len(medians) < 2:
        return None
    name = max(medians, key=lambda one: medians[one])
    share, score = medians[name], progress(log)
    if share < DOMINANT:
        return Margin(f"largest reward term ({name})", share, DOMINANT)
    trouble = score.trouble if score else ""
    text = (
        f"{name} is {in_percent(share, 1)} of the reward's size; {len(medians) - 1} other terms hardly count"
    )
    column = f"reward_share/{name}" if shares else f"reward/{name}"
    text += and_trouble(score)
    grade = (1 if not trouble else 0) + (0 if shares else 1)  # means of terms may cancel: less sure
    return Evidence(SEVERITIES[grade], text, {column: share}, column)


def at_the_ceiling(log: RunLog) -> Looked:
    headroom, score = log.facts.headroom, progress(log)
    gains = headroom.get("gains") or {}
    if not gains:
        return None
    shares = {name: _gain(gain) for name, gain in gains.items()}
    small = [name for name, share in shares.items() if share < SMALL_GAIN]
    best = max(shares.values())
    if not small:
        return Margin("left to earn above the baseline", min(shares.values()), SMALL_GAIN, "below")
    baseline = headroom.get("baseline", "the baseline")
    text = f"{baseline} earns about as much of the reward as any heuristic in {', '.join(small)}"
    is_chance = all(gain["above_random"] <= 2 * gain["above_random_error"] for gain in gains.values())
    if is_chance:
        text += "; none of them clearly earns more than random"
    is_beaten = score is not None and score.baseline is not None and score.end > score.baseline
    severity: Severity = "note" if len(small) < len(shares) or is_beaten else "warning"
    if severity == "warning" and score is not None and score.is_behind and is_chance:
        severity = "bad"
    return Evidence(severity, text, {"gain": best}, log.score_name or "reward_mean")


def _gain(gain: dict[str, float]) -> float:
    """Share of the way from the worst to the best that the baseline lacks; 0 within chance."""
    return 0.0 if gain["per_second"] <= gain["error"] else float(gain["share"])


def short_sighted(log: RunLog) -> Looked:
    horizon, score = _horizon(log), progress(log)
    if horizon is None or score is None:
        return None
    lengths = log.series("mean_ep_length").y
    limit = max(
        FEW_DECISIONS,
        HORIZON_SHARE * float(np.median(lengths)) if len(lengths) else 0.0,
    )
    if horizon >= limit or (not score.trouble and horizon >= NEXT_DECISIONS):
        return Margin("horizon, in decisions", horizon, limit, "below")
    text = f"rewards further than {horizon:.3g} decisions away hardly count"
    text += f" (an episode has {np.median(lengths):.0f})" if len(lengths) else ""
    text += and_trouble(score)
    return Evidence("bad" if score.trouble else "warning", text, {"horizon": horizon}, score.name)


def _horizon(log: RunLog) -> float | None:
    """In decisions, from γ; None where it is not known."""
    discount = log.facts.setting("ppo.discount") or {}
    gamma = discount.get("gamma")
    if gamma is None and log.has("gamma"):
        gamma = float(log.series("gamma").y[-1])
    if gamma is not None:
        return 1.0 / (1.0 - gamma) if gamma < 1.0 else math.inf
    if not log.has("elapsed_mean_s"):
        return None
    if discount.get("kind") == "lifetimes" and log.has("lifetime_mean_s"):
        horizon_s = discount["horizon"] * float(np.median(log.series("lifetime_mean_s").y))
    elif discount.get("kind") == "time":
        horizon_s = discount["horizon_s"]
    else:
        return None
    by_time = horizon_s / max(float(np.median(log.series("elapsed_mean_s").y)), 1e-9)
    return float(max(by_time, discount["horizon_steps"]))


def wrong_sign(log: RunLog) -> Looked:
    """Training earns more and more, and the evaluation is worse than before training all along; or, before
    training, random actions earned more than any heuristic, and the policy is behind one."""
    score, earned = progress(log), training_return(log)
    if score is None or score.name == "mean_ep_return":
        return Unclear(NO_EVALUATION)
    if score.is_behind and _pays_for_chance(log):
        gains = log.facts.headroom["gains"]
        text = f"before training, random actions earned more than any heuristic in {', '.join(gains)}; "
        least = min(-gain["above_random"] / gain["above_random_error"] for gain in gains.values())
        return Evidence("bad", text + score.trouble, {"deviations": least}, score.name)
    if len(earned) < 2 * MIN_SCORES or stands_still(log):
        return None
    fall = score.start - score.end
    never_gained = (
        score.best - score.start <= score.chance and (score.series.y[1:] < score.start).mean() > 0.9
    )
    has_fallen = fall > max(SIGNIFICANT * noise(score.series.y), score.chance, BEHIND * score.unit)
    if not (never_gained and has_fallen and rise(earned) > CLEAR_RISE):
        return None
    first, last = earned.head(0.2).mean(), earned.tail(0.2).mean()
    text = f"what it earns in training rose from {first:.3g} to {last:.3g}, while {score.label} only fell, "
    text += f"from {score.start:.3g} to {score.end:.3g}"
    figures = {"rise": rise(earned), "fall": fall}
    return Evidence("bad", text, figures, score.name)


def _pays_for_chance(log: RunLog) -> bool:
    """Whether random actions earned clearly more than the best heuristic, though evaluations put them behind
    the baseline."""
    gains = (log.facts.headroom.get("gains") or {}).values()
    random = log.series("eval_random_return").y
    is_worse = len(random) > 0 and log.baseline is not None and float(random[-1]) < log.baseline
    return (
        is_worse
        and len(gains) > 0
        and all(-gain["above_random"] > 2 * gain["above_random_error"] > 0 for gain in gains)
    )


def training_gap(log: RunLog) -> Looked:
    score, earned = progress(log), training_return(log)
    if score is None or score.name == "mean_ep_return":
        return Unclear(NO_EVALUATION)
    if stands_still(log, score.best_x):
        return None
    earned = earned.after(score.best_x)  # while the score fell
    if len(earned) < 2 * MIN_SCORES:
        return None
    gain = rise(earned)
    if gain < CLEAR_RISE or not _is_worse(score):
        return None
    first, last = earned.head(0.2).mean(), earned.tail(0.2).mean()
    text = f"what it earns in training rose from {first:.3g} to {last:.3g}, but {score.trouble}"
    severity: Severity = "bad" if score.is_behind or score.lost >= MOSTLY_LOST else "warning"
    return Evidence(severity, text, {"rise": gain, "score": score.end}, score.name, score.best_x)


def _is_worse(score: ScoreCourse) -> bool:
    """No better than before training, and behind or fallen: what stays where it was may be at its ceiling."""
    has_fallen = score.is_behind or score.lost >= LOST
    return has_fallen and score.end <= score.start + 3 * score.noise


SATURATION_RULES = (
    Rule(
        "reward-saturation",
        "Reward saturation",
        ("reward_clipped_frac|reward_zero_frac",),
        saturation,
        "a clip, a tanh or a threshold takes away the difference between good and bad",
        "the distribution of the raw reward before clipping",
        (
            Knob("clip and squash", "off", "env.reward.clip, env.reward.squash"),
            Knob("reward scale", "smaller", "env.reward.scale"),
        ),
        min_rows=3,
    ),
)

EARNING_RULES = (
    Rule(
        "reward-term-dominance",
        "Reward-term dominance",
        ("reward_share/*|reward/*",),
        dominance,
        "weights that do not fit the sizes of the terms",
        "the mean size of each term, and whether the one that rules is what you want",
        (Knob("weight of that term", "lower", "env.reward.terms"),),
    ),
    Rule(
        "short-sighted",
        "Horizon too short",
        ("config|gamma", "score"),
        short_sighted,
        "what a decision costs comes later than the discount looks",
        "after how many decisions, or seconds, a bad one has shown all its cost",
        (Knob("γ, or the horizon", "longer", "ppo.discount"),),
        from_fraction=0.3,
    ),
    Rule(
        "wrong-sign",
        "The reward has the wrong sign",
        ("score", "mean_ep_return|reward_mean"),
        wrong_sign,
        "the reward, or the term that weighs most, pays for what the evaluation punishes",
        "the return of a policy known to be good and of one known to be bad, under the training reward",
        (Knob("sign of the reward and of each term", "turn round where it is wrong", "env.reward"),),
        from_fraction=0.3,
    ),
    Rule(
        "training-evaluation-gap",
        "Training/evaluation gap",
        ("score", "mean_ep_return|reward_mean"),
        training_gap,
        "the reward is not what the evaluation measures (a term, a loophole), or the episodes differ",
        "the return of a policy known to be good and of one known to be bad, under the training reward",
        (
            Knob("reward", "towards what is evaluated", "env.reward"),
            Knob("training scenarios", "more like those evaluated", "env.scenarios"),
        ),
        from_fraction=0.3,
    ),
    Rule(
        "baseline-at-the-ceiling",
        "Baseline at the ceiling",
        ("headroom",),
        at_the_ceiling,
        "under this reward the baseline is as good as anything known, so there is nothing to learn from it",
        "headroom.json: what each heuristic earns",
        (Knob("reward", "one that tells policies apart", "env.reward"),),
        min_rows=1,
    ),
)
