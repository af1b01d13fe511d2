"""`pointsman capacity`: how many requests a second a cluster can serve."""

from __future__ import annotations

from typing import Any

from pointsman.cli.console import compilation_announced, print_json, stdout
from pointsman.cli.lists import plain_table
from pointsman.cli.options import AsJson, ConfigFile, Overrides, ScenarioName, base_dir, resolve


def capacity(
    config_file: ConfigFile = None,
    scenario: ScenarioName = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Find how many requests a second a cluster can sustain with its mix of lengths.

    One replica of each kind is kept saturated; the cluster's capacity is the sum over its replicas.

    Example: pointsman capacity --scenario mixed-hardware
    """
    from pointsman.experiments.capacity import replica_capacities
    from pointsman.simulator.plan import plan_replicas

    folder = base_dir(config_file, scenario)
    with compilation_announced():
        config = resolve(config_file, scenario, overrides or [])
        plans = plan_replicas(config.cluster, folder)
        rates = replica_capacities(config.workload, plans, folder)
    kinds: list[dict[str, Any]] = []
    first = 0
    for group in config.cluster.groups:
        plan = plans[first]
        kinds.append(
            {
                "replicas": group.count,
                "device": group.device or config.cluster.device,
                "model": group.model or config.cluster.model,
                "scheduler": plan.scheduler.kind,
                "kv_capacity_tokens": plan.kv_capacity_tokens,
                "requests_per_s": rates[first],
            }
        )
        first += group.count
    if as_json:
        print_json({"requests_per_s": sum(rates), "kinds": kinds})
        return
    columns = ("replicas", "KV tokens", "requests/s each", "requests/s")
    table = plain_table(
        "replicas",
        "device",
        "model",
        "scheduler",
        "KV tokens",
        "requests/s each",
        "requests/s",
        right=columns,
    )
    for kind in kinds:
        table.add_row(
            str(kind["replicas"]),
            kind["device"],
            kind["model"],
            kind["scheduler"],
            f"{kind['kv_capacity_tokens']:,}",
            f"{kind['requests_per_s']:.2f}",
            f"{kind['requests_per_s'] * kind['replicas']:.2f}",
        )
    console = stdout()
    console.print(table, "")
    console.print(f"The cluster can serve [bold]{sum(rates):.2f} requests/s[/bold].")
