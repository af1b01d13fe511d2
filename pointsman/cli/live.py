"""`--live`: the same comparison measured on real servers, the same training done on them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pointsman.cli.console import progress, say
from pointsman.cli.options import Situation
from pointsman.errors import InputError

if TYPE_CHECKING:
    from pointsman.evaluation.compare import Comparison
    from pointsman.experiments.objective import Objective
    from pointsman.live.processes import RouterProcess

LIVE_AGAINST = "least-outstanding"
LIVE_SEEDS = 6  # the fewest that make an interval


def refuse_with_live(scenarios: Sequence[str], suite: str | None, threads: int, ray: str | None) -> None:
    if suite is not None:
        raise InputError("--suite", suite, "given beside --live", "name one --scenario")
    if len(scenarios) > 1 or "all" in scenarios:
        raise InputError("--scenario", scenarios[-1], "given beside --live", "name one scenario at a time")
    for option, value in {"--threads": threads, "--ray": ray}.items():
        if value:
            raise InputError(option, value, "given beside --live", "leave it out: nothing is simulated")


def live_options(
    urls: Sequence[str], others: Mapping[str, object], scenarios: Sequence[str], start_from: str | None
) -> list[str]:
    """What `train --live` changes in its configuration; `others` are options that make no sense beside it."""
    from pointsman.experiments.scenarios import is_file

    for option, value in others.items():
        if value is not None:
            raise InputError(option, str(value), "given beside --live", "leave it out")
    options = [f"env.servers={json.dumps(urls)}"]
    if len(scenarios) > 1:
        raise InputError("--scenario", scenarios[1], "given beside --live", "name one scenario at a time")
    for name in scenarios:
        options.append(f"env.config={Path(name).resolve()}" if is_file(name) else f"env.scenario={name}")
    if start_from is not None:
        options.append(f"env.start={start_from}")
    return options


def measure(
    situation: Situation,
    policies: Sequence[str],
    baseline: str,
    urls: Sequence[str],
    objective: Objective | None,
) -> Comparison:
    """Serve the situation's arrivals on these servers, by each policy, with progress."""
    from pointsman.live.comparison import compare_live, plan_live
    from pointsman.live.processes import run_to_end

    async def planned_and_served() -> Comparison:
        plan = await plan_live(situation.name, situation.configs, policies, baseline, urls, situation.folder)
        about = f"{plan.num_requests:,} requests in at least {duration(plan.duration_s)}"
        say(f"{about}; --set workload.requests=N and --seeds N make it shorter")
        with progress("serving", 1.0) as advance:
            return await compare_live(plan, objective, advance, say_addresses)

    return run_to_end(planned_and_served())


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"


def say_addresses(routers: Mapping[str, RouterProcess]) -> None:
    for policy, router in routers.items():
        say(f"{policy}: live page on {router.admin_url}/dashboard")
