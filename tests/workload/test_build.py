from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from pointsman.errors import InputError, PointsmanWarning
from pointsman.workload import Workload, build_workload, sample_lengths

from .factories import synthetic, vidur_file


def unused_capacity() -> NoReturn:
    raise AssertionError("the capacity is expensive: only for load")


def all_bytes(workload: Workload) -> list[bytes]:
    return [value.tobytes() for value in vars(workload).values() if isinstance(value, np.ndarray)]


def test_default_is_20000_requests() -> None:
    workload = build_workload(synthetic(), 0, unused_capacity)
    assert len(workload) == 20_000
    assert workload.request_id.tolist() == list(range(20_000))
    assert np.all(workload.session == -1)
    assert workload.num_users == 0
    assert len(workload.think_s) == 0


@pytest.mark.parametrize("kind", ["poisson", "gamma", "mmpp", "diurnal", "ramp"])
def test_same_seed_same_bytes(kind: str) -> None:
    spec = synthetic({"kind": kind, "rate": 5.0}, "azure-conv", requests=2_000, sessions=3)
    first = build_workload(spec, 11)
    assert all_bytes(first) == all_bytes(build_workload(spec, 11))
    for mine, other in zip(all_bytes(first)[:4], all_bytes(build_workload(spec, 12))[:4], strict=True):
        assert mine != other


def test_another_rate_keeps_the_lengths() -> None:
    slow, fast = (
        build_workload(synthetic({"kind": "poisson", "rate": rate}, "azure-conv", requests=1_000), 3)
        for rate in (2.0, 8.0)
    )
    assert np.array_equal(slow.num_prefill_tokens, fast.num_prefill_tokens)
    assert np.array_equal(slow.num_decode_tokens, fast.num_decode_tokens)
    np.testing.assert_allclose(slow.arrived_at, 4 * fast.arrived_at)


def test_sampled_lengths_are_those_of_the_workload() -> None:
    spec = synthetic(lengths="azure-code", requests=1_000)
    workload = build_workload(spec, 5)
    prefill, decode = sample_lengths(spec, 1_000, 5)
    assert np.array_equal(prefill, workload.num_prefill_tokens)
    assert np.array_equal(decode, workload.num_decode_tokens)


def test_load_is_a_share_of_capacity() -> None:
    load = synthetic({"kind": "poisson", "load": 0.5}, requests=100)
    rate = synthetic({"kind": "poisson", "rate": 20.0}, requests=100)
    assert all_bytes(build_workload(load, 0, lambda: 40.0)) == all_bytes(build_workload(rate, 0))


def test_load_needs_a_capacity() -> None:
    with pytest.raises(InputError, match="capacity of the cluster is not known"):
        build_workload(synthetic({"kind": "poisson", "load": 0.5}), 0)


@pytest.mark.parametrize(
    "arrivals", [{"kind": "poisson", "load": 1.05}, {"kind": "ramp", "load": 0.9, "end": 1.2}]
)
def test_overload_needs_an_end(arrivals: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        build_workload(synthetic(arrivals), 0, lambda: 10.0)
    assert str(caught.value) == (
        f"workload.arrivals.load = {arrivals['load']}: a load above capacity with no end; "
        "set workload.requests or workload.duration_s"
    )
    for bound in ({"requests": 50}, {"duration_s": 5.0}):
        with pytest.warns(PointsmanWarning, match="above capacity, queues grow"):
            assert len(build_workload(synthetic(arrivals, **bound), 0, lambda: 10.0)) > 0


def test_a_load_in_percent_is_recognised() -> None:
    meant = synthetic({"kind": "poisson", "load": 85}, requests=50)
    with pytest.warns(PointsmanWarning, match=r"load = 85: above capacity.* \(85 % would be 0.85\)"):
        build_workload(meant, 0, lambda: 10.0)


def test_a_load_beyond_one_is_none_where_prompts_are_cached() -> None:
    """Capacity is what there is with nothing cached; a warning would be wrong."""
    shared = {"prefixes": {"systems": {"count": 1, "tokens": 100}}, "requests": 50}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (
            len(build_workload(synthetic({"kind": "poisson", "load": 1.8}, **shared), 0, lambda: 10.0)) == 50
        )


def test_full_load_is_no_overload() -> None:
    assert len(build_workload(synthetic({"kind": "poisson", "load": 1.0}), 0, lambda: 10.0)) == 20_000


def test_duration_bounds_the_arrivals() -> None:
    workload = build_workload(synthetic(duration_s=100.0), 0)
    assert workload.arrived_at[-1] <= 100.0
    assert len(workload) == pytest.approx(1_000, abs=160)


def test_closed_loop() -> None:
    workload = build_workload(synthetic({"kind": "closed", "users": 8, "think_s": 2.0}, requests=5_000), 0)
    assert workload.num_users == 8
    assert not workload.arrived_at.any()
    assert workload.think_s.mean() == pytest.approx(2.0, rel=0.08)


def test_times_of_a_trace_with_other_lengths(tmp_path: Path) -> None:
    path = vidur_file(tmp_path, "1.0,10,1", "2.0,20,2")
    workload = build_workload(synthetic({"kind": "trace", "path": path.name}), 0, base_dir=tmp_path)
    assert workload.arrived_at.tolist() == [0.0, 1.0]
    assert workload.num_prefill_tokens.tolist() == [100, 100]


@pytest.mark.parametrize("arrivals", [{"kind": "poisson", "rate": 1e-12}, {"kind": "closed", "users": 1}])
def test_a_clock_that_cannot_tell_seconds_apart_is_refused(arrivals: dict[str, Any]) -> None:
    """At 10^12 s two events a millisecond apart may fall together."""
    if arrivals["kind"] == "closed":
        arrivals = arrivals | {"think_s": 1e12}
    with pytest.raises(InputError, match="more than 300 years"):
        build_workload(synthetic(arrivals), 0)


def test_max_tokens_bounds_drawn_lengths() -> None:
    workload = build_workload(synthetic(lengths="azure-conv", max_tokens=500), 0)
    total = workload.num_prefill_tokens + workload.num_decode_tokens
    assert total.max() == 500
    assert workload.num_prefill_tokens.min() >= 1


def test_sessions_span_the_time_asked_for() -> None:
    workload = build_workload(synthetic(sessions=4, session_gap_s=20.0), 0)
    order = np.argsort(workload.session, kind="stable")
    is_same = np.diff(workload.session[order]) == 0
    gaps_s = np.diff(workload.arrived_at[order])[is_same]
    assert gaps_s.mean() == pytest.approx(20.0, rel=0.05)
    assert np.bincount(workload.session).mean() == pytest.approx(4.0, rel=0.05)


def test_two_million_requests_are_cheap() -> None:
    spec = synthetic(lengths="azure-conv", requests=2_000_000)
    started = time.perf_counter()
    workload = build_workload(spec, 0)
    assert len(workload) == 2_000_000
    # About 1 s; wide, because the machines of the project are shared.
    assert time.perf_counter() - started < 10.0
