"""Which problem to train on: `env.kind` names one of ours, or a Python module that offers three things.

    EnvSpec                     the section `env` of the configuration, a `Spec`
    make_env(spec, num_envs)    N environments that step together, an `EntityEnv`
    make_evaluate(spec)         how good a policy is, on fixed seeds beside baselines: an `Evaluate`

And a fourth, where policies are judged by returns (routing has latencies instead): what `pointsman evaluate`
and `compare` play. A checkpoint whose metadata has a section `env` is judged there.

    make_judge(spec)            a `Judge`

And a fifth, for what `pointsman report` shows of a run; without it, its evaluations:

    appraise(section, run, …)   an `Appraise` of report/appraisal.py

An evaluation returns metrics named `eval_*`. `eval_score` (higher is better) chooses the best checkpoint;
`eval_baseline_score`, if there is one, is what a run must not fall behind.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from pointsman.envs.entity import EntityEnv
from pointsman.errors import InputError
from pointsman.evaluation.returns import Judge
from pointsman.policies.checkpoint import Checkpoint
from pointsman.spec import Spec, parse_spec

Evaluate = Callable[[Checkpoint], dict[str, float]]
MODULE_PARTS = ("EnvSpec", "make_env", "make_evaluate", "make_judge", "appraise")


class Problem(NamedTuple):
    """Where to find the three things, as module:name; imported when they are needed."""

    env_spec: str
    make_env: str
    make_evaluate: str
    make_judge: str = ""
    appraise: str = ""
    preset: str = ""  # what `pointsman train --env` takes
    file_preset: str = ""  # what a CONFIG of this kind leaves out is as there; none: the defaults
    session: str = ""  # a context manager around a whole run, where something must be open for it


PROBLEMS = {
    "routing": Problem(
        "pointsman.envs.routing:RoutingSpec",
        "pointsman.envs.routing:make_env",
        "pointsman.evaluation.routing:make_evaluate",
        appraise="pointsman.report.routing:appraise",
        preset="quick",
    ),
    "jobs": Problem(
        "pointsman.envs.jobs:JobsSpec",
        "pointsman.envs.jobs:make_env",
        "pointsman.evaluation.jobs:make_evaluate",
        "pointsman.evaluation.jobs:make_judge",
        "pointsman.report.returns_page:appraise",
        preset="jobs",
        file_preset="jobs",
    ),
    "live": Problem(
        "pointsman.live.spec:LiveSpec",
        "pointsman.live.environment:make_env",
        "pointsman.live.environment:make_evaluate",
        preset="live",
        file_preset="live",
        session="pointsman.live.cluster:session",
    ),
}


def make_env(section: Mapping[str, Any], num_envs: int) -> EntityEnv:
    """Environments of a validated section `env`."""
    env: EntityEnv = _import(section, "make_env")(env_spec(section), num_envs)
    return env


def make_evaluate(section: Mapping[str, Any]) -> Evaluate:
    evaluate: Evaluate = _import(section, "make_evaluate")(env_spec(section))
    return evaluate


def make_judge(section: Mapping[str, Any]) -> Judge:
    judge: Judge = _import(section, "make_judge")(env_spec(section))
    return judge


def session(section: Mapping[str, Any]) -> AbstractContextManager[None]:
    """What a run on this problem goes on in."""
    problem = PROBLEMS.get(section["kind"])
    if problem is None or not problem.session:
        return nullcontext()
    opened: AbstractContextManager[None] = _import(section, "session")(env_spec(section))
    return opened


def find_appraise(section: Mapping[str, Any]) -> Any:
    """An `Appraise`; None where the problem has none."""
    env_spec(section)  # refuses what is none of ours, and what cannot be imported
    problem = PROBLEMS.get(section["kind"])
    has_it = problem.appraise if problem else hasattr(importlib.import_module(section["kind"]), "appraise")
    return _import(section, "appraise") if has_it else None


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
    problem = problem or Problem(*(f"{kind}:{name}" for name in MODULE_PARTS))
    module, _, name = getattr(problem, part).partition(":")
    if not module:
        raise InputError("env.kind", kind, "is judged by latencies", "use `pointsman compare` without --env")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError("env.kind", kind, f"cannot be imported ({error})", _kinds()) from None


def _kinds() -> str:
    return f"kinds: {', '.join(PROBLEMS)}, or a Python module"
