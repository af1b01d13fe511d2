"""How a trace file was understood: for a line on the terminal and for results."""

from __future__ import annotations

import logging
from dataclasses import dataclass

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TraceReading:
    """`time_format`: dates, Unix time in some unit, or a unit alone, since a start that the file knows."""

    path: str
    columns: dict[str, str]  # by what they hold
    time_format: str
    first_date: str | None  # UTC, where times are dates or Unix times
    num_requests: int
    span_s: float  # from the first to the last
    shifted_by_s: float  # taken off all times, so that the first is 0
    num_out_of_order: int

    def say(self) -> None:
        _log.info("%s", self)

    def __str__(self) -> str:
        rate = f" ({self.num_requests / self.span_s:.3g}/s)" if self.span_s > 0 else ""
        since = f" from {self.first_date} UTC" if self.first_date else ""
        shift = ", the first moved to 0" if self.shifted_by_s > 0 else ""
        columns = dict(self.columns)
        times = columns.pop("arrived_at")
        others = ", ".join(f"{field} = {column}" for field, column in columns.items() if field != column)
        order = f"; {self.num_out_of_order:,} rows were out of order and are sorted"
        return (
            f"{self.path}: {self.num_requests:,} requests in {self.span_s:,.6g} s{rate}; "
            f"times in {times!r} read as {self.time_format}{since}{shift}"
            + (f"; {others}" if others else "")
            + (order if self.num_out_of_order else "")
        )
