"""Logs as people have them: dates, epochs, whole seconds, usual names of columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pointsman.errors import InputError, PointsmanWarning
from pointsman.workload.spec import TraceColumns

from .factories import VIDUR_HEADER, vidur_file
from .written import AZURE_HEADER, as_rows, read, write


@pytest.mark.parametrize(
    "stamps",
    [
        ("2024-05-12 00:00:00.003948+00:00", "2024-05-12 00:00:01.503948+00:00"),
        ("2024-05-12T00:00:00Z", "2024-05-12T00:00:01.5Z"),
        ("2024-05-12 02:00:00+02:00", "2024-05-12 00:00:01.5+00:00"),
        ("2024-05-12 00:00:00", "2024-05-12 00:00:01.5"),
    ],
)
def test_other_calendar_times(tmp_path: Path, stamps: tuple[str, str]) -> None:
    workload = read(write(tmp_path, f"{AZURE_HEADER}\n{stamps[0]},1,2\n{stamps[1]},3,4\n"))
    assert workload.arrived_at.tolist() == [0.0, 1.5]


EPOCH_S = 1_714_557_600  # 2024-05-01 10:00 UTC


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        (f"{EPOCH_S}", f"{EPOCH_S + 1.5}", "Unix time in seconds from 2024-05-01 10:00:00 UTC"),
        (f"{EPOCH_S}000", f"{EPOCH_S + 1}500", "Unix time in milliseconds"),
        (f"{EPOCH_S}000000", f"{EPOCH_S + 1}500000", "Unix time in microseconds"),
        (f"{EPOCH_S}000000000", f"{EPOCH_S + 1}500000000", "Unix time in nanoseconds"),
        ("2024-05-01T10:00:00Z", "2024-05-01T12:00:01.500+02:00", "dates from 2024-05-01 10:00:00 UTC"),
        ("2024/05/01 10:00:00", "2024/05/01 10:00:01,5", "dates from 2024-05-01 10:00:00 UTC"),
        ("2024-05-01 10:00 UTC", "2024-05-01 10:00:01.5 UTC", "dates from 2024-05-01 10:00:00 UTC"),
        ("17.0", "18.5", "seconds, the first moved to 0"),
    ],
)
def test_ways_to_write_times_are_recognised_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: str, second: str, what: str
) -> None:
    path = write(tmp_path, f"created;prompt_tokens;completion_tokens\n{first};10;1\n{second};20;2\n")
    with caplog.at_level("INFO", logger="pointsman"):
        workload = read(path)
    assert workload.arrived_at == pytest.approx([0.0, 1.5], abs=1e-6)
    assert f"times in 'created' read as {what}" in caplog.text
    assert "num_prefill_tokens = prompt_tokens" in caplog.text
    assert workload.reading is not None and str(workload.reading) in caplog.text


def test_dates_without_a_time_of_day(tmp_path: Path) -> None:
    path = write(tmp_path, "date,prompt_tokens,completion_tokens\n2024-05-01,1,1\n2024-05-02,1,1\n")
    assert read(path).arrived_at.tolist() == [0.0, 86400.0]


def test_a_given_unit_wins(tmp_path: Path) -> None:
    path = write(tmp_path, f"created,prompt_tokens,completion_tokens\n{EPOCH_S},1,1\n{EPOCH_S + 1500},1,1\n")
    assert read(path, time_unit="ms").arrived_at.tolist() == [0.0, 1.5]


@pytest.mark.parametrize(
    ("column", "gap_s"), [("arrival_ms", 1.5), ("Arrival Time (us)", 0.0015), ("arrival", 1500.0)]
)
def test_a_unit_in_the_name_of_a_column(tmp_path: Path, column: str, gap_s: float) -> None:
    path = write(tmp_path, f"{column},input_tokens,output_tokens\n0,1,1\n1500,1,1\n")
    assert read(path).arrived_at.tolist() == [0.0, gap_s]


@pytest.mark.parametrize(
    "header",
    [
        "timestamp,prompt_tokens,completion_tokens",
        "created_at,input_tokens,output_tokens",
        "arrival_time,prompt_len,output_len",
        "Start Time,Prompt Tokens,Completion Tokens",
        "time,promptTokenCount,candidatesTokenCount",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "timestamp,input_length,generated_tokens",
        "TIMESTAMP, num_prompt_tokens ,num_generated_tokens",
    ],
)
def test_usual_names_of_columns(tmp_path: Path, header: str) -> None:
    path = write(tmp_path, f"id,{header},model\nx,5,10,1,m\ny,7,20,2,m\n")
    assert as_rows(read(path)) == [(0.0, 10, 1), (2.0, 20, 2)]


def test_a_log_of_answers_with_nested_usage(tmp_path: Path) -> None:
    def answer(at: int, prompt: int, output: int) -> dict[str, Any]:
        usage = {"prompt_tokens": prompt, "completion_tokens": output, "details": {"cached_tokens": 0}}
        return {"id": "x", "object": "chat.completion", "created": EPOCH_S + at, "usage": usage}

    answers = [answer(0, 10, 1), answer(1, 12, 0), answer(3, 20, 2)]
    for text in ("\n".join(map(json.dumps, answers)), json.dumps(answers, indent=2)):
        with pytest.warns(PointsmanWarning, match="1 of 3 requests failed"):
            assert as_rows(read(write(tmp_path, text, "log.json"))) == [(0.0, 10, 1), (3.0, 20, 2)]


def test_a_column_that_is_not_known_is_named_alone(tmp_path: Path) -> None:
    path = write(tmp_path, "when,prompt_tokens,completion_tokens\n3,10,1\n4,20,2\n")
    with pytest.raises(InputError, match=r"for arrival times among when, prompt.* \{arrived_at: NAME\}"):
        read(path)
    assert read(path, columns=TraceColumns(arrived_at="when")).arrived_at.tolist() == [0.0, 1.0]


def test_texts_without_token_counts_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps([{"id": "a", "conversations": [{"from": "human", "value": "hi"}]}]))
    with pytest.raises(InputError, match="prompt lengths and output lengths among id, conversations"):
        read(path)


def test_rows_out_of_order_are_sorted_and_said(tmp_path: Path) -> None:
    workload = read(vidur_file(tmp_path, "5,1,1", "3,2,1", "9,3,1"))
    assert workload.request_id.tolist() == [1, 0, 2]
    assert str(workload.reading).endswith("; 1 rows were out of order and are sorted")


def test_a_log_of_whole_seconds_has_no_bursts_that_never_were(tmp_path: Path) -> None:
    seconds = [1_770_000_000 + k // 4 for k in range(80)]
    path = write(
        tmp_path, "created,prompt_tokens,completion_tokens\n" + "".join(f"{s},9,9\n" for s in seconds)
    )
    workload = read(path)
    assert workload.arrived_at.tolist() == [k / 4 for k in range(80)]
    assert "spread evenly" in str(workload.reading)
    together = read(path, time_unit="s")
    assert together.arrived_at.tolist() == [k // 4 for k in range(80)]
    assert "spread" not in str(together.reading)


def test_dates_of_whole_minutes_are_spread_over_the_minute(tmp_path: Path) -> None:
    rows = "".join(f"2026-05-10 12:{k // 3:02d},9,9\n" for k in range(60))
    workload = read(write(tmp_path, f"time,prompt_tokens,completion_tokens\n{rows}"))
    assert workload.arrived_at.tolist() == [20.0 * k for k in range(60)]


@pytest.mark.parametrize(
    "times",
    [
        [0.0] * 40,  # one batch
        [10.0 * (k // 8) for k in range(64)],  # eight batches
        [k + 0.5 * (k == 7) for k in range(40) for _ in range(2)],  # a finer clock
        [float(k) for k in range(40)],  # nobody shares a second
    ],
)
def test_other_requests_that_come_together_stay_together(tmp_path: Path, times: list[float]) -> None:
    rows = "".join(f"{at!r},9,9\n" for at in times)
    workload = read(write(tmp_path, f"{VIDUR_HEADER}\n{rows}"), start_at_zero=False)
    assert workload.arrived_at.tolist() == times


def test_a_log_has_no_output_for_what_failed(tmp_path: Path) -> None:
    path = write(tmp_path, "timestamp,prompt_tokens,completion_tokens\n1.5,9,9\n2.5,9,\n3.5,9,4\n")
    with pytest.warns(PointsmanWarning, match=r"1 of 3 requests failed \(no tokens\) and are left out"):
        assert as_rows(read(path)) == [(0.0, 9, 9), (2.0, 9, 4)]
    table = pl.DataFrame({"timestamp": [1.5, 2.5], "prompt_tokens": [9, 9], "completion_tokens": [None, 4]})
    table.write_parquet(tmp_path / "trace.parquet")
    with pytest.warns(PointsmanWarning, match="1 of 2 requests failed"):
        assert as_rows(read(tmp_path / "trace.parquet")) == [(0.0, 9, 4)]
