"""Findings of a run, the worst first; what is far from going wrong; and what could not be judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from pointsman.diagnosis.curves import Array, RunLog
from pointsman.diagnosis.measures import MIN_SCORES
from pointsman.diagnosis.rule import SEVERITIES, Evidence, Knob, Margin, Rule, Severity, Unclear
from pointsman.diagnosis.rules import RULES
from pointsman.diagnosis.stories import tell
from pointsman.errors import InputError
from pointsman.plain import in_percent

Verdict = Literal["wrong", "clean", "unclear"]
MIN_ROWS = 3  # fewer are no curve
MIN_SEEN = 8  # values of a column
THE_SCORE = "how good the policy is"
# Without the score, or without two of these, a log is no reason to call a run healthy.
ESSENTIAL = {
    "score": THE_SCORE,
    "approx_kl_mean": "how large its updates are",
    "entropy_frac": "how much it explores",
    "explained_variance|v_loss": "what its critic foresees",
}
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
    symptoms: tuple[Finding, ...] = ()  # what follows from it; its advice is this one's

    def __str__(self) -> str:
        """One line, for logs."""
        return f"{self.title} ({self.name}): {self.evidence}. Likely cause: {self.cause}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        knobs = [knob._asdict() for knob in self.knobs]
        return {**asdict(self), "knobs": knobs, "symptoms": [one.to_dict() for one in self.symptoms]}


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
    findings: tuple[Finding, ...]  # one for each cause, worst first
    margins: tuple[Margin, ...]  # of the rules that found nothing
    not_judged: tuple[NotJudged, ...]
    notes: tuple[str, ...]
    num_rules: int  # that look at the log
    unseen: tuple[str, ...]  # of what every judgement rests on: what the log does not tell

    @property
    def num_judged(self) -> int:
        return self.num_rules - len(self.not_judged)

    @property
    def verdict(self) -> Verdict:
        """`unclear`: nothing is wrong with the little that could be judged."""
        if any(finding.severity != "note" for finding in self.findings):
            return "wrong"
        return "clean" if THE_SCORE not in self.unseen and len(self.unseen) <= 1 else "unclear"

    @property
    def worst(self) -> str:
        """The severity of the worst finding, or the verdict."""
        return self.findings[0].severity if self.verdict == "wrong" else self.verdict

    @property
    def rank(self) -> int:
        """For the order of several runs, the worst first."""
        return (*SEVERITIES, "unclear", "clean").index(self.worst)

    @property
    def verdict_text(self) -> str:
        judged = f"{self.num_judged} of {self.num_rules} rules"
        if self.verdict == "wrong":
            return f"{judged} could judge this log"
        if self.verdict == "clean":
            return f"nothing went wrong, as far as {judged} could judge"
        unseen = ", ".join(self.unseen)
        return f"only {judged} could judge this log, and found nothing: it does not tell {unseen}"

    @property
    def is_clean(self) -> bool:
        return self.verdict == "clean"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        margins = [margin._asdict() for margin in self.margins]
        findings = [finding.to_dict() for finding in self.findings]
        return {
            **asdict(self),
            "verdict": self.verdict,
            "is_clean": self.is_clean,
            "num_judged": self.num_judged,
            "findings": findings,
            "margins": margins,
        }


def diagnose(log: RunLog, rules: Sequence[Rule] = RULES) -> Diagnosis:
    """All that the rules have to say about a run."""
    findings: list[Finding] = []
    margins: list[Margin] = []
    not_judged: list[NotJudged] = []
    num_beyond = 0
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
        elif isinstance(looked, Margin) and looked.is_beyond:
            # Never a limit passed beneath "clean": alone it proves nothing, but it is no sign of health.
            not_judged.append(NotJudged(rule.name, rule.title, f"no proof, but {looked}"))
            num_beyond += 1
        elif isinstance(looked, Margin):
            margins.append(looked)
        elif isinstance(looked, Unclear):
            not_judged.append(NotJudged(rule.name, rule.title, looked.why))
    if log.num_rows < MIN_ROWS and not findings:
        problem = f"has {log.num_rows} row{'s' * (log.num_rows != 1)}: too few for a curve"
        raise InputError("RUN", log.source, problem, "wait for more updates")
    is_mute = not findings and not margins and not num_beyond
    if is_mute and len(not_judged) >= sum(bool(rule.needs) for rule in rules):
        seen = ", ".join([log.label(name) for name in log.columns][:12])
        problem = "has no column with numbers that a rule knows"
        raise InputError("RUN", log.source, problem, f"say with --map which it is, of: {seen}")
    return Diagnosis(
        log.source,
        log.kind,
        log.num_rows,
        tuple(tell(findings)),
        tuple(margins),
        tuple(not_judged),
        log.notes,
        sum(bool(rule.needs) for rule in rules),
        tuple(what for need, what in ESSENTIAL.items() if not _is_seen(log, need)),
    )


def _is_seen(log: RunLog, need: str) -> bool:
    if need == "score":
        return len(log.score) >= MIN_SCORES
    return any(len(log.series(name)) >= MIN_SEEN for name in need.split("|"))


def _obstacle(rule: Rule, log: RunLog) -> str:
    """Why a rule cannot be asked; empty if it can."""
    missing = [need for need in rule.needs if not any(_has(log, one) for one in need.split("|"))]
    if missing:
        return f"no {', '.join(need.replace('|', ' or ') for need in missing)}"
    if log.num_rows < rule.min_rows:
        return f"{log.num_rows} rows, needs {rule.min_rows}"
    if "score" in rule.needs and len(log.score) < MIN_SCORES:
        return f"{len(log.score)} values of {log.score_name}, needs {MIN_SCORES}"
    if log.fraction_done < rule.from_fraction:
        return f"too early: {in_percent(log.fraction_done)} of the run"
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
    """Name only keys that this run's configuration has: other problems and logs have others, or none."""
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
