from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pointsman.errors import InputError, PointsmanWarning
from pointsman.workload import Workload, build_workload

from .factories import VIDUR_HEADER, spec, vidur_file

ROWS = ("1.0,10,1", "2.0,20,2", "5.0,30,3")  # 2 gaps of 2 s on average, so a pass takes 6 s


def replayed(
    folder: Path, capacity_rps: Any = None, rows: tuple[str, ...] = ROWS, **options: Any
) -> Workload:
    workload = {key: options.pop(key) for key in ("requests", "duration_s", "max_tokens") if key in options}
    trace = {"path": str(vidur_file(folder, *rows)), "start_at_zero": False, **options}
    return build_workload(spec(trace=trace, **workload), seed=0, capacity_rps=capacity_rps)


def test_as_given(tmp_path: Path) -> None:
    workload = replayed(tmp_path)
    assert workload.arrived_at.tolist() == [1.0, 2.0, 5.0]
    assert workload.request_id.tolist() == [0, 1, 2]
    assert workload.num_users == 0


def test_rate_stretches_the_time_axis(tmp_path: Path) -> None:
    times = replayed(tmp_path, rate=5.0).arrived_at
    assert times.tolist() == pytest.approx([0.1, 0.2, 0.5])
    assert 2 / (times[-1] - times[0]) == pytest.approx(5.0)


def test_load_is_a_share_of_capacity(tmp_path: Path) -> None:
    times = replayed(tmp_path, lambda: 10.0, load=0.5).arrived_at
    assert times.tolist() == pytest.approx([0.1, 0.2, 0.5])


def test_load_above_capacity_is_bounded_by_the_trace(tmp_path: Path) -> None:
    with pytest.warns(PointsmanWarning, match=r"workload.trace.load = 1.5: above capacity"):
        replayed(tmp_path, lambda: 10.0, load=1.5)


def test_first_requests_and_their_own_rate(tmp_path: Path) -> None:
    workload = replayed(tmp_path, requests=2, rate=5.0)
    assert workload.arrived_at.tolist() == pytest.approx([0.2, 0.4])


def test_duration_cuts(tmp_path: Path) -> None:
    assert replayed(tmp_path, duration_s=2.0).request_id.tolist() == [0, 1]
    with pytest.raises(InputError, match="no request arrives in this time"):
        replayed(tmp_path, duration_s=0.5)


def test_repeat_keeps_the_rate_and_numbers_requests_apart(tmp_path: Path) -> None:
    workload = replayed(tmp_path, repeat=2)
    assert workload.arrived_at.tolist() == [1.0, 2.0, 5.0, 7.0, 8.0, 11.0]
    assert workload.num_prefill_tokens.tolist() == [10, 20, 30, 10, 20, 30]
    assert workload.request_id.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("bound", "num_requests"),
    [
        ({"requests": 7}, 7),
        ({"duration_s": 18.9}, 9),
        ({"duration_s": 19.0}, 10),
        ({"duration_s": 0.9e3}, 450),
    ],
)
def test_repeat_0_loops_as_long_as_needed(tmp_path: Path, bound: dict[str, Any], num_requests: int) -> None:
    workload = replayed(tmp_path, repeat=0, **bound)
    assert len(workload) == num_requests
    assert np.all(np.diff(workload.arrived_at) >= 0)


def test_sessions_of_two_passes_differ(tmp_path: Path) -> None:
    path = tmp_path / "sessions.csv"
    path.write_text(f"{VIDUR_HEADER},session\n0,1,1,a\n1,1,1,\n2,1,1,b\n", encoding="utf-8")
    workload = build_workload(spec(trace={"path": str(path), "repeat": 2}), seed=0)
    assert workload.session.tolist() == [0, -1, 1, 2, -1, 3]


def test_fewer_requests_than_asked_for(tmp_path: Path) -> None:
    with pytest.warns(PointsmanWarning, match="requests = 9: .* gives 3; repeat: 0 loops it"):
        assert len(replayed(tmp_path, requests=9)) == 3


def test_a_burst_has_no_rate_to_change(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no rate to change"):
        replayed(tmp_path, rows=("1.0,1,1", "1.0,1,1"), rate=2.0)


def test_a_burst_can_be_repeated_but_not_for_a_time(tmp_path: Path) -> None:
    assert replayed(tmp_path, rows=("1.0,1,1", "1.0,1,1"), repeat=2).arrived_at.tolist() == [1.0] * 4
    with pytest.raises(InputError, match="passes over 2 requests are more than"):
        replayed(tmp_path, rows=("1.0,1,1", "1.0,1,1"), repeat=0, duration_s=5.0)


def test_max_tokens_makes_no_request_of_one_that_failed(tmp_path: Path) -> None:
    with pytest.warns(PointsmanWarning, match="1 of 2 requests failed"):
        assert len(replayed(tmp_path, rows=("0,90,20", "1,5,0"), max_tokens=100)) == 1


def test_max_tokens_clips_as_vidur(tmp_path: Path) -> None:
    """Which makes 1 of 0, in files that are said to be its own; elsewhere 0 is a request that failed."""
    workload = replayed(tmp_path, rows=("0,90,20", "1,0,5"), max_tokens=100, format="vidur")
    assert workload.num_prefill_tokens.tolist() == [80, 1]
    assert workload.num_decode_tokens.tolist() == [20, 5]
