"""`pointsman report`: a training run as one page."""

from __future__ import annotations

import shlex
import webbrowser
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pointsman.cli.console import compilation_announced, print_json, progress, stdout, warnings_noted
from pointsman.cli.options import AsJson, NumThreads, num_threads, report_seeds
from pointsman.errors import InputError

if TYPE_CHECKING:
    from pointsman.report.appraisal import Appraisal
    from pointsman.report.page import Section
    from pointsman.report.record import RunRecord

PAGE = "report.html"


def report(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory of `pointsman train`.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write report.html there. Default: in RUN.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option("--figures", metavar="DIR", help="Write every figure as SVG and PNG.")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option("--seeds", metavar="N", help="Seeds to judge the policy on. Default: 8; jobs: 300."),
    ] = None,
    threads: NumThreads = 0,
    is_opened: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the report of a run: one page that needs no network, for screens, phones and paper.

    The verdict comes first: the best policy of the run against others, on seeds that nothing was trained or
    selected on. Then findings, latencies, curves, what the policy looks at, and how to reproduce it all.

    Example: pointsman report runs/quick-1 --open
    """
    from pointsman.files import output_dir, output_file
    from pointsman.report.findings import diagnosis_of
    from pointsman.report.png import write_figures
    from pointsman.report.record import read_run
    from pointsman.report.run import build_report

    if seeds is not None:
        report_seeds(seeds)
    record = read_run(run)
    path = (out or record.folder) / PAGE
    with ExitStack() as outputs:
        file = outputs.enter_context(output_file("--out", path))
        folder = outputs.enter_context(output_dir("--figures", figures)) if figures is not None else None
        outputs.enter_context(compilation_announced())
        warned = outputs.enter_context(warnings_noted())
        with progress("judging", 1.0) as advance:
            appraisal = _appraisal(record, seeds, num_threads(threads), advance)
        with progress("looking", 1.0) as advance:
            looks = _looks(record, advance)
        command = shlex.join(["pointsman", *context.obj])
        diagnosis = diagnosis_of(record.log)
        built = build_report(record, appraisal, diagnosis, looks, command, warned)
        file.write(built.html())
        written = write_figures(folder, built.figures()) if folder is not None else []
    if is_opened:
        webbrowser.open(path.resolve().as_uri())
    if as_json:
        verdict = vars(appraisal.verdict)
        findings = diagnosis.to_dict()["findings"] if diagnosis is not None else []
        print_json(
            {
                "report": path,
                "figures": written,
                "verdict": verdict,
                "findings": findings,
                "missing": record.problems,
                "warnings": warned,
                "results": appraisal.results,
            }
        )
        return
    console = stdout()
    console.print(appraisal.verdict.sentence, markup=False, soft_wrap=True)
    for finding in diagnosis.findings if diagnosis is not None else ():
        console.print(
            f"{finding.severity:<12}{finding.title}: {finding.evidence}", soft_wrap=True, markup=False
        )
    for problem in record.problems:
        console.print(f"missing     {problem}", soft_wrap=True, markup=False)
    console.print(f"report      {path}", soft_wrap=True, markup=False)
    if figures is not None:
        console.print(f"figures     {len(written)} files in {figures}", soft_wrap=True, markup=False)


def _appraisal(
    record: RunRecord, num_seeds: int | None, threads: int, advance: Callable[[float], None]
) -> Appraisal:
    """On report seeds, as far as the problem has them and the run has a policy."""
    from pointsman.report.appraisal import untrained

    found = _judged(record, num_seeds, threads, advance)
    best = record.log.facts.evaluation.get("best") or {}
    return untrained(found, record.name) if best.get("update") == 0 else found


def _judged(
    record: RunRecord, num_seeds: int | None, threads: int, advance: Callable[[float], None]
) -> Appraisal:
    from pointsman.evaluation.problem import complete, find_problem
    from pointsman.report.appraisal import by_evaluations
    from pointsman.report.run import baseline_of

    try:
        if record.config and record.checkpoint is not None:
            section = complete(record.config["env"])
            appraise = find_problem(section["kind"]).appraise
            if appraise is not None:
                found: Appraisal = appraise(section, record.folder, num_seeds, threads, advance)
                return found
    except InputError as error:
        record.problems.append(f"no judgement on report seeds ({error})")
    return by_evaluations(record.name, record.log.facts.evaluation, baseline_of(record))


def _looks(record: RunRecord, advance: Callable[[float], None]) -> Section | None:
    from pointsman.evaluation.problem import complete
    from pointsman.inference.checkpoint import load_checkpoint
    from pointsman.report.looks import looks_section

    if record.checkpoint is None or not record.config:
        record.problems.append("no checkpoint to look into")
        return None
    try:
        checkpoint = load_checkpoint(record.checkpoint, "RUN")
        return looks_section(complete(record.config["env"]), checkpoint, advance)
    except InputError as error:
        record.problems.append(f"what the policy looks at ({error})")
        return None
