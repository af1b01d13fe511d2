"""What an attention network looks at: how much of its attention goes from which entity to which.

Entities have no order, so slot by slot the mean says nothing. Here each decision's entities stand in the
order in which the policy prefers them, and the mean over decisions tells whether the favourite looks at its
rivals.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from pointsman.evaluation.explain import Network, RecordedDecisions
from pointsman.inference.checkpoint import Checkpoint
from pointsman.training.networks import TensorObservation, from_checkpoint


def attention_by_preference(
    checkpoint: Checkpoint, decisions: RecordedDecisions
) -> NDArray[np.float64] | None:
    """[heads, n, n]: rows look at columns, the preferred entity first; None without attention.

    Of the decisions with the most frequent number n of entities.
    """
    network = from_checkpoint(checkpoint)
    counts = np.bincount(decisions.num_entities)
    num_entities = int(counts.argmax())
    some = decisions.rows(decisions.num_entities == num_entities)
    room = some.entities.shape[1]
    mask = np.broadcast_to(np.arange(room) < num_entities, (len(some), room)).copy()
    privileged = np.zeros((len(some), len(checkpoint.space.privileged_features)), np.float32)
    seen = TensorObservation(
        *map(torch.from_numpy, (some.entities, some.context, mask, some.legal, privileged))
    )
    with torch.inference_mode():
        network.act(seen, torch.from_numpy(some.state) if network.memory is not None else None)
    if network.last_attention is None:
        return None
    weights = network.last_attention.double().numpy()[:, :, :num_entities, :num_entities]
    logits = Network(checkpoint).logits(some)[0][:, 1 : num_entities + 1]
    order = np.argsort(-logits, axis=1, kind="stable")  # [D, n]
    weights = np.take_along_axis(weights, order[:, None, :, None], axis=2)
    weights = np.take_along_axis(weights, order[:, None, None, :], axis=3)
    mean: NDArray[np.float64] = weights.mean(axis=0)
    return mean
