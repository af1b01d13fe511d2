from __future__ import annotations

from pathlib import Path

from pointsman import training
from pointsman.simulator.jit import kernel_digest
from pointsman.training import flat, losses, normalisers, pooled, pooled_gradients
from pointsman.training.jit import KERNEL_FILES


def test_a_change_in_any_file_with_kernels_makes_all_of_them_stale() -> None:
    folder = Path(training.__path__[0])
    with_kernels = {path.name for path in folder.glob("*.py") if "import Array, compiled" in path.read_text()}
    assert with_kernels <= {Path(name).name for name in KERNEL_FILES}
    assert all((folder.parent / name).is_file() for name in KERNEL_FILES)
    kernels = {
        name: kernel
        for module in (flat, losses, normalisers, pooled, pooled_gradients)
        for name, kernel in vars(module).items()
        if hasattr(getattr(kernel, "_cache", None), "_cache_file")
    }
    assert len(kernels) > 5
    for name, kernel in kernels.items():
        assert kernel._cache._cache_file._source_stamp == kernel_digest(KERNEL_FILES), name
