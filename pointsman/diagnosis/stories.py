"""One story per cause: which findings follow from which, and no knob turned both ways on one page.

A step that is too small leaves the policy uniform, the critic blind and the score at the mercy of noise: one
fault, and "raise the learning rate" is what to do. On its own each of the others is worth its own advice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pointsman.diagnosis.rule import SEVERITIES, Knob

if TYPE_CHECKING:
    from pointsman.diagnosis.findings import Finding

# Of the score: what others cause.
SHAPES = ("no-gain", "slow-drift", "best-early", "oscillation", "futile-exploration")
UNTAUGHT = (
    *SHAPES,
    "flat-learning",
    "training-evaluation-gap",
    "wrong-sign",
    "baseline-at-the-ceiling",
    "noop-gap",
)
COLLAPSED = ("noop-gap", "limits-passed")  # of a policy that is sure of the wrong thing
# Findings -> what follows from them.
FOLLOWS: dict[str, tuple[str, ...]] = {
    "diverged": (*SHAPES, "overshoot", "kl-brake-never", "value-loss-at-drops", "limits-passed", "stopped"),
    "stale-mask": ("mask-bug", "stopped"),
    "mask-bug": ("stopped",),
    "other-policy": ("overshoot", "kl-brake-always-on", "kl-brake-never", "stopped"),
    "kl-brake-always-on": (*SHAPES, *COLLAPSED, "overshoot", "flat-learning", "entropy-collapse"),
    "overshoot": (
        *SHAPES,
        *COLLAPSED,
        "entropy-collapse",
        "kl-brake-never",
        "training-evaluation-gap",
        "value-loss-at-drops",
    ),
    "flat-learning": (*SHAPES, "stuck-at-uniform", "critic-bottleneck", "noop-gap"),
    "reward-saturation": (*UNTAUGHT, "stuck-at-uniform", "critic-bottleneck"),
    "no-choice": (
        *(one for one in UNTAUGHT if one != "wrong-sign"),
        *COLLAPSED,
        "noop-collapse",
        "entropy-collapse",
    ),
    # After this, or a collapse of entropy, a policy is uniform where the trainer went back to weights before.
    "noop-collapse": (*UNTAUGHT, *COLLAPSED, "entropy-collapse", "noop-jump", "stuck-at-uniform"),
    "one-entity-collapse": (*UNTAUGHT, *COLLAPSED, "entropy-collapse", "critic-bottleneck"),
    "reward-term-dominance": UNTAUGHT,
    "short-sighted": (
        *SHAPES,
        "flat-learning",
        "training-evaluation-gap",
        "wrong-sign",
        "stuck-at-uniform",
        "critic-bottleneck",
    ),
    "wrong-sign": (
        *SHAPES,
        "training-evaluation-gap",
        "baseline-at-the-ceiling",
        "noop-gap",
        "stuck-at-uniform",
    ),
    "training-evaluation-gap": SHAPES,
    "baseline-at-the-ceiling": (*SHAPES, "stuck-at-uniform"),
    "critic-bottleneck": (*SHAPES, "value-loss-at-drops"),
    "stuck-at-uniform": SHAPES,
    "entropy-collapse": (*SHAPES, *COLLAPSED, "stuck-at-uniform"),
    "value-loss-at-drops": ("oscillation",),
    "oscillation": ("best-early", "no-gain"),
    "slow-drift": ("no-gain", "best-early", "futile-exploration"),
    "limits-passed": ("stopped",),
}


def tell(findings: Sequence[Finding]) -> list[Finding]:
    """Causes alone, the worst first, each with what follows from it; among equals the order given stays. A
    note explains nothing worse than a note."""
    roots = {finding.name: _root(finding, findings) for finding in findings}
    told = []
    for cause in findings:
        if roots[cause.name] != cause.name:
            continue
        symptoms = [one for one in findings if one is not cause and roots[one.name] == cause.name]
        worst = min((cause, *symptoms), key=lambda one: SEVERITIES.index(one.severity)).severity
        told.append(replace(cause, severity=worst, symptoms=tuple(symptoms)))
    told.sort(key=lambda one: SEVERITIES.index(one.severity))
    return _agreed(told)


def _cause(finding: Finding, findings: Iterable[Finding]) -> Finding | None:
    """The first that this one follows from."""
    causes = (one for one in findings if finding.name in FOLLOWS.get(one.name, ()))
    return next((one for one in causes if one.severity != "note" or finding.severity == "note"), None)


def _root(finding: Finding, findings: Sequence[Finding]) -> str:
    cause = _cause(finding, findings)
    return finding.name if cause is None else _root(cause, findings)


def _agreed(findings: Sequence[Finding]) -> list[Finding]:
    """Drop advice that an earlier, worse finding contradicts."""
    advised: dict[str, int] = {}

    def agrees(knob: Knob) -> bool:
        return advised.get(knob.aim, knob.direction) == knob.direction

    told = []
    for finding in findings:
        kept = tuple(knob for knob in finding.knobs if agrees(knob))
        for knob in kept:
            if knob.direction:
                advised.setdefault(knob.aim, knob.direction)
        told.append(replace(finding, knobs=kept))
    return told
