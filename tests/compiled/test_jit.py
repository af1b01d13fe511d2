"""What is compiled together, and that a change of any source it was compiled from makes it stale."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numba
import pytest
from llvmlite.binding import Linkage

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


@jit.kernel
def _too_large_to_inline(x):  # type: ignore[no-untyped-def]
    total = 0.0
    for k in range(int(x)):
        total += math.sin(x * k) + math.cos(x * k) + math.tan(x * k) + math.atan(x * k) + math.exp(x - k)
        total += math.sinh(x - k) + math.cosh(x - k) + math.tanh(x - k) + math.erf(x - k) + math.log(x + k)
    for k in range(int(x)):
        total *= math.sin(x * k) + math.cos(x * k) + math.tan(x * k) + math.atan(x * k) + math.exp(x - k)
        total *= math.sinh(x - k) + math.cosh(x - k) + math.tanh(x - k) + math.erf(x - k) + math.log(x + k)
    return total


@pytest.mark.skipif(jit.IS_INTERPRETED, reason="nothing is compiled")
def test_an_entry_point_shares_no_code_with_what_was_compiled_before() -> None:
    """Else a call would go there: to code that was never optimised, in the process that compiles it."""

    @numba.njit(numba.float64(numba.float64))
    def twice(x):  # type: ignore[no-untyped-def]
        return _too_large_to_inline(x) + _too_large_to_inline(x + 1.0)

    compiled: Any = twice.overloads[twice.signatures[0]]
    defined = [one for one in compiled.library._final_module.functions if not one.is_declaration]
    assert any("large" in one.name for one in defined)
    assert not [one.name for one in defined if one.linkage == Linkage.linkonce_odr]
    once = _too_large_to_inline.py_func
    assert twice(2.5) == pytest.approx(once(2.5) + once(3.5), rel=1e-12)
