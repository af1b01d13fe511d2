"""Training is tested on one thread: the same results on any machine, and shared cores do not spin."""

from __future__ import annotations

from pointsman.training.passes import use_one_thread

use_one_thread()
