"""`serve --share` and `epp`: what is wrong with their options is said at once, without a password."""

from __future__ import annotations

import pytest

from pointsman.cli.main import main

SERVER = ("--backend", "http://127.0.0.1:9")


@pytest.mark.parametrize("command", ["serve", "epp"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--share", "redis://me:secret@host:6379"), "names no group of routers"),
        (("--share", "secret"), "is not the address of a Redis or Valkey store"),
        (("--share", "redis://host/a", "--share-ca", "ca.pem"), "given for a store without TLS"),
    ],
)
def test_a_store_that_cannot_be_is_refused(
    command: str, options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("redis")
    assert main([command, *SERVER, *options]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "me:secret" not in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "no server is named"),
        ((*SERVER, "--port", "70000"), "--port"),
        ((*SERVER, "--tls-key", "key.pem"), "given without a certificate"),
        ((*SERVER, "--dns", "http://a", "--backends", "b.yaml"), "given beside"),
        (
            (*SERVER, "--policy", "no-such-policy", "--admin-port", "0", "--metrics-port", "0"),
            "unknown policy",
        ),
    ],
)
def test_a_picker_that_cannot_be_is_refused(
    options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("grpc_health")
    assert main(["epp", *options]) == 2
    assert said in capsys.readouterr().err
