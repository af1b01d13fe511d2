"""How a trace file was understood: for a line on the terminal and for results."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from pointsman.plain import counted

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TraceReading:
    """`time_format`: dates, Unix time in some unit, or a unit alone, since a start that the file knows."""

    path: str
    content: str  # request or job
    num_rows: int
    span_s: float  # from the first to the last
    columns: dict[str, str]  # by what they hold
    time_column: str
    time_format: str
    first_date: str | None  # UTC, where times are dates or Unix times
    shifted_by_s: float  # taken off all times, so that the first is 0
    num_out_of_order: int
    spread_over_s: float | None = None  # a coarse clock: what it counts alike was spread over it
    time_unit: str = "s"  # that of the numbers

    def say(self) -> None:
        _log.info("%s", self)

    def __str__(self) -> str:
        parts = [f"{self.path}: {counted(self.num_rows, self.content)} in {self.span_s:,.6g} s"]
        if self.span_s > 0:
            parts[0] += f" ({self.num_rows / self.span_s:.3g}/s)"
        parts.append(f"times in {self.time_column!r} read as {self.time_format}")
        if self.first_date:
            parts[-1] += f" from {self.first_date} UTC"
        if self.shifted_by_s > 0:
            parts[-1] += ", the first moved to 0"
        others = {
            field: name for field, name in self.columns.items() if name not in (field, self.time_column)
        }
        if others:
            parts.append(", ".join(f"{field} = {name}" for field, name in others.items()))
        if self.spread_over_s:
            clock = "minute" if self.spread_over_s > 1 else "second"
            parts.append(
                f"requests of one {clock} are spread evenly over it "
                f"(time_unit: {self.time_unit} keeps them together)"
            )
        if self.num_out_of_order:
            parts.append(f"{self.num_out_of_order:,} rows were out of order and are sorted")
        return "; ".join(parts)
