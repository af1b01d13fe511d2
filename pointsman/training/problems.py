"""Which problem to train on: `env.kind` names one of ours, or a Python module that offers three things.

    EnvSpec                     the section `env` of the configuration, a `Spec`
    make_env(spec, num_envs)    N environments that step together, an `EntityEnv`
    make_evaluate(spec)         how good a policy is, on fixed seeds beside baselines: an `Evaluate`

An evaluation returns metrics named `eval_*`. `eval_score` (higher is better) chooses the best checkpoint;
`eval_baseline_score`, if there is one, is what a run must not fall behind.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pointsman.envs.entity import EntityEnv
from pointsman.errors import InputError
from pointsman.policies.checkpoint import Checkpoint
from pointsman.spec import Spec, parse_spec

Evaluate = Callable[[Checkpoint], dict[str, float]]


class Problem(NamedTuple):
    """Where to find the three things, as module:name; imported when they are needed."""

    env_spec: str
    make_env: str
    make_evaluate: str


PROBLEMS = {
    "routing": Problem(
        "pointsman.envs.routing:RoutingSpec",
        "pointsman.envs.routing:make_env",
        "pointsman.evaluation.routing:make_evaluate",
    )
}


def make_env(section: Mapping[str, Any], num_envs: int) -> EntityEnv:
    """Environments of a validated section `env`."""
    env: EntityEnv = _import(section, "make_env")(env_spec(section), num_envs)
    return env


def make_evaluate(section: Mapping[str, Any]) -> Evaluate:
    evaluate: Evaluate = _import(section, "make_evaluate")(env_spec(section))
    return evaluate


def env_spec(section: Mapping[str, Any]) -> Spec:
    model: type[Spec] = _import(section, "env_spec")
    return parse_spec(model, {key: value for key, value in section.items() if key != "kind"}, "env")


def complete(value: Any) -> dict[str, Any]:
    """A section `env` as the user wrote it -> validated, with all defaults."""
    section = {"kind": value} if isinstance(value, str) else value
    if not isinstance(section, Mapping) or not isinstance(section.get("kind"), str):
        raise InputError("env", value, "has no kind", _kinds())
    return {"kind": section["kind"], **env_spec(section).model_dump(mode="json")}


def _import(section: Mapping[str, Any], part: str) -> Any:
    kind = section["kind"]
    problem = PROBLEMS.get(kind)
    if problem is None and "." not in kind:
        raise InputError("env.kind", kind, "unknown kind", _kinds())
    problem = problem or Problem(f"{kind}:EnvSpec", f"{kind}:make_env", f"{kind}:make_evaluate")
    module, _, name = getattr(problem, part).partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError("env.kind", kind, f"cannot be imported ({error})", _kinds()) from None


def _kinds() -> str:
    return f"kinds: {', '.join(PROBLEMS)}, or a Python module"
