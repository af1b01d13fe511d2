"""`pointsman epp`: the endpoint picker of an Envoy or an inference gateway."""

from __future__ import annotations

import sys
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
    admin_keys: AdminKeys = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    backend_ca: BackendCa = None,
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
    import hpack  # noqa: F401  # says at the start if it is missing
    import uvloop

    from pointsman.router.http.sockets import raise_file_limit
    from pointsman.router.main import serve_forever
    from pointsman.router.ports import Ports

    parsed = serving_settings(overrides or [])
    if settings:
        print_settings(parsed)
        return
    options = checked_options(
        parsed,
        Ports(host, port, admin_host, admin_port, None, admin_keys, tls_cert, tls_key, metrics_port),
        backend=backend or [],
        source=server_source(backends, dns, kubernetes),
        backend_ca=backend_ca,
        policy=policy,
        shadow=shadow,
        record=record,
        share=store_address(share, share_ca),
        is_quiet=is_quiet,
    )
    raise_file_limit()
    with compilation_announced():
        uvloop.run(serve_forever(options, say, sys.stderr))
