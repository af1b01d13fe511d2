"""How the network is changed: steps too large or too small, a critic that foresees nothing, brakes, time."""

from __future__ import annotations

from itertools import pairwise
from math import comb

import numpy as np

from pointsman.diagnosis.curves import RunLog, Series
from pointsman.diagnosis.measures import (
    COLLAPSED,
    LARGE_KL,
    LOST,
    MOSTLY_LOST,
    SIGNIFICANT,
    ScoreCourse,
    and_trouble,
    by_chance,
    first_x,
    has_kl_spike,
    noise,
    progress,
    running_median,
    since,
    stands_still,
)
from pointsman.diagnosis.rule import (
    FEWER_EPOCHS,
    LARGER_BATCH,
    LOWER_CLIP,
    LOWER_LR,
    LOWER_TARGET_KL,
    MORE_EPOCHS,
    RAISE_LR,
    RAISE_VALUE_COEF,
    Evidence,
    Knob,
    Looked,
    Margin,
    Rule,
    Severity,
    Unclear,
)
from pointsman.plain import in_percent

BRAKED = 0.8  # of the updates
TINY_KL = 1e-5
SMALL_KL = 1e-4
STOPPED_FOR = 0.3  # of the run
MOVED = 10.0  # times what is tiny
MIN_MOVING = 3  # updates
LARGE_BONUS = 0.1  # entropy coefficient, where advantages are about 1; usual are 0 to 0.02
EXPLAINED = 0.15  # of the variance of returns
BLIND = 0.1
LONG_BLIND = 30  # updates: a critic that is blind for longer is worth a word though the score is fine
EXPLODED = 1000.0  # times the value loss of the first half: more than what larger returns make of it
KEPT_LOSS = 0.3  # of the value loss at first
SHOCK = 3.0  # times the usual value loss
COINCIDENCE = 0.05  # more likely ones prove nothing
ENV_SHARE = 0.15  # of the time
CRITIC_WINDOW = 9


def brake_always_on(log: RunLog) -> Looked:
    stops = log.series("early_stop")
    share = float((stops.tail(0.7) > 0).mean())
    if share < BRAKED:
        return Margin("updates stopped by their KL", share, BRAKED)
    steps = log.series("num_steps")
    done = f", after {np.median(steps.tail(0.7)):.0f} gradient steps in the median" if len(steps) else ""
    kl = log.series("approx_kl_mean")
    size = f"; KL {np.median(kl.tail(0.7)):.2g}" if len(kl) else ""
    is_bad = not len(steps) or np.median(steps.tail(0.7)) <= 0.25 * _planned_steps(log)
    text = f"{in_percent(share)} of the updates were stopped early by their KL{done}{size}"
    began = since(stops, running_median(stops.y, 5) > 0)
    column = "approx_kl_mean" if len(kl) else "early_stop"
    return Evidence("bad" if is_bad else "warning", text, {"early_stop": share}, column, began)


def _planned_steps(log: RunLog) -> float:
    config = log.facts
    epochs, size = (
        config.setting("ppo.num_epochs"),
        config.setting("ppo.minibatch_size"),
    )
    envs, steps = config.setting("run.num_envs"), config.setting("run.rollout_steps")
    if not all((epochs, size, envs, steps)):
        return float(log.series("num_steps").y.max())
    return float(epochs * max(1, round(envs * steps / size)))


def brake_never(log: RunLog) -> Looked:
    kl, stops = log.series("approx_kl_mean"), log.series("early_stop")
    limit = log.facts.setting("ppo.target_kl") or LARGE_KL
    share = float((kl.y > 2 * limit).mean())
    if share < 0.2 or (len(stops) and stops.y.max() > 0):
        return None
    text = f"KL is above {2 * limit:.2g} in {in_percent(share)} of the updates, and none was stopped"
    return Evidence(
        "warning",
        text,
        {"share": share},
        "approx_kl_mean",
        first_x(kl, kl.y > 2 * limit),
    )


def overshoot(log: RunLog) -> Looked:
    score, kl = progress(log), log.series("approx_kl_mean")
    assert score is not None
    fall = score.fall
    around = kl.between(fall.peak_x, fall.trough_x)
    highest, usual = float(kl.y.max()), float(np.median(kl.y))
    if fall.depth < LOST or not has_kl_spike(log, fall.peak_x, fall.trough_x):
        if highest <= LARGE_KL:
            return Margin("largest KL of an update", highest, LARGE_KL)
        if usual < LARGE_KL:
            what = f"fall of {score.label} where KL was large, up to {highest:.2g}; of the gain"
            return Margin(what, fall.depth if fall.depth < LOST else 0.0, LOST)
        text = f"KL is {usual:.2g} in the median, up to {highest:.2g}"
        return Evidence(
            "warning",
            text,
            {"kl": usual},
            "approx_kl_mean",
            first_x(kl, kl.y > LARGE_KL),
        )
    at = first_x(kl, (kl.x > fall.peak_x) & (kl.y >= min(LARGE_KL, around.max())))
    text = f"{score.label} fell from {fall.high:.3g} to {fall.low:.3g} after {log.x_name} {fall.peak_x:g}, "
    text += f"with KL up to {around.max():.2g} (median of the run {usual:.2g})"
    figures = {"fall": fall.depth, "kl": float(around.max())}
    # Of a policy that was never good there is little to lose: what counts is where it ends.
    mattered = score.baseline is None or fall.high > score.baseline or bool(score.trouble)
    severity: Severity = "bad" if mattered and fall.depth >= MOSTLY_LOST else "warning"
    return Evidence(severity, text, figures, "approx_kl_mean", at)


def flat_learning(log: RunLog) -> Looked:
    score, kl = progress(log), log.series("approx_kl_mean")
    assert score is not None
    entropy = log.series("entropy_frac")
    late_entropy = float(np.median(entropy.tail(0.3))) if len(entropy) else np.nan
    if late_entropy < COLLAPSED:
        return None  # what is sure of itself moves no more; that is another finding
    sizes = Series(kl.x, np.abs(kl.y))  # some estimates of it may be negative
    stop = _stop(log, sizes)
    if stop is not None:
        what, column, began = stop
        text = f"the policy stands still since {log.x_name} {began:g}: {what}{and_trouble(score)}"
        return Evidence("bad" if score.trouble else "warning", text, {"since": began}, column, began)
    if not len(kl):
        return Unclear("no approx_kl_mean")
    usual = float(np.median(sizes.y))
    # What an entropy bonus holds at uniform can only move that little; that is another finding, too.
    bonus = log.series("ent_coef").y
    is_held = len(bonus) > 0 and float(np.median(bonus)) >= LARGE_BONUS
    is_uniform = late_entropy > 0.9 and not is_held
    is_still = usual < TINY_KL or (usual < SMALL_KL and is_uniform)
    # What does not move at all has not improved either, whatever the evaluations say.
    if stands_still(log) or (is_still and score.trouble):
        is_good = score.baseline is not None and not score.trouble
        text = f"the policy hardly moves: KL {usual:.1g} an update in the median"
        text += and_trouble(score)
        if stands_still(log) and score.trouble == score.fall_text:
            text += ", but not by training: by the workload, or by chance"
        return Evidence("warning" if is_good else "bad", text, {"kl": usual}, "approx_kl_mean")
    if usual < TINY_KL:
        return Unclear(f"updates are tiny, KL {usual:.1g}, but the score is no worse for it")
    return Margin("KL of an update, in the median", usual, TINY_KL, "below")


def _stop(log: RunLog, kl: Series) -> tuple[str, str, float] | None:
    """What, in which column, and since when, where a policy that moved stands still for much of the run, not
    only at the end of a schedule that goes down to 0."""
    rate = log.series("lr")
    began = since(rate, rate.y <= 0.0) if len(rate) and rate.y[0] > 0.0 else None
    if began is not None and (rate.x >= began).mean() >= STOPPED_FOR:
        return "the learning rate is 0", "lr", began
    smooth = running_median(kl.y, CRITIC_WINDOW)
    began = since(kl, smooth < TINY_KL)
    if began is None or (kl.x >= began).mean() < STOPPED_FOR:
        return None
    before, after = kl.y[kl.x < began], kl.y[kl.x >= began]
    if len(before) < MIN_MOVING or float(np.median(before)) < MOVED * TINY_KL:
        return None
    return f"KL {np.median(after):.1g}, {np.median(before):.1g} before", "approx_kl_mean", began


def critic_bottleneck(log: RunLog) -> Looked:
    explained, losses, score = (
        log.series("explained_variance"),
        log.series("v_loss"),
        progress(log),
    )
    if not len(explained):
        return _value_loss_alone(log, score)
    smooth = running_median(explained.y, CRITIC_WINDOW)
    best, late = (
        float(smooth[min(CRITIC_WINDOW, len(smooth)) - 1 :].max()),
        float(np.median(explained.tail(0.5))),
    )
    text = f"the critic explains {late:.2f} of the returns' variance in the second half, {best:.2f} at best"
    figures = {"explained_variance": late, "best": best}
    if log.facts.setting("ppo.value_coef") == 0 and score is not None and score.trouble:
        text = f"the value coefficient is 0: nothing teaches the critic; {score.trouble}. As it is, {text}"
        return Evidence("bad", text, figures, "explained_variance")
    if best >= EXPLAINED and late >= EXPLAINED:
        return Margin("variance of returns that the critic explains", late, EXPLAINED, "below")
    trouble = score.trouble if score else ""
    last = float(np.median(explained.tail(0.25)))
    has_gone_blind = not log.is_ours and best >= BLIND and last < 0 and bool(trouble)  # worse than no critic
    text += f", {last:.2f} in the last quarter" if has_gone_blind else ""
    text += _explosion(losses)
    is_blind = best < BLIND or has_gone_blind
    if len(losses) and log.is_ours:  # in units of the returns' spread: from about 0.5 it should fall
        kept = float(np.median(losses.tail(0.5)) / max(float(losses.y[0]), 1e-12))
        is_blind = (best < EXPLAINED and kept > KEPT_LOSS / 3) or (late < EXPLAINED and kept > KEPT_LOSS)
        text += f"; v_loss is {in_percent(kept)} of its first value"
    if not is_blind:
        began = since(explained, smooth < EXPLAINED)
        return Evidence("note", text, figures, "explained_variance", began)
    text += and_trouble(score)
    slight: Severity = "warning" if len(explained) >= LONG_BLIND else "note"
    return Evidence("bad" if trouble else slight, text, figures, "explained_variance")


def _explosion(losses: Series) -> str:
    """What to say where the value loss has become far larger than it was; empty where it has not."""
    if not len(losses):
        return ""
    usual, last = float(np.median(losses.head(0.5))), float(np.median(losses.tail(0.1)))
    return f"; the value loss is {last / usual:.1g} times what it was" if last > EXPLODED * usual > 0 else ""


def _value_loss_alone(log: RunLog, score: ScoreCourse | None) -> Looked:
    """Judge without the variance explained: a value loss that stays as high as it was, with a bad score."""
    losses, policy = log.series("v_loss"), np.abs(log.series("pg_loss").y)
    kept = float(np.median(losses.tail(0.5)) / max(float(np.median(losses.head(0.1))), 1e-12))
    outweighs = float(np.median(losses.tail(0.5))) > 50 * float(np.median(policy)) if len(policy) else False
    explosion = _explosion(losses)
    if score is None or not score.trouble or (not explosion and (kept < 0.8 or not outweighs)):
        return None
    if explosion:
        return Evidence("bad", f"{explosion.removeprefix('; ')}; {score.trouble}", {"kept": kept}, "v_loss")
    text = f"{log.label('v_loss')} is still {in_percent(kept)} of what it was, far above the policy's loss; "
    return Evidence("bad", text + score.trouble, {"kept": kept}, "v_loss")


def value_loss_at_drops(log: RunLog) -> Looked:
    score, losses = progress(log), log.series("v_loss")
    if score is None or not score.name.startswith("eval"):
        return Unclear("no evaluations")
    x, y = score.series
    usual = np.maximum(running_median(losses.y, CRITIC_WINDOW), 1e-30)
    sizes = np.log(np.maximum(losses.y, 1e-30) / usual)
    spread = noise(np.log(np.maximum(losses.y, 1e-30)))
    is_spike = sizes > max(np.log(SHOCK), (SIGNIFICANT + by_chance(len(sizes))) * spread)
    spiked = np.array([is_spike[(losses.x > a) & (losses.x <= b)].any() for a, b in pairwise(x)])
    gained = score.best - (score.start if score.baseline is None else score.baseline)
    # By the median: what drops and comes back at once is no noise.
    usual_change = 1.4826 * float(np.median(np.abs(np.diff(y))))
    has_dropped = -np.diff(y) > max(LOST * gained, SIGNIFICANT * usual_change, 1e-12)
    num_drops, num_hits = int(has_dropped.sum()), int((has_dropped & spiked).sum())
    if num_hits == 0 or num_hits < num_drops / 2:
        return None
    share = float(spiked.mean())
    chance = sum(
        comb(num_drops, k) * share**k * (1 - share) ** (num_drops - k) for k in range(num_hits, num_drops + 1)
    )
    if chance > COINCIDENCE:
        return None
    hits = np.flatnonzero(has_dropped & spiked)
    before, since = y[: hits[-1] + 1], y[hits[-1] + 1 :]
    is_over = len(since) > len(before) and float(np.median(since)) > before.max()
    largest = float(np.exp(sizes[is_spike].max()))
    text = f"{num_hits} of {num_drops} drops of {score.label} come with a spike of {log.label('v_loss')}, "
    text += f"up to {largest:.3g} times what is usual"
    text += "; since then it is better than ever before" if is_over else ""
    severity: Severity = "warning" if score.trouble or (num_hits > 1 and not is_over) else "note"
    figures = {"drops": float(num_drops), "with_spike": float(num_hits)}
    return Evidence(severity, text, figures, "v_loss", float(x[hits[0]]))


def slow_trainer(log: RunLog) -> Looked:
    # Of a usual update: the first may have to be compiled, which a short run never makes up for.
    parts = {name: float(np.median(series.y)) for name, series in log.group("time").items()}
    rollout = {name: parts[name] for name in ("env_s", "inference_s", "update_s") if name in parts}
    total = sum(rollout.values())
    if "env_s" not in rollout or total <= 0:
        return None
    share = float(rollout["env_s"] / total)
    split = ", ".join(
        f"{name.removesuffix('_s')} {in_percent(value / total)}" for name, value in rollout.items()
    )
    if share >= ENV_SHARE:
        return Margin("share of the time in the environment", share, ENV_SHARE, "below")
    text = f"the environment takes {in_percent(share)} of the time ({split}): it could be asked for more"
    return Evidence("note", text, {"env": share}, "steps_per_s")


STEP_RULES = (
    Rule(
        "kl-brake-always-on",
        "KL brake always on",
        ("early_stop",),
        brake_always_on,
        "steps so large that an update has to be stopped almost at once: most of each rollout is thrown away",
        "KL of the first minibatches; gradient norm; whether advantages are normalised; whether the target "
        "KL is far below what does harm (0.01)",
        (
            LOWER_LR,
            FEWER_EPOCHS,
            LARGER_BATCH,
        ),
    ),
    Rule(
        "overshoot",
        "Overshoot",
        ("approx_kl_mean", "score"),
        overshoot,
        "updates so large that the policy leaves what it had learned, and then learns from worse rollouts",
        "KL, clip fraction and gradient norm at that point",
        (LOWER_LR, FEWER_EPOCHS, LOWER_CLIP, LOWER_TARGET_KL, LARGER_BATCH),
    ),
    Rule(
        "flat-learning",
        "Flat learning",
        ("score", "approx_kl_mean|lr"),
        flat_learning,
        "the step is too small, or advantages are too weak to move the policy",
        "learning rate and its schedule, gradient norm and its clip, the size of advantages",
        (RAISE_LR, MORE_EPOCHS, Knob("reward", "denser, less noise", "env.reward")),
        from_fraction=0.3,
    ),
)

CRITIC_RULES = (
    Rule(
        "critic-bottleneck",
        "Critic bottleneck",
        ("explained_variance|v_loss",),
        critic_bottleneck,
        "the value loss does not reach the critic, the critic is too small or too slow, or returns do not "
        "follow from anything it sees (noise in the reward)",
        "the weight of the value loss, and what else the returns depend on",
        (
            RAISE_VALUE_COEF,
            Knob(
                "critic",
                "larger, or separate",
                "network.width, network.separate_critic",
            ),
            LARGER_BATCH,
            Knob("reward", "simpler, less noise", "env.reward"),
        ),
        min_rows=16,
        from_fraction=0.3,
    ),
    Rule(
        "value-loss-at-drops",
        "The value loss jumps where the evaluation drops",
        ("score", "v_loss"),
        value_loss_at_drops,
        "the policy moved to states that the critic does not know: until it catches up, advantages are noise",
        "KL and entropy just before the drops; whether the workload changes there",
        (LOWER_LR, LARGER_BATCH, RAISE_VALUE_COEF),
        min_rows=16,
    ),
)

LAST_RULES = (
    Rule(
        "kl-brake-never",
        "KL brake never on",
        ("approx_kl_mean",),
        brake_never,
        "no target KL, or one that is never compared",
        "whether the target KL is set, and which KL it is compared with",
        (LOWER_TARGET_KL, LOWER_LR),
    ),
    Rule(
        "slower-than-the-environment",
        "Slower than the environment allows",
        ("time/env_s", "time/update_s"),
        slow_trainer,
        "network and updates take most of the time",
        "the split of the time; the size of the network",
        (
            Knob("environments", "more", "run.num_envs"),
            Knob("minibatch", "larger", "ppo.minibatch_size"),
            Knob("processes", "more", "run.workers"),
        ),
    ),
)
