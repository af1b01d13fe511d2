"""All rules. Among findings of the same severity, those of earlier rules come first: causes before symptoms.

To add one: a function that takes a `RunLog` and returns `Evidence`, a `Margin` or None; a `Rule` that says
what it needs and what it means; its place here; a test on curves that show it and on curves that do not.
"""

from __future__ import annotations

from pointsman.diagnosis.rule import Rule
from pointsman.diagnosis.rules import actions, bugs, rewards, safety, scores, updates

RULES: tuple[Rule, ...] = (
    *bugs.RULES,
    *updates.STEP_RULES,
    *rewards.SATURATION_RULES,
    *actions.COLLAPSE_RULES,
    *rewards.EARNING_RULES,
    *updates.CRITIC_RULES,
    *actions.ENTROPY_RULES,
    *actions.NOOP_RULES,
    *scores.RULES,
    *safety.RULES,
    *updates.LAST_RULES,
    *bugs.LAST_RULES,
)
