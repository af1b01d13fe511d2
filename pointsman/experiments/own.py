"""Traffic of one's own: what of it is trained on, what selects, and what is kept for the report.

A configuration file may replay a trace or a recording. Its first part is for training, the next chooses the
checkpoint, the last is kept for the report (`PARTS`). Each of the latter is served in one run: runs of short
blocks would begin with an empty cluster, and look less loaded than they are. A replay is chaotic, and two
neighbours in other places may change a mean by percents; so a part is replayed several times, with
neighbours in other places. Blocks of the part for the report stand for the seeds that a trace does not have.
An episode of training is a window of the first part at a slightly other speed, its requests in a slightly
other order, so that a recording of an hour is enough and is not learned by heart. Made-up traffic has seeds
instead: three kinds that never mix (scenarios.py).

The events of a file come at the same share of an episode or a block as of the whole run.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pointsman.config import Config
from pointsman.errors import InputError, PointsmanWarning
from pointsman.experiments.scenarios import SELECTION_SEEDS, Scenario, expected_window_s, scenario_of_file
from pointsman.experiments.simulate import Prepared, prepare
from pointsman.files import digest_of
from pointsman.simulator.plan import ReplicaPlan
from pointsman.workload import Workload
from pointsman.workload.build import DEFAULT_NUM_REQUESTS
from pointsman.workload.replay import part_of, take
from pointsman.workload.spec import (
    ClosedArrivals,
    DiurnalArrivals,
    RampArrivals,
    Rated,
    TraceArrivals,
    TraceReplay,
)

Part = tuple[float, float]

TRAINING, SELECTION, REPORT = "training", "selection", "report"
PARTS: dict[str, Part] = {TRAINING: (0.0, 0.6), SELECTION: (0.6, 0.8), REPORT: (0.8, 1.0)}
BEFORE_REPORT: Part = (PARTS[TRAINING][0], PARTS[SELECTION][1])  # of use to who has not trained yet

SHUFFLED_REQUESTS = 32  # neighbours whose places are drawn anew: the mix of a minute stays in its minute
MIN_REQUESTS = 30  # of a trace: each part has as many as it may have blocks
MIN_BLOCKS = 6  # the fewest that make an interval
BLOCK_REQUESTS = 500  # at least, if that leaves MIN_BLOCKS
MAX_SELECTION_REQUESTS = 8_000  # of a run: an evaluation in training must not take long
MAX_REPLAYS = 8  # of what is judged on
REPLAYED_REQUESTS = 100_000  # in all replays together, unless one alone has more


def replayed(config: Config) -> TraceReplay | None:
    """The trace whose times are replayed, if there is one."""
    workload = config.workload
    return workload.arrivals if isinstance(workload.arrivals, TraceArrivals) else workload.trace


def trace_digest(scenario: Scenario, overrides: Sequence[str] = ()) -> str | None:
    """What the trace that is cut into parts is known by, whatever file names it; None without one.

    A scenario of ours that has a trace tells its parts apart by seeds.
    """
    trace = replayed(scenario.config(0, overrides))
    if trace is None:
        return None
    from pointsman.workload.readers import trace_path  # loads polars

    if scenario.path is None:
        ours = replayed(replace(scenario, changes=()).config(0))
        if ours is not None and ours.path == trace.path:
            return None
    return digest_of(trace_path(trace, scenario.folder))


def with_part(config: Config, part: Part) -> Config:
    """Replaying one part of its trace, once."""
    trace = replayed(config)
    assert trace is not None
    first, last = trace.part
    share = last - first
    changed = trace.model_copy(
        update={"part": (first + part[0] * share, min(first + part[1] * share, 1.0)), "repeat": 1}
    )
    key = "arrivals" if isinstance(trace, TraceArrivals) else "trace"
    workload = config.workload.model_copy(update={key: changed})
    return config.model_copy(update={"workload": workload})


# Selection and report ---------------------------------------------------------------------------------------


def report_configs(scenario: Scenario, seeds: Sequence[int], overrides: Sequence[str] = ()) -> list[Config]:
    """What is kept for the report: seeds that nobody has seen; of a trace the last part, the same for each.

    Whoever compares serves it once, and cuts what comes out into blocks.
    """
    configs = [scenario.config(seed, overrides) for seed in seeds]
    if replayed(configs[0]) is None:
        return configs
    _enough(configs[0], scenario.folder)
    return [_part_of_run(config, PARTS[REPORT]) for config in configs]


def _selection_configs(
    scenario: Scenario, seeds: Sequence[int], overrides: Sequence[str], part: Part
) -> list[Config]:
    """What chooses: seeds; of a trace a part, in blocks as long as the one for selection at most."""
    configs = [scenario.config(seed, overrides) for seed in seeds]
    if replayed(configs[0]) is None:
        return configs
    first, last = part
    count = _enough(configs[0], scenario.folder)
    block = min(PARTS[SELECTION][1] - PARTS[SELECTION][0], MAX_SELECTION_REQUESTS / count)
    num_blocks = min(len(seeds), math.ceil((last - first) / block - 1e-9))
    bounds = np.linspace(first, last, num_blocks + 1).tolist()
    return [
        _part_of_run(config, (begin, end))
        for config, begin, end in zip(configs, bounds[:-1], bounds[1:], strict=False)
    ]


def _part_of_run(config: Config, part: Part) -> Config:
    return _with_events_at(with_part(config, part), part[1] - part[0])


def num_blocks_of(num_requests: int, most: int) -> int:
    """In how many blocks so many requests of a trace are judged: long ones, but enough for an interval."""
    return min(most, max(min(MIN_BLOCKS, num_requests), num_requests // BLOCK_REQUESTS))


def num_replays_of(num_requests: int) -> int:
    """How often so many requests of a trace are replayed to judge on."""
    return max(1, min(MAX_REPLAYS, REPLAYED_REQUESTS // num_requests))


def reordered(one: Prepared, number: int) -> Prepared:
    """The same arrival times; what arrives changes place with its neighbours, in another way for each
    number. 0 is the order of the trace.
    """
    if number == 0:
        return one
    places = shuffled_places(len(one.workload), np.random.default_rng([number, 0x0DE5]))
    workload = replace(take(one.workload, places), arrived_at=one.workload.arrived_at)
    return replace(one, workload=workload)


def selection_episodes(
    scenario: Scenario, num_seeds: int, overrides: Sequence[str] = (), part: Part = PARTS[SELECTION]
) -> list[Prepared]:
    """What a policy in training is judged by: a run for each seed, or replays of a trace's part."""
    configs = _selection_configs(scenario, SELECTION_SEEDS[:num_seeds], overrides, part)
    if replayed(configs[0]) is None:
        if scenario.path is not None:
            configs = [_shortened(config, MAX_SELECTION_REQUESTS) for config in configs]
        return [quietly_prepared(config, scenario.folder) for config in configs]
    blocks = [quietly_prepared(config, scenario.folder) for config in configs]
    blocks = [replace(one, workload=take(one.workload, slice(MAX_SELECTION_REQUESTS))) for one in blocks]
    return [reordered(blocks[k % len(blocks)], k // len(blocks)) for k in range(num_seeds)]


def kept_text(scenario: Scenario, config: Config) -> str:
    """What a configuration of `report_configs` is."""
    trace = replayed(config)
    if trace is None:
        return scenario.what
    first, end = (f"{100 * share:.3g}" for share in _share_of_file(config, trace, scenario.folder))
    return f"{scenario.what}: {first} to {end} % of {trace.path}, kept for the report"


def parts_text(scenario: Scenario, overrides: Sequence[str] = ()) -> str:
    """Which traffic is used for what, for people to read."""
    config = scenario.config(0, overrides)
    trace = replayed(config)
    if trace is None:
        return "made-up traffic, so training, selection and report have different seeds"
    return f"{Path(trace.path).name}: " + ", ".join(
        f"{part} by requests {first:,} to {last:,}"
        for part, (first, last) in _requests_of_parts(config, scenario.folder).items()
    )


def part_text(scenario: Scenario, part: str, overrides: Sequence[str] = ()) -> str | None:
    """`requests 541 to 720 of my-traffic.csv`; None for made-up traffic, which has seeds instead."""
    config = scenario.config(0, overrides)
    trace = replayed(config)
    if trace is None:
        return None
    first, last = _requests_of_parts(config, scenario.folder)[part]
    return f"requests {first:,} to {last:,} of {Path(trace.path).name}"


def _requests_of_parts(config: Config, folder: Path | None) -> dict[str, tuple[int, int]]:
    """The first and the last request of each part of its trace, counted from 1 on in its file."""
    whole = with_part(config, (0.0, 1.0))
    trace = replayed(whole)
    assert trace is not None
    count = _enough(config, folder)
    before = 0 if _is_whole(config, trace) else _rows_before(whole, trace, count, folder)[0]
    return {
        part: (before + round(first * count) + 1, before + round(last * count))
        for part, (first, last) in PARTS.items()
    }


def _share_of_file(config: Config, trace: TraceReplay, folder: Path | None) -> Part:
    """From where to where in its file a part of a trace is, of which not all may be replayed."""
    if trace.begin == 0.0 and config.workload.requests is None and config.workload.duration_s is None:
        return trace.part
    count = len(quietly_prepared(config, folder).workload)
    before, num_rows = _rows_before(config, trace, count, folder)
    return before / num_rows, (before + count) / num_rows


def _is_whole(config: Config, trace: TraceReplay) -> bool:
    """Whether what is replayed begins where its file does."""
    return trace.begin == 0.0 and trace.part[0] == 0.0


def _rows_before(
    config: Config, trace: TraceReplay, num_requests: int, folder: Path | None
) -> tuple[int, int]:
    """How many requests of the file come before the `num_requests` of a part, and how many it has."""
    from pointsman.workload.readers import read_trace  # loads polars

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PointsmanWarning)
        num_rows = len(read_trace(trace, folder, lifts_zeros=config.workload.max_tokens is not None))
    begin, (first, last) = round(trace.begin * num_rows), trace.part
    replayed_rows = min(num_rows - begin, config.workload.requests or num_rows)
    if config.workload.duration_s is not None:
        replayed_rows = round(num_requests / (last - first))
    return begin + round(first * replayed_rows), num_rows


def _enough(config: Config, folder: Path | None) -> int:
    """How many requests the trace has that is cut into parts."""
    count = len(_whole(config, folder).workload)
    trace = replayed(config)
    if trace is not None and count < MIN_REQUESTS:
        requests = "1 request is" if count == 1 else f"{count} requests are"
        problem = f"{requests} too few to train, to select and to judge on"
        raise InputError("workload.trace", trace.path, problem, f"give at least {MIN_REQUESTS}")
    return count


# Training ---------------------------------------------------------------------------------------------------


class Own(NamedTuple):
    """A file that is trained on, read once."""

    config: Config
    plans: list[ReplicaPlan]
    workload: Workload | None  # of a trace: all that may be trained on
    window_s: float  # of the whole run, from the first arrival to the last


@cache
def _own(path: Path, overrides: tuple[str, ...]) -> Own:
    scenario = scenario_of_file(path)
    config = scenario.config(0, overrides)
    if isinstance(config.workload.arrivals, ClosedArrivals):
        problem = "its arrivals depend on the policy, so that no two policies can be compared on them"
        remedy = "use poisson arrivals at the rate that the users reach"
        raise InputError("workload.arrivals.kind", "closed", problem, remedy)
    if replayed(config) is None:
        one = quietly_prepared(_shortened(config, 1), scenario.folder)
        return Own(config, one.plans, None, expected_window_s(_with_length(config), scenario.folder))
    _enough(config, scenario.folder)
    one = _whole(config, scenario.folder)
    workload = part_of(one.workload, *PARTS[TRAINING])
    return Own(config, one.plans, workload, float(one.workload.arrived_at[-1]))


def training_episode(
    path: Path,
    num_requests: int,
    load: float,
    seed: int,
    rng: np.random.Generator,
    overrides: Sequence[str] = (),
) -> Prepared:
    """`num_requests` of a file's own traffic, at `load` times its rate."""
    own = _own(path, tuple(overrides))
    if own.workload is None:
        return _synthetic(own, path.parent, num_requests, load, seed, rng)
    workload = window(own.workload, num_requests, load, rng)
    config = _with_events_at(own.config, float(workload.arrived_at[-1]) / max(own.window_s, 1e-9))
    return Prepared(config.model_copy(update={"seed": seed}), own.plans, workload)


def refuse_trace_of_nobody(scenario: Scenario, overrides: Sequence[str] = ()) -> None:
    """The trace of a file is cut into parts to train, to select and to judge on; others are not."""
    trace = replayed(scenario.config(0, overrides))
    if (
        scenario.path is None
        and trace is not None
        and replayed(replace(scenario, changes=()).config(0)) is None
    ):
        problem = f"{scenario.name} has no trace, and this one would be trained and judged on as a whole"
        raise InputError("--set workload", trace.path, problem, "name it in a file: `workload: {trace: …}`")


def trained_on(scenario: Scenario, overrides: Sequence[str] = ()) -> int:
    """How many requests of a file's trace there are to train on."""
    assert scenario.path is not None
    workload = _own(scenario.path, tuple(overrides)).workload
    assert workload is not None
    return len(workload)


def window(trace: Workload, num_requests: int, load: float, rng: np.random.Generator) -> Workload:
    """Requests from a random place of the trace on, and from its beginning again where it ends.

    Gaps between arrivals stay in their order, as bursts are in them; what arrives changes place with its
    neighbours.
    """
    count = len(trace)
    first = int(rng.integers(count))
    rows = (first + np.arange(num_requests)) % count
    gaps_s = np.diff(trace.arrived_at, prepend=0.0)
    gaps_s[0] = float(trace.arrived_at[-1]) / max(count - 1, 1)  # from the last to the first again
    arrived_at = np.cumsum(gaps_s[rows]) / load
    what = rows[shuffled_places(num_requests, rng)]
    return replace(take(trace, what), arrived_at=arrived_at - arrived_at[0], reading=None)


def shuffled_places(count: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """[count] every place once, none far from where it was."""
    moved = np.arange(count) + rng.uniform(0.0, SHUFFLED_REQUESTS, count)
    return np.argsort(moved, kind="stable")


def _synthetic(
    own: Own, folder: Path, num_requests: int, load: float, seed: int, rng: np.random.Generator
) -> Prepared:
    """Made-up traffic; from anywhere in it where its rate changes with time."""
    arrivals = own.config.workload.arrivals
    assert isinstance(arrivals, Rated)
    faster = {
        name: value * load for name in ("load", "rate") if (value := getattr(arrivals, name)) is not None
    }
    changed = arrivals.model_copy(update=faster)
    workload = own.config.workload.model_copy(update={"arrivals": changed})
    config = own.config.model_copy(update={"workload": workload, "seed": seed})
    exact = _shortened(config, num_requests, exactly=True)
    changes_with_time = isinstance(arrivals, DiurnalArrivals | RampArrivals)
    whole = quietly_prepared(config if changes_with_time else exact, folder)
    if len(whole.workload) < num_requests:
        whole = quietly_prepared(exact, folder)
    first = int(rng.integers(len(whole.workload) - num_requests + 1))
    part = take(whole.workload, slice(first, first + num_requests))
    part = replace(part, arrived_at=part.arrived_at - part.arrived_at[0])
    return Prepared(_with_events_at(config, float(part.arrived_at[-1]) / own.window_s), own.plans, part)


# Helpers ----------------------------------------------------------------------------------------------------


def _whole(config: Config, folder: Path | None) -> Prepared:
    """All of its trace, once; what is odd about it is said only here."""
    return prepare(with_part(config, (0.0, 1.0)), folder)


def _with_length(config: Config) -> Config:
    """Spell out the number of requests, unless there is a duration."""
    workload = config.workload
    return config if workload.duration_s is not None else _shortened(config, DEFAULT_NUM_REQUESTS)


def _shortened(config: Config, num_requests: int, exactly: bool = False) -> Config:
    """Made-up traffic of at most, or exactly, so many requests."""
    given = config.workload.requests
    count = num_requests if exactly or given is None else min(given, num_requests)
    workload = config.workload.model_copy(update={"requests": count, "duration_s": None})
    return config.model_copy(update={"workload": workload})


def _with_events_at(config: Config, share: float) -> Config:
    """Event times shrunk with the run."""
    if not config.cluster.events or not math.isfinite(share):
        return config
    events = tuple(event.model_copy(update={"at_s": event.at_s * share}) for event in config.cluster.events)
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"events": events})})


def quietly_prepared(config: Config, folder: Path | None) -> Prepared:
    """Prepare without the warnings that `_whole` or the first look has given already."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PointsmanWarning)
        return prepare(config, folder)
