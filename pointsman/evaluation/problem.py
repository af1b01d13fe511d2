"""What a problem is, and how problems are found by name.

A problem states its parts in a `Problem`. Whoever wants `env.kind` and `--env` to know it by name registers
it as an entry point, in the pyproject.toml of their own package:

    [project.entry-points."pointsman.problems"]
    my-problem = "my_package.my_module:PROBLEM"

Ours register in the same way; the folder problems/ holds them, above all that they refer to. Without an entry
point, `env.kind` names a Python module that has a `PROBLEM`. A problem is imported when it is first asked
for: nobody waits for the others, or needs the packages that they need.

In a checkout the entry points are read from pyproject.toml itself: the metadata of an editable install are as
old as the install, and a checkout also runs without one.
"""

from __future__ import annotations

import difflib
import importlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from pointsman.envs.entity import EntityEnv
from pointsman.errors import InputError, missing_extra
from pointsman.evaluation.returns import Judge
from pointsman.inference.checkpoint import Checkpoint
from pointsman.spec import Spec, parse_spec

GROUP = "pointsman.problems"
_CHECKOUT = Path(__file__).parents[2] / "pyproject.toml"

Evaluate = Callable[[Checkpoint], dict[str, float]]


@dataclass(frozen=True)
class Problem:
    """The parts of a problem. A `spec` is an instance of `env_spec`, the section `env` of the configuration.

    An evaluation returns metrics named `eval_*`. `eval_score` (higher is better) chooses the best checkpoint;
    `eval_baseline_score`, if there is one, is what a run must not fall behind.
    """

    env_spec: type[Spec]
    make_env: Callable[[Any, int], EntityEnv]  # spec, N -> environments that step together
    make_evaluate: Callable[[Any], Evaluate]  # spec -> how good a policy is, on fixed seeds beside baselines
    # What `evaluate` and `compare` play, where policies are judged by returns; routing has latencies instead.
    make_judge: Callable[[Any], Judge] | None = None
    # What `report` shows of a run, an `Appraise` of report/appraisal.py; without it, the run's evaluations.
    appraise: Callable[..., Any] | None = None
    # spec -> spec: what a configuration leaves open, and a run decides before it begins.
    settle: Callable[[Any], Any] | None = None
    # The same where a run learns on: spec, policies -> the one to begin with, and the spec that suits it.
    choose_start: Callable[[Any, Sequence[str]], tuple[str, Any]] | None = None
    # What must be open during a run.
    session: Callable[[Any], AbstractContextManager[None]] = nullcontext
    preset: str | None = None  # what `pointsman train --env` takes
    file_preset: str | None = None  # what a file of this kind leaves out is as there; None: the defaults


def problem_names() -> list[str]:
    return sorted(_registered())


@cache
def find_problem(kind: str) -> Problem:
    point = _registered().get(kind)
    if point is None and "." not in kind:
        near = difflib.get_close_matches(kind, problem_names(), n=1)
        raise InputError("env.kind", kind, "unknown kind", f"did you mean {near[0]!r}?" if near else _kinds())
    try:
        found = point.load() if point is not None else importlib.import_module(kind).PROBLEM
    except (ImportError, AttributeError) as error:
        raise missing_extra(error) or InputError(
            "env.kind", kind, f"cannot be imported ({error})", _kinds()
        ) from None
    if not isinstance(found, Problem):
        raise InputError("env.kind", kind, "its PROBLEM is not a Problem", "see evaluation/problem.py")
    return found


def complete(value: Any) -> dict[str, Any]:
    """A section `env` as the user wrote it -> validated, with all defaults."""
    section = {"kind": value} if isinstance(value, str) else value
    if not isinstance(section, Mapping) or not isinstance(section.get("kind"), str):
        raise InputError("env", value, "has no kind", _kinds())
    return {"kind": section["kind"], **env_spec(section).model_dump(mode="json")}


def env_spec(section: Mapping[str, Any]) -> Spec:
    fields = {key: value for key, value in section.items() if key != "kind"}
    return parse_spec(find_problem(section["kind"]).env_spec, fields, "env")


def settled(section: Mapping[str, Any]) -> dict[str, Any]:
    """A validated section `env` with nothing left open."""
    settle = find_problem(section["kind"]).settle
    if settle is None:
        return {**section}
    return {"kind": section["kind"], **settle(env_spec(section)).model_dump(mode="json")}


def with_start(section: Mapping[str, Any], policies: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The policy to learn on from, and the section `env` with what comes with it and nothing left open."""
    choose = find_problem(section["kind"]).choose_start
    if choose is None:
        if len(policies) > 1:
            problem = f"are several, and env.kind {section['kind']} does not choose"
            raise InputError("run.start_from", ", ".join(policies), problem, "name one")
        return policies[0], settled(section)
    policy, spec = choose(env_spec(section), policies)
    return policy, {"kind": section["kind"], **spec.model_dump(mode="json")}


def make_env(section: Mapping[str, Any], num_envs: int) -> EntityEnv:
    """Environments of a validated section `env`."""
    return find_problem(section["kind"]).make_env(env_spec(section), num_envs)


def make_evaluate(section: Mapping[str, Any]) -> Evaluate:
    return find_problem(section["kind"]).make_evaluate(env_spec(section))


def make_judge(section: Mapping[str, Any]) -> Judge:
    make = find_problem(section["kind"]).make_judge
    if make is None:
        remedy = "use `pointsman compare` without --env"
        raise InputError("env.kind", section["kind"], "is judged by latencies", remedy)
    return make(env_spec(section))


def session(section: Mapping[str, Any]) -> AbstractContextManager[None]:
    """What a run on this problem goes on in."""
    return find_problem(section["kind"]).session(env_spec(section))


@cache
def _registered() -> dict[str, EntryPoint]:
    found = {point.name: point for point in entry_points(group=GROUP)}
    if _CHECKOUT.is_file():
        project = tomllib.loads(_CHECKOUT.read_text(encoding="utf-8")).get("project", {})
        if project.get("name") == "pointsman":
            own = project["entry-points"][GROUP]
            found |= {name: EntryPoint(name, value, GROUP) for name, value in own.items()}
    return found


def _kinds() -> str:
    return f"kinds: {', '.join(problem_names())}, or a Python module with a PROBLEM"
