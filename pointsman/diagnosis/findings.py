"""Findings of a run, the worst first; what is far from going wrong; and what could not be judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pointsman.diagnosis.curves import Array, RunLog
from pointsman.diagnosis.rule import SEVERITIES, Evidence, Knob, Margin, Rule, Severity
from pointsman.diagnosis.rules import RULES
from pointsman.errors import InputError

MIN_ROWS = 3  # fewer are no curve
BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 32


@dataclass(frozen=True)
class Finding:
    name: str
    title: str
    severity: Severity
    began_at: float | None  # None: from the start
    x_name: str
    evidence: str
    figures: dict[str, float]
    column: str  # what the sparkline shows
    sparkline: str
    cause: str
    check: str
    knobs: tuple[Knob, ...]

    def __str__(self) -> str:
        """One line, for logs."""
        return f"{self.title} ({self.name}): {self.evidence}. Likely cause: {self.cause}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "knobs": [knob._asdict() for knob in self.knobs]}


@dataclass(frozen=True)
class NotJudged:
    name: str
    title: str
    why: str


@dataclass(frozen=True)
class Diagnosis:
    source: str
    kind: str
    num_rows: int
    findings: tuple[Finding, ...]  # worst first
    margins: tuple[Margin, ...]  # of the rules that found nothing
    not_judged: tuple[NotJudged, ...]
    notes: tuple[str, ...]

    @property
    def is_clean(self) -> bool:
        return all(finding.severity == "note" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        margins = [margin._asdict() for margin in self.margins]
        findings = [finding.to_dict() for finding in self.findings]
        return {
            **asdict(self),
            "is_clean": self.is_clean,
            "findings": findings,
            "margins": margins,
        }


def diagnose(log: RunLog, rules: Sequence[Rule] = RULES) -> Diagnosis:
    """All that the rules have to say about a run."""
    findings: list[Finding] = []
    margins: list[Margin] = []
    not_judged: list[NotJudged] = []
    for rule in rules:
        why = _obstacle(rule, log)
        if why:
            not_judged.append(NotJudged(rule.name, rule.title, why))
            continue
        try:
            looked = rule.look(log)
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:
            # A log that no rule foresaw must not cost the other findings, nor a training run.
            not_judged.append(NotJudged(rule.name, rule.title, f"{type(error).__name__}: {error}"))
            continue
        if isinstance(looked, Evidence):
            findings.append(_finding(rule, looked, log))
        elif isinstance(looked, Margin):
            margins.append(looked)
    if log.num_rows < MIN_ROWS and not findings:
        problem = f"has {log.num_rows} row{'s' * (log.num_rows != 1)}: too few for a curve"
        raise InputError("RUN", log.source, problem, "wait for more updates")
    if not findings and not margins and len(not_judged) >= sum(bool(rule.needs) for rule in rules):
        seen = ", ".join([log.label(name) for name in log.columns][:12])
        problem = "has no column with numbers that a rule knows"
        raise InputError("RUN", log.source, problem, f"say with --map which it is, of: {seen}")
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))  # stable: causes first
    return Diagnosis(
        log.source,
        log.kind,
        log.num_rows,
        tuple(findings),
        tuple(margins),
        tuple(not_judged),
        log.notes,
    )


def _obstacle(rule: Rule, log: RunLog) -> str:
    """Why a rule cannot be asked; empty if it can."""
    missing = [need for need in rule.needs if not any(_has(log, one) for one in need.split("|"))]
    if missing:
        return f"no {', '.join(need.replace('|', ' or ') for need in missing)}"
    if log.num_rows < rule.min_rows:
        return f"{log.num_rows} rows, needs {rule.min_rows}"
    if "score" in rule.needs and len(log.score) < 4:
        return f"{len(log.score)} values of {log.score_name}, needs 4"
    if log.fraction_done < rule.from_fraction:
        return f"too early: {log.fraction_done:.0%} of the run"
    return ""


def _has(log: RunLog, need: str) -> bool:
    if need == "score":
        return log.score_name is not None
    if need in ("config", "headroom"):
        return bool(getattr(log.facts, need))
    return bool(log.group(need.removesuffix("/*"))) if need.endswith("/*") else log.has(need)


def _finding(rule: Rule, evidence: Evidence, log: RunLog) -> Finding:
    values = log.score.y if evidence.column == log.score_name else log.series(evidence.column).y
    return Finding(
        rule.name,
        rule.title,
        evidence.severity,
        evidence.began_at,
        log.x_name,
        evidence.text,
        dict(evidence.figures),
        log.label(evidence.column),
        sparkline(values),
        rule.cause,
        rule.check,
        tuple(_known(knob, log) for knob in rule.knobs),
    )


def _known(knob: Knob, log: RunLog) -> Knob:
    """With the keys that this run's configuration has: other problems and other logs have others, or none."""
    keys = [key for key in knob.key.split(", ") if key and log.facts.has_setting(key)]
    return knob._replace(key=", ".join(keys))


def sparkline(y: Array, width: int = SPARK_WIDTH) -> str:
    """A curve in one line; values far off all others are cut to what the others span."""
    if not len(y):
        return ""
    parts = np.array([np.median(part) for part in np.array_split(y, min(width, len(y)))])
    low, middle, high = np.quantile(parts, (0.1, 0.5, 0.9))
    reach = 4.0 * max(high - low, 1e-12)
    parts = np.clip(parts, middle - reach, middle + reach)
    span = float(parts.max() - parts.min())
    if span <= 1e-12 * max(1.0, float(np.abs(parts).max())):
        return BARS[3] * len(parts)
    heights = np.round((parts - parts.min()) / span * (len(BARS) - 1)).astype(int)
    return "".join(BARS[height] for height in heights)
