"""From options to a running router, until a signal ends it."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from pointsman.errors import InputError
from pointsman.router.admin import Admin
from pointsman.router.config import Backend, Settings
from pointsman.router.contract import Decider, DeciderSource, Ledger
from pointsman.router.discovery import Discovery, Source
from pointsman.router.downstream import ClientConnection
from pointsman.router.keys import read_keys
from pointsman.router.recording import Recorder
from pointsman.router.server import Parts, Router, port_of

_GC_THRESHOLD = 50_000


@dataclass(frozen=True)
class Options:
    backends: Sequence[str]
    source: Source | None
    policy: str
    shadow: str | None
    host: str
    port: int
    admin_host: str
    admin_port: int
    api_keys: Path | None
    backend_key: str | None
    record: Path | None
    logs_requests: bool
    settings: Settings


def live_books(settings: Settings) -> tuple[Ledger, DeciderSource]:
    """The signal table of this process, and policies at work on it."""
    from pointsman.router import decide, ledger

    books = ledger.Ledger()

    def decider(policy: str) -> Decider:
        return decide.Decider(books, policy, max_hold_s=settings.holding.max_hold_s)

    return books, decider


async def serve_forever(options: Options, say: Callable[[str], None], log_to: TextIO) -> None:
    """Until SIGTERM or SIGINT; then what has begun is finished. A second signal ends it at once."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    settings = options.settings
    books, deciders = live_books(settings)
    recorder = Recorder(options.record) if options.record is not None else None
    keys = read_keys(options.api_keys)
    parts = Parts(
        ledger=books,
        deciders=deciders,
        log_to=log_to,
        policy=options.policy,
        shadow=options.shadow,
        keys=keys,
        recorder=recorder,
        backend_key=options.backend_key,
        logs_requests=options.logs_requests,
    )
    router = Router(parts, settings, [Backend(url=url) for url in options.backends])
    discovery = None
    if options.source is not None:
        discovery = Discovery(options.source, router.registry, router.log, settings.discovery_interval_s)
        await discovery.look()
    admin = Admin(router.registry, router.chooser, keys)
    try:
        admin_server = await loop.create_server(
            lambda: ClientConnection(admin, settings.limits), options.admin_host, options.admin_port
        )
        port = await router.start(options.host, options.port)
    except OSError as error:
        remedy = "name another address with --host and --port, --admin-host and --admin-port"
        raise InputError("--port", options.port, f"cannot listen ({error.strerror})", remedy) from None
    # What is there now stays; what a request leaves behind is freed by counting references.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    looking = loop.create_task(discovery.run()) if discovery is not None else None
    about = f"policy {options.policy}, {len(router.registry)} servers"
    say(f"listening on http://{options.host}:{port}/v1, {about}")
    say(f"admin on http://{options.admin_host}:{port_of(admin_server)}/admin/replicas")
    await stopped.wait()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
    if looking is not None:
        looking.cancel()
    admin_server.close()
    for client in list(admin.clients):
        client.close()
    await router.stop()
    if recorder is not None:
        recorder.close()
