from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import typer
from numba.core import event

from pointsman import __version__
from pointsman.cli.console import compilation_announced, notices_as_lines, say
from pointsman.errors import PointsmanWarning
from pointsman.simulator.run import run

from .conftest import Cli
from .factories import ROOT

COMMANDS = ("simulate", "compare", "evaluate", "tune", "capacity", "scenarios", "policies", "hardware")


def start(*arguments: str) -> subprocess.Popen[str]:
    """As a process of its own, from the checkout."""
    command = [sys.executable, "-m", "pointsman", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


def test_version(cli: Cli) -> None:
    result = cli("--version")
    assert (result.status, result.out) == (0, f"pointsman {__version__}\n")


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_lists_the_commands(cli: Cli, arguments: tuple[str, ...]) -> None:
    result = cli(*arguments)
    assert result.status == 0
    for command in COMMANDS:
        assert command in result.out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(cli: Cli, command: str) -> None:
    result = cli(command, "--help")
    assert result.status == 0
    assert f"Example: pointsman {command}" in " ".join(result.out.split())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("compar",), "Did you mean 'compare'?"),
        (("simulate", "--sett", "a=b"), "No such option: --sett"),
        (("simulate", "a.yaml", "b.yaml"), "b.yaml"),
        (("plan", "--share", "x"), "--share = 'x': must be a number; see `pointsman plan --help`"),
        (("plan", "--seeds=1", "--seeds=many"), "--seeds = 'many': must be a whole number"),
        (("doctor", "--timeout", "0"), "--timeout = '0': must be greater than or equal to 0.1"),
        (("sweep", "--search"), "Option '--search' requires an argument; see `pointsman sweep --help`"),
    ],
)
def test_usage_errors_are_one_line(cli: Cli, arguments: tuple[str, ...], text: str) -> None:
    result = cli(*arguments)
    assert result.status == 2
    assert text in result.err
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1


def test_lines_are_never_wrapped_nor_marked_up(capsys: pytest.CaptureFixture[str]) -> None:
    line = "error: [bold]x[/bold] = [1, 2] " + "very " * 100 + "long"
    say(line)
    assert capsys.readouterr().err == line + "\n"


def test_each_warning_is_said_once_and_others_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(DeprecationWarning, match="other"), notices_as_lines():
        for text in ("first", "second", "first"):
            warnings.warn(PointsmanWarning(text), stacklevel=1)
        warnings.simplefilter("always")
        warnings.warn("other", DeprecationWarning, stacklevel=1)
    assert capsys.readouterr().err == "warning: first\nwarning: second\n"


def test_a_terminal_without_unicode_is_no_traceback() -> None:
    command = [sys.executable, "-m", "pointsman", "scenarios"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"4 ? A100-80" in done.stdout


def test_paragraphs_of_help_are_broken_at_the_margin_alone(cli: Cli) -> None:
    out = cli("train", "--help").out
    lines = [line.strip() for line in out.partition("Arguments")[0].splitlines()]
    paragraphs = [part.split("\n") for part in "\n".join(lines).split("\n\n")]
    short = [line for part in paragraphs for line in part[:-1] if 0 < len(line) < 60]
    assert short == []


def test_help_shows_no_types_of_python(cli: Cli) -> None:
    """Typer would show `--json <bool>`, `--port <int>` and `CONFIG.yaml <list[Path]>`."""
    from pointsman.cli.main import app

    names = [*typer.main.get_command(app).commands]  # type: ignore[attr-defined]
    assert len(names) == 24
    for arguments in ((), *((name,) for name in names)):
        found = cli(*arguments, "--help").out
        assert "Show this message" in found and not re.search(r"<\w+[\[> ]", found), found


def test_compilation_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    with compilation_announced():
        with event.trigger_event("numba:compile", data={"dispatcher": print}):
            pass
        assert capsys.readouterr().err == ""
        with event.trigger_event("numba:compile", data={"dispatcher": run}):
            assert capsys.readouterr().err == "compiling once, for about 30 s…\n"


def test_help_does_not_load_the_simulator() -> None:
    check = (
        "import sys\nfrom pointsman.cli.main import main\nmain(['--help'])\n"
        "sys.exit(any(name in sys.modules for name in ('numba', 'numpy', 'polars', 'resvg_py', 'pydantic')))"
    )
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("arguments", [("policies", "--json"), ("policies",), ("compare", "--help")])
def test_a_reader_that_stops_reading_is_no_error(arguments: tuple[str, ...]) -> None:
    process = start(*arguments)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 0


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("pointsman comp", "compare"),
        ("pointsman plan --scenario stead", "steady-chat"),
        ("pointsman compare --policies random,late", "random,late-binding"),
        ("pointsman evaluate defa", "default"),
        ("pointsman tune --suite gen", "generalisation"),
        ("pointsman serve --policy late", "late-binding"),
        ("pointsman emulate --devices A100-80,H1", "A100-80,H100"),
        ("pointsman config workload.arr", "workload.arrivals"),
    ],
)
def test_completion_in_a_shell(words: str, completed: str) -> None:
    variables = {"_POINTSMAN_COMPLETE": "complete_bash", "COMP_WORDS": words}
    variables["COMP_CWORD"] = str(len(words.split()) - 1)
    command = [sys.executable, "-m", "pointsman"]
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    assert completed in done.stdout.split()


NAMES = ("NAME", "POLICY", "KEY", "A,B,C", "A,B,…")


def test_whatever_takes_a_name_offers_the_names_there_are() -> None:
    from pointsman.cli.main import app

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for command in commands.values():
        with command.make_context(command.name, [], resilient_parsing=True) as context:
            for one in command.params:
                offered = one.shell_complete(context, "")
                assert bool(offered) or one.metavar not in NAMES, f"{command.name} {one.opts[0]}"


# What an option of this name is in every command that has it, whatever its help says.
GRAMMAR = {
    "--scenario": "NAME",
    "--suite": "NAME",
    "--seeds": "N",
    "--set": "KEY=VALUE",
    "--threads": "N",
    "--objective": "NAME",
    "--policies": "A,B,C",
    "--minutes": "M",
    "--steps": "N",
}


def test_commands_share_one_grammar() -> None:
    """What is judged or trained on is given to every command as CONFIG.yaml or as --scenario; an option takes
    the same wherever it is."""
    import typer.main

    from pointsman.cli.main import app

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        parameters = {option: one for one in command.params for option in one.opts}
        arguments = [one.metavar for one in command.params if one.param_type_name == "argument"]
        if "CONFIG.yaml" in arguments or "--scenario" in parameters:
            assert {"--scenario", "--set"} <= parameters.keys() and "CONFIG.yaml" in arguments, name
            is_of_several = next(one for one in command.params if one.metavar == "CONFIG.yaml").nargs == -1
            assert ("--suite" in parameters) is is_of_several, name
        if "--backend" in parameters and "--set" in parameters:
            assert "--settings" in parameters, name
        if "--out" in parameters:  # one folder of results, or one file that other commands read
            assert parameters["--out"].metavar in ("DIR", "FILE.yaml"), name
        assert "--config" not in parameters, name
        for option, metavar in GRAMMAR.items():
            if option in parameters:
                assert parameters[option].metavar == metavar, f"{name} {option}"


def test_a_table_that_does_not_fit_is_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than words that are broken anywhere."""
    from rich.console import Console

    from pointsman.cli.lists import plain_table

    table = plain_table("policy", "requests/s", "change", right=["requests/s"])
    table.add_row("least-outstanding", "50.9", r"[red]+7 % \[6, 12][/red]")
    wide, narrow = (Console(width=width, highlight=False) for width in (60, 30))
    with wide.capture() as capture:
        wide.print(table)
    assert "least-outstanding        50.9" in capture.get()
    middle = Console(width=38, highlight=False)  # two words of the last column go into the next line
    with middle.capture() as capture:
        middle.print(table)
    lines = capture.get().splitlines()
    assert lines[2].split() == ["least-outstanding", "50.9", "+7", "%"]
    assert lines[3].split() == ["[6,", "12]"]
    assert max(map(len, lines)) <= 38
    with narrow.capture() as capture:
        narrow.print(table)
    assert capture.get().split("\n") == [
        "least-outstanding",
        "  requests/s  50.9",
        "  change      +7 % [6, 12]",
        "",
    ]


def test_ctrl_c_ends_cleanly(tmp_path: Path) -> None:
    out = tmp_path / "new" / "requests.csv"
    process = start("simulate", "--set", "workload.requests=50000000", "--requests", str(out))
    deadline = time.monotonic() + 60
    while not out.parent.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    try:
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert stdout == ""
    assert "Traceback" not in stderr
    assert list(tmp_path.iterdir()) == []
