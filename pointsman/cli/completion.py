"""What a shell completes: the names that an argument or an option may be. Imports wait until somebody asks.

Paths are left to the shell, which offers them wherever none of our names fits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args


def scenario_names(incomplete: str) -> list[str]:
    from pointsman.experiments.scenarios import SATURATED, SCENARIOS, UNSEEN

    return _beginning(incomplete, (*SCENARIOS, *SATURATED, *UNSEEN))


def suite_names(incomplete: str) -> list[str]:
    from pointsman.experiments.scenarios import SUITES

    return _beginning(incomplete, SUITES)


def objective_names(incomplete: str) -> list[str]:
    from pointsman.experiments.objective import OBJECTIVES

    return _beginning(incomplete, OBJECTIVES)


def policy_names(incomplete: str) -> list[str]:
    """One policy, or the last of several with commas between them."""
    from pointsman.routing.heuristics import HEURISTICS
    from pointsman.routing.sources import SHIPPED

    return _last_of_several(incomplete, (*HEURISTICS, *SHIPPED))


def trained_names(incomplete: str) -> list[str]:
    from pointsman.routing.sources import SHIPPED

    return _beginning(incomplete, SHIPPED)


def tunable_names(incomplete: str) -> list[str]:
    from pointsman.evaluation.tune import tunable_kinds

    return _beginning(incomplete, tunable_kinds())


def preset_names(incomplete: str) -> list[str]:
    from pointsman.training.config import preset_names

    return _beginning(incomplete, preset_names())


def problem_names(incomplete: str) -> list[str]:
    from pointsman.evaluation.problem import problem_names

    return _beginning(incomplete, problem_names())


def feature_names(incomplete: str) -> list[str]:
    from pointsman.routing.features import CONTEXT_FEATURES, ENTITY_FEATURES

    return _beginning(incomplete, (one.name for one in (*ENTITY_FEATURES, *CONTEXT_FEATURES)))


def model_names(incomplete: str) -> list[str]:
    from pointsman.simulator.hardware import load_catalogue

    return _beginning(incomplete, load_catalogue().models)


def device_names(incomplete: str) -> list[str]:
    """One device, or the last of several with commas between them."""
    from pointsman.simulator.hardware import load_catalogue

    return _last_of_several(incomplete, load_catalogue().devices)


def length_names(incomplete: str) -> list[str]:
    from pointsman.workload.spec import NamedDistribution

    return _beginning(incomplete, get_args(NamedDistribution))


def config_keys(incomplete: str) -> list[str]:
    """One level of sections at a time, as a shell completes folders: there are hundreds of keys."""
    from pointsman.cli.keys import FILES, keys_of

    level = incomplete.count(".")
    keys = (one.key for file in FILES for one in keys_of(file) if one.key.count(".") == level)
    return list(dict.fromkeys(_beginning(incomplete, keys)))


def config_files(incomplete: str) -> list[str]:
    from pointsman.cli.keys import FILES

    return _beginning(incomplete, FILES)


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _last_of_several(incomplete: str, names: Iterable[str]) -> list[str]:
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _beginning(last, names)]
