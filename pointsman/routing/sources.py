"""Policies by name or path: what a user may write where a policy is asked for.

- the name of a heuristic, or of a trained policy that comes with the package: `default`, `default-mean`;
- a policy file, as `pointsman tune` writes it: YAML with `policy:`, a heuristic or any of these with what is
  to be different, and, for the reader, how it was `made:`;
- a checkpoint of `pointsman train`, or its run directory, which stands for its best checkpoint;
- a trained policy with how late it may have a first token, `default-mean:0.3s`: see `detour_s` in policy.py.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pointsman.errors import InputError, no_such_file
from pointsman.spec import read_yaml

LEARNED = "learned"
DEFAULT, DEFAULT_MEAN = "default", "default-mean"
# Trained policies that come with the package, and where they send a request.
SHIPPED = {
    DEFAULT: "where the trained policy of this package prefers; it may hold the request instead",
    DEFAULT_MEAN: "the same, trained for the shortest mean: long prompts wait for each other; with "
    "default-mean:0.3s, their first token comes at most 0.3 s later than it could",
}
DEFAULT_CHECKPOINT = Path(__file__).parent / f"{DEFAULT}.safetensors"
BEST = Path("checkpoints") / "best.safetensors"
_YAML = (".yaml", ".yml")
_TRACES = {".csv", ".jsonl", ".parquet"}
_MEANT = "name a heuristic, `default`, a run or a file of `pointsman tune`"
_SUFFIXES = (*_YAML, ".safetensors")


def look_up(text: str, heuristics: Sequence[str]) -> dict[str, Any]:
    """The fields of the policy that is meant by `text`, which is none of the heuristics."""
    policy, colon, seconds = text.rpartition(":")
    if colon and seconds.endswith("s") and not Path(text).expanduser().exists():
        return _with_detour(policy, seconds, heuristics)
    if text in SHIPPED:
        shipped = DEFAULT_CHECKPOINT.with_name(f"{text}.safetensors")
        if not shipped.exists():
            problem = "this version comes without this trained policy"
            raise InputError("policy", text, problem, "train one: `pointsman train`")
        return {"kind": LEARNED, "name": text, "checkpoint": shipped}
    path = Path(text).expanduser()
    if not text or not (is_path(text) or path.exists()):
        near = difflib.get_close_matches(text, (*heuristics, *SHIPPED), n=1)
        known = f"known: {', '.join((*heuristics, *SHIPPED))}; or give a path"
        remedy = f"did you mean {near[0]!r}?" if near else known
        raise InputError("policy", text, "unknown policy", remedy)
    if not path.exists():
        raise no_such_file("policy", path)
    if _TRACES & set(path.suffixes):
        raise InputError("policy", str(path), "is a trace, not a policy", _MEANT)
    if path.suffix in _YAML:
        fields = _read_policy(path, heuristics)
    else:
        fields = {"kind": LEARNED, "checkpoint": _checkpoint(path)}
    return {"name": _name(path, heuristics)} | fields


def _with_detour(policy: str, seconds: str, heuristics: Sequence[str]) -> dict[str, Any]:
    fields = {} if policy in heuristics else look_up(policy, heuristics)
    if "checkpoint" not in fields:
        problem = "only a trained policy is told how late a first token may be"
        raise InputError("policy", f"{policy}:{seconds}", problem, f"leave out :{seconds}")
    try:
        detour_s = float(seconds.removesuffix("s"))
    except ValueError:
        detour_s = -1.0
    if not 0.0 <= detour_s < math.inf:
        problem = f"{seconds} is not a time"
        raise InputError("policy", f"{policy}:{seconds}", problem, f"for example {policy}:0.3s")
    return fields | {"detour_s": detour_s, "name": f"{fields['name']}:{seconds}"}


def is_path(text: str) -> bool:
    return "/" in text or text.endswith(_SUFFIXES)


def anchored_policy(section: Any, folder: Path) -> Any:
    """A `policy:` section with its paths, which start at the file's folder, made independent of it."""

    def anchored(text: Any) -> Any:
        is_named = isinstance(text, str) and is_path(text)
        return str(folder.resolve() / Path(text).expanduser()) if is_named else text

    if not isinstance(section, Mapping):
        return anchored(section)
    return {
        key: anchored(value) if key in ("kind", "checkpoint") else value for key, value in section.items()
    }


def _checkpoint(path: Path) -> Path:
    if path.is_dir():
        if not (path / BEST).exists():
            remedy = f"name a run of `pointsman train`, which has {BEST}, or a file"
            raise InputError("policy", str(path), "no checkpoint in this directory", remedy)
        path = path / BEST
    return path.resolve()


def _read_policy(path: Path, heuristics: Sequence[str]) -> dict[str, Any]:
    try:
        data = read_yaml(path, "policy")
    except InputError as error:
        raise InputError("policy", str(path), error.problem, error.remedy) from None
    if "workload" in data:
        problem = "is not a policy file, but a cluster with its traffic"
        raise InputError("policy", str(path), problem, _MEANT)
    fields = data.get("policy")
    unknown = [key for key in data if key not in ("policy", "made")]
    if unknown or not isinstance(fields, Mapping) or "kind" not in fields:
        remedy = "it needs `policy: {kind: …}`, as `pointsman tune` writes it"
        raise InputError(str(path), unknown[0] if unknown else fields, "is not a policy file", remedy)
    fields = dict(anchored_policy(fields, path.parent))
    kind = str(fields["kind"])
    if kind in (*heuristics, LEARNED):
        return fields
    if kind.endswith(_YAML):
        raise InputError(f"{path}: policy.kind", kind, "is a policy file of its own", "name that one")
    try:
        meant = look_up(kind, heuristics)
    except InputError as error:
        raise InputError(f"{path}: policy.kind", error.value, error.problem, error.remedy) from None
    return {field: value for field, value in {**fields, **meant}.items() if field != "name"}


def _name(path: Path, heuristics: Sequence[str]) -> str:
    """Short, and never that of a heuristic: the run of a checkpoint, else the file without its ending."""
    path = path.resolve()
    name = path.name if path.is_dir() else path.stem
    if path.parent.name == BEST.parent.name:
        run = path.parent.parent.name
        name = run if path.name == BEST.name else f"{run}/{name}"
    return path.name if name in (*heuristics, LEARNED, *SHIPPED) else name
