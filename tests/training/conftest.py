"""Training is tested on one thread: the same results on any machine, and shared cores do not spin."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
