"""Every format read, exactly; every bad file refused in one line that says where and what to do."""

from __future__ import annotations

import gzip
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pointsman.errors import InputError, PointsmanWarning
from pointsman.workload.readers import read_trace
from pointsman.workload.spec import TraceColumns, TraceFile

from .factories import TRACES, VIDUR_HEADER, vidur_file
from .written import AZURE_HEADER, as_rows, read, write

BURSTGPT_HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"


requests = st.lists(
    st.tuples(
        st.floats(min_value=0.0, max_value=2.5e11),
        st.integers(1, 2**31 - 1),
        st.integers(1, 2**31 - 1),
    ),
    min_size=1,
    max_size=20,
)


def csv_bytes(rows: list[tuple[float, int, int]]) -> bytes:
    return "\n".join([VIDUR_HEADER, *(f"{at!r},{prompt},{output}" for at, prompt, output in rows)]).encode()


def jsonl_bytes(rows: list[tuple[float, int, int]]) -> bytes:
    names = VIDUR_HEADER.split(",")
    return "\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows).encode()


def parquet_bytes(rows: list[tuple[float, int, int]]) -> bytes:
    buffer = io.BytesIO()
    pl.DataFrame(rows, schema=VIDUR_HEADER.split(","), orient="row").write_parquet(buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("encode", [csv_bytes, jsonl_bytes, parquet_bytes])
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@given(rows=requests)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_round_trip_is_exact(
    tmp_path: Path, encode: Callable[[Any], bytes], pack: Callable[[bytes], bytes], rows: Any
) -> None:
    workload = read(write(tmp_path, pack(encode(rows)), "trace"), time_unit="s", start_at_zero=False)
    order = sorted(range(len(rows)), key=lambda row: rows[row][0])
    assert as_rows(workload) == [rows[row] for row in order]
    assert workload.request_id.tolist() == order


def test_arrays_are_plain_and_writable(tmp_path: Path) -> None:
    workload = read(vidur_file(tmp_path, "0.5,3,4"))
    arrays = [value for value in vars(workload).values() if isinstance(value, np.ndarray)]
    assert all(array.flags.writeable and array.flags.c_contiguous for array in arrays)
    assert workload.arrived_at.dtype == np.float64
    assert workload.num_prefill_tokens.dtype == workload.num_decode_tokens.dtype == np.int32
    assert workload.session.dtype == np.int32
    assert workload.request_id.dtype == np.int64


def test_azure_has_seven_digits_and_starts_at_0(tmp_path: Path) -> None:
    rows = ["2023-11-16 23:59:59.9999999,374,44", "2023-11-17 00:00:00.0000001,396,109"]
    workload = read(write(tmp_path, "\n".join([AZURE_HEADER, *rows])))
    assert as_rows(workload) == [(0.0, 374, 44), (2e-7, 396, 109)]


def test_mooncake_counts_milliseconds(tmp_path: Path) -> None:
    lines = [
        '{"timestamp": 27, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}',
        '{"timestamp": 3001, "input_length": 7322, "output_length": 490, "hash_ids": [0, 14]}',
    ]
    workload = read(write(tmp_path, "\n".join(lines)))
    assert as_rows(workload) == [(0.0, 6758, 500), (2.974, 7322, 490)]


@pytest.mark.parametrize(("unit", "per_s"), [("ms", 1e3), ("us", 1e6), ("ns", 1e9)])
def test_units_are_divided_exactly(tmp_path: Path, unit: str, per_s: float) -> None:
    rows = [f"{number},1,1" for number in range(1, 2_000)]
    times = read(vidur_file(tmp_path, *rows), time_unit=unit, start_at_zero=False).arrived_at
    assert times.tolist() == [number / per_s for number in range(1, 2_000)]


def test_burstgpt_leaves_failures_out_and_says_so(tmp_path: Path) -> None:
    rows = [
        "5,ChatGPT,472,18,490,Conversation log",
        "45,ChatGPT,0,0,0,Conversation log",
        "61,GPT-4,12,0,12,API log",
        "118,GPT-4,417,276,693,Conversation log",
    ]
    path = write(tmp_path, "\n".join([BURSTGPT_HEADER, *rows]))
    with pytest.warns(PointsmanWarning, match="2 of 4 requests failed"):
        workload = read(path)
    assert as_rows(workload) == [(0.0, 472, 18), (113.0, 417, 276)]
    assert workload.request_id.tolist() == [0, 3]


FAILING: dict[str, tuple[str, dict[str, Any]]] = {  # columns of times, prompts and outputs, and options
    "azure": (AZURE_HEADER, {}),
    "vidur": (VIDUR_HEADER, {}),
    "mooncake": ("timestamp,input_length,output_length", {"time_unit": "s"}),
    "burstgpt": ("Timestamp,Request tokens,Response tokens", {}),
    "generic": ("created,prompt_tokens,completion_tokens", {}),
    "columns": (
        "a,b,c",
        {"columns": TraceColumns(arrived_at="a", num_prefill_tokens="b", num_decode_tokens="c")},
    ),
}


@pytest.mark.parametrize("form", FAILING)
@pytest.mark.parametrize("failed", ["12,0", "0,0", "12,", "12,null", ",", "0,N/A"])
def test_failures_are_left_out_of_every_format(tmp_path: Path, form: str, failed: str) -> None:
    """With a length of one token they would be requests that never were."""
    header, options = FAILING[form]
    path = write(tmp_path, f"{header}\n1,472,18\n2,{failed}\n4,417,276\n")
    with pytest.warns(PointsmanWarning, match=r"1 of 3 requests failed \(no tokens\) and are left out"):
        workload = read(path, **options)
    assert as_rows(workload) == [(0.0, 472, 18), (3.0, 417, 276)]
    assert workload.request_id.tolist() == [0, 2]


def test_a_failure_has_no_blocks_to_check(tmp_path: Path) -> None:
    def row(at: int, prompt: int, output: int | None, blocks: list[int]) -> str:
        lengths = {"prompt_tokens": prompt, "completion_tokens": output}
        return json.dumps({"created": at, **lengths, "hash_ids": blocks}) + "\n"

    rows = [row(1, 20, 5, [1, 2]), row(2, 0, 0, [1, 2]), row(3, 20, None, [1, 2, 3]), row(5, 25, 4, [1, 2])]
    with pytest.warns(PointsmanWarning, match="2 of 4 requests failed"):
        workload = read(write(tmp_path, "".join(rows)), block_tokens=10)
    assert as_rows(workload) == [(0.0, 20, 5), (4.0, 25, 4)]
    assert workload.link_key[workload.chain_start[0]] == workload.link_key[workload.chain_start[1]]
    with pytest.raises(InputError, match=r"line 2, column hash_ids .*more blocks than the prompt has"):
        read(write(tmp_path, rows[0] + row(2, 5, 5, [1, 2])), block_tokens=10)


def test_burstgpt_of_failures_alone(tmp_path: Path) -> None:
    path = write(tmp_path, f"{BURSTGPT_HEADER}\n5,ChatGPT,0,0,0,API log\n")
    with pytest.raises(InputError, match="every request failed"):
        read(path)


def test_generic_columns_unit_and_shift(tmp_path: Path) -> None:
    path = write(tmp_path, "ts,in,out,user\n1700000000500,10,1,ann\n1700000000000,20,2,bob\n")
    columns = TraceColumns(arrived_at="ts", num_prefill_tokens="in", num_decode_tokens="out", session="user")
    workload = read(path, columns=columns, time_unit="ms", start_at_zero=False)
    assert as_rows(workload) == [(1700000000.0, 20, 2), (1700000000.5, 10, 1)]
    assert workload.session.tolist() == [1, 0]
    shifted = read(path, columns=columns, time_unit="ms")
    assert shifted.arrived_at.tolist() == [0.0, 0.5]


@pytest.mark.parametrize("dtype", [pl.Time, pl.Duration, pl.List(pl.Int64), pl.Boolean])
def test_parquet_times_of_another_type(tmp_path: Path, dtype: Any) -> None:
    times = pl.Series([[1], [2]] if dtype == pl.List else [0, 1]).cast(dtype)
    frame = pl.DataFrame({"arrived_at": times, "num_prefill_tokens": [1, 2], "num_decode_tokens": [3, 4]})
    frame.write_parquet(tmp_path / "trace.parquet")
    with pytest.raises(InputError, match=r"row 1, column arrived_at = .*: not a number"):
        read(tmp_path / "trace.parquet")


def test_parquet_calendar_times(tmp_path: Path) -> None:
    stamps = pl.Series(["2024-05-12 00:00:00", "2024-05-12 00:00:02.25"]).str.to_datetime()
    frame = pl.DataFrame({"arrived_at": stamps, "num_prefill_tokens": [1, 2], "num_decode_tokens": [3, 4]})
    frame.write_parquet(tmp_path / "trace.parquet")
    assert read(tmp_path / "trace.parquet").arrived_at.tolist() == [0.0, 2.25]


@pytest.mark.parametrize("column", ["session_id", "session"])
def test_sessions_become_dense_numbers(tmp_path: Path, column: str) -> None:
    header = f"{VIDUR_HEADER},{column}"
    path = write(tmp_path, f"{header}\n0,1,1,b\n1,1,1,a\n2,1,1,\n3,1,1,b\n")
    assert read(path).session.tolist() == [1, 0, -1, 1]


def test_sessions_of_jsonl_may_be_numbers_and_may_be_absent(tmp_path: Path) -> None:
    lines = [
        '{"arrived_at": 0, "num_prefill_tokens": 1, "num_decode_tokens": 1}',
        '{"arrived_at": 1, "num_prefill_tokens": 1, "num_decode_tokens": 1, "session_id": 70}',
    ]
    assert read(write(tmp_path, "\n".join(lines))).session.tolist() == [-1, 0]


def test_no_session_column(tmp_path: Path) -> None:
    assert read(vidur_file(tmp_path, "0,1,1", "1,1,1")).session.tolist() == [-1, -1]


def test_equal_times_keep_the_order_of_the_file(tmp_path: Path) -> None:
    workload = read(vidur_file(tmp_path, "2,1,1", "1,2,1", "2,3,1", "1,4,1"))
    assert workload.request_id.tolist() == [1, 3, 0, 2]


def test_times_start_at_0_unless_they_shall_not(tmp_path: Path) -> None:
    path = vidur_file(tmp_path, "17.25,1,1", "18.5,1,1")
    assert read(path).arrived_at.tolist() == [0.0, 1.25]
    assert read(path, start_at_zero=False).arrived_at.tolist() == [17.25, 18.5]


@pytest.mark.parametrize(
    "text",
    [
        f"{VIDUR_HEADER}\r\n0.5,3,4\r\n",
        f"{VIDUR_HEADER}\r\n0.5,3,4\r\n".encode("utf-16"),
        f"{VIDUR_HEADER}\n0.5,3,4\n".replace(",", "|"),
        f"{VIDUR_HEADER}\n0.5,3,4\n".replace(",", ";").replace(".", ","),
        f"\ufeff{VIDUR_HEADER}\n0.5,3,4",
        f"{VIDUR_HEADER}\n\n0.5, 3 ,4.0\n\n",
        f'{VIDUR_HEADER}\n"0.5","3","4"\n',
        f"{VIDUR_HEADER}\n0.5,3,4\n".replace(",", ";"),
        f"{VIDUR_HEADER}\n0.5,3,4\n".replace(",", "\t"),
        f"# exported on Monday, by hand, for tests, of a week\n#\n{VIDUR_HEADER}\n0.5,3,4\n",
        f"\n \r\n# exported\n\n{VIDUR_HEADER}\n0.5,3,4\n",
    ],
    ids=[
        *("crlf", "UTF-16", "bars", "decimal commas", "byte order mark", "blank lines and spaces"),
        *("quotes", "semicolons", "tabs", "comments", "empty lines first"),
    ],
)
def test_ways_to_write_the_same_csv(tmp_path: Path, text: str | bytes) -> None:
    assert as_rows(read(write(tmp_path, text), start_at_zero=False)) == [(0.5, 3, 4)]


def test_comments_before_the_header_count_as_lines(tmp_path: Path) -> None:
    path = write(tmp_path, f"# two\n# comments\n{VIDUR_HEADER}\n0.5,3,4\n0.6,x,4\n")
    with pytest.raises(InputError, match="line 5, column num_prefill_tokens = 'x'"):
        read(path)
    with pytest.raises(InputError, match="line 4"):
        read(write(tmp_path, f"# one\n\n{VIDUR_HEADER}\n0.5,3,4,5\n".replace("\n\n", "\n# two\n")))


def test_a_list_within_an_object_and_a_request_that_has_a_list(tmp_path: Path) -> None:
    request = {"arrived_at": 0.5, "num_prefill_tokens": 3, "num_decode_tokens": 4}
    whole = json.dumps({"model": "m", "requests": [request, request]}, indent=1)
    assert as_rows(read(write(tmp_path, whole), start_at_zero=False)) == 2 * [(0.5, 3, 4)]
    alone = json.dumps(request | {"messages": [{"role": "user"}, {"role": "assistant"}]})
    assert as_rows(read(write(tmp_path, alone), start_at_zero=False)) == [(0.5, 3, 4)]


def test_lengths_alone(tmp_path: Path) -> None:
    path = write(tmp_path, "num_prefill_tokens,num_decode_tokens,pd_ratio\n3772,54,69.8\n")
    workload = read_trace(TraceFile(path=str(path)), needs_times=False)
    assert as_rows(workload) == [(0.0, 3772, 54)]


def test_zeros_can_be_kept_for_clipping(tmp_path: Path) -> None:
    path = vidur_file(tmp_path, "0,0,0")
    file = TraceFile(path=str(path), format="vidur")
    assert as_rows(read_trace(file, lifts_zeros=True)) == [(0.0, 0, 0)]
    with pytest.raises(InputError, match="every request failed"):
        read_trace(TraceFile(path=str(path)), lifts_zeros=True)


def test_base_dir(tmp_path: Path) -> None:
    vidur_file(tmp_path, "0,1,1", name="here.csv")
    assert len(read_trace(TraceFile(path="here.csv"), tmp_path)) == 1


@pytest.mark.parametrize(
    ("row", "column", "value", "problem"),
    [
        ("1.0,abc,4", "num_prefill_tokens", "'abc'", "not a number"),
        ("1.0,NaN,4", "num_prefill_tokens", "'NaN'", "not a finite number"),
        ("inf,3,4", "arrived_at", "'inf'", "not a finite number"),
        ("nan,3,4", "arrived_at", "'nan'", "not a finite number"),
        ("1.0,-3,4", "num_prefill_tokens", "'-3'", "fewer than 0 tokens"),
        ("-0.5,3,4", "arrived_at", "'-0.5'", "a negative time"),
        ("1.0,3.5,4", "num_prefill_tokens", "'3.5'", "not a whole number"),
        ("1.0,3,3000000000", "num_decode_tokens", "'3000000000'", "more tokens than any model"),
        ("1.0,,4", "num_prefill_tokens", "None", "no value"),
        ("1.0, ,4", "num_prefill_tokens", "' '", "no value"),
        ("noon,3,4", "arrived_at", "'noon'", "not a number"),
    ],
)
def test_bad_value_is_named_with_its_line(
    tmp_path: Path, row: str, column: str, value: str, problem: str
) -> None:
    path = vidur_file(tmp_path, "0.0,1,1", row, "2.0,1,1")
    with pytest.raises(InputError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path} line 3, column {column} = {value}: {problem}")
    assert "correct or remove the row" in message
    assert "\n" not in message


@pytest.mark.parametrize("value", ["NaN", "-3", '"abc"', "null", "3.5", "true", "[1]", "1e999"])
def test_bad_value_in_jsonl(tmp_path: Path, value: str) -> None:
    good = '{"arrived_at": 0, "num_prefill_tokens": 1, "num_decode_tokens": 1}'
    bad = f'{{"arrived_at": 0, "num_prefill_tokens": {value}, "num_decode_tokens": 1}}'
    path = write(tmp_path, f"{good}\n\n{bad}\n")
    with pytest.raises(InputError, match="line 3, column num_prefill_tokens"):
        read(path)


@pytest.mark.parametrize(
    "values", [[1.0, math.nan], [1.0, -2.0], [1, None], ["1", "x"], [True, False], [[1], [2]]]
)
def test_bad_value_in_parquet(tmp_path: Path, values: list[Any]) -> None:
    frame = pl.DataFrame(
        {"arrived_at": [0.0, 1.0], "num_prefill_tokens": values, "num_decode_tokens": [1, 1]}
    )
    frame.write_parquet(tmp_path / "trace.parquet")
    with pytest.raises(InputError, match=r"trace.parquet row [12], column num_prefill_tokens"):
        read(tmp_path / "trace.parquet")


def test_bad_calendar_time(tmp_path: Path) -> None:
    rows = ["2023-11-16 18:15:46.6805900,374,44", "2023-11-16 25:00:00,374,44"]
    path = write(tmp_path, "\n".join([AZURE_HEADER, *rows]))
    with pytest.raises(InputError, match="line 3, column TIMESTAMP = '2023-11-16 25:00:00': not a date"):
        read(path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "the file is empty"),
        (b" \n\n", "the file is empty"),
        (gzip.compress(b"", mtime=0), "the file is empty"),
        (VIDUR_HEADER, "no requests"),
        (f"{VIDUR_HEADER}\n\n\n", "no requests"),
        (
            "0.5,10,10\n1.5,20,5\n",
            "numbers, no names; put a line with the names before it: arrived_at,",
        ),
        ("arrived_at,num_prefill_tokens\n0,1\n", "no known column for output lengths among arrived_at, num"),
        (
            "a,b,c\n1,2,3\n",
            "no known column for arrival times and prompt lengths and output lengths among a, b, c",
        ),
        ('{"a": 1}\n', "lengths among a; add it, or name it with trace: {path: trace.csv, columns: {arr"),
        (f"{VIDUR_HEADER}\n0,1,1,1\n", "4 fields, but the header has 3"),
        (f'{VIDUR_HEADER}\n0,"1,1\n', "line 2 = '0,\"1,1': its quotes do not match"),
        (gzip.compress(csv_bytes([(0.5, 1, 1)] * 50), mtime=0)[:-20], "truncated gzip"),
        (b"\x1f\x8bnot gzip at all", "truncated gzip"),
        (bytes(range(256)) * 8, "neither text nor Parquet"),
        (f"{VIDUR_HEADER},user\n0,1,1,Jürgen".encode("latin-1"), "not in UTF-8; save it as UTF-8"),
        (f"{VIDUR_HEADER}\n0,1,1".encode("utf-16")[:-1], "damaged text in UTF-16; save it as UTF-8"),
        (
            f"{VIDUR_HEADER}\n0,1,1,1\n".replace(",", ";"),
            "line 2 = '0;1;1;1': 4 fields, but the header has 3",
        ),
        (parquet_bytes([(0.5, 1, 1)])[:-30], "damaged or truncated Parquet"),
        (b"PAR1", "damaged or truncated Parquet"),
        ('{"arrived_at": 0}\n{"arrived_at": \n', "not a JSON object"),
        ("[1, 2]\n", "not a JSON object"),
        ("{" * 10_000, "not a JSON object"),
    ],
)
def test_bad_file(tmp_path: Path, content: str | bytes, problem: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(InputError) as caught:
        read(path)
    message = str(caught.value)
    assert problem in message
    assert str(path)[:60] in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("row", "remedy"),
    [
        ('0,"1,497",3', "write it without a separator of thousands"),
        ("10:00:00,1,1", "correct or remove the row, or write all times as numbers, or as 2023-"),
        ("0,-3,1", "correct or remove the row"),
    ],
)
def test_remedies_fit_what_is_wrong(tmp_path: Path, row: str, remedy: str) -> None:
    with pytest.raises(InputError) as caught:
        read(vidur_file(tmp_path, row))
    assert caught.value.remedy.startswith(remedy)
    assert "max_tokens" not in caught.value.remedy, "which lifts 0, and nothing else"


def test_a_gap_as_long_as_the_rest_warns(tmp_path: Path) -> None:
    rows = [f"{at},1,1" for at in range(40)]
    read(vidur_file(tmp_path, *rows))
    with pytest.warns(
        PointsmanWarning, match=r"nothing arrives in 97.5 % of its time, after request 39 of 40"
    ):
        read(vidur_file(tmp_path, *rows[:-1], "1500,1,1"))


def test_bad_json_line_has_its_number(tmp_path: Path) -> None:
    good = '{"timestamp": 0, "input_length": 1, "output_length": 1}\n'
    path = write(tmp_path, good * 200 + '{"timestamp": 0,\n' + good)
    with pytest.raises(InputError, match="line 201"):
        read(path)


@given(garbage=st.binary(max_size=200))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("prefix", [b"", b"PAR1", b"\x1f\x8b", b"{", VIDUR_HEADER.encode() + b"\n"])
def test_garbage_never_ends_in_another_exception(tmp_path: Path, prefix: bytes, garbage: bytes) -> None:
    path = write(tmp_path, prefix + garbage)
    try:
        read(path)
    except InputError as error:
        assert "\n" not in str(error)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file; check the path"):
        read(tmp_path / "none.csv")
    with pytest.raises(InputError, match="a directory; give the file in it"):
        read(tmp_path)
    with pytest.raises(InputError, match="cannot be read"):
        read(vidur_file(tmp_path, "0,1,1") / "below-a-file")


def test_explicit_format_that_doesn_t_fit(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="column 'TIMESTAMP' for arrived_at is missing from arrived_at"):
        read(vidur_file(tmp_path, "0,1,1"), format="azure")


@pytest.mark.parametrize(
    ("name", "num_requests", "span_s"),
    [
        ("AzureLLMInferenceTrace_conv.csv", 19366, 3501.721937),
        ("AzureLLMInferenceTrace_code.csv", 8819, 3435.948056),
        ("mooncake_conversation_trace.jsonl", 12031, 3536.999),
    ],
)
def test_public_traces(name: str, num_requests: int, span_s: float) -> None:
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"{path} is not here")
    workload = read(path)
    assert len(workload) == num_requests
    assert workload.arrived_at[0] == 0.0
    assert workload.arrived_at[-1] == pytest.approx(span_s, abs=1e-9)
