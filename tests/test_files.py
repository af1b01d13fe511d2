from __future__ import annotations

from pathlib import Path

import pytest

from pointsman.errors import InputError
from pointsman.files import output_dir, output_file


def test_the_name_is_taken_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "out.txt"
    with output_file("--out", path) as file:
        file.write("half")
        file.flush()
        assert not path.exists()
        file.write(" and half\n")
    assert path.read_text() == "half and half\n"
    assert list(path.parent.iterdir()) == [path]


def test_a_failure_keeps_what_was_there(tmp_path: Path) -> None:
    old = tmp_path / "old.txt"
    old.write_text("old")
    for path in (old, tmp_path / "new" / "new.txt"):
        with pytest.raises(RuntimeError), output_file("--out", path) as file:
            file.write("half")
            raise RuntimeError
    assert list(tmp_path.iterdir()) == [old]
    assert old.read_text() == "old"


def test_directories_of_others_stay(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), output_dir("--out", tmp_path / "a" / "b") as folder:
        (folder.parent / "theirs").write_text("")
        raise RuntimeError
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "theirs"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    with output_file("--out", tmp_path / "link") as file:
        file.write("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def test_files_have_the_usual_rights(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    with output_file("--out", tmp_path / "ours"):
        pass
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_device_is_written_to_directly() -> None:
    null = Path("/dev/null")
    before = null.stat().st_rdev
    with output_file("--out", null) as file:
        file.write("x")
    assert null.stat().st_rdev == before


@pytest.mark.parametrize("path", ["/proc/none/x", "/proc/x"])
def test_what_cannot_be_written_is_refused_at_once(path: str) -> None:
    with pytest.raises(InputError, match="cannot be written"), output_file("--out", Path(path)):
        raise AssertionError("too late")


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no space left"), output_file("--out", tmp_path / "x"):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_closed_pipe_is_no_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BrokenPipeError), output_file("--out", tmp_path / "x"):
        raise BrokenPipeError(32, "Broken pipe")
