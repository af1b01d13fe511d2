"""The command `pointsman`.

Exit status: 0 done, 1 a training run went wrong or `doctor` found something to fix, 2 bad input (one line on
stderr says what and how to correct it), 130 interrupted. Heavy imports (numba, polars, torch) happen inside
commands, so that --help answers at once.
"""

from __future__ import annotations

import inspect
import io
import itertools
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from pointsman import __version__
from pointsman.cli import (
    audit,
    calibrate,
    capacity,
    compare,
    config,
    demo,
    diagnose,
    doctor,
    emulate,
    epp,
    evaluate,
    explain,
    lists,
    plan,
    profile,
    report,
    serve,
    simulate,
    sweep,
    train,
    tune,
    watch,
)
from pointsman.cli.console import notices_as_lines, say
from pointsman.errors import InputError, missing_extra

# Newer versions of typer carry their own click: take the class from where this one has it.
_ClickError: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)


def _without_types(params: list[Any]) -> list[Any]:
    """Typer would show `<bool>` after a switch and `<list[Path]>` after an argument."""
    for one in params:
        if getattr(one, "is_flag", False) or isinstance(one, TyperArgument):
            one.display_type_rich = lambda ctx: None
    return params


def _unwrapped(text: str) -> str:
    """Paragraphs in one line each: typer would break them where the source does, and again at the margin."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(one if one.startswith("\b") else " ".join(one.split("\n")) for one in paragraphs)


class _Command(TyperCommand):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.help = _unwrapped(self.help or "")

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class _Commands(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def invoke(self, context: Any) -> Any:
        try:
            return super().invoke(context)
        except KeyboardInterrupt:  # typer makes status 130 of it, without a word
            say("interrupted")
            raise


app = typer.Typer(
    cls=_Commands,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS = {
    "Simulate and compare": (
        *(compare.compare, simulate.simulate, evaluate.evaluate, plan.plan, capacity.capacity),
    ),
    "Train": (
        *(train.train, watch.watch, report.report, explain.explain, diagnose.diagnose),
        *(tune.tune, sweep.sweep, audit.audit_features),
    ),
    "Serve": (
        *(serve.serve, epp.epp, doctor.doctor, calibrate.calibrate, profile.profile),
        *(emulate.emulate, demo.demo_serve),
    ),
    "Look up": (lists.scenarios, lists.policies, lists.hardware, config.config),
}
for _panel, _functions in _COMMANDS.items():
    for _function in _functions:
        app.command(cls=_Command, rich_help_panel=_panel)(_function)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"pointsman {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def pointsman(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Find out which routing policy serves your LLM traffic best, train one of your own, and serve with it.

    \b
    pointsman compare my-cluster.yaml --out results
    pointsman serve --backend http://a:8000 --backend http://b:8000
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows no × shows a question mark
    with notices_as_lines():
        try:
            arguments = _with_address(sys.argv[1:] if arguments is None else arguments)
            status = app(args=arguments, prog_name="pointsman", obj=arguments, standalone_mode=False)
            sys.stdout.flush()
            return int(status or 0)
        except InputError as error:
            say(f"error: {error}")
            return 2
        except ModuleNotFoundError as error:
            missing = missing_extra(error)
            if missing is None:
                raise
            say(f"error: {missing}")
            return 2
        except _ClickError as error:
            return _usage_error(error, list(arguments or ()))
        except BrokenPipeError:
            # Whoever read our output has seen enough. Nothing may be flushed into the pipe at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except OSError as error:
            if error.filename is None:
                raise
            # A name that no file can have, a disk that is full, a folder that is not ours.
            reason = (error.strerror or type(error).__name__).lower()
            say(f"error: {InputError('file', str(error.filename), reason, 'check the path')}")
            return 2
        except SystemExit:  # so rich and typer end where a pipe is closed, and completion when it is done
            return 0
        except (KeyboardInterrupt, typer.Abort):
            say("interrupted")
            return 130


def _with_address(arguments: Sequence[str]) -> list[str]:
    """`--ray` may stand alone, which typer does not know of."""
    following = [*arguments, "-"][1:]
    return [
        "--ray=auto" if one == "--ray" and after.startswith("-") else one
        for one, after in zip(arguments, following, strict=True)
    ]


# What typer says in more words.
_PLAINLY = {
    "Input should be a valid integer, unable to parse string as an integer": "must be a whole number",
    "Input should be a valid number, unable to parse string as a number": "must be a number",
    "Input should be": "must be",
}


def _usage_error(error: BaseException, arguments: Sequence[str]) -> int:
    message = " ".join(str(getattr(error, "format_message", error.__str__)()).split())
    option, value = _given(getattr(error, "param", None), arguments)
    if value is not None:
        message = " ".join(str(getattr(error, "message", message)).split())
        for theirs, ours in _PLAINLY.items():
            message = message.replace(theirs, ours)
        message = f"{option} = {value!r}: {message}"
    named = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    context = getattr(error, "ctx", None)  # there is none where an option lacks its value
    command = context.command_path if context is not None else f"pointsman {named}".strip()
    say(f"error: {message.rstrip('.')}; see `{command} --help`")
    return 2


def _given(param: Any, arguments: Sequence[str]) -> tuple[str, str | None]:
    """The option as it was written, and its value: the last one counts."""
    options = getattr(param, "opts", ())
    for one, after in reversed(list(itertools.pairwise(arguments))):
        if one in options:
            return one, after
    for one in reversed(arguments):
        option, sign, value = one.partition("=")
        if sign and option in options:
            return option, value
    return "", None
