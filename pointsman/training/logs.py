"""The curves of a run: one row an update, under one set of names, in progress.csv and TensorBoard.

Training, `diagnose` and the documentation use the same names. Groups of names have a slash: reward/<term>,
group/<name>, episode/<metric>, action_frac/<action>, ended/<limit>, time/<part>_s, safety/<limit>, and
eval_<metric>/<baseline>.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pointsman.files import replace_file

FIRST_COLUMNS = (
    "update",
    "timesteps",
    "fraction_done",
    "elapsed_s",
    "mean_ep_return",
    "mean_ep_length",
    "eval_score",
    "eval_mean_return",
    "invalid_frac",
    "noop_frac",
    "lr",
    "ent_coef",
    "temperature",
    "kl_ref_coef",
    "approx_kl_last",
    "approx_kl_mean",
    "approx_kl_max",
    "early_stop",
    "pg_loss",
    "v_loss",
    "entropy",
    "clip_frac",
    "explained_variance",
    "grad_norm",
)

NEWS = "news.txt"
FINISHED = "finished.json"  # of a run that reached its end

Row = Mapping[str, float]


_RIVAL = re.compile(r"eval_(?!mean_|(?:min_|max_)?block)(.+)_return")


def rival_of(column: str) -> str | None:
    """The heuristic whose return a column has: `random` of `eval_random_return`; None of other columns."""
    match = _RIVAL.fullmatch(column)
    return match[1] if match else None


class CsvLog:
    """A CSV file that grows a row at a time, and a column when a row brings a new name."""

    def __init__(self, path: Path, last_update: int) -> None:
        """Rows after `last_update` go: a resumed run will write them again."""
        self.path = path
        self.columns = list(FIRST_COLUMNS)
        rows = []
        if path.exists():
            text = path.read_text(encoding="utf-8")
            text = text[: text.rfind("\n") + 1]  # without a row that was cut off when the run was killed
            reader = csv.DictReader(io.StringIO(text, newline=""))
            self.columns = list(reader.fieldnames or FIRST_COLUMNS)
            rows = [row for row in reader if int(row["update"]) <= last_update]
        self._rewrite(rows)

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        replace_file(self.path, text.getvalue().encode())

    def append(self, row: Row) -> None:
        new = [name for name in row if name not in self.columns]
        if new:
            with self.path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
            self.columns += new
            self._rewrite(rows)
        with self.path.open("a", encoding="utf-8", newline="") as file:
            cells = {name: _text(value) for name, value in row.items()}
            csv.DictWriter(file, self.columns, restval="", lineterminator="\n").writerow(cells)


def _text(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.7g}"


class NewsLog:
    """Interventions and alerts as they were said, a line each; a line begins with `update <number>:`."""

    def __init__(self, path: Path, last_update: int) -> None:
        """Lines after `last_update` go: a resumed run will write them again."""
        self.path = path
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and update_of(line) <= last_update]
            replace_file(path, "".join(kept).encode())

    def append(self, news: Sequence[object]) -> None:
        if news:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(f"{item}\n" for item in news)


def update_of(line: str) -> int:
    """The update that a line of news is about; 0 where it does not say."""
    match = re.match(r"update (\d+):", line)
    return int(match[1]) if match else 0


class Curves:
    """progress.csv, news.txt and tensorboard/ of a run directory."""

    def __init__(self, folder: Path, last_update: int) -> None:
        # Here, because they take a second to import.
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        self._summary: Any = Summary
        self._csv = CsvLog(folder / "progress.csv", last_update)
        self._news = NewsLog(folder / NEWS, last_update)
        self._board: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=last_update + 1)

    def append(self, row: Row, news: Sequence[object] = ()) -> None:
        self._csv.append(row)
        self._news.append(news)
        # As one event: a hundred, by `add_scalar`, take ten times as long, and all other workers wait for it.
        value, named = self._summary.Value, {name: row[name] for name in row if name != "update"}
        scalars = [value(tag=name, simple_value=number) for name, number in named.items()]
        self._board.file_writer.add_summary(self._summary(value=scalars), int(row["update"]))
        self._add_histogram(row)

    def _add_histogram(self, row: Row) -> None:
        """Show how often each action was taken: its share is `action_frac/<action>`."""
        shares = [value for name, value in row.items() if name.startswith("action_frac/")]
        if not shares:
            return
        places = list(range(len(shares)))
        mean = sum(place * share for place, share in zip(places, shares, strict=True))
        squares = sum(place**2 * share for place, share in zip(places, shares, strict=True))
        self._board.add_histogram_raw(
            "actions",
            min=0,
            max=places[-1],
            num=1,
            sum=mean,
            sum_squares=squares,
            bucket_limits=[place + 0.5 for place in places],
            bucket_counts=shares,
            global_step=int(row["update"]),
        )

    def tell(self, news: Sequence[object]) -> None:
        """News of a row that is already written."""
        self._news.append(news)

    def close(self) -> None:
        self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()
