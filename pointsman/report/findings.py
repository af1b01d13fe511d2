"""The diagnosis of a run as a section of its report."""

from __future__ import annotations

from pointsman.diagnosis.curves import RunLog
from pointsman.diagnosis.findings import Diagnosis, Finding, diagnose
from pointsman.errors import InputError
from pointsman.report.figure import short
from pointsman.report.page import Section, escape, folded, paragraphs, table

STYLES = {"bad": "worse", "warning": "unclear", "note": "soft"}


def diagnosis_of(log: RunLog) -> Diagnosis | None:
    """None of a run that is too young."""
    try:
        return diagnose(log)
    except InputError:
        return None


def findings_section(diagnosis: Diagnosis | None) -> Section:
    """Findings, the worst first; else how far the run was from any. And what could not be judged."""
    if diagnosis is None:
        return Section("Findings", paragraphs(["There are too few updates to judge yet."]))
    parts = [_finding(one) for one in diagnosis.findings]
    if diagnosis.verdict != "wrong":
        text = diagnosis.verdict_text
        parts = [paragraphs([f"{text[0].upper()}{text[1:]}."]), *parts]
    if diagnosis.margins:
        rows = [[escape(one.what), short(one.value), short(one.limit)] for one in diagnosis.margins]
        parts.append(folded("How far from trouble", table(["", "is", "trouble at"], rows)))
    if diagnosis.not_judged:
        rows = [[escape(one.title), escape(one.why)] for one in diagnosis.not_judged]
        parts.append(folded("Could not be judged", table(["", "why"], rows, words=(1,))))
    return Section("Findings", "\n".join(parts))


def _finding(one: Finding) -> str:
    began = "from the start" if one.began_at is None else f"since {one.x_name} {one.began_at:,g}"
    style = STYLES[one.severity]
    knobs = "; ".join(
        f"{escape(knob.name)}: {escape(knob.turn)}"
        + (f" (<code>{escape(knob.key)}</code>)" if knob.key else "")
        for knob in one.knobs
    )
    lines = {
        "With it": "; ".join(escape(f"{symptom.title}: {symptom.evidence}") for symptom in one.symptoms),
        "Likely cause": escape(one.cause),
        "Check": escape(one.check),
        "Turn": knobs,
    }
    details = "".join(f"<p>{name}: {text}</p>" for name, text in lines.items() if text)
    return (
        f'<div class="verdict {style}"><h3>{escape(one.title)} '
        f'<span class="{style}">{one.severity}, {began}</span></h3>'
        f'<p>{escape(one.evidence)}. <span class="spark">{one.sparkline} {escape(one.column)}</span></p>'
        f"{details}</div>"
    )
