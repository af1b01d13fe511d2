"""What a run was judged on, in a line for people: the cluster, its traffic, and how much of it that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pointsman.config import Config
from pointsman.experiments.capacity import capacity_rps, rate_text
from pointsman.experiments.simulate import Prepared
from pointsman.simulator.spec import ClusterSpec, ReplicaGroup
from pointsman.workload.spec import ClosedArrivals


@dataclass(frozen=True)
class Setting:
    cluster: str
    num_requests: int
    rate_rps: float | None  # of arrivals; None where they wait for answers
    capacity_rps: float  # with nothing cached
    is_shared: bool = False  # prompts have prefixes in common, so that it may well serve more

    @property
    def load(self) -> float | None:
        """The rate of arrivals as a share of what the cluster can serve."""
        return self.rate_rps / self.capacity_rps if self.rate_rps and self.capacity_rps > 0 else None

    @property
    def text(self) -> str:
        """A clause: `at 0.85 of what … can serve`."""
        if self.load is None or self.rate_rps is None:
            return f"on {self.cluster}"
        cached = " with nothing cached" if self.is_shared else ""
        return (
            f"at {self.load:.2g} of what {self.cluster} can serve{cached} "
            f"({rate_text(self.rate_rps)} of {rate_text(self.capacity_rps)} requests/s)"
        )


def setting_of(
    first: Prepared, configs: Sequence[Config], gaps_s: Sequence[float], base_dir: Path | None
) -> Setting:
    """Describes the first run. `configs` are those of all, whose clusters may differ, and `gaps_s` the mean
    gaps between arrivals in each: a block of a trace may well be busier than the whole.
    """
    cluster = cluster_text(first.config.cluster)
    if any(config.cluster.groups != first.config.cluster.groups for config in configs):
        cluster = f"clusters such as {cluster}"
    gap_s = sum(gaps_s) / len(gaps_s)
    is_open = gap_s > 0 and not isinstance(first.config.workload.arrivals, ClosedArrivals)
    return Setting(
        cluster,
        len(first.workload),
        1 / gap_s if is_open else None,
        capacity_rps(first.config.workload, first.plans, base_dir),
        first.workload.is_shared,
    )


def cluster_text(cluster: ClusterSpec) -> str:
    """`2 × H100 and 2 × L40S with Llama-3.1-8B`"""
    counts: dict[str, int] = {}
    models: dict[str, None] = {}
    for group in cluster.groups:
        kind = kind_text(cluster, group)
        counts[kind] = counts.get(kind, 0) + group.count
        models[group.model or cluster.model] = None
    *first, last = [f"{count} × {kind}" for kind, count in counts.items()]
    return f"{', '.join(first)}{' and ' if first else ''}{last} with {', '.join(models)}"


def kind_names(cluster: ClusterSpec) -> list[str]:
    """What the servers of each group are called; groups of the same kind are numbered."""
    names: list[str] = []
    for group in cluster.groups:
        name, number = kind_text(cluster, group), 2
        while name in names:
            name, number = f"{kind_text(cluster, group)} ({number})", number + 1
        names.append(name)
    return names


def kind_text(cluster: ClusterSpec, group: ReplicaGroup) -> str:
    """What its servers are called: `H100`, `(4 H100)` for one on several, or the file that describes it."""
    if group.description is not None:
        return group.description.stem
    num_devices = group.tensor_parallel or cluster.tensor_parallel
    name = group.device or cluster.device
    return name if num_devices == 1 else f"({num_devices} {name})"
