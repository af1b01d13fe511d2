"""The curves of a run: one row an update, under one set of names, in progress.csv and TensorBoard.

Names are those of requirement O1; `docs` and `diagnose` use the same. Groups of names have a slash:
reward/<term>, group/<name>, episode/<metric>, time/<part>_s, safety/<monitor>.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from pointsman.policies.checkpoint import replace_file

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

Row = Mapping[str, float]


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


class Curves:
    """progress.csv and tensorboard/ of a run directory."""

    def __init__(self, folder: Path, last_update: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        self._csv = CsvLog(folder / "progress.csv", last_update)
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=last_update + 1)

    def append(self, row: Row) -> None:
        self._csv.append(row)
        for name, value in row.items():
            if name != "update":
                self._board.add_scalar(name, value, int(row["update"]))

    def close(self) -> None:
        self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()
