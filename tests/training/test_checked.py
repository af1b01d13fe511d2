"""Training with learned warm-up, shadow and teacher, each access to memory checked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from routing.learned import make_checkpoint

from pointsman.inference.checkpoint import save_checkpoint

from . import checked


def test_a_learned_warmup_policy_reaches_no_memory_but_its_own(tmp_path: Path) -> None:
    path = tmp_path / "tiny.safetensors"
    save_checkpoint(path, make_checkpoint(kind="attention+gru", heads=2))
    # Compiled first: it finds the capacities, which take long without compilation and are remembered.
    assert checked.train_a_little(str(path)) == 8
    done = subprocess.run(
        [sys.executable, "-W", "error", checked.__file__, str(path)],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "8\n"
