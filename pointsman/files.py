"""Output files that are complete or not there, and that are known to be writable before a long run starts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from pointsman.errors import InputError


@contextmanager
def output_file(option: str, path: Path) -> Iterator[IO[str]]:
    """A text file that takes its name only when the block ends well; until then it is a hidden sibling.

    Opened at once, so that what cannot be written is refused here. `option` names it in errors.
    """
    path = path.expanduser()
    try:
        is_there = path.exists()
    except OSError as error:  # a name that no file can have
        raise _cannot_write(option, path, error) from None
    if path.is_dir():
        raise InputError(option, str(path), "is a directory", "name a file")
    if is_there and not path.is_file():  # a device or a pipe: nothing to rename
        try:
            with path.open("w", encoding="utf-8", newline="") as file:
                yield file
        except OSError as error:
            raise _cannot_write(option, path, error) from None
        return
    target = path.resolve()  # a link stays a link
    with output_dir(option, target.parent, shown=path):
        partial = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            file = partial.open("w", encoding="utf-8", newline="")
        except OSError as error:
            raise _cannot_write(option, path, error) from None
        try:
            with file:
                yield file
            partial.replace(target)
        except OSError as error:
            raise _cannot_write(option, path, error) from None
        finally:
            partial.unlink(missing_ok=True)


def write_files(folder: Path, contents: Mapping[str, str]) -> None:
    """Each file is replaced as a whole."""
    for name, text in contents.items():
        with output_file("--out", folder / name) as file:
            file.write(text)


@contextmanager
def output_dir(option: str, path: Path, shown: Path | None = None) -> Iterator[Path]:
    """A directory, created with its parents where missing, and taken away again if the block fails."""
    target = path.expanduser().resolve()
    try:
        missing = [folder for folder in (target, *target.parents) if not folder.exists()]
        target.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        if target.is_file() and shown is None:
            raise InputError(option, str(path), "is a file", "name a directory") from None
        raise InputError(option, str(shown or path), "lies under a file", "name another path") from None
    except OSError as error:
        raise _cannot_write(option, shown or path, error) from None
    try:
        yield target
    except BaseException:
        for folder in missing:
            if not any(folder.iterdir()):
                folder.rmdir()
        raise


def replace_file(path: Path, data: bytes) -> None:
    """Write beside it, to the disk, then rename."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def digest_of(path: Path) -> str | None:
    """What a file is known by wherever it lies; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError):  # also a name that no file can have
        return None


def _cannot_write(option: str, path: Path, error: OSError) -> InputError:
    if isinstance(error, BrokenPipeError):
        raise error
    reason = (error.strerror or type(error).__name__).lower()
    return InputError(option, str(path), f"cannot be written ({reason})", "name another path")
