"""What is said of a file or a server that is not there."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import pytest

from pointsman.errors import no_such_file, reason_of


def error_of(act: object) -> BaseException:
    try:
        act()  # type: ignore[operator]
    except (OSError, ValueError) as error:
        return error
    raise AssertionError("nothing was wrong")


def test_reasons_are_words(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xff\xff")
    assert reason_of(error_of((tmp_path / "none").read_text)) == "no such file or directory"
    assert reason_of(error_of(lambda: (tmp_path / "latin").read_text(encoding="utf-8"))) == "not in UTF-8"
    assert reason_of(error_of(lambda: ssl.create_default_context(cafile=__file__))) == (
        "no certificate or crl found"
    )
    assert reason_of(TimeoutError()) == "timed out"
    assert reason_of(ValueError("a\n  b")) == "a b"
    assert reason_of(ValueError()) == "ValueError"


def test_a_server_that_is_not_there() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        refused = error_of(lambda: asyncio.run(asyncio.open_connection("127.0.0.1", port)))
        assert "Errno" in str(refused)
        assert reason_of(refused) == "connection refused"

    async def listen() -> None:
        async with await asyncio.start_server(lambda *both: None, "127.0.0.1", 0) as server:
            await asyncio.start_server(lambda *both: None, *server.sockets[0].getsockname())

    assert reason_of(error_of(lambda: asyncio.run(listen()))) == "address already in use"
    one = "[Errno 111] Connect call failed ('::1', 1)"
    several = f"Multiple exceptions: {one}, {one}"
    assert reason_of(OSError(several)) == "connection refused"


@pytest.mark.parametrize(
    ("asked", "remedy"),
    [
        ("mine.yml", "did you mean '{folder}/mine.yaml'?"),
        ("other.yaml", "check the path"),
        ("x/y", "check the path"),
    ],
)
def test_a_file_of_nearly_that_name_is_named(tmp_path: Path, asked: str, remedy: str) -> None:
    (tmp_path / "mine.yaml").touch()
    assert no_such_file("CONFIG", tmp_path / asked).remedy == remedy.format(folder=tmp_path)
