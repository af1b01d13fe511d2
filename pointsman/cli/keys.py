"""The keys of configuration files, explained from the models that read them."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from pointsman.errors import InputError
from pointsman.spec import Spec

FILES = {
    "cluster": "the file of `simulate`, `compare`, `plan`, `capacity`, `tune` and `train`",
    "serve": "the settings of `serve`, for its `--set` and `--settings`",
    "train": "a training configuration, and `--set` of `train`",
}
# What the models themselves leave to the name of the key.
MEANINGS = {
    "replicas": "how many servers, or groups of them that differ",
    "device": "GPU, by its name in `pointsman hardware`",
    "model": "by its name in `pointsman hardware`",
    "tensor_parallel": "devices of a server",
    "dtype": "of weights and KV memory",
    "scheduler": "how a server forms its batches",
    "cost": "how long a step takes",
    "events": "what happens to servers during the run",
    "kv_memory_share": "share of the computed KV memory to use",
    "kind": "which of them",
    "discount": "how far ahead a reward counts",
    "student": "share of decisions by the network in training",
    "teacher": "share of decisions by a teacher",
    "chance": "share of decisions at random",
    "actors": "who decides while teachers are imitated",
    "network": "the policy network",
    "ppo": "the learning algorithm",
    "exploration": "how much is tried, and what changes that",
    "run": "how long, how much at a time, how often",
    "safety": "what ends a run that goes wrong, and what is warned about",
    "prices": "what a breach of a limit on a tail costs",
    "env.reward": "what a decision earns",
    "cluster": "the servers",
    "policy": "who decides where a request goes",
    "limits": "what a client may send, and how long things may take",
    "reliability": "retries, breakers, health checks",
}


class Key(NamedTuple):
    key: str
    kind: str  # of the section it belongs to, where that comes in kinds
    values: str
    default: str
    meaning: str


def find_keys(text: str, files: Sequence[str] = tuple(FILES)) -> list[Key]:
    """The keys meant, in the first of these files that has them."""
    known: list[str] = []
    for file in files:
        keys = list(keys_of(file))
        found = [one for one in keys if one.key == text or one.key.startswith(f"{text}.")]
        if found:
            return found
        known += [one.key for one in keys]
    near = difflib.get_close_matches(text, [*known, *(one.rpartition(".")[2] for one in known)], n=1)
    ends = [one for one in known if near and (one == near[0] or one.endswith(f".{near[0]}"))]
    remedy = f"did you mean {ends[0]!r}?" if ends else "`pointsman config` lists them"
    raise InputError("KEY", text, "unknown key", remedy)


def keys_of(file: str) -> Iterator[Key]:
    """All of them, sections before what is in them; what is the same in several kinds of one, once."""
    kinds: dict[Key, list[str]] = {}
    for one in _all_keys(file):
        kinds.setdefault(one._replace(kind=""), []).append(one.kind)
    for one, found in kinds.items():
        yield one._replace(kind=", ".join(dict.fromkeys(filter(None, found))))


def _all_keys(file: str) -> Iterator[Key]:
    if file == "cluster":
        from pointsman.config import Config

        yield from _walk(Config, "")
    elif file == "serve":
        from pointsman.router.config import Settings

        yield from _walk(Settings, "")
    else:
        from pointsman.envs.jobs import JobsSpec
        from pointsman.envs.routing import RoutingSpec
        from pointsman.live.spec import LiveSpec
        from pointsman.training.config import TrainConfig

        yield from _walk(TrainConfig, "")
        for kind, spec in (("routing", RoutingSpec), ("jobs", JobsSpec), ("live", LiveSpec)):
            yield from _walk(spec, "env.", kind)


def _walk(model: type[Spec], prefix: str, kind: str = "") -> Iterator[Key]:
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        inner = _specs_in(field.annotation)
        meaning = field.description or MEANINGS.get(key) or MEANINGS.get(name) or _told(inner)
        yield Key(key, kind, _values(field), _default(field), meaning)
        if key.count(".") > 1 and prefix.count(f".{name}."):
            continue  # a distribution that is made of distributions
        for one in inner:
            kinds = get_args(one.model_fields["kind"].annotation) if "kind" in one.model_fields else ()
            yield from _walk(one, f"{key}.", "/".join(kinds) if len(inner) > 1 else kind)


def _specs_in(annotation: Any) -> list[type[Spec]]:
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        return [annotation]
    return list(dict.fromkeys(one for part in get_args(annotation) for one in _specs_in(part)))


def _told(inner: Sequence[type[Spec]]) -> str:
    """The first sentence that a section says of itself."""
    text = " ".join((inner[0].__doc__ or "").split()) if inner else ""
    return text.partition(". ")[0].removesuffix(".")


def _values(field: FieldInfo) -> str:
    limits = [_limit(one) for one in field.metadata]
    return ", ".join(filter(None, [_type_text(field.annotation), *limits]))


def _limit(metadata: Any) -> str:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    return ", ".join(
        f"{sign} {getattr(metadata, name):,}" for name, sign in signs.items() if hasattr(metadata, name)
    )


def _type_text(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _type_text(get_args(annotation)[0])
    if origin is Literal:
        return " | ".join(map(str, get_args(annotation)))
    if origin in (Union, types.UnionType):
        parts = dict.fromkeys(_type_text(part) for part in get_args(annotation))
        return " | ".join(parts)
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        return "section"
    if origin in (tuple, list):
        return f"list of {_type_text(get_args(annotation)[0])}"
    if origin is not None and issubclass(origin, Mapping):
        return "mapping"
    names = {"int": "whole number", "float": "number", "str": "text", "bool": "true | false"}
    names |= {"NoneType": "null", "Path": "path", "PosixPath": "path", "dict": "mapping"}
    return names.get(getattr(annotation, "__name__", ""), "text")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be given"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Spec):
        return str(getattr(value, "kind", "as below"))
    if isinstance(value, tuple | dict) and not value:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
