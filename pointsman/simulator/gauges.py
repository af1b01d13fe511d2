"""The servers' own metrics: they move when a step ends, and reach the router by scrapes, late."""

from __future__ import annotations

from pointsman.compiled.jit import kernel
from pointsman.compiled.memory import float_table
from pointsman.routing.booking import book_scraped
from pointsman.simulator.state import replica_at


@kernel
def update_gauges(replica):
    """What the server's own metrics say from now on."""
    replica.gauge_running = replica.num_holding
    replica.gauge_waiting = replica.num_waiting
    replica.gauge_used_blocks = replica.used_blocks


@kernel
def read_gauges(sim):
    """A scrape starts; what it reads will reach the router later."""
    scraped = float_table(sim.scraped, 3, sim.router.num_replicas)
    for k in range(sim.router.num_replicas):
        replica = replica_at(sim.replicas, k)
        scraped[0, k] = replica.gauge_running
        scraped[1, k] = replica.gauge_waiting
        scraped[2, k] = replica.gauge_used_blocks / replica.num_blocks


@kernel
def show_scrape(sim, scraped_at):
    scraped = float_table(sim.scraped, 3, sim.router.num_replicas)
    for k in range(sim.router.num_replicas):
        book_scraped(sim.router, k, scraped[0, k], scraped[1, k], scraped[2, k], scraped_at)


@kernel
def show_oracle(sim):
    """Oracle mode: the router reads the servers' state of this very instant."""
    for k in range(sim.router.num_replicas):
        replica = replica_at(sim.replicas, k)
        kv_use = replica.used_blocks / replica.num_blocks
        book_scraped(sim.router, k, replica.num_holding, replica.num_waiting, kv_use, sim.now)
