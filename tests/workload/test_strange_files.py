"""Logs as people have them: each is read right and that is said, or refused by line, column and value."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from pointsman.errors import InputError, PointsmanWarning
from pointsman.workload import Workload
from pointsman.workload.readers import read_trace
from pointsman.workload.spec import TraceColumns, TraceFile

HEADER = "timestamp,prompt_tokens,completion_tokens"
EPOCH_MS = 1_700_158_000_000
ROWS = [(1.5 * k, 100 + k, 10 + k) for k in range(20)]
CSV = "".join(f"{at},{prompt},{output}\n" for at, prompt, output in ROWS)


def read(folder: Path, content: str | bytes, name: str = "trace.csv") -> Workload:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_trace(TraceFile(path=str(path)))


def as_rows(workload: Workload) -> list[tuple[float, int, int]]:
    columns = (workload.arrived_at, workload.num_prefill_tokens, workload.num_decode_tokens)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def lines_of(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def usage(prompt: int, output: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_rows_that_end_in_a_comma(tmp_path: Path) -> None:
    assert as_rows(read(tmp_path, f"{HEADER}\n" + CSV.replace("\n", ",\n"))) == ROWS
    assert as_rows(read(tmp_path, f"{HEADER}\n" + CSV.replace("\n", ", ,\n"))) == ROWS
    with pytest.raises(InputError, match="line 22 = '99,1,1,,x': 5 fields, but the header has 3"):
        read(tmp_path, f"{HEADER}\n" + CSV.replace("\n", ",\n") + "99,1,1,,x\n")


@pytest.mark.parametrize(
    "header", [HEADER, f"\ufeff{HEADER}", ",".join(f'"{name}"' for name in HEADER.split(","))]
)
def test_a_header_that_comes_again(tmp_path: Path, header: str) -> None:
    later = "".join(f"{at + 30},{prompt},{output}\n" for at, prompt, output in ROWS)
    with pytest.warns(PointsmanWarning, match="its header comes again in line 22, and is left out"):
        trace = read(tmp_path, f"{HEADER}\n{CSV}{header}\n{later}")
    assert as_rows(trace) == ROWS + [(at + 30, *lengths) for at, *lengths in ROWS]


def test_two_recordings_each_from_0_would_double_the_rate(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"line 22, column timestamp = '0.0': time goes back from 28.5, as where"
    ):
        read(tmp_path, f"{HEADER}\n{CSV}{CSV}")
    by_date = [f"2023-11-16 {hour}:{minute:02d}:00,5,5\n" for hour in (11, 10) for minute in range(0, 60, 3)]
    assert len(read(tmp_path, f"{HEADER}\n{''.join(by_date)}")) == 40, "dates say when, in whichever order"
    disorder = [f"{at + (3 if at % 12 == 1 else 0)},5,5\n" for at in range(40)]
    assert len(read(tmp_path, f"{HEADER}\n{''.join(disorder)}")) == 40


@pytest.mark.parametrize("word", ["null", "None", "N/A", "-", "nan", "NaN", "#N/A", "\\N", "undefined", " "])
def test_words_that_mean_nothing(tmp_path: Path, word: str) -> None:
    with pytest.warns(PointsmanWarning, match="2 of 22 requests failed"):
        assert as_rows(read(tmp_path, f"{HEADER}\n{CSV}50,9,{word}\n51,{word},{word}\n")) == ROWS
    with pytest.raises(
        InputError, match=r"line 22, column prompt_tokens = .*: (no value|not a finite number)"
    ):
        read(tmp_path, f"{HEADER}\n{CSV}50,{word},9\n")
    with pytest.raises(InputError, match=r"line 22, column timestamp = .*: (no value|not a finite number)"):
        read(tmp_path, f"{HEADER}\n{CSV}{word},9,9\n")


@pytest.mark.parametrize("wrong", ["0", "-1", "1700158000", "1700158000000000", "1e300"])
def test_a_time_unlike_all_others_would_move_them_by_decades(tmp_path: Path, wrong: str) -> None:
    rows = "".join(f"{EPOCH_MS + round(1000 * at)},{prompt},{output}\n" for at, prompt, output in ROWS)
    assert as_rows(read(tmp_path, f"{HEADER}\n{rows}")) == ROWS
    with pytest.raises(
        InputError, match=f"line 22, column timestamp = '{wrong}': not Unix time in milliseconds"
    ):
        read(tmp_path, f"{HEADER}\n{rows}{wrong},9,9\n")


@pytest.mark.parametrize("wrong", ["1e300", "1e18", "99999999999999999999999999"])
def test_times_beyond_all_years(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(
        InputError, match=f"line 22, column timestamp = '{wrong}': in seconds later than any year"
    ):
        read(tmp_path, f"{HEADER}\n{CSV}{wrong},9,9\n")


def test_lines_are_counted_where_texts_have_several(tmp_path: Path) -> None:
    rows = CSV.replace("\n", ',"two\nlines, ""quoted"""\n')
    with pytest.raises(InputError, match="line 42, column timestamp = 'x'"):
        read(tmp_path, f"{HEADER},text\n{rows}x,5,5,one\n")


def test_a_quote_that_does_not_end(tmp_path: Path) -> None:
    rows = CSV.replace("\n", ",ok\n")
    with pytest.raises(InputError, match="line 22 = '99,5,5,\"open': its quotes do not match"):
        read(tmp_path, f'{HEADER},text\n{rows}99,5,5,"open\n100,5,5,ok\n')


@pytest.mark.parametrize("write", [json.dumps, str], ids=["JSON", "Python"])
def test_an_object_in_a_cell(tmp_path: Path, write: Any) -> None:
    cells = ((at, write(usage(prompt, output)).replace('"', '""')) for at, prompt, output in ROWS)
    text = "timestamp,usage\n" + "".join(f'{at},"{cell}"\n' for at, cell in cells)
    assert as_rows(read(tmp_path, text)) == ROWS
    records = [{"timestamp": at, "usage": write(usage(prompt, output))} for at, prompt, output in ROWS]
    assert as_rows(read(tmp_path, lines_of(records))) == ROWS


def test_an_object_in_parquet(tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {"timestamp": [at for at, *_ in ROWS], "usage": [usage(*lengths) for _, *lengths in ROWS]}
    )
    for one in (frame, frame.with_columns(pl.col("usage").struct.json_encode())):
        one.write_parquet(tmp_path / "trace.parquet")
        assert as_rows(read_trace(TraceFile(path=str(tmp_path / "trace.parquet")))) == ROWS


def test_requests_without_usage_failed(tmp_path: Path) -> None:
    records = [{"timestamp": at, "usage": usage(prompt, output)} for at, prompt, output in ROWS]
    records.insert(0, {"timestamp": 0.5, "usage": None})
    with pytest.warns(PointsmanWarning, match="1 of 21 requests failed"):
        assert as_rows(read(tmp_path, lines_of(records))) == ROWS


def test_the_benchmark_of_vllm_has_a_list_for_each_column(tmp_path: Path) -> None:
    at, prompts, outputs = (list(column) for column in zip(*ROWS, strict=True))
    whole = {"date": "20240501-100000", "num_prompts": 20, "duration": 60.0, "errors": [""] * 20}
    whole |= {"input_lens": prompts, "output_lens": outputs, "start_times": at, "itls": [[0.1, 0.2]] * 20}
    assert as_rows(read(tmp_path, json.dumps(whole))) == ROWS


@pytest.mark.parametrize("more", [{"object": "list", "has_more": False}, {"meta": {"page": 1}}])
def test_a_page_of_answers(tmp_path: Path, more: dict[str, Any]) -> None:
    answers = [
        {"created": EPOCH_MS / 1000 + at, "usage": usage(prompt, output)} for at, prompt, output in ROWS
    ]
    assert [lengths for _, *lengths in as_rows(read(tmp_path, json.dumps(more | {"data": answers})))] == [
        lengths for _, *lengths in ROWS
    ]


def test_json_as_pandas_and_mongodb_write_it(tmp_path: Path) -> None:
    names = HEADER.split(",")
    by_row = {name: {str(k): row[i] for k, row in enumerate(ROWS)} for i, name in enumerate(names)}
    assert as_rows(read(tmp_path, json.dumps(by_row))) == ROWS
    records = [
        {
            "timestamp": {"$numberDouble": str(at)},
            "usage": {"prompt_tokens": p, "completion_tokens": {"$numberInt": o}},
        }
        for at, p, o in ROWS
    ]
    assert as_rows(read(tmp_path, lines_of(records))) == ROWS


def test_objects_one_after_the_other(tmp_path: Path) -> None:
    records = [dict(zip(HEADER.split(","), row, strict=True)) for row in ROWS]
    for text in (
        "".join(json.dumps(record, indent=1) for record in records),
        "".join(json.dumps(record) for record in records),
        "".join(json.dumps(record) + ",\n" for record in records),
    ):
        assert as_rows(read(tmp_path, text)) == ROWS


def test_half_of_a_pair_of_utf_16(tmp_path: Path) -> None:
    """JSON can say it and no text can hold it: an emoji cut in two by a limit on length."""
    record = '{"timestamp": 1, "prompt_tokens": 3, "completion_tokens": 4, "session_id": "\\ud83d"}\n'
    assert read(tmp_path, record).session.tolist() == [0]
    with pytest.raises(InputError, match="column prompt_tokens"):
        read(tmp_path, '{"timestamp": 1, "prompt_tokens": "\\ud83d", "completion_tokens": 4}\n')


@pytest.mark.parametrize(
    "text", [f"{HEADER}\n{CSV}".replace(",", ";"), f"{HEADER}\n{CSV}".replace(",", "\t")]
)
def test_decimal_commas(tmp_path: Path, text: str) -> None:
    assert as_rows(read(tmp_path, text.replace(".", ","))) == ROWS
    assert as_rows(read(tmp_path, "sep=;\n" + text.replace("\t", ";"))) == ROWS


def test_text_of_old_systems(tmp_path: Path) -> None:
    text = f"{HEADER}\n{CSV}"
    assert as_rows(read(tmp_path, text.replace("\n", "\r"))) == ROWS
    assert as_rows(read(tmp_path, text.encode("utf-16-le"))) == ROWS


@pytest.mark.skipif(shutil.which("zstd") is None, reason="zstd is not installed")
def test_zstd(tmp_path: Path) -> None:
    (tmp_path / "plain.csv").write_text(f"{HEADER}\n{CSV}\n\n99,x,1\n")
    subprocess.run(["zstd", "-q", "plain.csv"], cwd=tmp_path, check=True)
    packed = (tmp_path / "plain.csv.zst").read_bytes()
    with pytest.raises(InputError, match="line 24, column prompt_tokens = 'x'"):
        read(tmp_path, packed)
    with pytest.raises(InputError, match="a damaged or truncated zstd file"):
        read(tmp_path, packed[:-10])
    (tmp_path / "good.csv").write_text(f"{HEADER}\n{CSV}")
    subprocess.run(["zstd", "-q", "good.csv"], cwd=tmp_path, check=True)
    assert as_rows(read_trace(TraceFile(path=str(tmp_path / "good.csv.zst")))) == ROWS


def test_how_long_a_request_took_is_not_when_it_came(tmp_path: Path) -> None:
    """In nginx's logs, `request_time` is a duration; vLLM's `queued_time` is one, too."""
    times = {
        "time_iso8601": lambda at: f"2024-05-01T23:50:{at:06.3f}+00:00",
        "time_local": lambda at: f"01/May/2024:23:50:{int(at):02d} +0000",
        "msec": lambda at: f"{EPOCH_MS / 1000 + at:.3f}",
    }
    for column, written in times.items():
        records = [
            {"request_time": 5.0 - 0.1 * k, column: written(2.0 * k), **usage(100 + k, 10 + k)}
            for k in range(20)
        ]
        trace = read(tmp_path, lines_of(records))
        assert trace.reading is not None and trace.reading.time_column == column
        assert trace.arrived_at == pytest.approx([2.0 * k for k in range(20)])
    with pytest.raises(InputError, match="no known column for arrival times among queued_time"):
        read(tmp_path, f"queued_time,prompt_tokens,completion_tokens\n{CSV}")


def test_times_that_go_up_and_down_are_doubted(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    header = "request_time,prompt_tokens,completion_tokens"
    rows = "".join(f"{seconds:.3f},9,9\n" for seconds in rng.exponential(1.0, 100))
    with pytest.warns(PointsmanWarning, match=r"times in 'request_time' go down in \d+ of \d+ rows, as dura"):
        read(tmp_path, f"{header}\n{rows}")
    nearly = "".join(f"{k + rng.uniform(0, 1.5):.3f},9,9\n" for k in range(100))
    assert len(read(tmp_path, f"{header}\n{nearly}")) == 100, "several streams in one log"


@pytest.mark.parametrize("names", [("cache_read_input_tokens", "cache_creation_input_tokens")])
def test_a_prompt_is_also_what_was_cached_of_it(tmp_path: Path, names: tuple[str, str]) -> None:
    """Anthropic counts apart what was read from the cache, and what was written to it."""
    read_name, written_name = names
    counts = [(3, 1000, 0), (4, 1000, 200), (50, None, None), (0, 700, 0)]
    records = [
        {"timestamp": k, "message": {"usage": {"input_tokens": one, "output_tokens": 7, **cached}}}
        for k, (one, *others) in enumerate(counts)
        for cached in [dict(zip(names, others, strict=True))]
    ]
    trace = read(tmp_path, lines_of(records))
    assert trace.num_prefill_tokens.tolist() == [1003, 1204, 50, 700]
    place = "message.usage."
    said = f"num_prefill_tokens = {place}input_tokens + {place}{read_name} + {place}{written_name}"
    assert said in str(trace.reading)
    columns = TraceColumns(num_prefill_tokens="message.usage.input_tokens")
    with pytest.warns(PointsmanWarning, match="1 of 4 requests failed"):
        alone = read_trace(TraceFile(path=str(tmp_path / "trace.csv"), columns=columns))
    assert alone.num_prefill_tokens.tolist() == [3, 4, 50], "a column that is named is meant"


def test_a_sum_is_not_added_to(tmp_path: Path) -> None:
    """LiteLLM's and OpenTelemetry's counts have what was cached in them."""
    for name, place in (("prompt_tokens", ""), ("input_tokens", "gen_ai.usage.")):
        header = f"timestamp,{place}{name},{place}output_tokens,{place}cache_read_input_tokens"
        assert read(tmp_path, f"{header}\n0,90,9,80\n1,95,9,80\n").num_prefill_tokens.tolist() == [90, 95]


def test_fractions_in_the_columns_of_mooncake_are_seconds(tmp_path: Path) -> None:
    header = "timestamp,input_length,output_length"
    trace = read(tmp_path, f"{header}\n{CSV}")
    assert as_rows(trace) == ROWS
    assert "read as seconds, as they have fractions" in str(trace.reading)
    whole = read(tmp_path, f"{header}\n{CSV}".replace(".5", ".0"))
    assert whole.arrived_at[-1] == pytest.approx(0.028), "its own are milliseconds"
    for options in ({"time_unit": "ms"}, {"format": "mooncake"}):
        (tmp_path / "trace.csv").write_text(f"{header}\n{CSV}")
        told = read_trace(TraceFile(path=str(tmp_path / "trace.csv"), **options))
        assert told.arrived_at[-1] == pytest.approx(0.0285), "unless it is said"


def test_fractions_of_mooncakes_milliseconds(tmp_path: Path) -> None:
    """Others write its form so, with its hashes of blocks."""
    rows = [
        {"timestamp": 512.25 * k, "input_length": 600, "output_length": 9, "hash_ids": [0, k]}
        for k in range(9)
    ]
    assert read(tmp_path, lines_of(rows)).arrived_at[-1] == pytest.approx(8 * 0.51225)


def test_a_duration_is_no_arrival_where_there_is_one(tmp_path: Path) -> None:
    for name in ("msec", "request_time"):
        header = f"created_at,prompt_tokens,completion_tokens,{name}"
        trace = read(tmp_path, f"{header}\n0,90,9,8000\n1,95,9,20\n3,95,9,4000\n")
        assert trace.arrived_at.tolist() == [0.0, 1.0, 3.0]


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
def test_whole_seconds_are_coarse_in_any_unit(tmp_path: Path, unit: str) -> None:
    zeros = {"ms": "000", "us": "000000", "ns": "000000000"}[unit]
    rows = "".join(f"{1_770_000_000 + k // 4}{zeros},9,9\n" for k in range(80))
    trace = read(tmp_path, f"created,prompt_tokens,completion_tokens\n{rows}")
    assert trace.arrived_at.tolist() == [k / 4 for k in range(80)]
    assert f"spread evenly over it (time_unit: {unit} keeps them together)" in str(trace.reading)
    file = TraceFile(path=str(tmp_path / "trace.csv"), time_unit=unit)
    assert read_trace(file).arrived_at.tolist() == [k // 4 for k in range(80)]
    finer = rows.replace(f"{1_770_000_007}{zeros}", f"{1_770_000_007}{zeros[:-3]}500")
    together = read(tmp_path, f"created,prompt_tokens,completion_tokens\n{finer}")
    assert "spread" not in str(together.reading), "who has written milliseconds could tell them apart"


def test_batches_of_mooncake_stay_batches(tmp_path: Path) -> None:
    rows = "".join(f"{3000 * (k // 4)},9,9\n" for k in range(80))
    trace = read(tmp_path, f"timestamp,input_length,output_length\n{rows}")
    assert trace.arrived_at.tolist() == [3.0 * (k // 4) for k in range(80)]


@pytest.mark.parametrize("content", ["[]", "{}", "[{}]", "[ ]\n"])
def test_json_without_a_request(tmp_path: Path, content: str) -> None:
    with pytest.raises(InputError, match="holds no requests; give a file with at least one"):
        read(tmp_path, content, "trace.json")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"PK\x03\x04" + bytes(100), "a zip archive or a spreadsheet; unpack it"),
        (b"BZh9" + bytes(100), "packed with bzip2; unpack it"),
        (b"<!DOCTYPE html><html></html>", "a page in HTML; download the file itself"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
    ],
)
def test_files_of_other_kinds_are_called_by_their_names(tmp_path: Path, content: bytes, what: str) -> None:
    with pytest.raises(InputError, match=what):
        read(tmp_path, content)
