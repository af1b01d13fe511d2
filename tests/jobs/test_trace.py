"""Traces in the columns people publish, and what is wrong with the others."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pointsman.errors import InputError, PointsmanWarning
from pointsman.jobs.table import Jobs
from pointsman.jobs.trace import JobTrace, read_jobs
from pointsman.jobs.workload import JobsWorkloadSpec, draw_jobs
from pointsman.spec import parse_spec

PLAIN = "submitted_at,duration_s,gpus,priority\n100,50,2,9\n40,20.5,1,1\n300,7,8,10\n"
HELIOS = """job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue
1,u,v,1,1,1,COMPLETED,2020-06-09 18:41:01,2020-06-09 18:41:01,2020-06-09 18:42:01,60,0
2,u,v,4,16,1,FAILED,2020-06-09 18:41:27,2020-06-09 18:41:30,2020-06-09 18:45:39,249,3
3,u,v,0,16,1,FAILED,2020-06-09 18:41:28,2020-06-09 18:41:30,2020-06-09 18:45:39,249,2
"""
ALIBABA = """name,cpu,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time
a,88000,8,1000,,Burstable,Succeeded,9437497,9438497,9437500
b,4000,1,220,,BE,Running,9437400,9439400,9437400
c,4000,1,220,,BE,Pending,9437401,9439400,
"""
PAI = """job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type
x,tensorflow,1.0,Terminated,1739162.0,1739200.0,600.0,29.29,50.0,MISC
y,worker,1.0,Terminated,1739100.0,1739200.0,600.0,29.29,200.0,V100
"""


def read(
    tmp_path: Path, text: str, num_gpus: int = 8, max_duration_s: float = 10_000.0, **trace: Any
) -> Jobs:
    path = tmp_path / "jobs.csv"
    path.write_text(text)
    return read_jobs(parse_spec(JobTrace, {"path": str(path), **trace}, "trace"), max_duration_s, num_gpus)


def columns(jobs: Jobs) -> list[list[float]]:
    return [column.tolist() for column in (jobs.arrived_at, jobs.duration_s, jobs.gpus, jobs.priority)]


def test_own_columns_need_no_map(tmp_path: Path) -> None:
    """Sorted by submission."""
    assert columns(read(tmp_path, PLAIN)) == [[40, 100, 300], [20.5, 50, 7], [1, 2, 8], [1, 9, 10]]


def test_deadlines_are_times_and_may_be_missing(tmp_path: Path) -> None:
    text = PLAIN.replace("priority\n", "priority,due_at\n").replace(",9\n", ",9,170\n")
    text = text.replace(",1,1\n", ",1,1,\n").replace(",10\n", ",10,307\n")
    assert read(tmp_path, text).deadline_at.tolist() == [np.inf, 170, 307]
    assert not read(tmp_path, PLAIN).has_deadlines
    dates = HELIOS.replace(",queue\n", ",deadline\n").replace(",60,0\n", ",60,2020-06-09 18:51:01\n")
    dates = dates.replace(",249,3\n", ",249,\n").replace(",249,2\n", ",249,nan\n")
    with pytest.warns(PointsmanWarning, match="1 need no GPU"):
        jobs = read(tmp_path, dates)
    assert (jobs.deadline_at - jobs.arrived_at).tolist() == [600, np.inf]


def test_unix_times_in_milliseconds_are_no_seconds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "submitted_at,duration_ms,gpus\n1714557600000,50000,2\n1714557601500,7000,8\n"
    with caplog.at_level("INFO", logger="pointsman"):
        jobs = read(tmp_path, text)
    assert np.diff(jobs.arrived_at).tolist() == [1.5]
    assert jobs.duration_s.tolist() == [50.0, 7.0]
    assert "2 jobs in 1.5 s" in caplog.text
    assert "times in 'submitted_at' read as Unix time in milliseconds from 2024-05-01 10:00:00" in caplog.text


def test_starts_and_ends_may_be_written_in_two_ways(tmp_path: Path) -> None:
    text = "submit_time,start_time,end_time,num_gpus\n1714557600,1714557600000,2024-05-01 10:00:30,1\n"
    assert columns(read(tmp_path, text))[1:3] == [[30.0], [1]]


def test_usual_names_need_no_map(tmp_path: Path) -> None:
    with pytest.warns(PointsmanWarning, match="1 need no GPU"):
        assert columns(read(tmp_path, HELIOS))[1:] == [[60, 249], [1, 4], [5, 5]]


def test_helios(tmp_path: Path) -> None:
    named = {"submitted_at": "submit_time", "duration_s": "duration", "gpus": "gpu_num"}
    with pytest.warns(PointsmanWarning, match="of 3 jobs, 1 need no GPU, and are left out"):
        jobs = read(tmp_path, HELIOS, columns=named)
    assert np.diff(jobs.arrived_at).tolist() == [26]
    assert columns(jobs)[1:] == [[60, 249], [1, 4], [5, 5]]
    by_times = named | {"duration_s": None, "started_at": "start_time", "ended_at": "end_time"}
    with pytest.warns(PointsmanWarning):
        assert columns(read(tmp_path, HELIOS, columns=by_times))[1] == [60, 249]


def test_alibaba_2023(tmp_path: Path) -> None:
    named = {
        "submitted_at": "creation_time",
        "started_at": "scheduled_time",
        "ended_at": "deletion_time",
        "gpus": "num_gpu",
    }
    with pytest.warns(PointsmanWarning, match="of 3 jobs, 1 never ran, and are left out"):
        jobs = read(tmp_path, ALIBABA, columns=named)
    assert columns(jobs) == [[9437400, 9437497], [2000, 997], [1, 8], [5, 5]]


def test_alibaba_2020_counts_percent(tmp_path: Path) -> None:
    named = {
        "submitted_at": "start_time",
        "started_at": "start_time",
        "ended_at": "end_time",
        "gpus": "plan_gpu",
    }
    jobs = read(tmp_path, PAI, columns=named, gpu_unit=0.01)
    assert columns(jobs)[1:3] == [[100, 38], [2, 1]]


def test_what_does_not_fit_is_left_out_or_cut(tmp_path: Path) -> None:
    with pytest.warns(PointsmanWarning) as said:
        jobs = read(tmp_path, PLAIN, num_gpus=4, max_duration_s=30)
    assert columns(jobs)[1:3] == [[20.5, 30], [1, 2]]
    texts = [str(one.message).partition(": ")[2] for one in said]
    assert texts == [
        "of 3 jobs, 1 need more than 4 GPUs, and are left out",
        "1 jobs are longer than max_duration_s, and are cut to it",
    ]


@pytest.mark.parametrize(
    ("text", "trace", "message"),
    [
        ("", {}, "the file is empty"),
        ("submitted_at,duration_s,gpus\n", {}, "a header but no requests"),
        (
            "a,b\n1,2\n",
            {},
            "for times of submission and numbers of GPUs among a, b; add it, or name it",
        ),
        (PLAIN, {"columns": {"gpus": "width"}}, "column 'width' for gpus is missing"),
        (PLAIN.replace("20.5", "-1"), {}, r"line 3, column duration_s = '-1': a negative duration"),
        (PLAIN.replace("20.5", "long"), {}, r"line 3, column duration_s = 'long': not a number"),
        (PLAIN.replace("300,", "soon,"), {}, r"line 4, column submitted_at = 'soon': not a number"),
        (PLAIN.replace(",2,9", ",-2,9"), {}, r"line 2, column gpus = '-2': fewer than 0 GPUs"),
        (PLAIN.replace(",2,9", ",2,11"), {}, r"line 2, column priority = '11': not from 1 to 10"),
        (PLAIN.replace(",2,9", ",,9"), {}, r"line 2, column gpus = None: no value"),
        (
            "submitted_at,duration_s,gpus,deadline\n100,5,1,\n100,5,1,99\n",
            {},
            r"line 3, column deadline = '99': a deadline before the job is submitted",
        ),
        (
            "submitted_at,duration_s,gpus,deadline\n1714557600,5,1,3600\n",
            {},
            r"column deadline = '3600': seconds, but jobs are submitted in Unix time in seconds",
        ),
        (PLAIN.replace("50", "").replace("20.5", "").replace("7,", ","), {}, "no job has a duration"),
        (PLAIN, {"columns": {"started_at": "submitted_at"}}, r"columns\.ended_at = None: missing"),
        (
            PLAIN,
            {"columns": {"duration_s": "gpus", "started_at": "gpus", "ended_at": "gpus"}},
            r"columns\.duration_s = 'gpus': given beside started_at",
        ),
        (
            HELIOS,
            {
                "columns": {
                    "submitted_at": "submit_time",
                    "gpus": "gpu_num",
                    "started_at": "end_time",
                    "ended_at": "submit_time",
                }
            },
            r"line 2, column submit_time = '2020-06-09 18:41:01': ends before it starts",
        ),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, text: str, trace: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        read(tmp_path, text, **trace)
    assert "\n" not in str(error.value)


def test_no_job_left(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PointsmanWarning)
        with pytest.raises(InputError, match="no job that this cluster can run"):
            read(tmp_path, "submitted_at,duration_s,gpus\n1,0,1\n2,5,0\n3,5,9\n")
    with pytest.raises(InputError, match="no such file"):
        read_jobs(JobTrace(path=str(tmp_path / "none.csv")), 1.0, 1)


def test_an_episode_is_a_window_of_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "many.csv"
    rows = [f"{1000 + 10 * i},{i + 1},{1 + i % 4}" for i in range(50)]
    path.write_text("submitted_at,duration_s,gpus\n" + "\n".join(rows))
    spec = parse_spec(JobsWorkloadSpec, {"trace": str(path), "num_jobs": 20}, "workload")
    starts = set()
    for seed in range(30):
        jobs = draw_jobs(spec, 8, seed)
        assert jobs.arrived_at.tolist() == [10.0 * i for i in range(20)]
        assert np.diff(jobs.duration_s).tolist() == [1.0] * 19
        starts.add(jobs.duration_s[0])
    assert len(starts) > 10
    assert len(draw_jobs(spec.model_copy(update={"num_jobs": 500}), 8, 0)) == 50
