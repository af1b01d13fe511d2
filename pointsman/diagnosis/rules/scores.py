"""The shape of the score: drifting away, up and down, better on average but not everywhere, best long ago."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pointsman.diagnosis.curves import Array, RunLog
from pointsman.diagnosis.measures import (
    LOST,
    MEDIAN_ERROR,
    MOSTLY_LOST,
    SIGNIFICANT,
    SLIGHTLY_LOST,
    has_kl_spike,
    noise,
    progress,
    rise,
    stands_still,
    training_return,
)
from pointsman.diagnosis.rule import (
    FEWER_EPOCHS,
    LARGER_BATCH,
    LOWER_CLIP,
    LOWER_LR,
    Evidence,
    Knob,
    Looked,
    Margin,
    Rule,
    Severity,
    Unclear,
)
from pointsman.plain import in_percent

SWING = 0.25  # of the gain, from one evaluation to the next
TURNS = 0.55  # of the evaluations; two of three are what chance gives
MIN_WAVE = 30  # evaluations: of fewer, chance makes a wave now and then
MIN_CYCLES = 3  # times up and down: less often is a rise and a fall
WAVE = 0.6  # of the variation
JUMP = 1.05  # of temperature or entropy coefficient: an intervention
RESPONSE_ROWS = 8


def slow_drift(log: RunLog) -> Looked:
    score, kl = progress(log), log.series("approx_kl_mean")
    assert score is not None
    if score.lost < SLIGHTLY_LOST:
        return Margin(
            "lost since the best evaluation, of what was gained",
            max(score.lost, 0.0),
            LOST,
        )
    if stands_still(log, score.best_x):
        return Unclear("the policy stands still: something else changes the score")
    around = kl.between(score.best_x, float(score.series.x[-1]))
    if not len(around) or has_kl_spike(log, score.best_x, float(score.series.x[-1])):
        return None  # overshoot
    text = f"{score.fall_text} since {log.x_name} {score.best_x:g}, with KL never above {around.max():.2g}"
    severity: Severity = "bad" if score.lost >= MOSTLY_LOST else "warning" if score.lost >= LOST else "note"
    return Evidence(severity, text, {"lost": score.lost}, score.name, score.best_x)


def best_early(log: RunLog) -> Looked:
    score = progress(log)
    assert score is not None
    x = score.series.x
    place = (score.best_x - x[0]) / max(float(x[-1] - x[0]), 1e-12)
    is_mute = not log.has("approx_kl_mean")  # whether it was one large step or many small ones: who knows
    if score.lost < SLIGHTLY_LOST or (place > 0.5 and not is_mute) or stands_still(log, score.best_x):
        return None
    text = f"the best {score.label}, {score.best:.3g}, was at {log.x_name} {score.best_x:g}; "
    text += f"now {score.end:.3g}"
    severity: Severity = "warning" if score.lost >= LOST else "note"
    if is_mute and score.lost >= MOSTLY_LOST:
        severity, text = (
            "bad",
            f"{text}; without KL, overshoot cannot be told from drift",
        )
    return Evidence(severity, text, {"lost": score.lost, "place": place}, score.name, score.best_x)


def brittle(log: RunLog) -> Looked:
    score = progress(log)
    mean_name = log.first_of("eval_mean_return", "eval_score")
    assert score is not None and mean_name is not None
    mean, worst = log.together(mean_name, "eval_min_block_return")
    if len(worst) < 6:
        return Unclear(f"{len(worst)} evaluations of blocks, needs 6")
    window = max(2, len(worst) // 6)
    third = len(worst) // 3
    before = slice(max(0, third - window), third)
    mean_gain = float(np.mean(mean.y[-window:]) - np.mean(mean.y[before]))
    worst_gain = float(np.median(worst.y[-window:]) - np.median(worst.y[before]))
    chance = SIGNIFICANT * MEDIAN_ERROR * noise(worst.y) * np.sqrt(2 / window)  # of a difference of medians
    if mean_gain <= 0 or worst_gain > -max(chance, SWING * score.unit):
        return Margin(
            "worst block fell while the mean rose, of the gain",
            max(-worst_gain / score.unit, 0.0),
            SWING,
        )
    text = f"{mean_name} rose by {mean_gain:.3g} while the worst block fell by {-worst_gain:.3g}"
    severity: Severity = "bad" if -worst_gain > score.unit else "warning"
    figures = {"mean": mean_gain, "worst": worst_gain}
    return Evidence(severity, text, figures, "eval_min_block_return", float(worst.x[third]))


def no_gain(log: RunLog) -> Looked:
    """The score is where it was, though the policy moves; or nobody knows whether it does."""
    score = progress(log)
    assert score is not None
    if stands_still(log):
        return None  # that is the reason
    moved = max(float(np.ptp(score.smooth[score.window - 1 :])), abs(score.end - score.start))
    is_flat = moved < max(score.chance, 0.15 * abs(score.start))
    is_flat = is_flat and score.lost < SLIGHTLY_LOST and score.fall.depth < LOST
    if not is_flat or not score.trouble or rise(training_return(log)) > 2.5:
        return None
    kl = log.series("approx_kl_mean").y
    text = f"{score.label} stays where it was: {score.start:.3g} at first, {score.end:.3g} now"
    text += f"; KL {np.median(kl):.1g}" if len(kl) else ""
    return Evidence("warning", text, {"score": score.end}, score.name)


def oscillation(log: RunLog) -> Looked:
    score = progress(log)
    assert score is not None
    y = score.series.y[len(score.series) // 3 :]
    if not score.name.startswith("eval"):
        return Unclear("no evaluations")
    if len(y) < 6:
        return Unclear(f"{len(y)} evaluations after the first third, needs 6")
    if stands_still(log):
        return Unclear("the policy stands still: something else changes the score")
    steps = np.diff(y)
    turns = float((np.sign(steps[1:]) * np.sign(steps[:-1]) < 0).mean())
    gain = max(score.best - score.start, score.unit) if score.baseline is None else score.unit
    wave = _wave(y)
    if wave is not None and wave.swing >= SWING * gain:
        period = wave.period * float(np.median(np.diff(score.series.x)))
        text = f"{score.label} goes up and down by {wave.swing:.3g}, {in_percent(wave.swing / gain)} of its "
        text += f"gain, once in {period:.3g} {log.x_name.removesuffix('s')}s"
        figures = {"swing": wave.swing / gain, "period": period}
        began = float(score.series.x[len(score.series) // 3])
        return Evidence("bad" if wave.swing > gain else "warning", text, figures, score.name, began)
    swing = float(np.median(np.abs(steps)) / gain)
    if swing < SWING or turns < TURNS:
        return Margin("swing between evaluations, of the gain", swing, SWING)
    if not log.is_ours and turns < _turns_by_chance(len(y)):
        # Ours are evaluated on the same seeds every time; who knows how others are.
        return Unclear("evaluations scatter as by chance: evaluate one checkpoint several times to tell")
    text = f"{score.label} turns at {in_percent(turns)} of the evaluations, "
    text += f"by {in_percent(swing)} of its gain in the median"
    severity: Severity = "bad" if swing > 1.0 else "warning"
    return Evidence(
        severity,
        text,
        {"turns": turns, "swing": swing},
        score.name,
        float(score.series.x[0]),
    )


class _Wave(NamedTuple):
    period: float  # evaluations
    swing: float  # from the lowest to the highest


def _wave(y: Array) -> _Wave | None:
    """The slow wave that most of the variation of many evaluations is; of one that turns at every second or
    third, turns tell."""
    if len(y) < MIN_WAVE:
        return None
    place = np.arange(len(y))
    off = y - np.polyval(np.polyfit(place, y, 1), place)
    power = np.abs(np.fft.rfft(off / max(float(np.abs(off).max()), 1e-300))) ** 2
    cycles = int(power.argmax())
    # With its neighbours: a wave need not fit in a whole number of times.
    share = float(power[max(cycles - 1, 1) : cycles + 2].sum() / max(float(power.sum()), 1e-300))
    if not MIN_CYCLES <= cycles <= len(y) / 3 or share < WAVE:
        return None
    return _Wave(len(y) / cycles, float(2 * np.sqrt(2 * share) * off.std()))


def _turns_by_chance(num: int) -> float:
    """The largest share of turning points that so many values of noise may well have."""
    return 2 / 3 + SIGNIFICANT * float(np.sqrt((16 * num - 29) / 90)) / (num - 2)


def futile_exploration(log: RunLog) -> Looked:
    entropy, score = log.series("entropy_frac"), progress(log)
    knob = np.ones(len(log.x))
    for name in ("temperature", "ent_coef"):
        values = log.columns.get(name)
        if values is not None:
            knob = knob * np.where(np.isfinite(values) & (values > 0), values, 1.0)
    jumps = np.flatnonzero(knob[1:] > JUMP * knob[:-1]) + 1
    if len(jumps) < 2:
        return None
    responses = []
    for row in jumps:
        x = log.x[row]
        before, after = (
            entropy.y[entropy.x < x][-RESPONSE_ROWS:],
            entropy.y[entropy.x >= x][:RESPONSE_ROWS],
        )
        if len(before) and len(after):
            responses.append(float(after.mean() - before.mean()))
    has_gained = score is not None and score.best_x > log.x[jumps[0]] and not score.trouble
    if not responses or has_gained:
        return None
    rose = float(np.mean(np.array(responses) > 0.02))
    if rose > 0.5:
        return None
    text = f"exploration was raised {len(jumps)} times; entropy answered {in_percent(rose)} of them"
    text += f", and {score.trouble}" if score is not None and score.trouble else ""
    return Evidence(
        "note",
        text,
        {"times": float(len(jumps)), "answered": rose},
        "entropy_frac",
        float(log.x[jumps[0]]),
    )


RULES = (
    Rule(
        "brittle",
        "Brittle",
        ("score", "eval_min_block_return", "eval_mean_return|eval_score"),
        brittle,
        "it specialises: some workloads pay for the others",
        "the returns block by block (eval_block<k>_return): which one falls, and since when",
        (
            Knob("training scenarios", "more varied", "env.scenarios"),
            Knob("advantages", "normalised by group", "ppo.normalise_advantages"),
            LARGER_BATCH,
        ),
        from_fraction=0.3,
    ),
    Rule(
        "no-gain",
        "Nothing gained",
        ("score",),
        no_gain,
        "advantages that are mostly noise: a reward that hardly depends on the actions, or features that do "
        "not show what it depends on",
        "what random actions and a good heuristic earn under this reward: is there a difference to learn?",
        (Knob("reward", "denser, less noise", "env.reward"), LARGER_BATCH),
        from_fraction=0.3,
    ),
    Rule(
        "oscillation",
        "Oscillation",
        ("score",),
        oscillation,
        "steps too large for what a rollout can tell, or rollouts too small",
        "whether the evaluation itself is that noisy: evaluate one checkpoint on other seeds",
        (
            LOWER_LR,
            LARGER_BATCH,
            Knob("policies averaged", "more", "run.average_updates"),
        ),
    ),
    Rule(
        "slow-drift",
        "Slow drift",
        ("score", "approx_kl_mean"),
        slow_drift,
        "many small steps along advantages that are mostly noise, or the states visited in training moved "
        "away from those evaluated",
        "explained variance; whether the reward still goes up where the score goes down",
        (
            Knob("learning rate", "lower at the end", "ppo.learning_rate"),
            FEWER_EPOCHS,
            LOWER_CLIP,
            Knob("rollouts", "longer", "run.rollout_steps"),
            Knob("reward", "simpler", "env.reward"),
        ),
    ),
    Rule(
        "best-early",
        "Best checkpoint early, then worse",
        ("score",),
        best_early,
        "training went on past what this set-up can hold",
        "whether the best checkpoint still looks best on other seeds",
        (Knob("checkpoint", "use the best, not the last"), LOWER_LR),
        from_fraction=0.5,
    ),
    Rule(
        "futile-exploration",
        "Exploration raised for nothing",
        ("entropy_frac", "temperature|ent_coef"),
        futile_exploration,
        "what holds the score back is not a lack of exploration",
        "the other findings first; whether temperature reaches the policy that acts",
        (Knob("pulses and raises", "off", "exploration.stagnation, exploration.behind"),),
    ),
)
