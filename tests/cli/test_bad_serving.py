"""Mistyped options of the commands around servers: one line each, before anything is started or measured."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from .conftest import Cli
from .test_bad_input import check

NOBODY = ("--backend", "http://127.0.0.1:1")


@pytest.mark.parametrize("command", ["serve", "epp"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((*NOBODY, "--policy", "least-wrok"), "--policy = 'least-wrok': unknown policy; did you mean"),
        ((*NOBODY, "--shadow", "least-wrok"), "--shadow = 'least-wrok': unknown policy; did you mean"),
        ((*NOBODY, *NOBODY), "--backend = 'http://127.0.0.1:1': is named twice; name every server once"),
        ((*NOBODY, "--backend", "http://127.0.0.1:1/v1"), "1/v1': is named twice; name every server once"),
        (
            (*NOBODY, "--port", 8099, "--admin-port", 8099),
            "--admin-port = 8099: is that of --port, too; name",
        ),
        ((*NOBODY, "--policy", "bad.safetensors"), "--policy = "),
        ((*NOBODY, "--shadow", "bad.safetensors"), "--shadow = "),
        (("--backends", "absent.yaml"), "--backends = 'absent.yaml': no such file"),
        (("--kubernetes", "a/b/c"), "--kubernetes = 'a/b/c': is not a service"),
        ((*NOBODY, "--admin-keys", "absent"), "--admin-keys = 'absent': "),
        ((*NOBODY, "--tls-cert", "absent"), "--tls-cert = 'absent': cannot be read"),
        ((*NOBODY, "--tls-key", "key.pem"), "--tls-key = 'key.pem': given without a certificate"),
        ((*NOBODY, "--backend-ca", "absent"), "CA file = 'absent': cannot be read"),
        ((*NOBODY, "--port", "0x"), "--port = '0x': must be a whole number; see"),
    ],
)
def test_servers_and_policies_are_named_by_their_option(
    cli: Cli,
    command: str,
    options: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("uvloop")
    monkeypatch.chdir(tmp_path)
    Path("bad.safetensors").write_text("no policy\n")
    check(cli(command, *options), said)


def test_an_address_of_another_machine_is_named_by_its_option() -> None:
    pytest.importorskip("uvloop")
    from pointsman.router.ports import cannot_listen

    elsewhere = OSError(errno.EADDRNOTAVAIL, "cannot assign requested address")
    told = cannot_listen("--admin-port", "192.0.2.1", 8081, elsewhere)
    assert str(told).startswith("--admin-host = '192.0.2.1': is not an address of this machine; use 127.")
    assert str(cannot_listen("--port", "192.0.2.1", 8080, elsewhere)).startswith("--host = '192.0.2.1': is")
    taken = cannot_listen("--port", "127.0.0.1", 8080, OSError(errno.EADDRINUSE, "address already in use"))
    assert str(taken).startswith("--port = 8080: cannot listen (address already in use); name another port")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--backends", "absent.yaml"), "--backends = 'absent.yaml': no such file"),
        (("--kubernetes", "vllm"), "--kubernetes = 'vllm': there is no service account here"),
        ((*NOBODY, "--backend-ca", "absent.pem"), "'absent.pem': cannot be read"),
    ],
)
def test_doctor(cli: Cli, options: tuple[str, ...], said: str) -> None:
    check(cli("doctor", *options), said)


URL = ("--url", "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((*URL, "--minutes", "nan"), "--minutes = nan: is not a time"),
        ((*URL, "--minutes", "-1"), "--minutes = -1.0: is not a time"),
        ((*URL, "--max-streams", "0"), "--max-streams = 0: leaves no requests"),
        ((*URL, "--traffic", "absent.jsonl"), "--traffic = 'absent.jsonl': no such file"),
        ((*URL, "--traffic", "folder"), "--traffic = 'folder': is a directory"),
        ((*URL, "--out", "folder"), "--out = 'folder': is a directory"),
        (("--traffic", "few.csv"), "server in --traffic = 'all': has only 1 requests in it; record at least"),
    ],
)
def test_calibrate(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], said: str
) -> None:
    """What is written is checked first: minutes of probing would be lost."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    columns = "arrived_at,num_prefill_tokens,num_decode_tokens,first_token_at,completed_at"
    (tmp_path / "few.csv").write_text(f"{columns}\n0,5,5,1,2\n")
    check(cli("calibrate", *options), said)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["few.csv", "folder"]
