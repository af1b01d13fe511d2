"""The configuration of a training run: what to learn on, with which network, how, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import yaml
from pydantic import BeforeValidator, Field, model_validator

from pointsman.config import Config
from pointsman.errors import InputError
from pointsman.evaluation.problem import complete, env_spec, find_problem, make_env, problem_names
from pointsman.experiments.scenarios import is_file
from pointsman.inference.checkpoint import NetworkSpec
from pointsman.spec import Spec, apply_override, parse_spec, read_yaml
from pointsman.training.curriculum import CurriculumSpec
from pointsman.training.exploration import ExplorationSpec
from pointsman.training.going_back import GoingBackSpec
from pointsman.training.ppo import PpoSpec
from pointsman.training.prices import PriceSpec
from pointsman.training.safety import SafetySpec
from pointsman.training.warm_start import WarmStartSpec, find_policy, policies_in

PRESETS = Path(__file__).parent / "presets"
SHORTEST_ROLLOUT = 64  # steps


class RunSpec(Spec):
    """How long, how much at a time, how often. An update is T rollout steps of all N environments."""

    minutes: float | None = Field(
        default=None, gt=0, description="length of the run [min], once kernels are compiled; or give steps"
    )
    steps: int | None = Field(
        default=None, ge=1, description="length of the run [decisions]; or give minutes"
    )
    start_from: str | None = Field(
        default=None,
        description="`default`, a run or a checkpoint to learn on from; its network is taken, too. Of "
        "several, `A,B`, a run takes the one with the best score (routing only)",
    )
    seed: int = Field(default=0, ge=0, description="of weights, environments, actions and minibatches")
    workers: int = Field(
        default=1, ge=1, le=1024, description="processes that share environments and gradients"
    )
    num_envs: int = Field(default=64, ge=1, le=65_536, description="N, environments, of all workers together")
    rollout_steps: int = Field(default=128, ge=2, description="T, decisions of an environment in an update")
    settle_steps: int = Field(
        default=256, ge=0, description="random decisions of an environment that set the feature scales first"
    )
    headroom_steps: int = Field(
        default=128,
        ge=0,
        description="decisions an environment makes by each heuristic, to see what there is to earn; 0: none",
    )
    rollout_lifetimes: float | None = Field(
        default=None,
        gt=0,
        description="length of a rollout in lifetimes of a request, instead of rollout_steps and num_envs: "
        "both follow when the run begins; routing only",
    )
    update_decisions: int = Field(
        default=16384, ge=4, description="with rollout_lifetimes: decisions of an update, about"
    )
    average_updates: int = Field(
        default=30, ge=1, description="[updates] what is judged and kept is the average of their policies"
    )
    going_back: GoingBackSpec | None = Field(
        default=GoingBackSpec(), description="to the best weights, where the score falls; null: off"
    )
    evaluate_every: int = Field(default=20, ge=1, description="[updates]")
    keep: int | None = Field(
        default=None,
        ge=1,
        description="keep the policy of every so many evaluations as checkpoints/update-<number>; null: none",
    )
    average_best: int | None = Field(
        default=None,
        ge=2,
        description="what the run leaves in the end is the average of so many of its best policies, of those "
        "that `keep` keeps, unless that is not as good; null: the best one",
    )
    checkpoint_every: int = Field(
        default=50, ge=1, description="[updates]; environments start anew at each, so that resuming is exact"
    )

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if (self.minutes is None) == (self.steps is None):
            problem = "missing" if self.minutes is None else "given beside run.steps"
            raise InputError("run.minutes", self.minutes, problem, "give one of run.minutes, run.steps")
        if self.average_best is not None and self.keep is None:
            raise InputError("run.keep", None, "missing beside run.average_best", "give 1")
        if self.num_envs % self.workers:
            remedy = "choose a multiple"
            raise InputError("run.num_envs", self.num_envs, f"no multiple of {self.workers} workers", remedy)
        return self

    @property
    def steps_per_update(self) -> int:
        return self.num_envs * self.rollout_steps


class TrainConfig(Spec):
    env: Annotated[dict[str, Any], BeforeValidator(complete)] = Field(
        description="what to learn on: `kind`, and what that environment takes"
    )
    network: NetworkSpec = NetworkSpec()
    ppo: PpoSpec = PpoSpec()
    exploration: ExplorationSpec = ExplorationSpec()
    warm_start: WarmStartSpec | None = Field(
        default=None, description="imitate heuristics first; off if null"
    )
    curriculum: CurriculumSpec | None = Field(default=None, description="easier tasks first; off if null")
    safety: SafetySpec = SafetySpec()
    prices: PriceSpec = PriceSpec()
    run: RunSpec

    @model_validator(mode="before")
    @classmethod
    def _network_of_start(cls, data: Any) -> Any:
        run = data.get("run") if isinstance(data, dict) else None
        start_from = run.get("start_from") if isinstance(run, dict) else None
        if not isinstance(start_from, str) or "network" in data:
            return data
        return data | {"network": find_policy(policies_in(start_from)[0]).network}

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        # What an environment cannot do without, by its own word.
        for name, wanted in getattr(env_spec(self.env), "run_must_be", {}).items():
            value = getattr(self.run, name)
            if value != wanted:
                problem = f"must be {wanted} with env.kind {self.env['kind']}"
                raise InputError(f"run.{name}", value, problem, f"--set run.{name}={wanted}")
        if self.run.start_from is not None and self.warm_start is not None:
            remedy = "start from a policy or imitate heuristics; --set warm_start=null"
            raise InputError("run.start_from", self.run.start_from, "given beside warm_start", remedy)
        rows = self.run.steps_per_update
        if self.ppo.minibatch_size > rows:
            raise InputError(
                "ppo.minibatch_size",
                self.ppo.minibatch_size,
                f"an update has {rows} decisions",
                "make it smaller",
            )
        if self.network.kind == "attention+gru" and self.run.rollout_steps % self.ppo.sequence_length:
            raise InputError(
                "ppo.sequence_length",
                self.ppo.sequence_length,
                f"does not divide run.rollout_steps {self.run.rollout_steps}",
                "choose a divisor",
            )
        if self.ppo.imitation.highest > 0 and self.warm_start is None:
            raise InputError(
                "warm_start", None, "missing", "ppo.imitation needs teachers: add `warm_start: {}`"
            )
        return self


def with_rollouts(config: TrainConfig) -> TrainConfig:
    """Rollouts as long as `run.rollout_lifetimes` says, measured in the environments themselves.

    By Little's law a lifetime is as many decisions as there are requests in the system: about 40 with few
    long requests, 300 with many. The middle one of all groups counts: steps are the same for all.
    """
    run = config.run
    if run.rollout_lifetimes is None:
        return config
    groups = list(config.env.get("scenarios", ()))
    env = make_env(config.env, 2 * max(len(groups), 4))
    env.reset(run.seed)
    mean_in_system = getattr(env, "mean_in_system", None)
    if mean_in_system is None:
        problem, remedy = f"env.kind {config.env['kind']} has no lifetimes", "give run.rollout_steps"
        raise InputError("run.rollout_lifetimes", run.rollout_lifetimes, problem, remedy)
    wanted = run.rollout_lifetimes * float(np.median(mean_in_system))
    # Every worker has environments of all groups, as many of each, if an update has room for that.
    share = run.workers * len(env.groups)
    if run.update_decisions < share * SHORTEST_ROLLOUT:
        share = run.workers
    longest = max(run.update_decisions // share, SHORTEST_ROLLOUT)
    unit = config.ppo.sequence_length  # recurrent networks learn from whole sequences
    num_steps = unit * max(1, round(min(max(wanted, SHORTEST_ROLLOUT), longest) / unit))
    num_envs = share * max(1, round(run.update_decisions / num_steps / share))
    fitted = run.model_copy(update={"rollout_steps": num_steps, "num_envs": num_envs})
    return config.model_copy(update={"run": fitted})


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def load_train_config(source: Path | str, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a YAML file (a path) or a preset (its name), apply `key=value` overrides, validate.

    A key of what is learned on means the same as to `compare` and `evaluate`.
    """
    data = _read_preset(source) if isinstance(source, str) else _on_preset(read_yaml(source, "env"))
    if not isinstance(source, str):
        _anchor_scenarios(data, source.parent)
    if any(override.startswith("run.start_from=") for override in overrides):
        # How the policy of a preset or file begins is for one that starts from nothing.
        data.pop("warm_start", None)
        data.pop("network", None)
    for override in overrides:
        _apply(data, override)
    return parse_spec(TrainConfig, data)


def _apply(data: dict[str, Any], override: str) -> None:
    section = override.partition("=")[0].split(".")[0]
    env = data.get("env")
    kind = env.get("kind") if isinstance(env, dict) else env
    if section not in TrainConfig.model_fields and isinstance(kind, str):
        spec = find_problem(kind).env_spec
        if "changes" in spec.model_fields and section in Config.model_fields:
            env = data["env"] = env if isinstance(env, dict) else {"kind": kind}
            env["changes"] = [*env.get("changes", ()), override]
            return
        if section in spec.model_fields:
            override = f"env.{override}"
    apply_override(data, override, "ppo.num_epochs=2")


def _anchor_scenarios(data: dict[str, Any], folder: Path) -> None:
    """Paths of configurations to train on start at the folder of the file that names them."""
    env = data.get("env")
    sections = [env, env.get("evaluation")] if isinstance(env, dict) else []
    for section in sections:
        if isinstance(section, dict) and isinstance(section.get("scenarios"), list):
            section["scenarios"] = [
                str(folder.resolve() / Path(name).expanduser()) if is_file(str(name)) else name
                for name in section["scenarios"]
            ]


def _read_preset(name: str) -> dict[str, Any]:
    path = PRESETS / f"{name}.yaml"
    if not path.is_file():
        raise InputError("--preset", name, "no such preset", f"presets: {', '.join(preset_names())}")
    return read_yaml(path, "env")


def _on_preset(data: dict[str, Any]) -> dict[str, Any]:
    """A file's keys on top of the preset of its problem, where files of that problem build on it.

    A section is merged key by key, and a key of it replaced as a whole: half of a schedule is no schedule.
    """
    env, run = data.get("env"), data.get("run")
    kind = env.get("kind") if isinstance(env, dict) else env
    problem = find_problem(kind) if isinstance(kind, str) and kind in problem_names() else None
    if problem is None or not problem.file_preset:
        return data
    base = _read_preset(problem.file_preset)
    if isinstance(run, dict):
        if {"minutes", "steps"} & run.keys():
            base["run"] = {
                key: value for key, value in base["run"].items() if key not in ("minutes", "steps")
            }
        if run.get("start_from") is not None:
            base.pop("network", None)
    given = data | {"env": env if isinstance(env, dict) else {"kind": kind}}
    return base | {
        key: base[key] | value if isinstance(value, dict) and isinstance(base.get(key), dict) else value
        for key, value in given.items()
    }


def to_yaml(config: TrainConfig) -> str:
    """Complete, defaults included: `load_train_config` reads the same configuration from it."""
    data: dict[str, Any] = config.model_dump(mode="json")
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
