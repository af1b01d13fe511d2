"""What operators apply: accepted by the schemas of Kubernetes, and in step with the router."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
import yaml
from simulator.factories import ROOT

from pointsman import __version__
from pointsman.cli.main import app
from pointsman.router.config import Settings
from pointsman.router.http.limits import Limits
from pointsman.router.replicas.registry import Registry
from pointsman.router.telemetry.exposition import Exposition
from pointsman.router.telemetry.metrics import Metrics
from pointsman.routing.books import Books

FOLDER = ROOT / "deploy" / "kubernetes"
WORKLOADS = ("router.yaml", "epp.yaml")
SUFFIXES = ("_bucket", "_sum", "_count", "_total")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def by_kind(kind: str, name: str = "router.yaml") -> dict[str, Any]:
    (found,) = [one for one in documents(name) if one["kind"] == kind]
    return found


def container(name: str = "router.yaml") -> dict[str, Any]:
    return by_kind("Deployment", name)["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize("version", ["1.28", "1.31", "1.34"])
def test_schemas_accept_them(version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for document in (one for name in WORKLOADS for one in documents(name)):
        validator.validate(document, version, strict=True)
    broken = by_kind("Deployment") | {"spec": {"replicas": "two"}}
    with pytest.raises(validator.ValidationError):
        validator.validate(broken, version, strict=True)


@pytest.mark.parametrize("file", WORKLOADS)
def test_arguments_are_those_of_the_command(file: str) -> None:
    name, *arguments = container(file)["args"]
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    if name not in commands:
        pytest.skip(f"there is no `pointsman {name}` here")
    options = {option for parameter in commands[name].params for option in parameter.opts}
    assert {argument.partition("=")[0] for argument in arguments} <= options


@pytest.mark.parametrize("file", WORKLOADS)
def test_parts_refer_to_each_other(file: str) -> None:
    deployment, service = by_kind("Deployment", file)["spec"], by_kind("Service", file)["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    budget = by_kind("PodDisruptionBudget", file)["spec"]
    for selector in (
        deployment["selector"]["matchLabels"],
        service["selector"],
        budget["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    ports = {port["name"] for port in container(file)["ports"]}
    assert {port["targetPort"] for port in service["ports"]} <= ports
    assert (
        deployment["template"]["spec"]["serviceAccountName"] == by_kind("ServiceAccount")["metadata"]["name"]
    )


def test_monitor_finds_the_service() -> None:
    (monitor,) = documents("monitoring.yaml")
    service = by_kind("Service")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    ports = {port["name"] for port in service["spec"]["ports"]}
    assert {one["port"] for one in monitor["spec"]["endpoints"]} <= ports


def test_kustomization_names_files_that_there_are() -> None:
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))
    named = [*kustomization["resources"], *kustomization["configMapGenerator"][0]["files"]]
    assert all((FOLDER / name).is_file() for name in named)


def test_requests_have_time_to_finish() -> None:
    pod = by_kind("Deployment")["spec"]["template"]["spec"]
    pause_s = int(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pause_s + Limits().drain_timeout_s


def test_image_is_of_this_version() -> None:
    assert container()["image"] == f"pointsman:{__version__}"


def test_dashboard_asks_for_metrics_that_there_are() -> None:
    dashboard = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"pointsman_\w+", target["expr"])
    }
    books = Books()
    decisions: Any = SimpleNamespace(policy="default", shadow=None)
    exposition = Exposition(Metrics(), Registry(books, Settings()), books, decisions)
    shown = {family.name for family in exposition.collect()}
    assert len(asked) > 10
    for name in asked:
        stem = next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)
        assert stem in shown or name in shown, name


def test_container_file_copies_what_there_is() -> None:
    text = (ROOT / "Containerfile").read_text(encoding="utf-8")
    copied = re.findall(r"^COPY (?!--from)(\S+) ", text, re.MULTILINE)
    assert copied and all((ROOT / Path(name)).exists() for name in copied)
