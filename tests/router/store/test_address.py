"""Where the store is; and what may be shown of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pointsman.errors import InputError
from pointsman.router.store.address import parse_store


def test_parts_of_an_address() -> None:
    store = parse_store("rediss://me:s%40cret@store.internal:7000/west")
    assert store.client_options() == {
        "host": "store.internal",
        "port": 7000,
        "username": "me",
        "password": "s@cret",
        "ssl": True,
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
    }
    assert store.channel == "pointsman:west"
    plain = parse_store("redis://localhost/a")
    assert (plain.port, plain.is_tls, plain.user, plain.password) == (6379, False, None, None)


def test_a_password_is_never_shown() -> None:
    store = parse_store("rediss://me:secret@host:7000/west")
    assert "secret" not in f"{store} {store!r}"


@pytest.mark.parametrize(
    "url",
    [
        "redis://me:secret@host:6379",  # no name
        "redis://me:secret@host:6379/",
        "redis://me:secret@host:6379/a b",
        "redis://me:secret@host:port/a",
        "redis://me:secret@/a",
        "redis://me:secret@host/a?db=3",
        "http://me:secret@host/a",
        "me:secret@host/a",
    ],
)
def test_what_is_no_address_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_store(url)
    assert "secret" not in str(caught.value)
    assert "redis://host:6379/name" in str(caught.value)


def test_a_certificate_needs_tls_and_a_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="without TLS"):
        parse_store("redis://host/a", tmp_path / "ca.pem")
    with pytest.raises(InputError, match="is not a file"):
        parse_store("rediss://host/a", tmp_path / "ca.pem")
