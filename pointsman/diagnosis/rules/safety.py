"""What the trainer's own guards have counted: limits that were passed, episodes that were ended for it."""

from __future__ import annotations

from pointsman.diagnosis.curves import RunLog, Series
from pointsman.diagnosis.measures import first_x
from pointsman.diagnosis.rule import Evidence, Knob, Looked, Margin, Rule, Severity

OFTEN = 0.05  # of the updates
WHAT = {
    "kl": "an update beyond the KL limit",
    "entropy": "entropy below its limit",
    "behind": "an evaluation too far behind the baseline",
    "overhang": "an episode ended with far more requests than the shadow's",
    "queue": "an episode ended for its queue",
    "wait_s": "an episode ended for a request that waited too long",
    "ttft_p99_s": "an episode ended for its P99 TTFT",
    "ttft_p99_ratio": "an episode ended for a P99 TTFT far above the shadow's",
    "imbalance_cv": "an episode ended for its imbalance",
}


def limits_passed(log: RunLog) -> Looked:
    counts = {name: series for name, series in log.group("safety").items() if series.y.max() > 0}
    if not counts:
        return Margin("limits passed, times", 0.0, 0.0)
    totals = {name: _total(series) for name, series in counts.items()}
    late = {name: _total(series) - _total(_first_half(series)) for name, series in counts.items()}
    worst = max(totals, key=lambda name: totals[name])
    text = ", ".join(f"{WHAT.get(name, name)}: {total:,.0f} times" for name, total in totals.items())
    text += f"; {sum(late.values()):,.0f} of them in the second half"
    is_often = max(late.values()) > OFTEN * log.num_rows / 2
    has_stopped = log.facts.stopped.get("error") == "SafetyError"
    severity: Severity = "bad" if has_stopped else "warning" if is_often else "note"
    began = min(first_x(series, series.y > 0) or 0.0 for series in counts.values())
    return Evidence(severity, text, totals, f"safety/{worst}", began)


def _total(series: Series) -> float:
    """The sum of a counter that goes on, or of counts one by one."""
    is_counter = bool((series.y[1:] >= series.y[:-1]).all())
    return float(series.y[-1] if is_counter else series.y.sum())


def _first_half(series: Series) -> Series:
    half = max(1, len(series) // 2)
    return Series(series.x[:half], series.y[:half])


RULES = (
    Rule(
        "limits-passed",
        "Safety limits passed",
        ("safety/*",),
        limits_passed,
        "the policy goes where the limits were set to keep it from; or they are tighter than this workload "
        "allows",
        "the updates at which the counts rise; whether the baseline keeps these limits",
        (Knob("limits", "as the baseline keeps them", "safety, env.limits"),),
        min_rows=1,
    ),
)
