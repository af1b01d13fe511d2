"""A cached kernel is stale as soon as any source that it was compiled from has changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pointsman.compiled import jit
from pointsman.emulator import kernels
from pointsman.jobs import rollout
from pointsman.simulator import run
from pointsman.training import pooled

PACKAGE = Path(jit.__file__).parents[1]


@pytest.mark.parametrize(
    ("module", "part", "is_part"),
    [
        ("pointsman.simulator.run", "simulator/schedulers.py", True),
        ("pointsman.simulator.run", "routing/signals.py", True),
        ("pointsman.simulator.run", "inference/network.py", True),
        ("pointsman.simulator.run", "jobs/kernel.py", False),
        ("pointsman.jobs.rollout", "jobs/observation.py", True),
        ("pointsman.jobs.rollout", "compiled/memory.py", True),
        ("pointsman.jobs.rollout", "simulator/loop.py", False),
        ("pointsman.emulator.kernels", "simulator/replica.py", True),
        ("pointsman.training.pooled_gradients", "training/pooled.py", True),
    ],
)
def test_a_change_in_what_is_compiled_into_it_makes_a_kernel_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, part: str, is_part: bool
) -> None:
    shutil.copytree(PACKAGE, tmp_path / "pointsman", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(jit, "_ROOT", tmp_path)
    before = jit.kernel_digest.__wrapped__(module)
    with (tmp_path / "pointsman" / part).open("a") as file:
        file.write("# another\n")
    assert (jit.kernel_digest.__wrapped__(module) != before) == is_part


def test_entry_points_are_cached_under_the_digest_of_their_module() -> None:
    for module in (run, rollout, kernels, pooled):
        entries = [
            one for one in vars(module).values() if hasattr(getattr(one, "_cache", None), "_cache_file")
        ]
        assert entries
        for one in entries:
            stamp = one._cache._cache_file._source_stamp
            assert stamp == jit.kernel_digest(one.py_func.__module__)
