from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from pointsman.training.going_back import GoingBack, GoingBackSpec
from pointsman.training.ranks import Ranks
from pointsman.training.trainer import Trainer

from .fakes import fake_config


def evaluation(score: float) -> dict[str, float]:
    return {"eval_score": score}


def share_that_goes_back(spec: GoingBackSpec, fall: float = 0.0) -> float:
    """Of 50 runs with 40 evaluations, whose scores are noise, and from the tenth on fall a little each."""
    num_back = 0
    for seed in range(50):
        rng, back = np.random.default_rng(seed), GoingBack(spec)
        for update in range(40):
            back.after_evaluation(
                update, evaluation(0.1 - fall * max(0, update - 10) + rng.normal(scale=0.007))
            )
        num_back += back.state.times > 0
    return num_back / 50


def test_noise_is_not_a_fall() -> None:
    assert share_that_goes_back(GoingBackSpec()) < 0.2
    assert share_that_goes_back(GoingBackSpec(), fall=0.002) > 0.95
    assert share_that_goes_back(GoingBackSpec(deviations=0.0)) > 0.9  # one that knows of no noise


def test_a_fall_is_noticed_after_three_evaluations_and_steps_get_smaller() -> None:
    back = GoingBack(GoingBackSpec())
    assert back.after_evaluation(10, evaluation(0.12)) == (True, [])
    told = [back.after_evaluation(20 + k, evaluation(0.11 - 0.01 * k))[1] for k in range(3)]
    assert [len(events) for events in told] == [0, 0, 1]
    assert "back to the weights of update 10" in str(told[2][0])
    assert back.factor == 0.5 and back.state.times == 1
    other = GoingBack(GoingBackSpec())
    other.load_state_dict(json.loads(json.dumps(back.state_dict())))
    for one in (back, other):
        for k in range(3 * 5):
            one.after_evaluation(30 + k, evaluation(0.05))
        assert one.factor == 0.1 and one.state.times == 6
        assert one.after_evaluation(60, evaluation(0.13)) == (True, [])
    assert GoingBack(None).after_evaluation(1, evaluation(0.5)) == (False, [])


def test_the_trainer_takes_the_best_weights_back() -> None:
    trainer = Trainer(fake_config(run={"average_updates": 4}), Ranks())
    trainer.prepare()
    trainer.step(0.0)
    for score in (0.16, 0.17, 0.18, 0.19, 0.2):
        trainer.judged(evaluation(score))
    best = {name: tensor.clone() for name, tensor in trainer.network.state_dict().items()}
    served = {name: array.copy() for name, array in trainer.checkpoint().arrays.items()}
    for _ in range(3):
        metrics, _ = trainer.step(0.5)
        news = trainer.judged(evaluation(0.1))
    rate = metrics["lr"]
    assert len(news) == 1
    for name, tensor in trainer.network.state_dict().items():
        torch.testing.assert_close(tensor, best[name], rtol=0, atol=0)
    for name, array in trainer.checkpoint().arrays.items():
        np.testing.assert_array_equal(array, served[name])
    metrics, _ = trainer.step(0.5)
    assert metrics["lr"] == pytest.approx(0.5 * rate)
    assert metrics["times_back"] == 1
    # And learning goes on from there.
    assert any(not torch.equal(tensor, best[name]) for name, tensor in trainer.network.state_dict().items())
