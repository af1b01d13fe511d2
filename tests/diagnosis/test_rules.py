"""Every rule, on curves made to show it and on curves that come close but must not trigger it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pointsman.diagnosis.curves import Array, RunLog
from pointsman.diagnosis.findings import diagnose
from pointsman.diagnosis.measures import training_return
from pointsman.diagnosis.rules import RULES

from .made import CONFIG, GAIN, HEADROOM, ROWS, foreign, found, healthy, make, told

Columns = dict[str, Array]
DONE = np.arange(1.0, ROWS + 1) / ROWS
LATE = np.where(DONE > 0.5, 1.0, 0.0)
RNG = np.random.default_rng(7)
FALLING = 0.05 - 0.25 * np.clip(
    DONE - 0.4, 0.0, None
)  # a score that goes from above the baseline to behind it


def scored(score: Array, noise: float = 0.001) -> Columns:
    """Healthy, but for the evaluations: noise like that of a real one, on every block."""
    columns = healthy()
    seen = np.isfinite(columns["eval_score"])
    values = np.where(seen, score + RNG.normal(0.0, noise, ROWS), np.nan)
    for name in ("eval_score", "eval_mean_return"):
        columns[name] = values
    columns["eval_min_block_return"] = values - 0.004
    return columns


def with_(columns: Columns, **changes: Any) -> Columns:
    """Names with a slash are written with two underscores."""
    changed = dict(columns)
    for name, values in changes.items():
        changed[name.replace("__", "/")] = np.broadcast_to(np.asarray(values, float), ROWS).copy()
    return changed


def discount(gamma: float) -> dict[str, Any]:
    ppo = {**CONFIG["ppo"], "discount": {"kind": "steps", "gamma": gamma, "lam": 0.95}}  # type: ignore[dict-item]
    return {**CONFIG, "ppo": ppo}


def headroom(**changes: float) -> dict[str, Any]:
    return {**HEADROOM, "gains": {"here": {**GAIN, **changes}}}


def stopped(error: str, why: str) -> dict[str, Any]:
    return {"update": float(ROWS), "error": error, "why": why}


def noisy(level: Any, size: float) -> Array:
    return np.asarray(level + RNG.normal(0.0, size, ROWS))


BEHIND = np.full(ROWS, -0.3)
AT_DROPS = np.isin(np.arange(ROWS) // 5, (8, 13, 19)).astype(float)  # for one evaluation each
SHOWS: dict[str, tuple[RunLog, str]] = {
    "diverged": (make(healthy(), stopped=stopped("DivergedError", "v_loss is not finite")), "bad"),
    "stale-mask": (make(with_(healthy(), invalid_frac=0.01, invalid_late_frac=noisy(0.97, 0.01))), "bad"),
    "mask-bug": (make(with_(healthy(), invalid_frac=0.002 * LATE)), "bad"),
    "other-policy": (make(healthy(), stopped=stopped("RatioError", "the ratio is off 1 by 0.3")), "bad"),
    "kl-brake-always-on": (
        make(with_(healthy(), early_stop=1.0, num_steps=1.0, approx_kl_mean=noisy(0.04, 0.005))),
        "bad",
    ),
    "overshoot": (
        make(
            with_(
                scored(np.where(DONE > 0.6, -0.1, 0.05)),
                approx_kl_mean=np.where(abs(DONE - 0.62) < 0.02, 0.4, 0.0015),
            )
        ),
        "bad",
    ),
    "flat-learning": (
        make(with_(scored(BEHIND), approx_kl_mean=1e-9, entropy_frac=noisy(0.999, 1e-4))),
        "bad",
    ),
    "reward-saturation": (make(with_(healthy(), reward_clipped_frac=noisy(0.8, 0.02))), "bad"),
    "no-choice": (
        make(with_(scored(BEHIND), entropy_frac=0.0, entropy=0.0, approx_kl_mean=0.0, noop_frac=0.55)),
        "bad",
    ),
    "noop-collapse": (
        make(
            with_(
                scored(FALLING),
                noop_frac=noisy(0.05 + 0.85 * DONE, 0.02),
                entropy_frac=1.0 - 0.8 * DONE,
            )
        ),
        "bad",
    ),
    "one-entity-collapse": (
        make(with_(scored(BEHIND), action_frac_max=noisy(0.25 + 0.65 * DONE, 0.01))),
        "bad",
    ),
    "reward-term-dominance": (
        make(with_(scored(BEHIND), reward_share__latency=0.995, reward_share__age=0.005)),
        "bad",
    ),
    "short-sighted": (make(scored(BEHIND), config=discount(0.5)), "bad"),
    "wrong-sign": (make(scored(-0.3 - 0.2 * DONE)), "bad"),
    "training-evaluation-gap": (
        make(
            with_(
                scored(np.interp(DONE, [0.0, 0.4, 1.0], [-0.3, 0.05, -0.4])), mean_ep_return=noisy(DONE, 0.1)
            )
        ),
        "bad",
    ),
    "baseline-at-the-ceiling": (
        make(scored(BEHIND), headroom=headroom(share=0.0, per_second=0.0, above_random=0.001)),
        "bad",
    ),
    "critic-bottleneck": (
        make(with_(scored(BEHIND), explained_variance=noisy(-0.2, 0.3), v_loss=noisy(0.5, 0.05))),
        "bad",
    ),
    "value-loss-at-drops": (
        make(
            with_(
                scored(0.05 - 0.1 * AT_DROPS),
                v_loss=0.02 + 0.3 * AT_DROPS * (np.arange(ROWS) % 5 == 3),
            )
        ),
        "warning",
    ),
    "noop-jump": (make(with_(healthy(), noop_frac=noisy(0.04 + 0.4 * LATE, 0.01))), "warning"),
    "noop-gap": (
        make(
            with_(scored(BEHIND), eval_noop_frac=np.where(np.isfinite(healthy()["eval_score"]), 0.7, np.nan))
        ),
        "warning",
    ),
    "no-gain": (
        make(with_(scored(BEHIND), mean_ep_return=noisy(-5.0, 0.3), reward_mean=noisy(0.0, 0.1))),
        "warning",
    ),
    "limits-passed": (
        make(
            with_(healthy(), safety__kl=np.cumsum(np.arange(ROWS) % 3 == 0), safety__queue=np.floor(9 * DONE))
        ),
        "warning",
    ),
    "stuck-at-uniform": (
        make(with_(healthy(), entropy_frac=noisy(0.99, 0.003), mean_ep_return=noisy(-5.0, 0.3))),
        "bad",
    ),
    "entropy-collapse": (
        make(with_(scored(BEHIND), entropy_frac=np.clip(1.0 - 3.0 * DONE, 0.003, 1.0))),
        "bad",
    ),
    "brittle": (
        make(with_(scored(0.05 + 0.02 * DONE), eval_min_block_return=noisy(0.04 - 0.1 * LATE, 0.003))),
        "bad",
    ),
    "oscillation": (make(scored(0.05 + 0.03 * np.where(np.arange(ROWS) % 10 < 5, 1.0, -1.0))), "warning"),
    "slow-drift": (make(scored(0.06 - 0.05 * np.clip(DONE - 0.3, 0.0, None) / 0.7)), "bad"),
    "best-early": (make(scored(0.06 - 0.05 * np.clip(DONE - 0.3, 0.0, None) / 0.7)), "warning"),
    "futile-exploration": (
        make(with_(scored(BEHIND), temperature=1.1 ** np.floor(4.0 * DONE), entropy_frac=noisy(0.5, 0.01))),
        "note",
    ),
    "kl-brake-never": (make(with_(healthy(), early_stop=0.0, approx_kl_mean=noisy(0.09, 0.01))), "warning"),
    "slower-than-the-environment": (make(with_(healthy(), time__env_s=0.05)), "note"),
    "stopped": (make(healthy(), stopped=stopped("WorkerError", "worker 1 failed")), "warning"),
}

# Close to it: what must not trigger the rule.
SPARES: dict[str, RunLog] = {
    "diverged": make(healthy(), stopped=stopped("LostWorkerError", "a process was killed")),
    "stale-mask": make(with_(healthy(), invalid_frac=0.1, invalid_late_frac=0.3)),
    "mask-bug": make(with_(healthy(), invalid_frac=0.01, invalid_late_frac=0.95)),  # is stale
    "other-policy": make(healthy(), stopped=stopped("SafetyError", "the KL of an update was 3")),
    "kl-brake-always-on": make(with_(healthy(), early_stop=(RNG.random(ROWS) < 0.5))),
    "overshoot": make(with_(healthy(), approx_kl_mean=np.where(np.arange(ROWS) == 60, 0.3, 0.0015))),
    "flat-learning": make(with_(scored(np.full(ROWS, 0.05)), approx_kl_mean=1e-6)),  # good from the start
    "reward-saturation": make(with_(healthy(), reward_clipped_frac=0.1, reward_zero_frac=0.6)),
    "no-choice": make(  # sure of itself, but not from the start
        with_(scored(BEHIND), entropy_frac=np.where(DONE < 0.05, 0.5, 0.0), approx_kl_mean=0.0)
    ),
    "noop-collapse": make(with_(healthy(), noop_frac=noisy(0.05 + 0.6 * DONE, 0.02))),  # holding pays
    "one-entity-collapse": make(with_(scored(BEHIND), action_frac_max=noisy(0.85, 0.01))),  # from the start
    "reward-term-dominance": make(  # the other term fades because it is avoided
        with_(
            scored(BEHIND),
            reward_share__latency=1.0 - 0.3 * (DONE < 0.3),
            reward_share__age=0.3 * (DONE < 0.3),
        )
    ),
    "short-sighted": make(healthy(), config=discount(0.85)),  # but it works
    "wrong-sign": make(scored(np.interp(DONE, [0.0, 0.4, 1.0], [-0.3, 0.05, -0.2]))),  # it had gained first
    "value-loss-at-drops": make(  # spikes, but elsewhere
        with_(
            scored(0.05 - 0.1 * AT_DROPS),
            v_loss=0.02 + 0.3 * np.roll(AT_DROPS, 10) * (np.arange(ROWS) % 5 == 3),
        )
    ),
    "noop-jump": make(with_(healthy(), noop_frac=noisy(0.04 + 0.4 * DONE, 0.01))),  # gradually
    "noop-gap": make(with_(scored(BEHIND), noop_frac=noisy(0.25, 0.02))),
    "no-gain": make(
        with_(scored(np.full(ROWS, 0.05)), mean_ep_return=noisy(-5.0, 0.3))
    ),  # good from the start
    "limits-passed": make(with_(healthy(), safety__kl=np.minimum(np.arange(ROWS), 3))),  # early, and no more
    "training-evaluation-gap": make(
        with_(scored(BEHIND), mean_ep_return=noisy(-5.0, 0.3), reward_mean=noisy(0.0, 1.0))
    ),
    "baseline-at-the-ceiling": make(healthy(), headroom=headroom(share=0.2)),
    "critic-bottleneck": make(with_(healthy(), explained_variance=noisy(0.4, 0.6))),
    "stuck-at-uniform": make(with_(healthy(), entropy_frac=noisy(1.0 - 0.3 * DONE, 0.01))),
    "entropy-collapse": make(
        with_(healthy(), entropy_frac=np.clip(1.0 - 1.2 * DONE, 0.01, 1.0))
    ),  # at the end
    "brittle": make(with_(scored(0.05 + 0.02 * DONE), eval_min_block_return=noisy(0.04, 0.006))),
    "oscillation": make(scored(np.full(ROWS, 0.05), noise=0.004)),
    "slow-drift": make(scored(np.full(ROWS, 0.05), noise=0.004)),
    "best-early": make(scored(0.05 - 0.003 * DONE)),
    "futile-exploration": make(
        with_(
            scored(BEHIND),
            temperature=1.1 ** np.floor(4.0 * DONE),
            entropy_frac=0.3 + 0.1 * np.floor(4.0 * DONE),
        )
    ),
    "kl-brake-never": make(with_(healthy(), early_stop=0.0)),
    "slower-than-the-environment": make(with_(healthy(), time__env_s=0.25)),
    "stopped": make(healthy()),
}


def test_every_rule_has_both_tests() -> None:
    assert set(SHOWS) == set(SPARES) == {rule.name for rule in RULES}


@pytest.mark.parametrize("name", SHOWS)
def test_a_rule_sees_what_it_is_for(name: str) -> None:
    log, severity = SHOWS[name]
    assert found(log).get(name) == severity


def test_early_drops_that_a_run_got_over_are_a_note() -> None:
    early = AT_DROPS * (DONE < 0.4)
    rows = with_(
        scored(0.03 + 0.03 * (DONE > 0.5) - 0.1 * early),
        v_loss=0.02 + 0.3 * early * (np.arange(ROWS) % 5 == 3),
    )
    assert found(make(rows)).get("value-loss-at-drops") == "note"


@pytest.mark.parametrize("name", SPARES)
def test_a_rule_is_silent_where_it_only_looks_like_it(name: str) -> None:
    assert found(SPARES[name]).get(name, "note") == "note"


def test_an_update_that_was_compiled_first_does_not_make_a_run_slow() -> None:
    columns = healthy()
    columns["time/update_s"][0] *= 10_000
    assert "slower-than-the-environment" not in found(make(columns))


@pytest.mark.parametrize("seed", range(10))
def test_noise_alone_triggers_nothing(seed: int) -> None:
    diagnosis = diagnose(make(healthy(seed)))
    assert diagnosis.is_clean, [str(one) for one in diagnosis.findings]
    assert diagnosis.margins
    assert not diagnosis.not_judged


@pytest.mark.parametrize("rows", [8, 20, 400])
def test_short_and_long_runs_are_no_reason_for_findings(rows: int) -> None:
    assert diagnose(make(healthy(3, rows))).verdict == ("unclear" if rows == 8 else "clean")


# Of `pointsman train --env jobs`, 32 updates of 256 decisions: entropies, and the episodes that ended.
SHORT_ENTROPY = (
    *(
        0.996,
        0.994,
        0.994,
        0.994,
        0.988,
        0.987,
        0.991,
        0.984,
        0.959,
        0.955,
        0.941,
        0.917,
        0.954,
        0.954,
        0.968,
    ),
    *(
        0.945,
        0.949,
        0.953,
        0.949,
        0.959,
        0.953,
        0.964,
        0.961,
        0.952,
        0.958,
        0.948,
        0.958,
        0.952,
        0.962,
        0.955,
    ),
    *(0.962, 0.955),
)
SHORT_RETURNS = {5: 0.761, 6: 0.113, 9: -0.268, 10: 0.121, 12: 0.472, 13: 0.534, 16: 0.071, 21: 0.543}
SHORT_RETURNS |= {22: 0.412, 24: 0.214, 28: 0.363, 29: 0.744}


def short_run(sign: float) -> RunLog:
    update = np.arange(1.0, len(SHORT_ENTROPY) + 1)
    earned = [sign * SHORT_RETURNS.get(int(one), np.nan) for one in update]
    columns = {"entropy_frac": np.array(SHORT_ENTROPY), "mean_ep_return": np.array(earned)}
    return make({"update": update, "fraction_done": update / len(update), **columns})


def test_a_run_too_short_to_show_its_rise_is_no_bad_one() -> None:
    """From 0.44 to 0.55, but a dozen episodes spread by 0.3; the other way round it is bad all the same."""
    assert found(short_run(1.0))["stuck-at-uniform"] == "warning"
    (falling,) = (one for one in told(short_run(-1.0)) if one.name == "stuck-at-uniform")
    assert falling.severity == "bad"
    assert "did not rise (-0.437 at first, -0.553 now)" in falling.evidence


def test_causes_come_before_symptoms() -> None:
    """A step that is far too small leaves the policy uniform and the critic blind too."""
    columns = with_(
        scored(BEHIND),
        approx_kl_mean=1e-10,
        entropy_frac=noisy(0.999, 1e-4),
        mean_ep_return=noisy(-5.0, 0.3),
        explained_variance=noisy(-0.5, 0.2),
        v_loss=noisy(1.4, 0.1),
    )
    names = list(found(make(columns)))
    assert names[0] == "flat-learning"
    assert {"critic-bottleneck", "stuck-at-uniform"} <= set(names)


def test_a_jump_of_no_ops_that_the_policy_or_the_curriculum_explains_is_none() -> None:
    jump = noisy(0.04 + 0.4 * LATE, 0.01)
    changed_its_mind = with_(healthy(), noop_frac=jump, entropy_frac=noisy(0.7 - 0.3 * LATE, 0.01))
    assert "noop-jump" not in found(make(changed_its_mind))
    planned = with_(healthy(), noop_frac=jump, stage=LATE)
    assert found(make(planned))["noop-jump"] == "note"


@pytest.mark.parametrize(("greedy", "why"), [(0.68, "sampling hides"), (0.05, "another workload")])
def test_a_gap_of_no_ops_says_whether_it_is_the_arg_max(greedy: float, why: str) -> None:
    columns = with_(SHOWS["noop-gap"][0].columns, greedy_noop_frac=greedy)
    (finding,) = [one for one in told(make(columns)) if one.name == "noop-gap"]
    assert why in finding.evidence


def test_limits_that_ended_the_run_are_bad_and_counted() -> None:
    log = make(
        with_(healthy(), safety__latency=np.cumsum(np.arange(ROWS) % 10 == 0)),
        stopped=stopped("SafetyError", "update 120: too many episodes were ended"),
    )
    first = diagnose(log).findings[0]
    assert (first.name, first.severity) == ("limits-passed", "bad")
    assert "latency: 12 times; 6 of them in the second half" in first.evidence
    assert [one.name for one in first.symptoms] == ["stopped"]


Change = Callable[[Columns], Columns]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda columns: columns, None),
        (
            lambda columns: with_(columns, approx_kl_mean=1e-9, mean_ep_return=noisy(20.0, 1.0)),
            "flat-learning",
        ),
        (lambda columns: with_(columns, mean_ep_return=400.0 * DONE * (DONE < 0.7) + 20.0), "slow-drift"),
        (
            lambda columns: with_(columns, explained_variance=noisy(0.0, 0.02), mean_ep_return=20.0),
            "critic-bottleneck",
        ),
    ],
)
def test_a_log_of_training_alone_is_judged_by_its_returns(change: Change, expected: str | None) -> None:
    """As CleanRL writes it: no evaluation, no baseline, episodes that end when they end."""
    names = ("update", "entropy_frac", "approx_kl_mean", "explained_variance", "v_loss")
    columns = {name: healthy()[name] for name in names}
    columns["mean_ep_return"] = noisy(20.0 + 400.0 * (1.0 - np.exp(-5.0 * DONE)), 15.0)
    names_found = [name for name, severity in found(foreign(change(columns))).items() if severity != "note"]
    assert (names_found[:1] or [None])[0] == expected


def test_exploration_that_ends_early_is_worth_a_word_though_the_score_is_fine() -> None:
    early = with_(scored(np.full(ROWS, 0.05)), entropy_frac=np.clip(1.0 - 4.0 * DONE, 0.01, 1.0))
    assert found(make(early)) == {"entropy-collapse": "warning"}


def test_a_policy_that_cannot_move_because_it_is_sure_is_not_called_flat() -> None:
    columns = with_(scored(BEHIND), entropy_frac=np.clip(1.0 - 9.0 * DONE, 1e-4, 1.0), approx_kl_mean=1e-9)
    assert "flat-learning" not in found(make(columns))
    assert found(make(columns))["entropy-collapse"] == "bad"


BACK = np.floor(3.0 * DONE - 1e-9)  # the trainer goes back twice
ATTEMPT = 3.0 * DONE - BACK  # how far each is, from weights before the fault on


def test_what_collapses_until_the_trainer_goes_back_is_found_in_what_it_gave_up() -> None:
    """Going back takes the collapse out of the last rows, not out of the run."""
    rows = {
        "noop_frac": noisy(0.2 + 0.7 * ATTEMPT * (BACK < 2), 0.01),
        "entropy_frac": noisy(0.99 - 0.2 * ATTEMPT, 0.003),
    }
    given_up = with_(scored(BEHIND), times_back=BACK, **rows)
    first = diagnose(make(given_up)).findings[0]
    assert (first.name, first.severity) == ("noop-collapse", "bad")
    assert "until update 40, when the trainer went back to earlier weights" in first.evidence
    assert "noop-collapse" not in found(make(with_(scored(BEHIND), **rows)))  # it comes and goes by itself
    gradual = with_(given_up, noop_frac=noisy(0.2 + 0.2 * ATTEMPT, 0.01))
    assert "noop-collapse" not in found(make(gradual))


def test_no_rule_breaks_on_a_run_that_never_went_back() -> None:
    log = make(with_(healthy(), times_back=np.zeros(ROWS)))
    broken = [one for one in diagnose(log).not_judged if "Error" in one.why]
    assert broken == []


@pytest.mark.parametrize(("score", "expected"), [(BEHIND, "bad"), (BEHIND + 0.35 * (DONE > 0.75), "warning")])
def test_entropy_that_collapses_until_the_trainer_goes_back(score: Array, expected: str) -> None:
    entropy = np.where(BACK < 2, np.clip(1.0 - 1.4 * ATTEMPT, 0.001, 1.0), 1.0 - 0.5 * ATTEMPT)
    returns = {"mean_ep_return": noisy(-5.0, 0.3), "reward_mean": noisy(0.0, 0.1)}
    columns = with_(scored(score), entropy_frac=entropy, times_back=BACK, **returns)
    first = diagnose(make(columns)).findings[0]
    assert (first.name, first.severity) == ("entropy-collapse", expected)
    uniform = with_(columns, entropy_frac=np.where(BACK < 2, entropy, 1.0))
    first = diagnose(make(uniform)).findings[0]
    assert first.name == "entropy-collapse"
    assert "stuck-at-uniform" in [one.name for one in first.symptoms]
    good = with_(scored(np.full(ROWS, 0.05)), entropy_frac=entropy, times_back=BACK)
    assert "entropy-collapse" not in found(make(good))  # sure of itself, and right


def test_a_reward_that_pays_random_actions_most_has_the_wrong_sign() -> None:
    """Even where going back to better weights hides what it leads to."""
    paid = headroom(share=0.0, per_second=0.0, above_random=-0.04)  # with an error of 0.006
    columns = with_(scored(BEHIND), mean_ep_return=noisy(-5.0, 0.3), entropy_frac=noisy(0.99, 0.003))
    (first,) = (one for one in diagnose(make(columns, headroom=paid)).findings if one.severity != "note")
    assert (first.name, first.severity) == ("wrong-sign", "bad")
    assert {"baseline-at-the-ceiling", "stuck-at-uniform"} <= {one.name for one in first.symptoms}
    by_chance = headroom(share=0.0, per_second=0.0, above_random=-0.01)
    assert "wrong-sign" not in found(make(columns, headroom=by_chance))
    assert "wrong-sign" not in found(make(healthy(), headroom=paid))  # it learned all the same


def test_a_horizon_too_short_explains_a_policy_at_uniform_and_a_blind_critic() -> None:
    columns = with_(
        scored(BEHIND),
        entropy_frac=noisy(0.99, 0.003),
        mean_ep_return=noisy(-5.0, 0.3),
        explained_variance=noisy(0.0, 0.05),
        v_loss=noisy(0.5, 0.05),
    )
    (story,) = (one for one in diagnose(make(columns, config=discount(0.5))).findings)
    assert story.name == "short-sighted"
    assert {"stuck-at-uniform", "critic-bottleneck"} <= {one.name for one in story.symptoms}


@pytest.mark.parametrize(("bonus", "expected"), [(1.0, "stuck-at-uniform"), (0.01, "flat-learning")])
def test_what_an_entropy_bonus_holds_at_uniform_does_not_lack_a_larger_step(
    bonus: float, expected: str
) -> None:
    columns = with_(
        scored(BEHIND), approx_kl_mean=6e-5, entropy_frac=noisy(0.998, 5e-4), ent_coef=bonus, v_loss=0.02
    )
    assert diagnose(make(columns)).findings[0].name == expected


def test_a_ratio_off_1_after_huge_updates_is_rounding() -> None:
    log = make(
        with_(healthy(), approx_kl_mean=noisy(30.0, 2.0)),
        stopped=stopped("RatioError", "the ratio is off 1 by 0.0013"),
    )
    names = [(one.name, one.severity) for one in diagnose(log).findings]
    assert names[:2] == [("overshoot", "warning"), ("other-policy", "note")]


def test_behind_at_every_evaluation_is_behind_however_noisy() -> None:
    """From -1 to -60 and back: no two evaluations alike, and none as good as the baseline."""
    score = -np.exp(RNG.uniform(0.0, 4.0, ROWS))
    assert found(make(scored(score), config=discount(0.5)))["short-sighted"] == "bad"
    once_ahead = np.where(np.arange(ROWS) == ROWS - 11, 0.01, score)
    assert found(make(scored(once_ahead, noise=0.0), config=discount(0.5)))["short-sighted"] == "warning"


def test_a_mean_of_episodes_that_is_repeated_until_others_end_counts_once() -> None:
    """Four means of many episodes each, in 120 rows: no rise that could be judged, by single steps neither,
    which earn less and less until all episodes end at once."""
    held = np.repeat([-7.5, -7.1, -7.0, -6.8], ROWS // 4)
    columns = with_(
        scored(np.where(DONE < 0.1, -0.2, BEHIND)), mean_ep_return=held, reward_mean=-((DONE * 4) % 1.0)
    )
    assert training_return(make(columns)).y.tolist() == [-7.5, -7.1, -7.0, -6.8]
    assert "training-evaluation-gap" not in found(make(columns))
    often = with_(healthy(), mean_ep_return=np.repeat(np.arange(12.0), ROWS // 12))
    assert training_return(make(often)).y.tolist() == np.arange(12.0).tolist()
    assert len(training_return(foreign(often))) == ROWS  # who knows what others write


def test_a_critic_that_nothing_teaches_is_one_however_well_it_does_by_chance() -> None:
    config = {**CONFIG, "ppo": {**CONFIG["ppo"], "value_coef": 0.0}}  # type: ignore[dict-item]
    columns = with_(scored(BEHIND), mean_ep_return=noisy(-5.0, 0.3))
    assert found(make(columns, config=config))["critic-bottleneck"] == "bad"
    assert "critic-bottleneck" not in found(make(columns))


def test_what_began_when() -> None:
    log, _ = SHOWS["mask-bug"]
    (finding,) = [one for one in diagnose(log).findings if one.name == "mask-bug"]
    assert (finding.began_at, finding.x_name) == (ROWS / 2 + 1, "update")
    drift = next(one for one in told(SHOWS["slow-drift"][0]) if one.name == "slow-drift")
    assert drift.began_at == pytest.approx(0.3 * ROWS, abs=15)


def test_early_in_a_run_slow_things_are_not_judged() -> None:
    log, _ = SHOWS["stuck-at-uniform"]
    early = {name: values[:20] for name, values in log.columns.items()}
    diagnosis = diagnose(make(early))
    assert "stuck-at-uniform" not in {one.name for one in diagnosis.findings}
    assert {"stuck-at-uniform": "too early: 16 % of the run"}.items() <= {
        one.name: one.why for one in diagnosis.not_judged
    }.items()


def test_every_rule_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "diagnosis.md").read_text(encoding="utf-8")
    assert [name for name in SHOWS if f"| `{name}` |" not in page] == []
