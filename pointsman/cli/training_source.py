"""What `train` and `sweep` learn on: a file, a preset or scenarios, and the configuration they stand for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pointsman.cli.console import say
from pointsman.cli.options import chosen_scenarios
from pointsman.errors import InputError

if TYPE_CHECKING:
    from pointsman.training.config import TrainConfig

DEFAULT_ENV = "routing"


def told_apart(files: list[Path], scenarios: list[str], suite: str | None) -> tuple[Path | None, list[str]]:
    """A training configuration, if one is given, and what to train on; a file's keys say which it is."""
    from pointsman.spec import read_yaml

    if suite is not None:
        scenarios = [one.name for one in chosen_scenarios([], scenarios, suite)]
    own = [str(file) for file in files if "workload" in read_yaml(file, "env")]
    configs = [file for file in files if str(file) not in own]
    if len(configs) > 1:
        remedy = "give one; several files are a mix only if each has a `workload`"
        raise InputError("CONFIG", str(configs[1]), "a second training configuration", remedy)
    return configs[0] if configs else None, [*own, *scenarios]


def own_options(names: list[str]) -> list[str]:
    """What to train and select on, in place of what the preset says; --set may change it again."""
    from pointsman.envs.episodes import RANDOM
    from pointsman.experiments.scenarios import find_scenario, is_file

    if not names:
        return []
    known = [name for name in names if name != RANDOM]
    sizes = [find_scenario(name).config(0).cluster.num_replicas for name in known]
    if all(is_file(name) for name in names):
        room = max(sizes)
    else:
        room = max([8, *sizes])  # the largest that `random` and `random-hardware` draw
    named = json.dumps([str(Path(name).expanduser().resolve()) if is_file(name) else name for name in names])
    return [f"env.scenarios={named}", "env.evaluation.scenarios=[]", f"env.max_replicas={room}"]


def say_parts(config: TrainConfig) -> None:
    """Which of the user's traffic is trained on, and which is kept."""
    from pointsman.experiments.own import parts_text
    from pointsman.experiments.scenarios import find_scenario, is_file

    for name in dict.fromkeys(config.env.get("scenarios", ())):
        if is_file(name):
            say(parts_text(find_scenario(name, config.env.get("changes", ()))))


def own_preset(preset: str | None, own: list[str], overrides: list[str]) -> str | None:
    """Traffic of one's own has a preset that learns on from `default`, unless the beginning is changed."""
    from pointsman.experiments.scenarios import is_file

    begins_anew = any(override.startswith(("network", "warm_start")) for override in overrides)
    if preset in (None, "quick") and not begins_anew and any(is_file(name) for name in own):
        return "own"
    return preset


def source_of(file: Path | None, preset: str | None, env: str | None) -> Path | str:
    """The file, or the preset: that of the problem, if none is named."""
    from pointsman.evaluation.problem import find_problem, problem_names

    given = {"CONFIG": file, "--preset": preset, "--env": env}
    named = {option: value for option, value in given.items() if value is not None}
    if len(named) > 1:
        first, second, *_ = named
        raise InputError(first, str(named[first]), f"given beside {second}", "name one of the two")
    source = file if file is not None else preset
    if source is not None:
        return source
    name = env or DEFAULT_ENV
    found = find_problem(name).preset if name in problem_names() else None
    if found is None:
        known = f"known: {', '.join(problem_names())}; for others give a CONFIG with env.kind"
        raise InputError("--env", env, "names no problem with a preset", known)
    return found


def config_of(
    source: Path | str, overrides: list[str], given: dict[str, Any], searched: Sequence[str] = ()
) -> TrainConfig:
    """The configuration meant; options of their own win over --set, and what is searched over both."""
    from pointsman.training.config import load_train_config

    options, option_of = [], {}
    if given["minutes"] is not None or given["steps"] is not None:
        options = ["run.minutes=null", "run.steps=null"]
    for name, value in given.items():
        if value is not None:
            key = f"{'env' if name == 'objective' else 'run'}.{name}"
            options.append(f"{key}={value}")
            option_of[key] = f"--{name.replace('_', '-')}"
    try:
        return load_train_config(source, [*overrides, *options, *searched])
    except InputError as error:  # a wrong value is named by the option that gave it
        if error.problem == "unknown key" or error.field not in option_of:
            raise
        raise InputError(option_of[error.field], error.value, error.problem, error.remedy) from None
