"""A real vLLM server on CPU, calibrated by `pointsman calibrate --url` alone: does the simulator predict it?

    python benchmarks/calibrate_vllm.py --vllm /tmp/vllm-venv/bin/vllm --cores 0,1 --runs 2    # 16 minutes
    python benchmarks/calibrate_vllm.py --url http://127.0.0.1:8100 --minutes 0.5 --seconds 20

After the calibration the server gets open-loop traffic at three loads that the calibration did not see. The
same arrivals are simulated from the calibration's file. It exits with 1 if mean or P90 of TTFT or end-to-end
is off by more than 10 %. With --url it takes a server that runs already.

With --cores all processes of vLLM are on the first of two cores, this one and the calibration on the second:
vLLM's engine and worker wait for each other in loops that leave no core to a client. With --runs 2 each load
is sent twice, and the second table says how far the two differ: no prediction can be closer than that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
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
    """When requests were sent, when their first tokens came, and when their last: [3, requests]."""
    server = Server(url)
    model = (await server.facts()).model
    begun_at = time.monotonic() + 0.5

    async def ask(at: float, prompt: int, output: int) -> tuple[float, float, float]:
        await asyncio.sleep(begun_at + at - time.monotonic())
        answer = await server.ask(model, prompt, output)
        return answer.sent_at, answer.token_at[0], answer.token_at[-1]

    rows = zip(workload.arrived_at, workload.num_prefill_tokens, workload.num_decode_tokens, strict=True)
    times = await asyncio.gather(*(ask(float(at), int(prompt), int(output)) for at, prompt, output in rows))
    return np.array(times).T


def keep_requests(file: Path, workload: Workload, times: Floats) -> None:
    """One line each, for those who want to know where the error comes from."""
    columns = (workload.num_prefill_tokens, workload.num_decode_tokens, *(times - times[0, 0]))
    names = "prompt_tokens,output_tokens,sent_at,first_token_at,completed_at"
    np.savetxt(file, np.column_stack(columns), ["%d", "%d", *["%.6f"] * 3], ",", header=names, comments="")


def compare(url: str, description: Path, seconds: float, num_runs: int, keep: Path | None) -> bool:
    """Tables of measured and predicted times, and of the runs of the same load."""
    rows, repeated, is_good = [], [], True
    for load in LOADS:
        made = prepare(config(description, load, seconds))
        requests = simulate([made])[0].requests
        predicted = measures(*(requests[name] for name in ("arrived_at", "first_token_at", "completed_at")))
        runs = []
        for number in range(num_runs):
            times = asyncio.run(served(url, made.workload))
            runs.append(measures(*times))
            if keep is not None:
                keep_requests(keep / f"load-{load:g}-{number}.csv", made.workload, times)
        found = np.mean(runs, 0)
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
        for name, values in zip(MEASURES, np.transpose(runs), strict=True):
            spread = f"{100 * (values.max() / values.min() - 1):.1f} %"
            repeated.append([f"{load:g}", name, *(f"{value:.4f}" for value in values), spread])
        print(f"  load {load:g} is over", file=sys.stderr, flush=True)
    print(markdown(["load", "requests", "", "measured, s", "predicted, s", "error"], rows))
    if num_runs > 1:
        heads = [f"run {number + 1}, s" for number in range(num_runs)]
        print("\n" + markdown(["load", "", *heads, "apart"], repeated))
    return is_good


def main() -> bool:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", default="vllm", help="the program; default: on the PATH")
    parser.add_argument("--url", default=None, help="a server that runs already, instead")
    parser.add_argument("--minutes", type=float, default=4.3, help="of probing")
    parser.add_argument("--seconds", type=float, default=100.0, help="of arrivals at each load")
    parser.add_argument("--runs", type=int, default=1, help="of each load; the mean counts")
    parser.add_argument("--cores", default=None, metavar="A,B", help="one for the server, one for the client")
    parser.add_argument("--keep", type=Path, default=None, metavar="FOLDER", help="for every request's times")
    asked = parser.parse_args()
    on_its_core = []
    if asked.cores is not None:
        core, ours = asked.cores.split(",")
        on_its_core = ["taskset", "-c", core]
        os.sched_setaffinity(0, {int(ours)})
    if asked.keep is not None:
        asked.keep.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, url = Path(name), asked.url
        if url is None:
            model, port, log = folder / "model", free_port(), folder / "vllm.log"
            make_model(model, CONTEXT)
            config_file = model / "config.json"
            config_file.write_text(json.dumps(json.loads(config_file.read_text()) | LARGER))
            url = f"http://127.0.0.1:{port}"
            options = [*serve_options(CONTEXT), *MEMORY]
            command = [*on_its_core, asked.vllm, "serve", str(model), "--port", str(port), *options]
            child = stack.enter_context(process(command, log, **VLLM_ENVIRONMENT))
            print(f"  vLLM ({MODEL}) is starting, which takes a minute or more", file=sys.stderr, flush=True)
            wait_for(f"{url}/health", child, log)
        description, began_at = (asked.keep or folder) / "server.yaml", time.monotonic()
        calibrate = [sys.executable, "-m", "pointsman", "calibrate", "--url", url, "--out", str(description)]
        subprocess.run([*calibrate, "--minutes", str(asked.minutes), "--max-streams", "16"], check=True)
        print(f"calibrated in {(time.monotonic() - began_at) / 60:.1f} minutes", flush=True)
        return compare(url, description, asked.seconds, asked.runs, asked.keep)


if __name__ == "__main__":
    sys.exit(not main())
