"""What others call the columns that rules look at, and the columns that follow from others."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pointsman.diagnosis.curves import SCORES, Array, RunFacts
from pointsman.errors import InputError

ROUNDING = 1.01
NUM_FIRST = 3  # values that count as the start of an entropy curve
FROM_START = "entropy, as a share of its start"


@dataclass(frozen=True)
class Writer:
    """A program that writes logs: how to know it, and its names (patterns) with ours; `-` turns the sign."""

    kind: str
    mark: str  # pattern of a column that only it writes
    names: Mapping[str, str]


_OLD_RLLIB = r"info/learner/[^/]+/learner_stats/"
_NEW_RLLIB = r"learners/(?!__all_modules__)[^/]+/"

WRITERS = (
    Writer(
        "Stable-Baselines3",
        r"train/(entropy_loss|policy_gradient_loss|clip_fraction)|rollout/ep_rew_mean",
        {
            r"time/iterations": "update",
            r"time/total_timesteps": "timesteps",
            r"time/fps": "steps_per_s",
            r"time/time_elapsed": "elapsed_s",
            r"rollout/ep_rew_mean": "mean_ep_return",
            r"rollout/ep_len_mean": "mean_ep_length",
            r"eval/mean_reward": "eval_mean_return",
            r"train/approx_kl": "approx_kl_mean",
            r"train/clip_fraction": "clip_frac",
            r"train/clip_range": "clip",
            r"train/entropy_loss": "-entropy",
            r"train/explained_variance": "explained_variance",
            r"train/learning_rate": "lr",
            r"train/loss": "loss",
            r"train/n_updates": "num_epochs_so_far",
            r"train/policy_gradient_loss": "pg_loss",
            r"train/value_loss": "v_loss",
        },
    ),
    Writer(
        "CleanRL",
        r"losses/(policy_loss|clipfrac|old_approx_kl)|charts/episodic_return",
        {
            r"global_step": "timesteps",
            r"charts/episodic_return": "mean_ep_return",
            r"charts/episodic_length": "mean_ep_length",
            r"charts/learning_rate": "lr",
            r"charts/SPS": "steps_per_s",
            r"losses/value_loss": "v_loss",
            r"losses/policy_loss": "pg_loss",
            r"losses/entropy": "entropy",
            r"losses/approx_kl": "approx_kl_last",
            r"losses/clipfrac": "clip_frac",
            r"losses/explained_variance": "explained_variance",
        },
    ),
    Writer(
        "RLlib",
        rf"{_OLD_RLLIB}.*|{_NEW_RLLIB}.*|episode_reward_mean|env_runners/episode_(return|reward)_mean",
        {
            r"training_iteration": "update",
            r"num_env_steps_sampled_lifetime|timesteps_total": "timesteps",
            r"time_total_s": "elapsed_s",
            r"episode_reward_mean|env_runners/episode_(?:return|reward)_mean": "mean_ep_return",
            r"episode_len_mean|env_runners/episode_len_mean": "mean_ep_length",
            r"evaluation/(?:env_runners/)?episode_(?:return|reward)_mean": "eval_mean_return",
            rf"{_OLD_RLLIB}entropy|{_NEW_RLLIB}entropy": "entropy",
            rf"{_OLD_RLLIB}kl|{_NEW_RLLIB}mean_kl_loss": "approx_kl_mean",
            rf"{_OLD_RLLIB}cur_kl_coeff|{_NEW_RLLIB}curr_kl_coeff": "kl_coef",
            rf"{_OLD_RLLIB}cur_lr|{_NEW_RLLIB}default_optimizer_learning_rate": "lr",
            rf"{_OLD_RLLIB}entropy_coeff|{_NEW_RLLIB}curr_entropy_coeff": "ent_coef",
            rf"{_OLD_RLLIB}grad_gnorm|{_NEW_RLLIB}gradients_default_optimizer_global_norm": "grad_norm",
            rf"{_OLD_RLLIB}policy_loss|{_NEW_RLLIB}policy_loss": "pg_loss",
            rf"{_OLD_RLLIB}total_loss|{_NEW_RLLIB}total_loss": "loss",
            rf"{_OLD_RLLIB}vf_explained_var|{_NEW_RLLIB}vf_explained_var": "explained_variance",
            rf"{_OLD_RLLIB}vf_loss|{_NEW_RLLIB}vf_loss": "v_loss",
            r"config/gamma": "gamma",
        },
    ),
    Writer(
        "TRL",
        r"objective/(kl|scores|rlhf_reward)|ppo/policy/approxkl|completions?/(mean_)?length",
        {
            r"(?:objective/)?kl": "kl_to_reference",  # how far from the first policy: it may well grow
            r"policy/approxkl(?:_avg)?|ppo/policy/approxkl": "approx_kl_mean",
            r"policy/clipfrac_avg|ppo/policy/clipfrac": "clip_frac",
            r"policy/entropy_avg|ppo/policy/entropy": "entropy",
            r"objective/(?:rlhf_reward|scores)|ppo/mean_scores": "mean_ep_return",
            r"loss/policy_avg|ppo/loss/policy": "pg_loss",
            r"loss/value_avg|ppo/loss/value": "v_loss",
            r"ppo/val/var_explained": "explained_variance",
        },
    ),
    Writer(
        "Tianshou",
        r"(train|training|test)/returns_stat/mean|(update/)?loss/(clip|vf|ent)(/mean)?",
        {
            r"train(?:ing)?/returns_stat/mean|train/reward": "mean_ep_return",
            r"test/returns_stat/mean|test/reward": "eval_mean_return",
            r"(?:update/)?loss/ent(?:/mean)?": "entropy",
            r"(?:update/)?loss/clip(?:/mean)?": "pg_loss",
            r"(?:update/)?loss/vf(?:/mean)?": "v_loss",
            r"(?:update|train)/env_step": "timesteps",
        },
    ),
)

_CHOSEN = r"selected|chosen|target|assigned|routed"
# Of any other log, in lower case, with `_` for slashes or without what stands before the last one. Our own
# names count in any such form, too.
ALIASES = {
    r"iterations?|iter|epochs?|updates|num_updates|n_?updates": "update",
    r"(total_|num_|env_)?(timesteps?|steps?|frames)|global_steps?|total_env_(interacts|steps)": "timesteps",
    r"(mean_|average_|avg_)?(ep|episode|episodic|train|training|avg)_?(rew|ret|reward|return)s?(_?mean)?": (
        "mean_ep_return"
    ),
    r"(mean_|average_|avg_)?(rewards?|returns?)|(ep|episode)_mean_(reward|return)": "mean_ep_return",
    r"rewards?_(step|iter)": "mean_ep_return",
    r"(mean_|average_|avg_)?(ep|episode|episodic)_?(len|length)s?(_?mean)?": "mean_ep_length",
    r"(eval|evaluation|test)_(mean_|avg_|average_|ep_|episode_)*(rew|ret|reward|return|score)s?(_mean)?": (
        "eval_mean_return"
    ),
    r"(eval|evaluation|test)_(min|worst)(_block)?_(reward|return)": "eval_min_block_return",
    r"(policy_|action_|mean_|avg_|average_)*entropy(_mean|_avg)?": "entropy",
    r"entropy_(frac|fraction|ratio)|normali[sz]ed_entropy": "entropy_frac",
    r"entropy_loss": "-entropy",
    r"(approx_?|mean_|avg_|policy_)*kl(_div|_divergence|_mean|_avg|_approx|_loss)*": "approx_kl_mean",
    r"max_kl|kl_max": "approx_kl_max",
    r"(policy|actor|policy_gradient|pi|surrogate|a)_loss|loss_pi|surrogate": "pg_loss",
    r"(value|critic|vf|value_function|c)_loss|loss_(v|critic|value_function)|value_function": "v_loss",
    r"(vf_|value_)?explained_var(iance)?|var(iance)?_explained|ev": "explained_variance",
    r"clip_?frac(tion)?": "clip_frac",
    r"grad(ient)?_g?norm|global_norm": "grad_norm",
    r"learning_rate|cur_lr": "lr",
    r"(ent|entropy)_coeff?(icient)?": "ent_coef",
    r"no_?op_(frac|fraction|rate|ratio)": "noop_frac",
    r"(invalid|illegal)_(actions?_)?(frac|fraction|rate|ratio)": "invalid_frac",
    r"reward_(clip|clipped|saturated|saturation)(_frac|_fraction|_rate)?": "reward_clipped_frac",
    r"reward_zero(_fraction|_rate)|zero_reward_(frac|fraction|rate)": "reward_zero_frac",
    r"fps|sps|steps_per_sec(ond)?": "steps_per_s",
    r"(kl_)?early_stop(ped|ping)?": "early_stop",
    r"(baseline|reference)_(reward|return|score)": "eval_baseline_return",
    rf"({_CHOSEN})_(action|replica|server|backend|worker|node|gpu|instance|endpoint|pod)(_id|_idx|_index)?": (
        "action"
    ),
    r"(actions?|replica|server|backend|endpoint|instance|pod|node)(_id|_idx|_index|_taken)?": "action",
    r"routed_to|dispatched_to": "action",
}
_OURS = {name.lstrip("-") for name in ALIASES.values()}
_OF_EVALUATION = ("eval", "evaluation", "test", "val")  # what stands before a slash

# A word in the name of a column that nobody reads, and what it may be where nothing else in the log is.
_LOOKS_LIKE = (
    (r"entropy|h", ("entropy", "entropy_frac")),
    (r"kl|kld|divergence|approxkl", ("approx_kl_mean", "approx_kl_max")),
    (r"rew|ret|rewards?|returns?|scores?", ("mean_ep_return", *SCORES)),
    (r"explained|ev", ("explained_variance",)),
)
_WHO_WAS_CHOSEN = r"worker|gpu|host|device|target|dest|destination|choice|picked"  # or who wrote the row
_FEW = 64  # different numbers

_ACTION_SHARE = re.compile(r"actions?(?:_frac|_dist|_prob|_share)?[_/](\d+)(?:_frac)?")
_BLOCK = re.compile(r"eval_block\d+_return")


def translate(
    found: Mapping[str, Array], own_map: Mapping[str, str]
) -> tuple[str, dict[str, Array], dict[str, str]]:
    """Columns under our names, who wrote them, and which name each had; `own_map` (ours -> theirs) wins."""
    writer = next(
        (one for one in WRITERS if any(re.fullmatch(one.mark, name) for name in found)),
        None,
    )
    columns: dict[str, Array] = {}
    names: dict[str, str] = {}
    for ours, theirs in own_map.items():
        if theirs not in found:
            remedy = f"columns: {', '.join(found)}"
            raise InputError("--map", f"{ours}={theirs}", f"the log has no column {theirs!r}", remedy)
        columns[ours], names[ours] = found[theirs], theirs
    taken = set(own_map.values())
    for patterns in (writer.names if writer else {}, None, ALIASES):
        for theirs, values in found.items():
            match = theirs if patterns is None else _match(theirs, patterns)
            if theirs in taken or match is None or match.lstrip("-") in columns:
                continue
            ours = match.lstrip("-")
            # A loss that is minus the entropy; who is not known may write it as it is.
            is_negative = match != ours and (
                patterns is not ALIASES or bool(np.nanmean(np.append(values, -1e-9)) <= 0)
            )
            columns[ours] = -values if is_negative else values
            if ours != theirs:
                names[ours] = theirs
            if patterns is not None:
                taken.add(theirs)
    return (writer.kind if writer else "table"), columns, names


def _match(name: str, patterns: Mapping[str, str]) -> str | None:
    forms = [name]
    if patterns is ALIASES:
        whole = plain(name)
        folder, _, last = whole.rpartition("/")
        forms = [whole.replace("/", "_")]
        if folder.rpartition("/")[2] not in _OF_EVALUATION:
            forms.append(last)
    for form in forms:
        if patterns is ALIASES and form in _OURS:
            return form
        for pattern, ours in patterns.items():
            if re.fullmatch(pattern, form):
                return ours
    return None


def plain(name: str) -> str:
    """In lower case, words joined by `_`. What Weights & Biases exports begins with the name of the run."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.rpartition(" - ")[2].strip())
    return re.sub(r"[\s\-.]+", "_", words.lower()).strip("_")


def unread(found: Mapping[str, Array], columns: Mapping[str, Array], names: Mapping[str, str]) -> list[str]:
    """A note on each column that nobody reads and that looks like what the log does not tell otherwise."""
    notes = []
    for theirs in (name for name in found if name not in names.values() and name not in _OURS):
        words = re.split(r"[_/]", plain(theirs))

        def has(pattern: str, words: list[str] = words) -> bool:
            return any(re.fullmatch(pattern, word) for word in words)

        ours = next((ours for pattern, ours in _LOOKS_LIKE if has(pattern)), None)
        if ours is None and has(_WHO_WAS_CHOSEN) and _are_few_numbers(found[theirs]):
            ours = ("action",)
        if ours is not None and not any(name in columns for name in ours):
            notes.append(f"{theirs} is not read; if that is what it is: --map {ours[0]}={theirs}")
    return notes


def _are_few_numbers(values: Array) -> bool:
    seen = values[np.isfinite(values)]
    return bool((seen % 1 == 0).all()) and 1 < len(np.unique(seen)) <= _FEW


def derive(
    columns: dict[str, Array], names: dict[str, str], facts: RunFacts, num_actions: int | None = None
) -> None:
    """Add what rules look at and what follows from the columns there are; `names` says from which.
    `num_actions`: as many as were seen, in a log that names them."""

    def follow(name: str, source: str) -> None:
        if name not in columns and source in columns:
            columns[name], names[name] = columns[source], source

    follow("approx_kl_mean", "approx_kl_last")
    follow("approx_kl_max", "approx_kl_mean")
    blocks = [values for name, values in columns.items() if _BLOCK.fullmatch(name)]
    if blocks and "eval_min_block_return" not in columns:
        columns["eval_min_block_return"] = np.min(blocks, axis=0)
    chosen = {match[1]: columns[name] for name in [*columns] if (match := _ACTION_SHARE.fullmatch(name))}
    if len(chosen) > 1 and "action_frac_max" not in columns:
        total = np.sum(list(chosen.values()), axis=0)  # 1, or as many as were counted
        with np.errstate(divide="ignore", invalid="ignore"):
            columns |= {f"action_share/{number}": values / total for number, values in chosen.items()}
        columns["action_frac_max"] = np.max([columns[f"action_share/{number}"] for number in chosen], axis=0)
    if "num_epochs_so_far" in columns and "early_stop" not in columns:
        # Stable-Baselines3 counts epochs: an update with fewer than the others was stopped by its KL.
        counts = columns["num_epochs_so_far"]
        rows = np.flatnonzero(np.isfinite(counts))
        epochs = np.diff(counts[rows])
        if len(epochs):
            columns["early_stop"] = np.full(len(counts), np.nan)
            columns["early_stop"][rows[1:]] = epochs < epochs.max()
    if "entropy" in columns and "entropy_frac" not in columns:
        highest, is_known = _highest_entropy(columns["entropy"], facts, num_actions)
        if highest > 0:
            columns["entropy_frac"] = columns["entropy"] / highest
            names["entropy_frac"] = "entropy" if is_known else FROM_START


def _highest_entropy(entropy: Array, facts: RunFacts, num_actions: int | None) -> tuple[float, bool]:
    """The entropy of uniform actions, and True, if their number is known; else that of the start, or 0."""
    num_entities = facts.schema.get("num_entities")
    if num_entities:
        return math.log(num_entities + 1), True
    seen = entropy[np.isfinite(entropy)]
    if not len(seen) or seen.min() < 0:
        return 0.0, False  # Gaussian actions: a density, it may be negative, and uniform means nothing
    if num_actions is not None and num_actions > 1 and seen.max() <= ROUNDING * math.log(num_actions):
        return math.log(num_actions), True  # an entropy above it would mean that not all were chosen
    return float(seen[:NUM_FIRST].max()), False
