"""What anybody sees at a glance in somebody else's log is named first; what is fine there gets no warning."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pointsman.diagnosis.curves import Array
from pointsman.diagnosis.findings import Diagnosis, diagnose
from pointsman.diagnosis.readers import read_run

from .made import HOME_ROWS as ROWS
from .made import around, log_of, write

DONE = np.arange(ROWS) / ROWS
SEEDS = range(5)


def judge(tmp_path: Path, columns: dict[str, Array]) -> Diagnosis:
    diagnosis = diagnose(read_run(write(tmp_path / "log.csv", columns)))
    assert [one for one in diagnosis.not_judged if "Error" in one.why] == []
    assert [one for one in diagnosis.margins if one.is_beyond] == []
    return diagnosis


def first(diagnosis: Diagnosis) -> tuple[str, str]:
    return (diagnosis.findings[0].name, diagnosis.findings[0].severity) if diagnosis.findings else ("", "")


def course(*points: tuple[float, float]) -> Array:
    """Straight lines through (share of the run, level)."""
    return np.interp(DONE, [x for x, _ in points], [y for _, y in points])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_collapse_at_a_huge_update_is_seen_through_the_noise_of_single_episodes(
    tmp_path: Path, seed: int
) -> None:
    """From -50 to -180, each episode off by 60: fifteen means of 100 episodes leave no doubt."""
    rows = 1500
    done = np.arange(rows) / rows
    level = np.interp(done, [0, 0.3, 0.5, 0.53, 1], [-200, -60, -50, -180, -150])
    kl = np.where((done > 0.5) & (done < 0.54), 0.4, 0.005)
    columns = log_of(seed, rows, kl=kl, reward=around(level, 60, seed, rows))
    assert first(judge(tmp_path, columns)) == ("overshoot", "bad")
    learning = -200 + 150 * (1 - np.exp(-6 * done))
    calm = log_of(seed, rows, kl=kl, reward=around(learning, 60, seed, rows))
    assert judge(tmp_path, calm).findings == ()  # the same update did no harm


@pytest.mark.parametrize("seed", SEEDS)
def test_a_policy_that_stops_learning_early_is_seen(tmp_path: Path, seed: int) -> None:
    score = around(course((0, -200), (0.3, -150), (1, -150)), 8, seed)
    frozen = judge(tmp_path, log_of(seed, kl=np.where(DONE > 0.3, 3e-7, 0.01), reward=score))
    assert frozen.findings[0].name == "flat-learning"
    assert frozen.findings[0].began_at == pytest.approx(0.3 * ROWS, abs=8)
    later = log_of(seed, kl=np.where(DONE > 0.6, 0.0, 0.01))
    assert first(judge(tmp_path, later)) == ("flat-learning", "warning")
    no_rate = log_of(seed, lr=np.where(DONE > 0.5, 0.0, 3e-4))
    assert "the learning rate is 0" in judge(tmp_path, no_rate).findings[0].evidence
    schedule = log_of(seed, kl=0.01 * (1 - DONE) ** 2, lr=3e-4 * np.maximum(0.95 - DONE, 0))
    assert judge(tmp_path, schedule).findings == ()


def test_a_reward_that_is_no_number_to_the_end_is_divergence(tmp_path: Path) -> None:
    columns = log_of(0)
    columns["reward"][100:] = np.nan
    diagnosis = judge(tmp_path, columns)
    assert first(diagnosis) == ("diverged", "bad")
    assert diagnosis.findings[0].evidence == "reward not finite from update 101 on"
    seldom = log_of(0, eval_return=np.where(np.arange(ROWS) % 10 == 5, -50 - 150 * np.exp(-6 * DONE), np.nan))
    assert judge(tmp_path, seldom).findings == ()  # NaN is how it writes "not evaluated"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "entropy",
    [
        np.full(ROWS, 0.5),  # resumed: less than that of two actions
        np.interp(DONE, [0, 0.2, 1], [0.2, 0.4, 0.35]),  # begun with a clone
        8.51 - 0.25 * DONE,  # of a normal distribution
    ],
)
def test_where_the_number_of_actions_is_not_known_nobody_is_said_to_be_stuck_at_uniform(
    tmp_path: Path, seed: int, entropy: Array
) -> None:
    entropy = around(entropy, 0.005, seed)
    assert judge(tmp_path, log_of(seed, entropy=entropy)).findings == ()
    resumed = log_of(seed, entropy=entropy, reward=around(-45, 8, seed))
    assert {one.name for one in judge(tmp_path, resumed).findings} <= {"no-gain"}


def test_entropy_of_some_number_of_actions_that_stays_there_is_stuck(tmp_path: Path) -> None:
    stuck = log_of(0, entropy=around(1.38, 0.002, 0), reward=around(-190, 8, 0))
    assert first(judge(tmp_path, stuck)) == ("stuck-at-uniform", "bad")


def test_a_positive_entropy_loss_is_a_negative_entropy(tmp_path: Path) -> None:
    """Stable-Baselines3, normal distribution."""
    names = {
        "update": "time/total_timesteps",
        "reward": "rollout/ep_rew_mean",
        "kl": "train/approx_kl",
        "entropy": "train/entropy_loss",
        "explained_var": "train/explained_variance",
    }
    columns = {names[name]: values for name, values in log_of(0, entropy=1 + 0.25 * DONE).items()}
    log = read_run(write(tmp_path / "log.csv", columns))
    assert log.series("entropy").y[0] == -1.0
    assert diagnose(log).findings == ()


@pytest.mark.parametrize("seed", range(12))
def test_kl_may_be_negative_by_chance(tmp_path: Path, seed: int) -> None:
    """As the mean of old minus new log-probabilities is."""
    assert judge(tmp_path, log_of(seed, kl=around(0.0, 0.002, seed))).findings == ()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_critic_that_goes_blind_is_why_the_score_falls(tmp_path: Path, seed: int) -> None:
    score = around(course((0, -200), (0.4, -50), (0.6, -120), (1, -190)), 8, seed)
    columns = log_of(seed, explained_var=np.where(DONE > 0.5, -5.0, 0.8), reward=score)
    columns["value_loss"] = np.exp(40 * np.maximum(0, DONE - 0.5))
    diagnosis = judge(tmp_path, columns)
    assert first(diagnosis) == ("critic-bottleneck", "bad")
    assert "slow-drift" in [one.name for one in diagnosis.findings[0].symptoms]
    assert "the value loss is 6e+07 times what it was" in diagnosis.findings[0].evidence
    del columns["explained_var"]
    assert first(judge(tmp_path, columns)) == ("critic-bottleneck", "bad")
    fine = log_of(seed, explained_var=np.where(DONE > 0.5, -0.1, 0.8))
    assert [one.severity for one in judge(tmp_path, fine).findings] == ["note"]


@pytest.mark.parametrize("cycles", [5, 7.5, 12, 20])
def test_a_slow_wave_of_evaluations_is_oscillation(tmp_path: Path, cycles: float) -> None:
    wave = course((0, -200), (0.15, -100), (1, -100)) + 60 * np.sin(2 * np.pi * cycles * DONE)
    columns = log_of(0, eval_return=around(wave, 8, 0))
    del columns["reward"]
    diagnosis = judge(tmp_path, columns)
    assert diagnosis.findings[0].name == "oscillation"
    assert f"once in {ROWS / cycles:.2g}"[:9] in diagnosis.findings[0].evidence
    calm = columns | {"eval_return": around(course((0, -200), (0.15, -100), (1, -100)), 30, 0)}
    assert judge(tmp_path, calm).findings == ()


@pytest.mark.parametrize("seed", SEEDS)
def test_what_rose_and_fell_did_not_stay_where_it_was(tmp_path: Path, seed: int) -> None:
    """In 2,000 single decisions, which we average ourselves."""
    rows = 2000
    done = np.arange(rows) / rows
    rng = np.random.default_rng(seed)
    columns = {
        "step": np.arange(float(rows)),
        "action": np.floor(4 * rng.random(rows)),
        "reward": -5 + np.interp(done, [0, 0.3, 0.6, 0.7, 1], [0, 3, 3, -2, -2]) + rng.normal(0, 2, rows),
        "entropy": 1.38 - done,
        "approx_kl": 0.01 * rng.lognormal(0, 0.4, rows),
        "explained_var": 0.7 * (1 - np.exp(-8 * done)),
    }
    diagnosis = judge(tmp_path, columns)
    names = [one.name for cause in diagnosis.findings for one in (cause, *cause.symptoms)]
    assert names[0] in ("slow-drift", "best-early")
    assert "no-gain" not in names
    assert not any("stays where it was" in one.evidence for one in diagnosis.findings)


def test_fifteen_evaluations_that_rise_fall_and_rise_again(tmp_path: Path) -> None:
    level = course((0, -160), (0.4, -35), (0.6, -186), (0.8, -180), (1, -54))
    columns = log_of(0, eval_return=np.where(np.arange(ROWS) % 10 == 9, around(level, 8, 0), np.nan))
    assert "no-gain" not in {one.name for one in judge(tmp_path, columns).findings}


def test_an_empty_cell_of_no_ops_is_no_reason_to_stumble(tmp_path: Path) -> None:
    share = 0.25 + 0.7 * DONE
    noops = np.where(DONE == 0.0, np.nan, 0.01)
    columns = log_of(0, action_0=share, action_1=(1 - share) / 2, action_2=(1 - share) / 2, noop_frac=noops)
    assert judge(tmp_path, columns).findings[0].name == "one-entity-collapse"


def test_a_collapse_to_one_in_the_last_tenth_counts(tmp_path: Path) -> None:
    share = np.where(DONE > 0.88, 0.95, 0.25)
    columns = log_of(0, action_0=share, action_1=(1 - share) / 2, action_2=(1 - share) / 2)
    assert judge(tmp_path, columns).findings[0].name == "one-entity-collapse"


def test_what_is_beyond_its_limit_is_never_listed_as_far_from_trouble(tmp_path: Path) -> None:
    """A policy that chose one entity most of the time from the start: no finding, but no sign of health."""
    diagnosis = judge(tmp_path, log_of(0, action_frac_max=around(0.9, 0.01, 0)))
    assert diagnosis.is_clean
    (why,) = [one.why for one in diagnosis.not_judged if one.name == "one-entity-collapse"]
    assert why.startswith("no proof, but share of the most chosen entity (sampled): 0.9")
