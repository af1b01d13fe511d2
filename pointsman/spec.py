"""The base of every configuration model: unknown keys are errors, and errors are one readable line.

And where configurations come from: YAML files, and `key=value` on the command line.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails

from pointsman.errors import InputError, no_such_file, reason_of


class Spec(BaseModel):
    """A part of the configuration. Frozen, so that a resolved configuration can be written beside a run."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _as_people_write_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """In YAML `yes` is true, which pydantic takes for 1; 1e5 is text, which it refuses."""
        if isinstance(value, bool | str):
            kinds = set(_alternatives(cls.model_fields[str(info.field_name)].annotation))
            if kinds & {int, float} and type(value) not in kinds:
                if isinstance(value, bool):
                    raise ValueError("must be a number")
                if re.fullmatch(r"[-+]?[\d.]+[eE]\+?\d+", value):
                    return float(value)
        return value


def _alternatives(annotation: Any) -> list[Any]:
    """The types of a union, without their bounds."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [one for part in get_args(annotation) for one in _alternatives(part)]
    return [annotation]


S = TypeVar("S", bound=Spec)


def parse_spec(model: type[S], data: Mapping[str, Any], where: str = "") -> S:
    """Validate `data`; the first problem becomes an `InputError` that names the full key."""
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        raise _as_input_error(error, model, where) from None


def one_of(where: str, models: tuple[type[Spec], ...], usual_kind: str | None = None) -> Callable[[Any], Any]:
    """Choose the model by its `kind`, so that an error names the user's key and not a branch of a union.

    `usual_kind`: what a section without a kind is.
    """
    by_kind = {kind: model for model in models for kind in get_args(model.model_fields["kind"].annotation)}

    def validate(value: Any) -> Any:
        if isinstance(value, Spec):
            return value
        data = {"kind": value} if isinstance(value, str) else value
        kinds = ", ".join(by_kind)
        if not isinstance(data, Mapping):
            raise InputError(where, value, "is neither a kind nor a mapping with a kind", f"kinds: {kinds}")
        kind = data.get("kind", usual_kind)
        if kind not in by_kind:
            near = difflib.get_close_matches(str(kind), by_kind, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else f"kinds: {kinds}"
            raise InputError(f"{where}.kind", kind, "unknown kind" if kind else "missing", remedy)
        return parse_spec(by_kind[kind], data, where)

    return validate


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice: YAML would keep the last one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    problem = f"the key {key.value!r} is there twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, name: str = "the text") -> Any:
    """What a text in YAML says; whatever is wrong with it raises YAMLError, which calls the text `name`."""
    loader = _Loader(text)
    loader.name = name
    try:
        return loader.get_single_data()
    except (ValueError, RecursionError) as error:  # no such date or number; nested a thousand times
        raise yaml.YAMLError(str(error)) from None


def read_yaml(path: Path, first_key: str, field: str = "CONFIG") -> dict[str, Any]:
    """The keys of a configuration file; `field` is what named it."""
    if {".csv", ".jsonl", ".parquet"} & set(path.suffixes):
        remedy = f"write `workload: {{trace: {path.name}}}` into a YAML file and name that"
        raise InputError(field, str(path), "is a trace, not a configuration", remedy)
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"), path.name)
    except FileNotFoundError:
        raise no_such_file(field, path) from None
    except IsADirectoryError:
        raise InputError(field, str(path), "is a directory", "name a YAML file") from None
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise InputError(field, str(path), f"not valid YAML ({problem})", "correct the file") from None
    except (OSError, ValueError) as error:  # not text, or a name that no file can have
        raise InputError(
            field, str(path), f"cannot be read ({reason_of(error)})", "name a YAML text file"
        ) from None
    if not isinstance(data, dict):
        raise InputError(field, str(path), "holds no keys with values", f"start with `{first_key}:`")
    return data


def apply_override(data: dict[str, Any], override: str, example: str) -> None:
    """Set what `key=value` says, the key with dots, the value in YAML."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise InputError("--set", override, "is not key=value", f"for example --set {example}")
    try:
        value = parse_yaml(text)
    except yaml.YAMLError:
        raise InputError(f"--set {key}", text, "is not a YAML value", "quote it") from None
    *parents, last = key.split(".")
    for parent in parents:
        inner = data.setdefault(parent, {})
        if isinstance(inner, str):  # a kind or the path of a trace, written short
            inner = data[parent] = {"path" if parent == "trace" else "kind": inner}
        if not isinstance(inner, dict):
            raise InputError(f"--set {key}", value, f"{parent} is not a section", "set it as a whole")
        data = inner
    data[last] = value


def _as_input_error(error: ValidationError, model: type[Spec], where: str) -> InputError:
    # An unknown key often causes a second, more confusing error: report it first.
    problems = sorted(_meant(error.errors()), key=lambda problem: problem["type"] != "extra_forbidden")
    problem = problems[0]
    path = [str(part) for part in problem["loc"] if not _is_branch(part)]
    field = ".".join(([where] if where else []) + path) or model.__name__
    cause = (problem.get("ctx") or {}).get("error")
    if isinstance(cause, InputError):
        return InputError(_within(field, path, cause.field), cause.value, cause.problem, cause.remedy)
    if problem["type"] == "extra_forbidden":
        known = _known_keys(model, path[:-1])
        near = difflib.get_close_matches(path[-1], known, n=1)
        others = f"known keys: {', '.join(known)}" if known else "leave it out"
        remedy = f"did you mean {near[0]!r}?" if near else others
        return InputError(field, problem["input"], "unknown key", remedy)
    remedy = "correct the value"  # of a file, an option or a request: the field says which
    if problem["type"] == "missing":
        return InputError(field, None, "missing", "add it")
    if problem["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return InputError(field, problem["input"], "is not a section with keys of its own", remedy)
    what = _NOT_A.get(problem["type"]) or problem["msg"].removeprefix("Value error, ")
    what = what.replace("Input should be", "must be")
    return InputError(field, problem["input"], what[0].lower() + what[1:], remedy)


def _meant(problems: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Errors within the one of several types that fits a value best, which is the one that is meant.

    A list of groups is no whole number, either, but that is not what is wrong with its second group.
    """
    locations = [problem["loc"] for problem in problems]

    def fits_none(at: tuple[int | str, ...]) -> bool:
        return bool(at) and _is_branch(at[-1])

    def is_beside_better(at: tuple[int | str, ...]) -> bool:
        return any(other[: len(at) - 1] == at[:-1] and len(other) > len(at) for other in locations)

    return [one for one in problems if not (fits_none(one["loc"]) and is_beside_better(one["loc"]))]


def _within(field: str, path: list[str], inner: str) -> str:
    """The full key for one that a section was given whose usual place is not in a list, as here."""
    parts = inner.split(".")
    is_in_list = any(part.isdigit() for part in path)
    if not is_in_list or inner.startswith(field) or path[-1] not in parts:
        return inner
    return ".".join([field, *parts[parts.index(path[-1]) + 1 :]])


_WHOLE, _NUMBER, _SWITCH = "must be a whole number", "must be a number", "must be true or false"
_NOT_A = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), _WHOLE),
    **dict.fromkeys(("float_type", "float_parsing"), _NUMBER),
    **dict.fromkeys(("bool_type", "bool_parsing"), _SWITCH),
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list"),
    "string_type": "must be text",
}  # what pydantic says in more words


def _is_branch(part: int | str) -> bool:
    """Whether a part of pydantic's location names one of several types that a value may have, and no key."""
    return isinstance(part, str) and (part == "constrained-int" or "[" in part or part[:1].isupper())


def _section_in(annotation: Any) -> type[Spec] | None:
    """The model of a section, or of those in a list."""
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        return annotation
    return next(filter(None, map(_section_in, get_args(annotation))), None)


def _known_keys(model: type[Spec], path: list[str]) -> list[str]:
    for part in path:
        if part.isdigit():  # of a list, whose items are what its field is about
            continue
        field = model.model_fields.get(part)
        inner = _section_in(getattr(field, "annotation", None))
        if inner is None:
            return []
        model = inner
    return sorted(field.alias or name for name, field in model.model_fields.items())
