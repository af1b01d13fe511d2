"""Does the simulator predict what the router measures? Both compare `default` with `least-outstanding`.

The same unequal replicas (as in the scenario random-hardware) are simulated, and emulated in real time behind
real routers; both serve the same arrivals. The emulator keeps the simulator's time, so what can differ is all
that lies between: the router's own books instead of the simulator's, HTTP, the wall clock, other decisions.
Agreement: the changes of P99 TTFT and of mean end-to-end have the same sign, and the measured one is within a
third of the predicted. How late clients and emulator were is printed: both share this machine.

    python benchmarks/live_agreement.py [--requests 500] [--seeds 6] [--known] [--devices A100-80,L40S,…]

--known tells the router model and device of each server; without it, it finds out how fast they are.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from pointsman.config import Config
from pointsman.evaluation.compare import Comparison, compare
from pointsman.experiments.scenarios import REPORT_SEEDS, find_scenario
from pointsman.live.comparison import compare_live, plan_live
from pointsman.live.processes import emulator, run_to_end
from pointsman.report.tables import change, markdown, number

MODEL = "Llama-3.1-8B"  # Llama-3-8B with room for the longest conversations
POLICY, BASELINE = "default", "least-outstanding"
JUDGED = ("ttft_p99_s", "e2e_mean_s")
SHOWN = {
    "ttft_mean_s": "TTFT mean",
    "ttft_p99_s": "TTFT P99",
    "e2e_mean_s": "e2e mean",
    "e2e_p99_s": "e2e P99",
    "tpot_mean_s": "TPOT mean",
}


def configs(devices: Sequence[str], num_requests: int, num_seeds: int) -> list[Config]:
    groups = ",".join(f"{{device: {device}}}" for device in devices)
    overrides = [
        f"cluster.replicas=[{groups}]",
        f"cluster.model={MODEL}",
        f"workload.requests={num_requests}",
    ]
    scenario = find_scenario("mixed-hardware")
    return [scenario.config(seed, overrides) for seed in REPORT_SEEDS[:num_seeds]]


def backends_file(folder: str, urls: Sequence[str], devices: Sequence[str]) -> Path:
    backends = [
        {"url": url, "calibration": {"model": MODEL, "device": device}}
        for url, device in zip(urls, devices, strict=True)
    ]
    path = Path(folder) / "backends.yaml"
    path.write_text(json.dumps({"backends": backends}))
    return path


async def measured(
    devices: Sequence[str], wanted: Sequence[Config], is_known: bool
) -> tuple[Comparison, list[dict[str, float]]]:
    """The comparison on the emulator, and how late each of its replicas was."""
    async with emulator(["--model", MODEL, "--devices", ",".join(devices)]) as servers:
        with tempfile.TemporaryDirectory() as folder:
            options = None
            if is_known:
                options = ["--backends", str(backends_file(folder, servers.urls, devices))]
            plan = await plan_live("unequal", wanted, [POLICY], BASELINE, servers.urls, servers=options)
            comparison = await compare_live(plan)
        with urllib.request.urlopen(f"{servers.admin_url}/replicas") as page:
            return comparison, [replica["late_ms"] for replica in json.load(page)]


def report(simulated: Comparison, live: Comparison) -> str:
    """The changes, and the values that they come from."""
    changes, seconds = [], []
    for metric, name in SHOWN.items():
        both = (simulated, live)
        predicted, found = (one.ratios[POLICY][metric] for one in both)
        expected, actual = predicted.ratio - 1, found.ratio - 1
        is_close = expected * actual > 0 and abs(actual - expected) <= abs(expected) / 3
        verdict = ("yes" if is_close else "NO") if metric in JUDGED else "–"
        values = [number(one.mean(policy, metric)) for policy in (BASELINE, POLICY) for one in both]
        changes.append([name, change(predicted), change(found), verdict])
        seconds.append([name, *values])
    failed = sum(live.metrics[policy]["num_unfinished"].sum() for policy in live.names)
    changes.append(["failed requests", "", f"{failed:.0f}", ""])
    header = ["", f"{BASELINE}, simulated", "measured", f"{POLICY}, simulated", "measured"]
    first = markdown(["", "predicted", "measured", "within a third"], changes)
    return f"{first}\n\n{markdown(header, seconds)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=500, help="of each block")
    parser.add_argument("--seeds", type=int, default=6, help="blocks")
    parser.add_argument("--devices", default="A100-80,L40S,A40,A10")
    parser.add_argument("--known", action="store_true", help="tell the router the hardware")
    asked = parser.parse_args()
    devices = asked.devices.split(",")
    wanted = configs(devices, asked.requests, asked.seeds)
    simulated = compare("unequal", "", wanted, [POLICY], BASELINE)
    live, late_ms = run_to_end(measured(devices, wanted, asked.known))
    print(report(simulated, live))
    print()
    client_ms = [1000 * live.metrics[policy]["client_late_p99_s"].max() for policy in live.names]
    print(f"clients late, P99 of the worst block: {max(client_ms):.1f} ms")
    print(f"emulator late at the end, P50 and P99: {late_ms}")
    print(f"load average: {os.getloadavg()}")
    for policy in live.names:
        for metric in JUDGED:
            for name, one in (("simulated", simulated), ("measured", live)):
                blocks = ", ".join(number(float(value)) for value in one.metrics[policy][metric])
                print(f"{policy} {metric} {name}, block by block: {blocks}")


if __name__ == "__main__":
    main()
