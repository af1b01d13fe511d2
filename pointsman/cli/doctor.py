"""`pointsman doctor`: what is wrong with a deployment, and what to do about it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pointsman.cli.console import print_json, stdout
from pointsman.cli.lists import plain_table
from pointsman.cli.options import AsJson, policies_option
from pointsman.cli.serving_options import BackendCa, BackendUrls, KubernetesService, server_source
from pointsman.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pointsman.live.doctor import Checkup
    from pointsman.router.config import Backend

_LOOKS = {"ok": "[green]ok[/green]", "warning": "[yellow]look[/yellow]", "problem": "[red]fix[/red]"}


def doctor(
    backend: BackendUrls = None,
    backends: Annotated[
        Path | None, typer.Option("--backends", metavar="FILE.yaml", help="Servers in a file.")
    ] = None,
    dns: Annotated[
        str | None, typer.Option("--dns", metavar="URL", help="All addresses of the host are servers.")
    ] = None,
    kubernetes: KubernetesService = None,
    router: Annotated[
        str | None, typer.Option("--router", metavar="URL", help="A router that runs already.")
    ] = None,
    policy: Annotated[
        str,
        policies_option("--policy", "POLICY", "The policy that `serve` will use."),
    ] = "default",
    backend_ca: BackendCa = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.1, help="How long to wait for each answer.")
    ] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Check a deployment: this machine, every server, and the router if it runs; say what to fix.

    Servers are named as for `serve`, and $POINTSMAN_BACKEND_KEY is the key that they want. The exit status is
    1 if something must be fixed, and 0 if there are only things worth a look.

    Example: pointsman doctor --backend http://a:8000 --backend http://b:8000 --router http://localhost:8080
    """
    from pointsman.live.doctor import as_rows, examine
    from pointsman.router.http.address import parse_url
    from pointsman.router.http.tls import server_side_tls

    servers = _servers(backend or [], backends, dns, kubernetes)
    if router is not None:
        parse_url(router, "--router")
    if backend_ca is not None:
        server_side_tls(backend_ca)
    findings = examine(servers, policy, router, backend_ca, timeout)
    if as_json:
        print_json(as_rows(findings))
    else:
        _print(findings)
    raise typer.Exit(any(finding.level == "problem" for finding in findings))


def _servers(
    named: Sequence[str], file: Path | None, dns: str | None, kubernetes: str | None
) -> list[Backend]:
    from pointsman.router.config import Backend
    from pointsman.router.http.address import parse_url
    from pointsman.router.replicas.discovery import SourceError

    for url in named:
        parse_url(url)
    found = [Backend(url=url) for url in named]
    source = server_source(file, dns, kubernetes)
    if source is not None:
        try:
            found += asyncio.run(source.backends())
        except SourceError as error:
            option = "--kubernetes" if kubernetes else "--dns"
            remedy = "correct the name, or the rights of the service account"
            raise InputError(option, kubernetes or dns, str(error), remedy) from None
    return found


def _print(findings: Sequence[Checkup]) -> None:
    table = plain_table("", "where", "check", "found")
    for finding in findings:
        what = f"{finding.what}; [bold]{finding.remedy}[/bold]" if finding.remedy else finding.what
        table.add_row(_LOOKS[finding.level], finding.subject, finding.check, what)
    console = stdout()
    console.print(table, "")
    problems = sum(finding.level == "problem" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    console.print(f"{problems} to fix, {warnings} worth a look, {len(findings)} checks.")
