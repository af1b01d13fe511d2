"""Options that `serve`, `epp` and `doctor` share, and what is made of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pointsman.cli.options import check_port, policies_option
from pointsman.errors import InputError

if TYPE_CHECKING:
    from pointsman.router.config import Settings
    from pointsman.router.main import Options
    from pointsman.router.ports import Ports
    from pointsman.router.replicas.discovery import Source
    from pointsman.router.store.address import StoreAddress

BackendUrls = Annotated[
    list[str] | None, typer.Option("--backend", metavar="URL", help="A server; repeat it.")
]
ServedPolicy = Annotated[
    str,
    policies_option("--policy", "POLICY", "A heuristic, `default`, a run or a file."),
]
BackendsFile = Annotated[
    Path | None,
    typer.Option("--backends", metavar="FILE.yaml", help="A file of servers, read again when it changes."),
]
DnsName = Annotated[
    str | None,
    typer.Option(
        "--dns", metavar="URL", help="All addresses of this host are servers; resolved again and again."
    ),
]
KubernetesService = Annotated[
    str | None,
    typer.Option(
        "--kubernetes",
        metavar="[NAMESPACE/]SERVICE[:PORT]",
        help="The ready endpoints of this service are servers.",
    ),
]
Host = Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")]
AdminHost = Annotated[
    str, typer.Option("--admin-host", metavar="ADDRESS", help="Address of the admin API and the live page.")
]
AdminPort = Annotated[
    int, typer.Option("--admin-port", metavar="PORT", help="Their port; 0 takes any free one.")
]
AdminKeys = Annotated[
    Path | None,
    typer.Option(
        "--admin-keys",
        metavar="FILE",
        help="Keys of the admin API, one per line; or $POINTSMAN_ADMIN_KEYS.",
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option("--tls-cert", metavar="FILE", help="Speak TLS with this certificate chain (PEM)."),
]
TlsKey = Annotated[
    Path | None,
    typer.Option("--tls-key", metavar="FILE", help="Key of the certificate, unless it is in the same file."),
]
Shadow = Annotated[
    str | None,
    policies_option("--shadow", "POLICY", "Count what this policy would have done."),
]
RecordFile = Annotated[
    Path | None,
    typer.Option(
        "--record", metavar="FILE.jsonl", help="Write anonymised traffic, to simulate and train with."
    ),
]
Share = Annotated[
    str | None,
    typer.Option(
        "--share",
        metavar="redis://HOST/NAME",
        envvar="POINTSMAN_SHARE",
        show_envvar=False,
        help="Decide by the books of all routers and pickers of this name; or $POINTSMAN_SHARE.",
    ),
]
ShareCa = Annotated[
    Path | None,
    typer.Option(
        "--share-ca", metavar="FILE", help="The authority that signed the certificate of a rediss:// store."
    ),
]
Quietly = Annotated[bool, typer.Option("--quiet", help="Log events only, not every request.")]
BackendCa = Annotated[
    Path | None,
    typer.Option(
        "--backend-ca", metavar="FILE", help="The authority that signed the certificates of https:// servers."
    ),
]
ServingOverrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a setting, e.g. holding.max_held=200; see --settings."
    ),
]
ShownSettings = Annotated[
    bool, typer.Option("--settings", help="Print all settings with their defaults, and exit.")
]


def check_servers(urls: Sequence[str]) -> None:
    """Refuse what is no URL of a server, and a server that is named twice."""
    from pointsman.router.http.address import parse_url, server_url

    for number, url in enumerate(urls):
        parse_url(url)
        if server_url(url) in map(server_url, urls[:number]):
            raise InputError("--backend", url, "is named twice", "name every server once")


def check_ports(ports: Mapping[str, tuple[str, int]]) -> None:
    """Refuse, by their options, numbers that are no ports, and two of a kind; each comes with its host."""
    hosts_of: dict[int, dict[str, str]] = {}
    for option, (host, port) in ports.items():
        check_port(option, port)
        for other, its_host in hosts_of.get(port, {}).items() if port else ():
            if its_host == host or {host, its_host} & {"", "0.0.0.0", "::"}:
                raise InputError(option, port, f"is that of {other}, too", "name another port")
        hosts_of.setdefault(port, {})[option] = host


def check_policies(policy: str, shadow: str | None) -> None:
    """Refuse names that are none by the option that gave them."""
    from pointsman.inference.checkpoint import load_checkpoint
    from pointsman.routing.policy import PolicySpec
    from pointsman.spec import parse_spec

    for option, name in (("--policy", policy), ("--shadow", shadow)):
        try:
            spec = parse_spec(PolicySpec, {"kind": name or policy}, option)
            if spec.checkpoint is not None:
                load_checkpoint(spec.checkpoint, option)
        except InputError as error:
            raise InputError(option, error.value, error.problem, error.remedy) from None


def checked_options(
    settings: Settings,
    ports: Ports,
    *,
    backend: Sequence[str],
    source: Source | None,
    backend_ca: Path | None,
    policy: str,
    shadow: str | None,
    record: Path | None,
    share: StoreAddress | None,
    is_quiet: bool,
) -> Options:
    """Put together what a router or a picker runs with. Raises InputError, by the option that is wrong."""
    from pointsman.router.http.tls import server_side_tls
    from pointsman.router.keys import BACKEND_KEY
    from pointsman.router.main import Options

    check_ports(ports.by_option)
    check_servers(backend)
    check_policies(policy, shadow)
    if backend_ca is not None:
        server_side_tls(backend_ca)
    if not backend and source is None:
        raise InputError(
            "--backend", None, "no server is named", "give --backend, --backends, --dns or --kubernetes"
        )
    return Options(
        backends=backend,
        source=source,
        policy=policy,
        shadow=shadow,
        ports=ports,
        backend_key=os.environ.get(BACKEND_KEY),
        backend_ca=backend_ca,
        record=record,
        logs_requests=not is_quiet,
        settings=settings,
        share=share,
    )


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
