"""The command line, called in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from pointsman.cli.main import main


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is not JSON")

        return json.loads(self.out, parse_constant=refuse)


Cli = Callable[..., Result]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def call(*arguments: object) -> Result:
        status = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        err = "".join(line for line in err.splitlines(True) if not line.startswith("compiling "))
        return Result(status, out, err)

    return call
