from __future__ import annotations

import numpy as np
import pytest

from pointsman.workload.workload import Workload, clip_tokens


@pytest.mark.parametrize(
    ("tokens", "clipped"),
    [
        ((4000, 96), (4000, 96)),
        ((4000, 97), (3999, 97)),
        ((5000, 200), (3896, 200)),
        ((0, 0), (1, 1)),
        ((10, 5000), (1, 4095)),
        ((10, 4096), (1, 4095)),
    ],
)
def test_clip_tokens_takes_the_excess_out_of_the_prompt(
    tokens: tuple[int, int], clipped: tuple[int, int]
) -> None:
    prefill, decode = (np.array([count], dtype=np.int32) for count in tokens)
    clip_tokens(prefill, decode, 4096)
    assert (prefill[0], decode[0]) == clipped


def test_columns_of_unequal_length_are_refused() -> None:
    tokens = np.ones(2, dtype=np.int32)
    with pytest.raises(AssertionError, match="request_id"):
        Workload(np.zeros(2), tokens, tokens, tokens, np.arange(3))
