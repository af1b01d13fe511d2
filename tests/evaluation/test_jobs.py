"""Policies judged in the compiled simulator decide as they do in the environment that they are trained in."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from pointsman.envs import jobs as envs
from pointsman.envs.jobs import JobsEnv, JobsSpec, make_clusters
from pointsman.errors import InputError
from pointsman.evaluation import jobs as evaluation
from pointsman.evaluation.jobs import JobsJudge, JobsSelection
from pointsman.experiments.scenarios import REPORT_SEEDS, SELECTION_SEEDS
from pointsman.inference.checkpoint import Checkpoint, NetworkSpec
from pointsman.jobs.observation import job_space
from pointsman.jobs.rollout import decide_all
from pointsman.jobs.state import GOING_ON
from pointsman.jobs.workload import draw_jobs
from pointsman.spec import parse_spec
from pointsman.training.config import load_train_config
from pointsman.training.losses import policy_logp
from pointsman.training.networks import TensorObservation, build_network, from_checkpoint, to_checkpoint

torch.set_num_threads(1)

SMALL: dict[str, Any] = {"num_gpus": 4, "window": 6, "workload": {"num_jobs": 25}}
DEADLINES = {"num_jobs": 25, "deadline_slack": [2, 20]}


def make_spec(**fields: Any) -> JobsSpec:
    return parse_spec(JobsSpec, SMALL | fields, "env")


@cache
def untrained(
    kind: str = "pooled", seed: int = 0, features: str = "full", has_deadlines: bool = False
) -> Checkpoint:
    """With weights large enough to prefer something, and to start a job where it can."""
    spec = make_spec(features=features)
    hint = {"hint": "missing", "hint_strength": 20.0} if features == "full" else {}
    network_spec = NetworkSpec.model_validate({"kind": kind, "width": 8, **hint})
    space = job_space(spec.num_gpus, spec.window, features == "full", has_deadlines)
    network = build_network(network_spec, space, seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.startswith("head."):
                parameter.mul_(20.0)
    return to_checkpoint(network, {})


def play_in_torch(
    checkpoint: Checkpoint, spec: JobsSpec, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> dict[int, float]:
    """Returns by seed, through the environment and the network that is trained."""
    to_draw = iter(seeds)
    monkeypatch.setattr(
        envs, "draw_jobs", lambda workload, gpus, _: draw_jobs(workload, gpus, next(to_draw, 0))
    )
    env, network = JobsEnv(spec, len(seeds)), from_checkpoint(checkpoint)
    seen = env.reset(0)
    state = network.initial_state(len(seeds))
    found: dict[int, float] = {}
    while len(found) < len(seeds):
        with torch.inference_mode():
            logits, state = network.act(TensorObservation.from_numpy(seen), state)
        step = env.step(logits.argmax(-1).numpy())
        for episode in step.episodes:
            found.setdefault(seeds[episode.env], episode.episode_return)
        seen = step.observation
    return found


@pytest.mark.parametrize("kind", ["pooled", "attention", "attention+gru", "mlp"])
@pytest.mark.parametrize("features", ["original", "full"])
def test_a_network_decides_alike_in_the_kernel_and_in_training(
    kind: str, features: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, checkpoint = make_spec(features=features, max_steps=200), untrained(kind, features=features)
    seeds = range(12)
    ours = JobsJudge(spec).play(checkpoint, seeds)
    theirs = play_in_torch(checkpoint, spec, seeds, monkeypatch)
    assert ours["return"] == pytest.approx([theirs[seed] for seed in seeds], abs=1e-9)
    assert len(np.unique(ours["return"])) == 12
    assert not ours["invalid_frac"].any()


def test_it_decides_alike_where_jobs_have_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, checkpoint, seeds = make_spec(workload=DEADLINES), untrained(has_deadlines=True), range(12)
    ours = JobsJudge(spec).play(checkpoint, seeds)
    theirs = play_in_torch(checkpoint, spec, seeds, monkeypatch)
    assert ours["return"] == pytest.approx([theirs[seed] for seed in seeds], abs=1e-9)
    assert 0 < ours["missed_deadlines"].mean() < 1


def test_a_policy_that_knows_no_deadlines_serves_jobs_that_have_some_and_the_other_way_round() -> None:
    plain, with_deadlines = make_spec(), make_spec(workload=DEADLINES, deadline_price=0.0)
    blind, seeing = untrained(), untrained(has_deadlines=True)
    before, after = (JobsJudge(spec).play(blind, range(8)) for spec in (plain, with_deadlines))
    assert np.array_equal(before["return"], after["return"])
    assert "missed_deadlines" in after and "missed_deadlines" not in before
    one, other = (JobsJudge(spec).play(seeing, range(8))["return"] for spec in (plain, with_deadlines))
    assert not np.allclose(one, other)


def test_no_ops_are_those_of_choice_and_illegal_actions_are_counted() -> None:
    clusters = make_clusters(make_spec(), 1)
    clusters.load(0, draw_jobs(make_spec().workload, 4, 0), 0)
    num_steps = num_choices = num_noops = num_illegal = 0
    rng, sim = np.random.default_rng(0), clusters.sims[0]
    while sim.status == GOING_ON:
        gpus = clusters.jobs[0]["gpus"][clusters.window[0, : sim.num_window]]
        is_fitting = gpus <= sim.num_idle
        action = int(rng.integers(sim.num_window + 2))
        is_legal = action == 0 or (action <= len(gpus) and is_fitting[action - 1])
        num_steps, num_illegal = num_steps + 1, num_illegal + (not is_legal)
        num_choices += is_fitting.any()
        num_noops += is_fitting.any() and (action == 0 or not is_legal)
        decide_all(clusters.sims, np.array([action]), False, 0, 1)
    found = evaluation.measure(clusters)
    assert 0 < num_noops < num_choices < num_steps
    assert found["noop_frac"] == pytest.approx(num_noops / num_choices)
    assert found["invalid_frac"] == pytest.approx(num_illegal / num_steps)
    assert num_illegal > 0


def test_who_starts_whatever_fits_has_no_no_ops() -> None:
    """Half of the steps leave no choice: they are not counted."""
    judge = JobsJudge(make_spec())
    assert not judge.play("sjf", range(8))["noop_frac"].any()
    assert judge.play("easy-backfill", range(8))["noop_frac"].mean() > 0


def test_another_network_decides_otherwise() -> None:
    judge = JobsJudge(make_spec())
    one, other = (judge.play(untrained(seed=seed), range(12))["return"] for seed in (0, 1))
    assert not np.allclose(one, other)


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = JobsJudge(make_spec())
    on_two = judge.play(untrained(), range(9))
    monkeypatch.setattr(evaluation, "NUM_THREADS", 1)
    on_one = judge.play(untrained(), range(9))
    assert all(np.array_equal(on_two[name], on_one[name]) for name in on_two)


def test_other_features_are_refused() -> None:
    with pytest.raises(InputError, match="mine = 'entity_features': was trained on other entity features"):
        JobsJudge(make_spec(features="original")).play(untrained(), range(2), "mine")
    with pytest.raises(
        InputError, match=r"mine = 5: was trained with 4 GPUs, .* train with this num_gpus, or"
    ):
        JobsJudge(make_spec(num_gpus=5, lookahead="per_gpu")).play(untrained(), range(2), "mine")
    with pytest.raises(InputError, match="an mlp for 6 entities"):
        JobsJudge(make_spec(window=7)).play(untrained("mlp"), range(2))
    assert len(JobsJudge(make_spec(window=9)).play(untrained(), range(2))["return"]) == 2


@pytest.mark.parametrize("kind", ["pooled", "attention", "mlp"])
@pytest.mark.parametrize("num_gpus", [1, 5, 16])
def test_a_policy_runs_with_another_number_of_gpus(kind: str, num_gpus: int) -> None:
    played = JobsJudge(make_spec(num_gpus=num_gpus)).play(untrained(kind), range(8))
    assert np.isfinite(played["return"]).all()
    assert played["return"].std() > 0
    assert not played["invalid_frac"].any()
    assert played["finished"].mean() > 0.5


def test_what_the_trainer_is_told() -> None:
    select = JobsSelection(make_spec(evaluation={"blocks": 3, "episodes": 4}))
    assert list(select.seeds) == list(range(12))
    assert set(select.seeds) < set(SELECTION_SEEDS)
    assert not set(SELECTION_SEEDS) & set(REPORT_SEEDS)
    metrics = select(untrained())
    played = select.judge.play(untrained(), range(12))["return"].reshape(3, 4).mean(axis=1)
    assert [metrics[f"eval_block{k}_return"] for k in range(3)] == pytest.approx(played)
    assert metrics["eval_score"] == metrics["eval_mean_return"] == pytest.approx(played.mean())
    assert metrics["eval_min_block_return"] == played.min()
    assert metrics["eval_max_block_return"] == played.max()
    assert metrics["eval_invalid_frac"] == 0
    assert metrics["eval_noop_frac"] == 0  # the hint: it starts what fits
    rivals = {name: metrics[f"eval_{name}_return"] for name in ("random-feasible", "fifo", "sjf")}
    assert metrics["eval_baseline_score"] == max(rivals.values())
    for name, value in rivals.items():
        assert value == pytest.approx(select.judge.play(name, range(12))["return"].mean())


@pytest.mark.parametrize("hint", [None, "missing"])
def test_doing_nothing_does_not_dominate_at_the_start(hint: str | None) -> None:
    """Where a job fits, an untrained network does nothing as often as it starts any one job, at most."""
    strength = 4.0 if hint else 0.0
    spec = NetworkSpec(width=32, hint=hint, hint_strength=strength)
    env = JobsEnv(JobsSpec(warmup_steps=800), 64)
    network = build_network(spec, env.space, seed=0)
    seen = TensorObservation.from_numpy(env.reset(0))
    network.observe(seen)
    with torch.inference_mode():
        share = policy_logp(network.act(seen)[0], 1.0).exp()
    num_fitting = seen.action_mask[:, 1:].sum(1)
    is_open = num_fitting > 0
    assert 16 < is_open.sum() < 64
    even = 1 / (1 + num_fitting[is_open] * np.exp(strength))
    assert (share[is_open, 0] / even).numpy() == pytest.approx(1.0, abs=0.35)
    assert share[~is_open, 0].numpy() == pytest.approx(1.0)
    if hint:
        assert (share[is_open].argmax(1) > 0).all()
        assert share[is_open, 0].mean() < 0.01


def test_a_training_begins_as_the_best_heuristic_and_keeps_it_unless_it_finds_better() -> None:
    """The preset's network decides as wide-and-short does before it has learned anything."""
    config = load_train_config("jobs")
    spec = parse_spec(JobsSpec, {name: value for name, value in config.env.items() if name != "kind"}, "env")
    select = JobsSelection(spec)
    heuristic = select.judge.play("wide-and-short", select.seeds)["return"].mean()
    for seed in range(3):
        network = build_network(config.network, JobsEnv(spec, 1).space, seed)
        env = JobsEnv(spec, 32)
        network.observe(TensorObservation.from_numpy(env.reset(seed)))
        begins = select(to_checkpoint(network, {}))
        assert begins["eval_score"] == pytest.approx(heuristic, abs=0.03)
        assert begins["eval_noop_frac"] == 0


@pytest.mark.parametrize("has_deadlines", [False, True])
def test_a_policy_from_before_there_was_a_rule_to_see_still_serves(has_deadlines: bool) -> None:
    spec = make_spec(workload=DEADLINES) if has_deadlines else make_spec()
    now = job_space(spec.num_gpus, spec.window, True, has_deadlines)
    before = replace(now, entity_features=now.entity_features[:-1])
    old = to_checkpoint(build_network(NetworkSpec(width=8, hint="missing", hint_strength=5.0), before, 0), {})
    widened = old.widened(now)
    judge = JobsJudge(spec)
    played = [judge.play(policy, range(9))["return"] for policy in (old, widened)]
    assert np.array_equal(*played)
