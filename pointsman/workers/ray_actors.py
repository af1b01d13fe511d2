"""Workers as actors of a Ray cluster.

Ray finds a place for them, starts them and ends them. What they say goes over TCP straight to the process
that they work for, not through Ray's object store: a gradient step has a message each way, and Ray takes a
millisecond for a call.

Every node needs the same version of pointsman, and what configurations name by path.
"""

from __future__ import annotations

import os
import socket
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from pointsman.errors import InputError
from pointsman.workers.peers import LinkedProcess, LostWorkerError, WorkerError
from pointsman.workers.processes import serve

AUTO = "auto"  # the address of the cluster on this machine; if there is none, one is started
START_S = 120.0  # for a place in the cluster to become free
# A machine that vanishes closes no connection: it is asked after 10 s of silence, and given up after 25.
SILENCE_S, ASK_EVERY_S, NUM_ASKED = 10, 5, 3


class RayActors:
    """The `Launcher` of a Ray cluster: a core for each worker, spread over the nodes."""

    def __init__(self, address: str) -> None:
        if address.startswith("ray://"):
            remedy = "run on a node of the cluster, for example by `ray job submit`"
            raise InputError("--ray", address, "workers cannot connect to a Ray client", remedy)
        if ray.is_initialized():
            return
        try:
            ray.init(
                None if address == AUTO else address,
                include_dashboard=False if address == AUTO and "RAY_ADDRESS" not in os.environ else None,
                logging_level="ERROR",
                log_to_driver=False,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            remedy = "start one by `ray start --head`, or leave the address out"
            raise InputError("--ray", address, f"no Ray cluster answers ({error})", remedy) from None

    def num_free_cores(self) -> int:
        return max(1, int(ray.available_resources().get("CPU", 0)))

    def launch(self, count: int) -> list[RayWorker]:
        remote = ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(_Actor)
        key = os.urandom(32)
        actors = [remote.remote(key) for _ in range(count)]
        try:
            addresses = ray.get([actor.listen.remote() for actor in actors], timeout=START_S)
            return [
                RayWorker(actor, number, address, key)
                for number, (actor, address) in enumerate(zip(actors, addresses, strict=True), start=1)
            ]
        except GetTimeoutError:
            free = ray.available_resources().get("CPU", 0.0)
            problem = f"Ray found no place for {count} workers in {START_S:g} s"
            raise WorkerError(f"{problem}: {free:g} of its cores are free; add nodes") from None
        except (RayError, OSError, EOFError) as error:
            raise LostWorkerError(f"a worker ended before it was ready: {error}") from None


class RayWorker:
    def __init__(self, actor: Any, number: int, address: tuple[str, int], key: bytes) -> None:
        self._actor = actor
        serving = actor.serve.remote()

        def is_alive() -> bool:
            ended, _ = ray.wait([serving], timeout=0)
            return not ended

        with Client(address, authkey=key) as link:
            self.peer = LinkedProcess(_watched(link), f"worker {number}", is_alive)

    def end(self) -> None:
        ray.kill(self._actor)
        self.peer.link.close()


class _Actor:
    def __init__(self, key: bytes) -> None:
        self._key = key

    def listen(self) -> tuple[str, int]:
        self._listener = Listener((ray.util.get_node_ip_address(), 0), authkey=self._key)
        address: tuple[str, int] = self._listener.address
        return address

    def serve(self) -> None:
        with self._listener.accept() as link:
            watched = _watched(link)
        serve(watched)


def _watched(link: Connection) -> socket.socket:
    """Its socket: small messages leave at once, and the end of the other machine is noticed."""
    watched = socket.socket(fileno=os.dup(link.fileno()))
    watched.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    watched.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    watched.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S)
    watched.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_EVERY_S)
    watched.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_ASKED)
    return watched
