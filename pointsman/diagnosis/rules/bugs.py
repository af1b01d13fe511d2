"""What is broken whatever the settings: numbers that are not finite, masks, an update of another policy."""

from __future__ import annotations

import numpy as np

from pointsman.diagnosis.curves import LOSSES, SCORES, RunLog
from pointsman.diagnosis.measures import LARGE_KL, first_x
from pointsman.diagnosis.rule import (
    LOWER_LR,
    SEVERITIES,
    Evidence,
    Knob,
    Looked,
    Margin,
    Rule,
    Severity,
)
from pointsman.plain import in_percent

UNSEEN = 3  # times the longest gap of a score before: not finite for longer is to the end
LATE = 0.8  # of the illegal actions that a mask one step off explains


def diverged(log: RunLog) -> Looked:
    stopped = log.facts.stopped
    broken = {
        name: row
        for name, row in log.broken_at.items()
        if name in LOSSES and np.isfinite(log.columns[name][:row]).any()  # else it was never a number
    }
    broken |= {name: row for name in SCORES if (row := _lost_at(log, name)) is not None}
    why = str(stopped.get("why", ""))
    if stopped.get("error") == "DivergedError" or "not finite" in why:
        return Evidence("bad", why, {}, "grad_norm", float(stopped["update"]))
    if not broken:
        return None
    row = min(broken.values())
    text = f"{', '.join(map(log.label, broken))} not finite from {log.x_name} {log.x[row]:g} on"
    return Evidence("bad", text, {"row": float(row)}, next(iter(broken)), float(log.x[row]))


def _lost_at(log: RunLog, name: str) -> int | None:
    """The row from which on a score that was a number is written as none, to the end. Between evaluations
    some write NaN, too."""
    if name not in log.broken_at:
        return None
    seen = np.flatnonzero(np.isfinite(log.columns[name]))
    if len(seen) < 2 or log.num_rows - 1 - seen[-1] < UNSEEN * np.diff(seen).max():
        return None
    return int(seen[-1]) + 1


def stale_mask(log: RunLog) -> Looked:
    invalid, late = log.series("invalid_frac"), log.series("invalid_late_frac")
    if not len(late) or late.y.mean() < LATE:
        return None
    worst = float(invalid.y.max())
    text = (
        f"{in_percent(worst, 2)} of the actions were illegal; a mask shifted by one step explains "
        f"{in_percent(late.y.mean())} of those"
    )
    figures = {"invalid_frac": worst, "invalid_late_frac": float(late.y.mean())}
    return Evidence("bad", text, figures, "invalid_frac", float(late.x[0]))


def mask_bug(log: RunLog) -> Looked:
    name = log.first_of("invalid_frac", "eval_invalid_frac") or ""
    invalid = log.series(name)
    is_wrong = invalid.y > 0
    late = log.series("invalid_late_frac")
    if is_wrong.any() and not (len(late) and late.y.mean() >= LATE):
        share, worst = float(is_wrong.mean()), float(invalid.y.max())
        text = (
            f"{log.label(name)} is above 0 in {in_percent(share)} of the rows, up to {in_percent(worst, 2)}"
        )
        return Evidence("bad", text, {name: worst, "rows": share}, name, first_x(invalid, is_wrong))
    return Margin("illegal actions", float(invalid.y.max()), 0.0) if not is_wrong.any() else None


def other_policy(log: RunLog) -> Looked:
    stopped = log.facts.stopped
    if stopped.get("error") != "RatioError" or log.series("invalid_frac").tail(0.0).max(initial=0.0) > 0:
        return None
    kl = log.series("approx_kl_mean").y
    text, severity = str(stopped.get("why")), SEVERITIES[0]
    if len(kl) and np.median(kl) > LARGE_KL:
        text, severity = f"{text}; after updates that large it may be rounding", "note"
    return Evidence(severity, text, {}, "approx_kl_mean", float(stopped["update"]))


def stopped_early(log: RunLog) -> Looked:
    """The run ended by itself, for whatever reason it gave; only a note if another rule explains it."""
    stopped = log.facts.stopped
    if not stopped:
        return None
    text = f"the run ended by itself: {stopped.get('why')}"
    at = stopped.get("update")
    severity: Severity = "note" if isinstance(other_policy(log), Evidence) else "warning"  # it says why
    return Evidence(severity, text, {}, "approx_kl_mean", float(at) if at is not None else np.nan)


ENVIRONMENT = Knob("the environment's mask", "correct")

RULES = (
    Rule(
        "diverged",
        "Diverged",
        (),
        diverged,
        "a step that was too large, or a reward or an observation that is not finite",
        "the first row that is not finite, and the rewards and features that came before it",
        (LOWER_LR, Knob("gradient-norm clip", "lower", "ppo.max_grad_norm")),
        min_rows=1,
    ),
    Rule(
        "stale-mask",
        "Stale mask timing",
        ("invalid_frac",),
        stale_mask,
        "the policy acts by the mask of another step than the environment judges by, off by one",
        "where the mask is read: after the step that changes it, and for the observation that is acted on",
        (ENVIRONMENT,),
        min_rows=1,
    ),
    Rule(
        "mask-bug",
        "Mask bug",
        ("invalid_frac|eval_invalid_frac",),
        mask_bug,
        "the mask shown differs from what the environment allows; with masked logits this is a bug",
        "the feasibility test of the environment's step against the one that makes its mask",
        (ENVIRONMENT,),
        min_rows=1,
    ),
    Rule(
        "other-policy",
        "The update sees another policy than the one that acted",
        (),
        other_policy,
        "mask, temperature, normaliser or recurrent state differ between rollout and update",
        "log-probabilities of the rollout against those that the update computes before its first step",
        min_rows=1,
    ),
)

LAST_RULES = (
    Rule(
        "stopped",
        "Stopped by itself",
        (),
        stopped_early,
        "a guard of the trainer ended the run",
        "the line above",
        min_rows=1,
    ),
)
