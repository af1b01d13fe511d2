"""`pointsman config`: every key of a configuration file, from the models that read it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from pointsman.cli.completion import config_files, config_keys
from pointsman.cli.console import print_json, stdout
from pointsman.cli.lists import plain_table
from pointsman.cli.options import AsJson
from pointsman.errors import InputError

KEY_WIDTH = 28


def config(
    key: Annotated[
        str | None,
        typer.Argument(
            metavar="KEY",
            help="A key, or the beginning of some: workload.arrivals",
            autocompletion=config_keys,
        ),
    ] = None,
    of: Annotated[
        str | None,
        typer.Option(
            "--of",
            metavar="FILE",
            help="cluster (default), serve or train: whose keys to list.",
            autocompletion=config_files,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain the keys of configuration files: what each means, what it may be, and what it is if left out.

    Example: pointsman config workload.arrivals
    """
    from pointsman.cli.keys import FILES, find_keys, keys_of

    if of is not None and of not in FILES:
        raise InputError("--of", of, "unknown file", f"one of {', '.join(FILES)}")
    found = list(keys_of(of or "cluster")) if key is None else find_keys(key, [of] if of else [*FILES])
    if as_json:
        print_json([one._asdict() for one in found])
        return
    table = plain_table("key", "may be", "default", "meaning")
    for one in found:
        name = f"{_in_lines(one.key)} ({one.kind})" if one.kind else _in_lines(one.key)
        table.add_row(name, *map(escape, (one.values, one.default, one.meaning)))
    stdout().print(table)


def _in_lines(key: str) -> str:
    """A long key is broken behind its dots, so that every name in it stays whole."""
    *sections, name = key.split(".")
    lines = [""]
    for part in [*(f"{section}." for section in sections), name]:
        if len(lines[-1]) + len(part) > KEY_WIDTH and lines[-1]:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)
