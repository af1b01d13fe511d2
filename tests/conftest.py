"""For all tests: fixed examples, and a cache of their own."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

# A shell that runs tests in the background lets them ignore Ctrl-C, and so would every command they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Compiled kernels make single examples slow at first, so no deadline. `derandomize`: the same examples in
# every run; `--hypothesis-profile=thorough` draws new ones, many more of them.
PHASES = (Phase.explicit, Phase.generate, Phase.shrink)
settings.register_profile(
    "pointsman", deadline=None, derandomize=True, database=None, max_examples=200, phases=PHASES
)
settings.register_profile(
    "thorough",
    deadline=None,
    database=None,
    phases=PHASES,
    max_examples=5000,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("pointsman")


@pytest.fixture(scope="session")
def shared_cache_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache-home")


@pytest.fixture(autouse=True)
def own_cache_home(shared_cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache; within a session, capacities are found once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared_cache_home))
