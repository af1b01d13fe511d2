"""`pointsman serve`: the router in front of OpenAI-compatible servers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pointsman.cli.console import compilation_announced, say
from pointsman.cli.serving_options import (
    AdminHost,
    AdminPort,
    BackendCa,
    BackendsFile,
    BackendUrls,
    DnsName,
    Host,
    KubernetesService,
    Quietly,
    RecordFile,
    ServedPolicy,
    ServingOverrides,
    Shadow,
    Share,
    ShareCa,
    ShownSettings,
    TlsKey,
    check_policies,
    check_ports,
    check_servers,
)
from pointsman.errors import InputError

if TYPE_CHECKING:
    from pointsman.router.config import Settings
    from pointsman.router.replicas.discovery import Source
    from pointsman.router.store.address import StoreAddress


def serve(
    context: typer.Context,
    backend: BackendUrls = None,
    policy: ServedPolicy = "default",
    backends: BackendsFile = None,
    dns: DnsName = None,
    kubernetes: KubernetesService = None,
    host: Host = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="PORT", help="Port to listen on; 0 takes any free one.")
    ] = 8080,
    admin_host: AdminHost = "127.0.0.1",
    admin_port: AdminPort = 8081,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            "--api-keys", metavar="FILE", help="Keys of clients, one per line; or $POINTSMAN_API_KEYS."
        ),
    ] = None,
    admin_keys: Annotated[
        Path | None,
        typer.Option(
            "--admin-keys",
            metavar="FILE",
            help="Keys of the admin API, one per line; or $POINTSMAN_ADMIN_KEYS.",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option("--tls-cert", metavar="FILE", help="Speak HTTPS with this certificate chain (PEM)."),
    ] = None,
    tls_key: TlsKey = None,
    backend_ca: BackendCa = None,
    shadow: Shadow = None,
    record: RecordFile = None,
    workers: Annotated[
        int,
        typer.Option(
            "--workers", metavar="N", min=1, max=64, help="Processes that share the port and the books."
        ),
    ] = 1,
    share: Share = None,
    share_ca: ShareCa = None,
    overrides: ServingOverrides = None,
    settings: ShownSettings = False,
    is_quiet: Quietly = False,
) -> None:
    """Route OpenAI requests to several servers (vLLM or similar) by a policy.

    Clients use http://HOST:PORT/v1; /health and /metrics are the router's own. /dashboard on the admin port
    is a live page. Every request is a JSON line on stderr, without its prompt. After SIGTERM or Ctrl-C the
    router finishes what has begun. $POINTSMAN_BACKEND_KEY is the key that the servers want, if any.

    Example: pointsman serve --policy default --backend http://a:8000 --backend http://b:8000
    """
    import uvloop

    from pointsman.router.http.tls import server_side_tls
    from pointsman.router.keys import BACKEND_KEY
    from pointsman.router.main import Options, serve_forever
    from pointsman.router.ports import Ports
    from pointsman.router.processes.workers import own_seat, supervise

    parsed = serving_settings(overrides or [])
    if settings:
        print_settings(parsed)
        return
    check_ports({"--port": (host, port), "--admin-port": (admin_host, admin_port)})
    check_servers(backend or [])
    check_policies(policy, shadow)
    if backend_ca is not None:
        server_side_tls(backend_ca)
    options = Options(
        backends=backend or [],
        source=server_source(backends, dns, kubernetes),
        policy=policy,
        shadow=shadow,
        ports=Ports(host, port, admin_host, admin_port, api_keys, admin_keys, tls_cert, tls_key),
        backend_key=os.environ.get(BACKEND_KEY),
        backend_ca=backend_ca,
        record=record,
        logs_requests=not is_quiet,
        settings=parsed,
        share=store_address(share, share_ca),
    )
    if not options.backends and options.source is None:
        raise InputError(
            "--backend", None, "no server is named", "give --backend, --backends, --dns or --kubernetes"
        )
    seat = own_seat()
    if workers > 1 and seat is None:
        drain_s = parsed.limits.drain_timeout_s
        status = supervise(context.obj, workers, host, port, record, drain_s, say)
        raise typer.Exit(status)
    with compilation_announced():
        uvloop.run(serve_forever(options, say, sys.stderr, seat))


def serving_settings(overrides: list[str]) -> Settings:
    from pointsman.router.config import Settings
    from pointsman.spec import apply_override, parse_spec

    data: dict[str, Any] = {}
    for override in overrides:
        apply_override(data, override, "holding.max_held=200")
    return parse_spec(Settings, data)


def store_address(share: str | None, ca: Path | None) -> StoreAddress | None:
    from pointsman.router.store.address import parse_store

    if share is None:
        return None
    import redis  # noqa: F401  # says at the start if it is missing

    return parse_store(share, ca)


def server_source(file: Path | None, dns: str | None, kubernetes: str | None) -> Source | None:
    from pointsman.router.replicas.discovery import DnsSource, FileSource, KubernetesSource

    given = [
        name for name, value in (("--backends", file), ("--dns", dns), ("--kubernetes", kubernetes)) if value
    ]
    if len(given) > 1:
        raise InputError(
            given[1], file or dns or kubernetes, f"given beside {given[0]}", "name one of the two"
        )
    if file is not None:
        return FileSource(file)
    if dns is not None:
        return DnsSource(dns)
    return KubernetesSource(kubernetes) if kubernetes is not None else None


def print_settings(settings: Settings) -> None:
    from pointsman.cli.console import stdout
    from pointsman.cli.lists import plain_table
    from pointsman.spec import Spec

    table = plain_table("setting", "value", "what")
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if isinstance(value, Spec):
            for inner, inner_field in type(value).model_fields.items():
                table.add_row(f"{name}.{inner}", str(getattr(value, inner)), inner_field.description)
        else:
            table.add_row(name, str(value), field.description)
    stdout().print(table)
