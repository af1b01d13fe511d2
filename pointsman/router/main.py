"""From options to a running router, until a signal ends it."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from pointsman.plain import counted
from pointsman.router.config import Backend, Settings
from pointsman.router.epp.status import StatusOnly
from pointsman.router.http.address import server_url
from pointsman.router.http.listening import listen, port_of
from pointsman.router.http.tls import CERT
from pointsman.router.operations.admin import Admin
from pointsman.router.ports import Listening, Ports, cannot_listen
from pointsman.router.processes.linking import Follower, Leader
from pointsman.router.processes.workers import Seat
from pointsman.router.replicas.discovery import Discovery, Source
from pointsman.router.server import Parts, Router
from pointsman.router.store.address import StoreAddress
from pointsman.router.telemetry.metrics import Sharing
from pointsman.router.telemetry.recording import Recorder, new_recording
from pointsman.routing.books import Books
from pointsman.routing.decider import Decider, DeciderSource
from pointsman.routing.policy import PolicySpec, lacking
from pointsman.routing.sharing import SharedBooks
from pointsman.spec import parse_spec

if TYPE_CHECKING:
    from pointsman.router.epp.picker import Picker
    from pointsman.router.store.link import StoreLink

_GC_THRESHOLD = 50_000
_INFORMED_S = 5.0


@dataclass(frozen=True)
class Options:
    backends: Sequence[str]
    source: Source | None
    policy: str
    shadow: str | None
    ports: Ports
    backend_key: str | None
    backend_ca: Path | None
    record: Path | None
    logs_requests: bool
    settings: Settings
    share: StoreAddress | None = None


def live_books(
    settings: Settings, seat: Seat | None = None, is_shared: bool = False
) -> tuple[Books, DeciderSource]:
    """The signal table of this process, and policies at work on it. `is_shared`: with other routers."""
    prefix_bytes = settings.prefix_index_mib << 20
    if seat is not None:
        shared = seat.shared_books()
        books = Books(None, shared, seat.index, prefix_bytes, keeps_journal=is_shared)
    elif is_shared:
        ours_and_theirs = SharedBooks(None, 2)
        books = Books(shared=ours_and_theirs, prefix_bytes=prefix_bytes, keeps_journal=True)
    else:
        books = Books(prefix_bytes=prefix_bytes)

    def decider(policy: str) -> Decider:
        holding = settings.holding
        return Decider(books, policy, max_hold_s=holding.max_hold_s, overtake_s=holding.overtake_s)

    return books, decider


async def serve_forever(
    options: Options, say: Callable[[str], None], log_to: TextIO, seat: Seat | None = None
) -> None:
    """Until SIGTERM or SIGINT; then what has begun is finished. A second signal ends it at once.

    `seat`: this process is one of several.
    """
    settings = options.settings
    public, private, envoy = options.ports.check()
    leads = seat is None or seat.leads
    books, deciders = live_books(settings, seat, options.share is not None)
    recorder = _recorder(options, seat)
    parts = Parts(
        books=books,
        deciders=deciders,
        log_to=log_to,
        policy=options.policy,
        shadow=options.shadow,
        keys=public.keys,
        recorder=recorder,
        backend_key=options.backend_key,
        backend_ca=options.backend_ca,
        logs_requests=options.logs_requests,
    )
    router = Router(parts, settings, [Backend(url=url) for url in options.backends])
    # Not before: a router may have to be compiled first, and Ctrl-C ends that at once.
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    if leads:
        control: _Leading | _Following = _Leading(options, router, private, seat)
    else:
        assert seat is not None
        control = _Following(router, seat)
    link = store_link(options.share, router) if options.share is not None and leads else None
    with _can_listen("--admin-port", private):
        await control.start()
    with _can_listen("--port" if envoy is None else "--metrics-port", public):
        port = public.port if seat is None else seat.port
        service = StatusOnly(router.proxy) if envoy is not None else None
        port = await router.start(public.host, port, seat is not None, public.tls, service)
    picker: Picker | None = None
    if envoy is not None:
        from pointsman.router.epp.picker import Picker

        picker = Picker(router)
        with _can_listen("--port", envoy):
            picker_port = await picker.start(envoy.host, envoy.port, envoy.tls)
    if link is not None:
        link.start()
    # What is there now stays; what a request leaves behind is freed by counting references.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    if seat is not None:
        loop.add_reader(seat.parent, stopped.set)  # readable when the parent is gone
        seat.ready.touch()
    if control.admin_url is not None:
        about = f"policy {router.decisions.policy}, {counted(len(router.registry), 'server')}"
        if envoy is None:
            say(f"listening on {public.url(port)}/v1, {about}")
        else:
            say(f"picking on {envoy.host}:{picker_port}, {about}")
            say(f"metrics on {public.url(port)}/metrics")
        say(f"admin on {control.admin_url}/admin/replicas, live page on {control.admin_url}/dashboard")
        for warning in _warnings(options, router, private):
            say(f"warning: {warning}")
    await stopped.wait()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
    control.stop()
    if picker is not None:
        picker.stop()
    await router.stop()
    if picker is not None:
        await picker.close()
    if link is not None:
        await link.stop()
    if recorder is not None:
        recorder.close()


class _Leading:
    """Looks for replicas, takes commands, and tells other processes."""

    def __init__(self, options: Options, router: Router, listening: Listening, seat: Seat | None) -> None:
        self._options = options
        self._router = router
        self._listening = listening
        self._admin = Admin(router, listening.keys)
        source = options.source
        self._discovery: Discovery | None = None
        if source is not None:
            interval_s = options.settings.discovery_interval_s
            self._discovery = Discovery(source, router.registry, router.log, interval_s)
        self._leader: Leader | None = None
        if seat is not None:
            found = self._discovery.found if self._discovery is not None else tuple
            self._leader = Leader(router, seat.leader, seat.notes, found)
        self._looking: asyncio.Task[None] | None = None
        self.admin_url: str | None = None

    async def start(self) -> None:
        options, discovery = self._options, self._discovery
        found_before = self._leader.take_over() if self._leader is not None else []
        if discovery is not None:
            discovery.was_found(found_before)
            await discovery.look()
            self._looking = asyncio.get_running_loop().create_task(discovery.run())
        listening = self._listening
        self._server = await listen(
            self._admin, options.settings.limits, listening.host, listening.port, listening.tls
        )
        self.admin_url = self._listening.url(port_of(self._server))
        if self._leader is not None:
            await self._leader.start()

    def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        self._server.close()
        for client in list(self._admin.clients):
            client.close()
        if self._leader is not None:
            self._leader.close()


class _Following:
    """Does as the leading process says."""

    admin_url = None

    def __init__(self, router: Router, seat: Seat) -> None:
        self._follower = Follower(router, seat.leader, seat.index)
        self._notes = seat.notes

    async def start(self) -> None:
        self._running = asyncio.get_running_loop().create_task(self._follower.run())
        try:
            async with asyncio.timeout(_INFORMED_S):
                await self._follower.is_informed.wait()
        except TimeoutError:  # the leader may be down just now; it will tell later
            self._follower.go_by(self._notes)

    def stop(self) -> None:
        self._running.cancel()


def store_link(address: StoreAddress, router: Router) -> StoreLink:
    """What shares the books of this router with others."""
    from pointsman.router.store.link import StoreLink

    registry = router.registry
    state = router.metrics.sharing = Sharing()

    def share_a_line(model: str | None, other: str | None) -> bool:
        return registry.without(model) == registry.without(other)

    return StoreLink(address, router.books, router.dispatcher, share_a_line, state, router.log)


@contextmanager
def _can_listen(option: str, listening: Listening) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise cannot_listen(option, listening.host, listening.port, error) from None


def _warnings(options: Options, router: Router, admin: Listening) -> Iterator[str]:
    for url in options.backends:
        if server_url(url) != url.rstrip("/"):
            yield f"{url} is taken as {server_url(url)}: the paths of requests bring their own /v1"
    lacks = lacking(parse_spec(PolicySpec, {"kind": options.policy}, "--policy"))
    if lacks:
        yield f"policy {options.policy} is older than the features {', '.join(lacks)}: it does not see them"
    for name, problem in router.watch.problems.items():
        yield f"{name} {problem}"
    if not admin.is_local and admin.tls is None:
        yield f"admin keys travel unencrypted; {CERT} changes that"


def _recorder(options: Options, seat: Seat | None) -> Recorder | None:
    if seat is not None:
        return Recorder(seat.recording) if seat.recording is not None else None
    return Recorder(new_recording(options.record)) if options.record is not None else None
