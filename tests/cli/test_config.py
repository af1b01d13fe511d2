"""`pointsman config`: the keys of configuration files, explained from the source."""

from __future__ import annotations

import pytest

from pointsman.cli.keys import FILES, MEANINGS, keys_of

from .conftest import Cli
from .test_bad_input import check


@pytest.mark.parametrize("file", FILES)
def test_every_key_says_what_it_means(file: str) -> None:
    keys = list(keys_of(file))
    assert [one.key for one in keys if not one.meaning or not one.values] == []
    assert len(keys) > 20


def test_no_meaning_is_kept_for_a_key_that_is_gone() -> None:
    known = {one.key for file in FILES for one in keys_of(file)}
    names = known | {key.rpartition(".")[2] for key in known}
    assert [name for name in MEANINGS if name not in names] == []


def test_a_key_a_section_or_all(cli: Cli) -> None:
    (one,) = cli("config", "slo.ttft_s", "--json").json
    assert one == {
        "key": "slo.ttft_s",
        "kind": "",
        "values": "number, > 0",
        "default": "2",
        "meaning": "time to first token, at most",
    }
    section = {one["key"]: one for one in cli("config", "workload.arrivals", "--json").json}
    assert section["workload.arrivals.cv"]["kind"] == "gamma"
    loads = [one["kind"] for one in cli("config", "workload.arrivals.load", "--json").json]
    assert loads == ["poisson, gamma, mmpp, diurnal, ramp", "trace"], "what means the same is said once"
    assert cli("config", "ppo.num_epochs").out.count("ppo.num_epochs") == 1, "of a training configuration"
    assert "reliability.max_retries" in cli("config", "--of", "serve").out
    everything = cli("config")
    assert everything.status == 0 and "cluster.replicas.count" in "".join(everything.out.split())


def test_units_in_brackets_are_shown(cli: Cli) -> None:
    """They are not taken for markup."""
    assert "[updates]" in cli("config", "run.evaluate_every").out
    assert "[s]" in cli("config", "policy.detour_s").out


def test_bad_input(cli: Cli) -> None:
    check(cli("config", "workload.arival"), "KEY = 'workload.arival'", "did you mean 'workload.arrivals'?")
    check(cli("config", "ttft"), "KEY = 'ttft'")
    check(cli("config", "--of", "x"), "--of = 'x'", "cluster, serve, train")
    check(cli("config", "workload", "--of", "serve"), "KEY = 'workload'", "unknown key")


@pytest.mark.parametrize("section", ["workload.arrivals", "cluster", "reliability", "ppo"])
def test_names_in_keys_stay_whole(cli: Cli, section: str) -> None:
    keys = [one["key"] for one in cli("config", section, "--json").json]
    words = set(cli("config", section).out.split())
    assert len(keys) > 10
    assert [key for key in keys if key not in words and key.rpartition(".")[2] not in words] == []
