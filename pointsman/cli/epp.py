"""`pointsman epp`: the endpoint picker of an Envoy or an inference gateway."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pointsman.cli.console import compilation_announced, say
from pointsman.cli.serve import print_settings, server_source, serving_settings, store_address
from pointsman.cli.serving_options import (
    AdminHost,
    AdminPort,
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


def epp(
    backend: BackendUrls = None,
    policy: ServedPolicy = "default",
    backends: BackendsFile = None,
    dns: DnsName = None,
    kubernetes: KubernetesService = None,
    host: Host = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="PORT", help="Port of gRPC; 0 takes any free one.")
    ] = 9002,
    metrics_port: Annotated[
        int,
        typer.Option(
            "--metrics-port", metavar="PORT", help="Port of /metrics and /health; 0 takes any free one."
        ),
    ] = 9090,
    admin_host: AdminHost = "127.0.0.1",
    admin_port: AdminPort = 8081,
    admin_keys: Annotated[
        Path | None,
        typer.Option("--admin-keys", metavar="FILE", help="Keys of the admin API; or $POINTSMAN_ADMIN_KEYS."),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option("--tls-cert", metavar="FILE", help="Speak gRPC over TLS with this certificate (PEM)."),
    ] = None,
    tls_key: TlsKey = None,
    shadow: Shadow = None,
    record: RecordFile = None,
    share: Share = None,
    share_ca: ShareCa = None,
    overrides: ServingOverrides = None,
    settings: ShownSettings = False,
    is_quiet: Quietly = False,
) -> None:
    """Pick servers for Envoy or an inference gateway, which carry the requests themselves.

    It speaks gRPC (`envoy.service.ext_proc.v3.ExternalProcessor`) and the endpoint picker protocol of the
    Gateway API Inference Extension.
    $POINTSMAN_BACKEND_KEY is the key that the servers want for /health and /metrics, if any.

    Example: pointsman epp --policy default --backend http://10.0.0.1:8000 --backend http://10.0.0.2:8000
    """
    import os

    import hpack  # noqa: F401  # says at the start if it is missing
    import uvloop

    from pointsman.router.http.tls import client_side_tls
    from pointsman.router.keys import BACKEND_KEY
    from pointsman.router.main import Options, PickerPort, serve_forever
    from pointsman.router.ports import Ports

    parsed = serving_settings(overrides or [])
    if settings:
        print_settings(parsed)
        return
    hosted = {"--port": (host, port), "--metrics-port": (host, metrics_port)}
    check_ports({**hosted, "--admin-port": (admin_host, admin_port)})
    check_servers(backend or [])
    check_policies(policy, shadow)
    client_side_tls(tls_cert, tls_key)  # says what is wrong with the files
    options = Options(
        backends=backend or [],
        source=server_source(backends, dns, kubernetes),
        policy=policy,
        shadow=shadow,
        ports=Ports(host, metrics_port, admin_host, admin_port, None, admin_keys),
        backend_key=os.environ.get(BACKEND_KEY),
        backend_ca=None,
        record=record,
        logs_requests=not is_quiet,
        settings=parsed,
        share=store_address(share, share_ca),
        picker=PickerPort(host, port, (tls_cert, tls_key) if tls_cert is not None else None),
    )
    if not options.backends and options.source is None:
        raise InputError(
            "--backend", None, "no server is named", "give --backend, --backends, --dns or --kubernetes"
        )
    with compilation_announced():
        uvloop.run(serve_forever(options, say, sys.stderr))
