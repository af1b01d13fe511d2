"""The same moments in every way to write them, and what is no date."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import polars as pl
import pytest

from pointsman.errors import InputError
from pointsman.workload.dates import looks_like_date, parse_dates
from pointsman.workload.readers import read_trace
from pointsman.workload.spec import TraceFile

SECONDS = (0, 7, 3600)


@pytest.mark.parametrize("day", [16, 1])
@pytest.mark.parametrize(
    "way",
    [
        "%Y-%m-%dT%H:%M:%SZ",
        "%Y-%m-%d %H:%M:%S,000",
        "%Y-%m-%dT%H:%M:%S+01:00",
        "%Y-%m-%d %H:%M:%S+01",
        "%Y-%m-%d %H:%M:%S -0800",
        "%Y-%m-%d %H:%M:%S EST",
        "%Y-%m-%dT%H:%M:%S+01:00[Europe/Paris]",
        "%Y.%m.%d %H:%M:%S",
        "%Y%m%dT%H%M%SZ",
        "%Y%m%d%H%M%S",
        "%m/%d/%Y %H:%M:%S",
        "%m/%d/%Y %I:%M:%S %p",
        "%m/%d/%y, %I:%M:%S %p",
        "%d/%m/%Y %H:%M:%S",
        "%d.%m.%Y %H:%M:%S,000",
        "%b %d %Y %H:%M:%S",
        "%B %d, %Y %I:%M:%S %p",
        "%b %d, %Y @ %H:%M:%S.000",
        "%d %b %Y %H:%M:%S",
        "%d/%b/%Y:%H:%M:%S +0000",
        "%a, %d %b %Y %H:%M:%S GMT",
        "%a %b %d %H:%M:%S %Y",
        "%a %b %d %H:%M:%S UTC %Y",
    ],
)
def test_ways_to_write_a_date(tmp_path: Path, way: str, day: int) -> None:
    start = datetime(2023, 11, day, 11, 15, 46)
    moments = [(start + timedelta(seconds=after)).strftime(way) for after in SECONDS]
    path = tmp_path / "trace.csv"
    rows = "".join(f'"{moment}",5,5\n' for moment in moments)
    path.write_text(f"timestamp,prompt_tokens,completion_tokens\n{rows}")
    trace = read_trace(TraceFile(path=str(path)))
    assert trace.arrived_at.tolist() == [float(after) for after in SECONDS]
    assert "dates" in str(trace.reading)


def test_minutes_alone() -> None:
    stamps, how = parse_dates(pl.Series(["01/11/2023 18:15", "01/11/2023 18:17"]))
    assert stamps.diff().dt.total_seconds().to_list() == [None, 120]
    assert how == "dates (day or month first)"


@pytest.mark.parametrize(
    ("texts", "first", "how"),
    [
        (["01/11/2023 10:00", "02/11/2023 10:00", "03/11/2023 10:00"], "2023-11-01", "dates (day first)"),
        (["11/01/2023 10:00", "11/02/2023 10:00", "11/03/2023 10:00"], "2023-11-01", "dates (month first)"),
        (["12/11/2023 10:00", "13/11/2023 10:00"], "2023-11-12", "dates (day first)"),
        (["11/12/2023 10:00", "11/13/2023 10:00"], "2023-11-12", "dates (month first)"),
        (["24/05/31 23:59:58", "24/06/01 00:00:01"], "2024-05-31", "dates (year first)"),
        (["24/12/31 23:59:58", "25/01/01 00:00:01"], "2024-12-31", "dates (year first)"),
        (["05/05/06 23:59:58", "05/05/07 00:00:01"], "2005-05-06", "dates (year first)"),
        (["30/05/24 10:00", "31/05/24 10:00", "01/06/24 10:00"], "2024-05-30", "dates (day first)"),
        (["05/30/24 10:00", "06/01/24 10:00"], "2024-05-30", "dates (month first)"),
        (["24/05/31 10:00", "24/05/31 10:05"], "2031-05-24", "dates (day or year first)"),
    ],
)
def test_day_or_month_first(texts: list[str], first: str, how: str) -> None:
    stamps, said = parse_dates(pl.Series(texts))
    assert stamps.dt.strftime("%Y-%m-%d")[0] == first
    assert said == how


@pytest.mark.parametrize(
    "text", ["17.5", "1700158000", "1700158000000", "20231116", "noon", "1.5.2", "", "10:00"]
)
def test_what_is_no_date(text: str) -> None:
    assert not looks_like_date(text)


@pytest.mark.parametrize(
    "text", ["9999-12-31 00:00:00", "0001-01-01 00:00:00", "1900-01-01 00:00:00", "2023-02-30 10:00:00"]
)
def test_impossible_dates_are_refused_for_what_they_are(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"timestamp,prompt_tokens,completion_tokens\n2023-11-16 18:00:00,1,1\n{text},1,1\n")
    with pytest.raises(
        InputError, match=f"line 3, column timestamp = '{text}': not a date and time between 1970"
    ):
        read_trace(TraceFile(path=str(path)))
