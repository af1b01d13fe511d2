"""Dates and times of day as people and programs write them, to nanoseconds since 1970.

| way              | for example                                                                |
|------------------|----------------------------------------------------------------------------|
| ISO 8601         | 2023-11-16T18:15:46.5Z, 2023/11/16 18:15, 20231116T181546+01:00            |
| day or month first | 16/11/2023 18:15, 11/16/2023 6:15:46 PM, 16.11.2023 18:15:46,5           |
| year of two digits first | 23/11/16 18:15:46                                                  |
| month in letters | Nov 16 2023 18:15:46, Thu, 16 Nov 2023 18:15:46 GMT, 16/Nov/2023:18:15:46 +0000 |

Every way is rewritten to the first one, so that one parser does the rest. What has no zone counts as UTC.
Whether the day or the month comes first is told by a number above 12 anywhere in the column. Where no number
tells, it is the order that makes the recording shorter: days in a row look like months in a row otherwise,
and days of one year like those of many.
"""

from __future__ import annotations

import polars as pl

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
# Only names that mean one zone wherever they are written.
_ZONES = {
    "EST": "-05:00",
    "EDT": "-04:00",
    "CDT": "-05:00",
    "MST": "-07:00",
    "MDT": "-06:00",
    "PST": "-08:00",
    "PDT": "-07:00",
    "CET": "+01:00",
    "CEST": "+02:00",
    "EET": "+02:00",
}
YEARS = (1970, 2261)  # what nanoseconds since 1970 reach
_WEEKDAY = r"(?:(?:mon|tue|wed|thu|fri|sat|sun)[a-z]*\.?,? +)?"
_MONTH = rf"({'|'.join(_MONTHS)})[a-z]*\.?"
_ISO = r"^(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})(?:[^\d].*)?$"
_COMPACT = (
    r"^((?:19|20)\d\d)(0[1-9]|1[0-2])([0-3]\d)[ t]?([0-2]\d):?([0-5]\d):?([0-5]\d)([.,]\d+)?(z|[+-].*)?$"
)
_NUMBERS = r"^(\d{1,2})[-/.](\d{1,2})[-/.](\d{4}|\d\d)([^\d].*)?$"
_MONTH_DAY = rf"^{_WEEKDAY}{_MONTH} +(\d{{1,2}})(?:st|nd|rd|th)?,? +(\d{{4}})([^\d].*)?$"
_DAY_MONTH = rf"^{_WEEKDAY}(\d{{1,2}})(?:st|nd|rd|th)?[ /.-]+{_MONTH}[ ,/.-]+(\d{{4}})([^\d].*)?$"
_CTIME = rf"^{_WEEKDAY}{_MONTH} +(\d{{1,2}}) +(\d{{1,2}}:\d\d:\d\d[.\d]*)( +[a-z]{{3,4}})? +(\d{{4}})$"
_WAYS = (_ISO, _COMPACT, _NUMBERS, _MONTH_DAY, _DAY_MONTH, _CTIME)
_FORMATS = tuple(
    f"%Y-%m-%d {clock}{zone}"
    for clock in ("%H:%M:%S%.f", "%H:%M", "%I:%M:%S%.f %p", "%I:%M %p")
    for zone in ("", "%z")
)


def looks_like_date(text: str) -> bool:
    """Also of dates that turn out to be impossible, such as February 30."""
    one = pl.Series([text]).str.strip_chars().str.to_lowercase()
    return any(one.str.contains(way).item() for way in _WAYS)


def parse_dates(values: pl.Series) -> tuple[pl.Series, str]:
    """Nanoseconds since 1970 as datetimes, null where it is no date, and in words how they were read."""
    text = values.str.strip_chars().str.to_lowercase().str.replace(r"\[[a-z_/]+\]$", "")
    text = _months_as_numbers(text)
    numbers = text.str.extract_groups(_NUMBERS)
    if numbers.struct.field("1").is_not_null().any():
        orders = _possible_orders(numbers)
        read = {order: _parse(text.str.replace(_NUMBERS, orders[order])) for order in orders}
        spans = {order: _span(stamps) for order, stamps in read.items()}
        shortest = [order for order in spans if spans[order] == min(spans.values())]
        return read[shortest[0]], f"dates ({' or '.join(shortest)} first)"
    return _parse(text), "dates"


def _possible_orders(numbers: pl.Series) -> dict[str, str]:
    """How to rewrite the three numbers of a date, by which of them may come first."""
    first, second, third = (numbers.struct.field(name).cast(pl.Int64) for name in ("1", "2", "3"))
    orders = {"day": r"$3-$2-$1$4", "month": r"$3-$1-$2$4", "year": r"$1-$2-$3$4"}
    if int(first.max() or 0) > 12:  # type: ignore[arg-type]
        del orders["month"]
    elif int(second.max() or 0) > 12:  # type: ignore[arg-type]
        del orders["day"]
    if int(third.max() or 0) > 31 or int(second.max() or 0) > 12:  # type: ignore[arg-type]
        del orders["year"]
    return orders


def _months_as_numbers(text: pl.Series) -> pl.Series:
    if not text.str.contains("[a-z]{3}").any():
        return text
    text = text.str.replace(_CTIME, "$5-$1-$2 $3$4").str.replace(_MONTH_DAY, "$3-$1-$2$4")
    text = text.str.replace(_DAY_MONTH, "$3-$2-$1$4")
    for number, month in enumerate(_MONTHS, start=1):
        text = text.str.replace(rf"^(\d{{4}})-{month}-", f"${{1}}-{number}-")
    return text


def _parse(text: pl.Series) -> pl.Series:
    """Text that begins with year, month and day, as datetimes."""
    text = text.str.replace(_COMPACT, "$1-$2-$3 $4:$5:$6$7$8")
    text = text.str.replace(r"^(\d\d)-(\d{1,2}-)", "20$1-$2")
    text = text.str.replace(r"^(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})", "$1-$2-$3")
    text = text.str.replace(r"^([\d-]+)[ t:,@]+(\d)", "$1 $2").str.replace(r"^([\d-]+)$", "$1 00:00:00")
    text = text.str.replace(r"(:\d\d),(\d+)", "$1.$2").str.replace(r" ?([ap])\.?m\.?", " ${1}m")
    text = text.str.replace(r" ?(z|utc|gmt)$", "+00:00").str.replace(r" ([+-]\d\d:?\d\d)$", "$1")
    text = text.str.replace(r"(:[\d.]+ ?(?:[ap]m)?)([+-]\d\d)$", "$1$2:00")
    for zone, offset in _ZONES.items():
        text = text.str.replace(rf" {zone.lower()}$", offset)
    stamps = pl.Series(text.name, [None] * len(text), dtype=pl.Datetime("ns"))
    year = text.str.extract(r"^(\d{4})-").cast(pl.Int64)
    text = pl.select(pl.when(year.is_between(*YEARS)).then(text)).to_series()
    for form in _FORMATS:
        if not stamps.has_nulls():
            break
        parsed = text.str.to_datetime(form, time_unit="ns", strict=False)
        stamps = stamps.fill_null(parsed.dt.replace_time_zone(None))
    return stamps


def _span(stamps: pl.Series) -> tuple[int, int]:
    """How many are no dates, and the time between first and last."""
    ticks = stamps.to_physical()
    return stamps.null_count(), int(ticks.max() or 0) - int(ticks.min() or 0)  # type: ignore[arg-type]
