from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.cli.conftest import cli

__all__ = ["cli"]

TIME_SCALE = 20


@pytest.fixture(scope="session")
def servers() -> Iterator[list[str]]:
    """Two emulated ones of unequal speed, twenty times as fast as real ones."""
    options = ["--devices", "a100,a10", "--time-scale", str(TIME_SCALE), "--port", "0", "--admin-port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pointsman", "emulate", *options], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    urls: list[str] = []
    try:
        for line in process.stderr:
            if "faults:" in line:
                break
            if "replica" in line:
                urls.append(line.split()[0])
        assert len(urls) == 2
        yield urls
    finally:
        process.terminate()
        process.wait(10)
        process.stderr.close()
