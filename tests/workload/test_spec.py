"""The `workload:` section: what is accepted, and the one line for what is not."""

from __future__ import annotations

from typing import Any

import pytest

from pointsman.errors import InputError
from pointsman.spec import Spec, parse_spec
from pointsman.workload import WorkloadSpec
from pointsman.workload.spec import AnyArrivals, AnyLengths, PoissonArrivals, TraceReplay

from .factories import spec

POISSON = {"kind": "poisson", "load": 0.85}


def test_the_two_documented_forms() -> None:
    assert spec(trace="trace.csv").trace == TraceReplay(path="trace.csv")
    synthetic = spec(arrivals=POISSON, lengths="azure-conv", requests=20000)
    assert synthetic.arrivals == PoissonArrivals(load=0.85)
    assert synthetic.requests == 20000


@pytest.mark.parametrize(
    "workload",
    [
        {"trace": {"path": "t.csv", "columns": {"arrived_at": "ts"}, "rate": 3.0}},
        {"arrivals": {"kind": "mmpp", "rate": 2.0}, "lengths": "azure-code", "duration_s": 60},
        {
            "arrivals": {"kind": "closed", "users": 5},
            "lengths": {"kind": "mixture", "parts": [{"weight": 1, "lengths": "azure-conv"}]},
        },
    ],
)
def test_a_resolved_spec_can_be_read_back(workload: dict[str, Any]) -> None:
    resolved = spec(**workload)
    assert parse_spec(WorkloadSpec, resolved.model_dump(), "workload") == resolved
    assert parse_spec(WorkloadSpec, resolved.model_dump(exclude_none=True), "workload") == resolved


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ({}, "workload.arrivals = None: missing; set workload.trace, or both"),
        ({"arrivals": POISSON}, "workload.lengths = None: missing"),
        ({"trace": "t.csv", "lengths": "azure-conv"}, "workload.trace = 't.csv': given beside arrivals"),
        ({"arrivals": {"kind": "poisson"}, "lengths": "azure-conv"}, "neither load nor rate"),
        (
            {"arrivals": {**POISSON, "rate": 2}, "lengths": "azure-conv"},
            "workload.arrivals = 0.85: both load and rate are given; set exactly one of",
        ),
        ({"trace": {"path": "t.csv", "load": 1, "rate": 2}}, "workload.trace.load = 1.0: both load and rate"),
        (
            {"arrivals": {"kind": "poison", "load": 1}, "lengths": "azure-conv"},
            "workload.arrivals.kind = 'poison': unknown kind; did you mean 'poisson'?",
        ),
        (
            {"arrivals": {"load": 1}, "lengths": "azure-conv"},
            "workload.arrivals.kind = None: missing; kinds: poi",
        ),
        ({"arrivals": 5, "lengths": "azure-conv"}, "workload.arrivals = 5: is neither a kind nor"),
        ({"arrivals": POISSON, "lengths": "azure-conf"}, "did you mean 'azure-conv'?"),
        (
            {"arrivals": {**POISSON, "lod": 1}, "lengths": "azure-conv"},
            "workload.arrivals.lod = 1: unknown key; did you mean 'load'?",
        ),
        (
            {"arrivals": {"kind": "poisson", "load": -1}, "lengths": "azure-conv"},
            "workload.arrivals.load = -1",
        ),
        (
            {"arrivals": {"kind": "poisson", "rate": float("nan")}, "lengths": "azure-conv"},
            "workload.arrivals.rate = nan",
        ),
        ({"trace": "t.csv", "requests": 0}, "workload.requests = 0"),
        ({"trace": "t.csv", "duration_s": 0}, "workload.duration_s = 0"),
        ({"trace": {"path": "t.csv", "fromat": "azure"}}, "workload.trace.fromat = 'azure': unknown key"),
        ({"trace": {"path": "t.csv", "format": "azur"}}, "workload.trace.format = 'azur'"),
        (
            {"trace": {"path": "t.csv", "format": "azure", "columns": {}}},
            "workload.trace.columns = 'azure': this format names its own columns",
        ),
        ({"trace": {"path": "t.csv", "repeat": 0}}, "workload.trace.repeat = 0: an endless trace"),
        ({"trace": "t.csv", "sessions": 3}, "workload.sessions = 3.0: only for synthetic"),
        (
            {"arrivals": {"kind": "closed", "users": 3}, "lengths": "azure-conv", "duration_s": 5},
            "workload.duration_s = 5.0: a closed loop has no set times; set workload.requests instead",
        ),
        (
            {
                "arrivals": POISSON,
                "lengths": {
                    "kind": "uniform",
                    "prompt_min": 9,
                    "prompt_max": 3,
                    "output_min": 1,
                    "output_max": 2,
                },
            },
            "workload.lengths = '9..3': the prompt minimum is above its maximum",
        ),
        (
            {"arrivals": POISSON, "lengths": {"kind": "zipf", "min_total": 9, "max_total": 3}},
            "the zipf total minimum is above its maximum",
        ),
        ({"arrivals": POISSON, "lengths": {"kind": "mixture", "parts": []}}, "workload.lengths.parts"),
    ],
)
def test_bad_input_is_one_line(workload: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        spec(**workload)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", [WorkloadSpec, *AnyArrivals.__args__, *AnyLengths.__args__])
def test_every_field_says_what_it_is(model: type[Spec]) -> None:
    for name, field in model.model_fields.items():
        assert field.description, f"{model.__name__}.{name}"
