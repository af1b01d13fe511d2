"""`pointsman serve`: the router in front of OpenAI-compatible servers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pointsman.cli.console import compilation_announced, say
from pointsman.cli.serving_options import (
    AdminHost,
    AdminKeys,
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
    TlsCert,
    TlsKey,
    checked_options,
    print_settings,
    server_source,
    serving_settings,
    store_address,
)


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
    admin_keys: AdminKeys = None,
    tls_cert: TlsCert = None,
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

    from pointsman.router.http.sockets import raise_file_limit
    from pointsman.router.main import serve_forever
    from pointsman.router.ports import Ports
    from pointsman.router.processes.workers import own_seat, supervise

    parsed = serving_settings(overrides or [])
    if settings:
        print_settings(parsed)
        return
    options = checked_options(
        parsed,
        Ports(host, port, admin_host, admin_port, api_keys, admin_keys, tls_cert, tls_key),
        backend=backend or [],
        source=server_source(backends, dns, kubernetes),
        backend_ca=backend_ca,
        policy=policy,
        shadow=shadow,
        record=record,
        share=store_address(share, share_ca),
        is_quiet=is_quiet,
    )
    seat = own_seat()
    if workers > 1 and seat is None:
        drain_s = parsed.limits.drain_timeout_s
        status = supervise(context.obj, workers, host, port, record, drain_s, say)
        raise typer.Exit(status)
    raise_file_limit()
    with compilation_announced():
        uvloop.run(serve_forever(options, say, sys.stderr, seat))
