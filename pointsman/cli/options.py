"""Options that several commands share, and the configurations they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pointsman.errors import InputError

if TYPE_CHECKING:
    from pointsman.config import Config

ConfigFile = Annotated[
    Path | None,
    typer.Argument(metavar="CONFIG.yaml", help="Configuration; paths in it start at its folder."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change the configuration, e.g. workload.requests=5000."),
]
ScenarioName = Annotated[
    str | None, typer.Option("--scenario", metavar="NAME", help="A named scenario instead of a file.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def resolve(file: Path | None, scenario: str | None, overrides: list[str]) -> Config:
    """The one configuration meant; the default scenario where neither file nor name is given."""
    from pointsman.config import load_config
    from pointsman.evaluation.scenarios import DEFAULT, find_scenario

    if file is not None:
        if scenario is not None:
            raise both_given(file)
        return load_config(file, overrides)
    found = find_scenario(scenario or DEFAULT)
    config = found.config(0, overrides)
    # Some scenarios depend on their seed.
    return config if config.seed == 0 else found.config(config.seed, overrides)


def both_given(file: Path) -> InputError:
    return InputError("CONFIG", str(file), "given beside --scenario", "name one of the two")


def base_dir(file: Path | None) -> Path | None:
    """Where relative paths of the configuration start; None = here."""
    return file.parent if file is not None else None
