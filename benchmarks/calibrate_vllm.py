"""A real vLLM server on CPU, calibrated by `pointsman calibrate --url` alone: does the simulator predict it?

    python benchmarks/calibrate_vllm.py --vllm /tmp/vllm-venv/bin/vllm        # 11 minutes, on quiet cores
    python benchmarks/calibrate_vllm.py --url http://127.0.0.1:8100 --minutes 0.5 --seconds 20

After the calibration the server gets open-loop traffic at three loads that the calibration did not see. The
same arrivals are simulated from the calibration's file. It exits with 1 if mean or P90 of TTFT or end-to-end
is off by more than 10 %. With --url it takes a server that runs already.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from real_vllm import MODEL, VLLM_ENVIRONMENT, process, serve_options, wait_for
from router_cost import free_port
from tiny_model import make_model

from pointsman.config import Config
from pointsman.experiments.simulate import prepare, simulate
from pointsman.live.probing import Server
from pointsman.report.tables import markdown
from pointsman.spec import parse_spec
from pointsman.workload import Workload

Floats = NDArray[np.float64]

LOADS = (0.3, 0.5, 0.7)
LENGTHS = {"kind": "lognormal", "prompt_mean": 200, "output_mean": 40}
CONTEXT = 1024
MAX_TOKENS = 1000  # of a request
MAX_ERROR = 0.10
# Slow enough that the API server, in Python, is not what is measured.
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
LARGER = HEADS | {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6}
MEMORY = ("--kv-cache-memory-bytes", "200M")
MEASURES = ("TTFT mean", "TTFT P90", "e2e mean", "e2e P90")


def measures(arrived_at: Floats, first_token_at: Floats, completed_at: Floats) -> Floats:
    ttft_s, e2e_s = first_token_at - arrived_at, completed_at - arrived_at
    return np.array([value for times in (ttft_s, e2e_s) for value in (times.mean(), np.quantile(times, 0.9))])


def config(description: Path, load: float, seconds: float) -> Config:
    data: dict[str, Any] = {
        "workload": {
            "arrivals": {"kind": "poisson", "load": load},
            "lengths": LENGTHS,
            "requests": 20_000,
            "max_tokens": MAX_TOKENS,
        },
        "cluster": {"replicas": [{"count": 1, "description": str(description)}]},
        "policy": {"kind": "round-robin"},
        "seed": round(100 * load),
    }
    workload = prepare(parse_spec(Config, data)).workload
    data["workload"]["requests"] = max(30, int(np.searchsorted(workload.arrived_at, seconds)))
    return parse_spec(Config, data)


async def served(url: str, workload: Workload) -> Floats:
    """What clients of the server measure."""
    server = Server(url)
    model = (await server.facts()).model
    begun_at = time.monotonic() + 0.5

    async def ask(at: float, prompt: int, output: int) -> tuple[float, float, float]:
        await asyncio.sleep(begun_at + at - time.monotonic())
        answer = await server.ask(model, prompt, output)
        return answer.sent_at, answer.token_at[0], answer.token_at[-1]

    rows = zip(workload.arrived_at, workload.num_prefill_tokens, workload.num_decode_tokens, strict=True)
    times = await asyncio.gather(*(ask(float(at), int(prompt), int(output)) for at, prompt, output in rows))
    return measures(*np.array(times).T)


def compare(url: str, description: Path, seconds: float) -> bool:
    rows, is_good = [], True
    for load in LOADS:
        made = prepare(config(description, load, seconds))
        requests = simulate([made])[0].requests
        predicted = measures(*(requests[name] for name in ("arrived_at", "first_token_at", "completed_at")))
        found = asyncio.run(served(url, made.workload))
        errors = predicted / found - 1.0
        is_good &= bool(np.all(np.abs(errors) <= MAX_ERROR))
        for name, ours, theirs, error in zip(MEASURES, predicted, found, errors, strict=True):
            rows.append(
                [
                    f"{load:g}",
                    str(len(requests)),
                    name,
                    f"{theirs:.4f}",
                    f"{ours:.4f}",
                    f"{100 * error:+.1f} %",
                ]
            )
        print(f"  load {load:g} is over", file=sys.stderr, flush=True)
    print(markdown(["load", "requests", "", "measured, s", "predicted, s", "error"], rows))
    return is_good


def main() -> bool:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", default="vllm", help="the program; default: on the PATH")
    parser.add_argument("--url", default=None, help="a server that runs already, instead")
    parser.add_argument("--minutes", type=float, default=4.5, help="of the calibration")
    parser.add_argument("--seconds", type=float, default=100.0, help="of arrivals at each load")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, url = Path(name), asked.url
        if url is None:
            model, port, log = folder / "model", free_port(), folder / "vllm.log"
            make_model(model, CONTEXT)
            config_file = model / "config.json"
            config_file.write_text(json.dumps(json.loads(config_file.read_text()) | LARGER))
            url = f"http://127.0.0.1:{port}"
            command = [asked.vllm, "serve", str(model), "--port", str(port), *serve_options(CONTEXT), *MEMORY]
            child = stack.enter_context(process(command, log, **VLLM_ENVIRONMENT))
            print(f"  vLLM ({MODEL}) is starting, which takes a minute or more", file=sys.stderr, flush=True)
            wait_for(f"{url}/health", child, log)
        description, began_at = folder / "server.yaml", time.monotonic()
        calibrate = [sys.executable, "-m", "pointsman", "calibrate", "--url", url, "--out", str(description)]
        subprocess.run([*calibrate, "--minutes", str(asked.minutes), "--max-streams", "16"], check=True)
        print(f"calibrated in {(time.monotonic() - began_at) / 60:.1f} minutes", flush=True)
        return compare(url, description, asked.seconds)


if __name__ == "__main__":
    sys.exit(not main())
