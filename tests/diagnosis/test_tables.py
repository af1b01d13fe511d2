"""CSV files as they are found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pointsman.diagnosis.tables import read_table
from pointsman.errors import InputError


def table(tmp_path: Path, text: str) -> dict[str, list[float]]:
    path = tmp_path / "log.csv"
    path.write_text(text)
    return {name: values.tolist() for name, values in read_table(path).columns.items()}


def test_empty_cells_and_words_are_nothing(tmp_path: Path) -> None:
    columns = table(tmp_path, "update,entropy,host\n1,0.5,a\n2,,b\n3,true,c\n")
    assert columns["update"] == [1.0, 2.0, 3.0]
    assert np.isnan(columns["entropy"][1])
    assert columns["entropy"][2] == 1.0
    assert np.isnan(columns["host"]).all()


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_any_delimiter(tmp_path: Path, mark: str) -> None:
    assert table(tmp_path, f"update{mark}kl\n1{mark}0.5\n2{mark}0.25\n")["kl"] == [0.5, 0.25]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_what_a_spreadsheet_makes_of_it(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "progress.csv"
    text = "update;entropy;approx_kl\r\n" + "".join(f"{n},0;0,{n}5;1,5e-03\r\n" for n in range(1, 6))
    path.write_bytes(text.encode(encoding))
    table = read_table(path)
    assert table.columns["entropy"].tolist() == [0.15, 0.25, 0.35, 0.45, 0.55]
    assert table.columns["approx_kl"].tolist() == 5 * [0.0015]


def test_comments_blank_lines_a_title_and_a_byte_order_mark_come_before_the_header(tmp_path: Path) -> None:
    text = "\ufeff# made by a script\n\nresults of run 3\nupdate,kl\n1,0.5\n\n2,0.25\n"
    assert table(tmp_path, text) == {"update": [1.0, 2.0], "kl": [0.5, 0.25]}


def test_a_header_that_comes_again_in_another_order_holds_from_there(tmp_path: Path) -> None:
    text = "update,kl,entropy\n1,0.5,1.0\nupdate,kl,entropy\n2,0.4,0.9\nupdate,entropy,new,kl\n3,0.8,7,0.3\n"
    columns = table(tmp_path, text)
    assert columns["kl"] == [0.5, 0.4, 0.3]
    assert columns["entropy"] == [1.0, 0.9, 0.8]
    assert columns["new"][2] == 7.0
    assert np.isnan(columns["new"][:2]).all()


def test_an_index_without_a_name_shifts_nothing(tmp_path: Path) -> None:
    columns = table(tmp_path, "update,kl\n0,1,0.5\n1,2,0.25\n")
    assert columns["update"] == [1.0, 2.0]
    assert columns["kl"] == [0.5, 0.25]
    assert table(tmp_path, ",update,kl\n0,1,0.5\n1,2,0.25\n")["kl"] == [0.5, 0.25]


def test_commas_at_the_end_short_rows_and_a_row_cut_off(tmp_path: Path) -> None:
    columns = table(tmp_path, "update,kl,entropy\n1,0.5,0.9,,\n2,0.4\n3,0.3,0.7\n4,0.\n")
    assert columns["update"] == [1.0, 2.0, 3.0]
    assert columns["kl"] == [0.5, 0.4, 0.3]
    assert np.isnan(columns["entropy"][1])


def test_of_a_name_that_stands_twice_the_first_counts(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("update,kl,kl\n1,0.5,9\n2,0.4,9\n")
    found = read_table(path)
    assert found.columns["kl"].tolist() == [0.5, 0.4]
    assert any("twice" in note for note in found.notes)


def test_written_nan_and_infinity_are_told_from_empty(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("update,v_loss,kl\n1,0.5,\n2,nan,0.1\n3,inf,0.1\n")
    assert read_table(path).broken_at == {"v_loss": 1}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (b"\n\n# nothing\n", "is empty"),
        (b"update,kl\n", "has a header but no row"),
        (b"1,2,3\n4,5,6\n", "has no header"),
        (b"a poem\nwithout columns\n", "has no header"),
        (b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", "is not text"),
        (b"update,kl\n1,\x00\x01\n", "is not text"),
    ],
)
def test_what_is_no_log_is_one_line(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=problem):
        read_table(path)
