"""Every test draws the same noise, whichever ran before it."""

from __future__ import annotations

import numpy as np
import pytest

from . import test_rules


@pytest.fixture(autouse=True)
def _same_noise() -> None:
    test_rules.RNG.bit_generator.state = np.random.default_rng(11).bit_generator.state
