"""A trained policy on disk: one safetensors file, read without PyTorch and without running anything from it.

The arrays are those of `PolicyNetwork.state_dict()` (training/networks.py). The file's header holds one JSON
text with the shape of the network, the feature schema (so that a policy is never fed other numbers than it
was trained on) and where it came from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from pointsman import __version__
from pointsman.errors import InputError, no_such_file
from pointsman.files import replace_file
from pointsman.inference.space import EntitySpace, Feature
from pointsman.spec import Spec, parse_spec

HEADER = "pointsman"  # the one key of the file's header: with two, their order would be random
FORMAT = 1


class NetworkSpec(Spec):
    kind: Literal["pooled", "attention", "attention+gru", "mlp"] = Field(
        default="pooled",
        description="how entities see each other: by mean and max, by attention, by attention with a memory "
        "of earlier decisions; mlp is one flat vector, for a fixed number of entities",
    )
    width: int = Field(default=64, ge=4, le=512, description="units of a hidden layer")
    depth: int = Field(default=2, ge=1, le=8, description="hidden layers before the entities meet")
    heads: int = Field(default=4, ge=1, description="attention: heads, each of width / heads units")
    separate_critic: bool = Field(default=True, description="the critic has an encoder of its own")
    privileged_critic: bool = Field(
        default=True, description="the critic sees what the actor must not; in training only"
    )
    hint: str | None = Field(
        default=None, description="entity feature of which hint_strength times is taken off the logits"
    )
    hint_strength: float = Field(default=0.0, ge=0, description="at the start; learned from there on")

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.kind.startswith("attention") and self.width % self.heads:
            raise InputError("network.heads", self.heads, f"does not divide width {self.width}", "try 4")
        if self.hint is None and self.hint_strength:
            raise InputError("network.hint", self.hint, "missing", "name an entity feature for hint_strength")
        return self


@dataclass(frozen=True)
class Checkpoint:
    """Everything that inference needs, and where it came from."""

    network: NetworkSpec
    space: EntitySpace  # the feature schema: what every number of an observation means
    arrays: Mapping[str, NDArray[Any]]
    metadata: Mapping[str, Any] = field(default_factory=dict)  # configuration digest, metrics, ...: JSON

    def lacks(self, space: EntitySpace) -> list[str]:
        """The features that came after those the policy was trained on. It does not see them."""
        return [
            feature.name
            for part in ("entity_features", "context_features")
            for feature in getattr(space, part)[len(getattr(self.space, part)) :]
        ]

    def widened(self, space: EntitySpace) -> Checkpoint:
        """The same policy for a space with more features, to learn on. It makes nothing of the new ones."""
        parts = ("entity_features", "context_features", "privileged_features")
        num_features, num_context, num_privileged = (len(getattr(self.space, part)) for part in parts)
        more = [len(getattr(space, part)) - len(getattr(self.space, part)) for part in parts]
        if not any(more):
            return self
        arrays = dict(self.arrays)
        for name, array in self.arrays.items():
            if name.endswith("layers.0.weight"):
                arrays[name] = _padded(
                    _padded(array, num_features + num_context, more[1]), num_features, more[0]
                )
            elif name.endswith("summary.weight"):
                num_pooled = 2 * self.network.width + num_context
                if array.shape[1] == num_pooled + num_privileged:  # the critic's
                    array = _padded(array, num_pooled + num_privileged, more[2])
                arrays[name] = _padded(array, num_pooled, more[1])
            for scale, count in zip(("entity_scale", "context_scale", "privileged_scale"), more, strict=True):
                if name.startswith(scale) and array.ndim == 1:
                    usual = 1.0 if name.endswith(("factor", "square")) else 0.0
                    arrays[name] = np.append(array, np.full(count, usual, array.dtype))
        return replace(self, space=replace(space, num_entities=self.space.num_entities), arrays=arrays)

    def require_space(self, space: EntitySpace, where: str) -> None:
        """Refuse another feature schema than the policy was trained on; `where` names it in the error.

        Features that were added at the end since then do not matter, except for an mlp.
        """
        for part in ("entity_features", "context_features"):
            mine = [f"{feature.name} [{feature.unit}]" for feature in getattr(self.space, part)]
            theirs = [f"{feature.name} [{feature.unit}]" for feature in getattr(space, part)]
            if not set(mine) & set(theirs):
                names = ", ".join(feature.name for feature in getattr(self.space, part)[:3])
                problem, remedy = "was trained for another problem", "name a policy that was trained for this"
                raise InputError(where, f"a network that sees {names}, …", problem, remedy)
            if mine != (theirs if self.network.kind == "mlp" else theirs[: len(mine)]):
                only_mine = [name for name in mine if name not in theirs]
                only_theirs = [name for name in theirs if name not in mine]
                differs = f"{only_mine[:1] or 'nothing'} instead of {only_theirs[:1] or 'nothing'}"
                if not only_mine and not only_theirs:
                    differs = "the same in another order"
                problem = f"was trained on other {part.replace('_', ' ')}: {differs}"
                raise InputError(where, part, problem, "train again, or use the version it was trained with")
        if self.network.kind == "mlp" and self.space.num_entities != space.num_entities:
            problem = f"an mlp for {self.space.num_entities} entities"
            raise InputError(where, space.num_entities, problem, "only the other kinds take any number")


def _padded(weights: NDArray[Any], column: int, count: int) -> NDArray[Any]:
    """Insert so many columns of zeros before this one."""
    return np.insert(weights, [column] * count, 0.0, axis=1)


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write the file; until it is complete and on disk, an older one of that name stays."""
    header = {
        "format": FORMAT,
        "version": __version__,
        "network": checkpoint.network.model_dump(),
        "space": space_to_json(checkpoint.space),
        "metadata": dict(checkpoint.metadata),
    }
    arrays = {name: np.asarray(array, order="C") for name, array in checkpoint.arrays.items()}
    replace_file(path, save(arrays, {HEADER: json.dumps(header, sort_keys=True)}))


def load_checkpoint(path: Path, where: str = "checkpoint") -> Checkpoint:
    """Read a policy; `where` names it in errors."""
    header, arrays = _read(path, where)
    try:
        version = header["format"]
        if version != FORMAT:
            remedy = f"this is Pointsman {__version__}, the file was written by {header['version']}"
            raise InputError(where, str(path), f"unknown format {version}", remedy)
        network = parse_spec(NetworkSpec, header["network"], f"{where}: network")
        space = space_from_json(header["space"])
        metadata = dict(header["metadata"]) | {"version": header["version"]}
    except InputError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
        raise _not_ours(path, where) from None
    checkpoint = Checkpoint(network, space, arrays, metadata)
    _require_arrays(checkpoint, path, where)
    return checkpoint


def space_to_json(space: EntitySpace) -> dict[str, Any]:
    """The feature schema, also written beside every run."""

    def listed(features: Sequence[Feature]) -> list[dict[str, str]]:
        return [feature._asdict() for feature in features]

    return {
        "num_entities": space.num_entities,
        "entity_features": listed(space.entity_features),
        "context_features": listed(space.context_features),
        "privileged_features": listed(space.privileged_features),
    }


def space_from_json(data: Mapping[str, Any]) -> EntitySpace:
    def features(part: str) -> tuple[Feature, ...]:
        return tuple(Feature(**{key: str(text) for key, text in row.items()}) for row in data[part])

    return EntitySpace(
        int(data["num_entities"]),
        features("entity_features"),
        features("context_features"),
        features("privileged_features"),
    )


def _read(path: Path, where: str) -> tuple[Mapping[str, Any], dict[str, NDArray[Any]]]:
    if path.is_dir():
        raise InputError(where, str(path), "is a directory", "name a .safetensors file")
    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads((file.metadata() or {})[HEADER])
            return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise no_such_file(where, path) from None
    except SafetensorError as error:
        reason = re.sub(r"\s+", " ", str(error))
        remedy = "name a checkpoint of `pointsman train`, or copy it again"
        raise InputError(where, str(path), f"damaged, or not a safetensors file ({reason})", remedy) from None
    except (KeyError, ValueError, RecursionError):
        raise _not_ours(path, where) from None
    except OSError as error:
        raise InputError(where, str(path), f"cannot be read ({error.strerror})", "check the file") from None


def _not_ours(path: Path, where: str) -> InputError:
    remedy = "name a checkpoint of `pointsman train`"
    if path.name.startswith("state-"):
        problem = "the state of a trainer, to resume from, not a policy"
        return InputError(where, str(path), problem, "use last.safetensors or best.safetensors beside it")
    return InputError(where, str(path), "a safetensors file, but not one of Pointsman's policies", remedy)


def _require_arrays(checkpoint: Checkpoint, path: Path, where: str) -> None:
    """The compiled network follows addresses, so sizes must be right before it gets them."""
    hint = checkpoint.network.hint
    if hint is not None and hint not in [feature.name for feature in checkpoint.space.entity_features]:
        raise InputError(where, str(path), f"its hint {hint!r} is not an entity feature", "train again")
    for name, shape in _inference_shapes(checkpoint.network, checkpoint.space):
        array = checkpoint.arrays.get(name)
        if array is None or array.shape != shape or array.dtype != np.float32:
            found = "missing" if array is None else f"{array.dtype}{list(array.shape)}"
            problem = f"{name} is {found}, not float32{list(shape)}"
            raise InputError(where, str(path), problem, "the file is damaged: copy it again, or train again")
        if not np.isfinite(array).all():
            raise InputError(where, str(path), f"{name} is not finite", "take an earlier checkpoint")


def _inference_shapes(spec: NetworkSpec, space: EntitySpace) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The arrays that inference reads, with their shapes."""
    num_features, num_context, width = len(space.entity_features), len(space.context_features), spec.width

    def layer(name: str, num_inputs: int, num_outputs: int, has_bias: bool = True) -> Any:
        yield f"{name}.weight", (num_outputs, num_inputs)
        if has_bias:
            yield f"{name}.bias", (num_outputs,)

    yield "hint_strength", ()
    for name, size in (("entity_scale", num_features), ("context_scale", num_context)):
        yield f"{name}.shift", (size,)
        yield f"{name}.factor", (size,)
    num_flat = space.num_entities * num_features if spec.kind == "mlp" else num_features
    yield from layer("actor.layers.0", num_flat + num_context, width)
    for number in range(1, spec.depth):
        yield from layer(f"actor.layers.{number}", width, width)
    if spec.kind == "mlp":
        yield from layer("head.output", width, space.num_actions)
        return
    yield from layer("actor.summary", 2 * width + num_context, width)
    yield from layer("head.of_entity", width, width)
    yield from layer("head.of_all", width, width, has_bias=False)
    yield from layer("head.score", width, 1, has_bias=False)
    yield from layer("head.hold", width, 1)
    if spec.kind.startswith("attention"):
        yield from layer("actor.attention.queries_keys_values", width, 3 * width)
        yield from layer("actor.attention.output", width, width)
    if spec.kind == "attention+gru":
        for end in ("ih", "hh"):
            yield f"memory.weight_{end}", (3 * width, width)
            yield f"memory.bias_{end}", (3 * width,)
