"""Does learning hold? Train several seeds of a preset, and judge the last and the best policy of each.

    .venv/bin/python benchmarks/learning_runs.py --preset quick --seeds 3 --jobs 1
    .venv/bin/python benchmarks/learning_runs.py --preset generalist --seeds 3 --jobs 3 --out runs/general
    … --report                       # judge on report seeds: once, for the table that is published

Seeds are trained by processes of their own, `--jobs` at a time, each with `run.workers` processes: jobs times
workers should not exceed the cores. Selection seeds from the hundredth on are judged by, so that not even the
choice of the best checkpoint has seen them. Prints a table and writes OUT/results.json.

Runs without polars and TensorBoard, which a machine with PyTorch and numba may lack: scenarios need neither.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


class _Nothing:
    """In place of what is TensorBoard's: takes everything, does nothing. progress.csv has the same curves."""

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def __call__(self, *arguments: Any, **options: Any) -> _Nothing:
        return self

    def __getattr__(self, name: str) -> _Nothing:
        return self


def _has(package: str) -> bool:
    try:
        importlib.import_module(package)
    except ImportError:
        return False
    return True


# Processes that share gradients import this file first, so they find the same modules.
if not _has("polars"):
    sys.modules["polars"] = types.ModuleType("polars")
if not _has("tensorboard"):
    for name, what in (
        ("torch.utils.tensorboard", "SummaryWriter"),
        ("tensorboard.compat.proto.summary_pb2", "Summary"),
    ):
        module = types.ModuleType(name)
        setattr(module, what, _Nothing())
        sys.modules[name] = module

METRICS = ("cost", "e2e_mean_s", "e2e_p99_s", "ttft_mean_s", "ttft_p99_s")
RIVALS = ("least-outstanding", "late-binding")
FIRST_SELECTION_SEED = 100


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="quick", help="of pointsman train")
    parser.add_argument("--seeds", type=int, default=3, help="how many training seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("--minutes", type=float, help="of each training; default: the preset's")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--scenarios", default="", help="to judge on: A,B,C, or `all`; default: the preset's")
    parser.add_argument("--judge-seeds", type=int, default=8, help="how many seeds to judge on")
    parser.add_argument("--report", action="store_true", help="judge on report seeds")
    parser.add_argument("--threads", type=int, default=2, help="of each judgement")
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("--judge-only", action="store_true", help="the runs in OUT are there already")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)  # a process of ours: this training seed
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.one is not None:
        _train_and_judge(options)
        return
    if not options.judge_only:
        _compile(options)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    with ThreadPoolExecutor(options.jobs) as pool:
        results = [result for result in pool.map(lambda seed: _in_process(options, seed), seeds) if result]
    if not results:
        sys.exit("no run came to its end")
    print_table(results)
    path = options.out / "results.json"
    path.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(f"\n{path}")


def _compile(options: argparse.Namespace) -> None:
    """One update of anything: fills numba's cache, so that no training spends its minutes on it."""
    code = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1]); import learning_runs, tempfile;"
        "learning_runs.train(sys.argv[2], [*sys.argv[3:], 'run.minutes=null', 'run.steps=1', 'run.workers=1',"
        " 'env.evaluation.seeds=1'], pathlib.Path(tempfile.mkdtemp()) / 'run')"
    )
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent), options.preset, *options.overrides],
        check=True,
    )
    print(f"kernels compiled in {time.perf_counter() - started:.0f} s", flush=True)


def _in_process(options: argparse.Namespace, seed: int) -> dict[str, Any] | None:
    command = [sys.executable, __file__, *sys.argv[1:], "--one", str(seed)]
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / f"seed-{seed}.log"
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
    if done.returncode != 0:
        print(f"seed {seed} failed, see {log}", flush=True)
        return None
    result: dict[str, Any] = json.loads((options.out / f"seed-{seed}.json").read_text(encoding="utf-8"))
    print(f"seed {seed}: {result['updates']} updates, {_summary(result['best'])}", flush=True)
    return result


# One seed ---------------------------------------------------------------------------------------------------


class Quiet:
    """A `Show` that prints evaluations and news."""

    def begin(self, config: Any, folder: Path, update: int) -> None:
        run = config.run
        print(f"{run.num_envs} environments, {run.rollout_steps} steps, {run.workers} workers", flush=True)

    def headroom(self, headroom: Any) -> None: ...

    def prepared(self, metrics: dict[str, float]) -> None: ...

    def first_evaluation(self, metrics: dict[str, float]) -> None:
        print(f"first: {_evaluation(metrics)}", flush=True)

    def row(self, row: Any) -> None:
        if "eval_score" in row:
            print(
                f"update {row['update']} at {row['elapsed_s']:.0f} s: {_evaluation(row)} "
                f"reward {row['reward_mean']:.4f} ep {row.get('mean_ep_return', float('nan')):.2f} "
                f"explained {row['explained_variance']:.2f} kl {row['approx_kl_mean']:.4f} "
                f"prices {_prices(row)} "
                f"{row['steps_per_s']:.0f}/s",
                flush=True,
            )

    def news(self, news: Any) -> None:
        print(f"  {news}", flush=True)


def _prices(row: Any) -> str:
    names = [name for name in row if name.startswith("price/") and name.count("/") == 1]
    return " ".join(f"{row[name]:.3f}" for name in names)


def _evaluation(row: Any) -> str:
    tails = " ".join(
        f"{name.split('/')[1]} {row[name]:+.3f}"
        for name in row
        if name.startswith("eval_breach/") and name.count("/") == 1
    )
    return (
        f"score {row['eval_score']:.4f} return {row['eval_mean_return']:.4f} "
        f"e2e {row['eval_change/e2e_mean_s']:+.3f} breaches {tails}"
    )


def train(preset: str, overrides: list[str], folder: Path) -> Any:
    from pointsman.training import runs
    from pointsman.training.config import load_train_config
    from pointsman.training.stopping import StopSwitch

    return runs.start(load_train_config(preset, overrides), folder, Quiet(), StopSwitch())


def _train_and_judge(options: argparse.Namespace) -> None:
    folder = options.out / f"seed-{options.one}"
    overrides = [*options.overrides, f"run.seed={options.one}"]
    if options.minutes is not None:
        overrides.append(f"run.minutes={options.minutes}")
    if not options.judge_only:
        train(options.preset, overrides, folder)
    from pointsman.training.config import load_train_config

    config = load_train_config(folder / "config.yaml")
    evaluations = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    progress = (folder / "progress.csv").read_text(encoding="utf-8").splitlines()
    row = dict(zip(progress[0].split(","), progress[-1].split(","), strict=True))
    result = {
        "seed": options.one,
        "updates": int(row["update"]),
        "decisions": int(row["timesteps"]),
        "elapsed_s": float(row["elapsed_s"]),
        "times_back": float(row["times_back"] or 0),
        "prices": {name: float(value) for name, value in row.items() if name.startswith("price/") and value},
        "best_update": evaluations["best"]["update"],
        "scores": {name: evaluations[name]["eval_score"] for name in ("first", "best", "last")},
        **judge(folder, config.env, options),
    }
    (options.out / f"seed-{options.one}.json").write_text(json.dumps(result), encoding="utf-8")


def judge(folder: Path, env: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Of the last and the best policy: ratios to each rival, by scenario and metric."""
    import numpy as np

    from pointsman.envs.routing import RoutingSpec
    from pointsman.experiments.objective import find_objective
    from pointsman.experiments.scenarios import REPORT_SEEDS, SCENARIOS, SELECTION_SEEDS, find_scenario
    from pointsman.experiments.simulate import prepare, simulate
    from pointsman.inference.checkpoint import load_checkpoint
    from pointsman.routing.policy import PolicySpec
    from pointsman.spec import parse_spec

    spec = parse_spec(RoutingSpec, {name: value for name, value in env.items() if name != "kind"}, "env")
    objective = find_objective(spec.objective, spec.keep)
    names = (
        options.scenarios.split(",")
        if options.scenarios
        else [name for name in dict.fromkeys(spec.scenarios) if name in SCENARIOS]
    )
    if names == ["all"]:
        names = list(SCENARIOS)
    block = REPORT_SEEDS if options.report else SELECTION_SEEDS[FIRST_SELECTION_SEED:]
    policies: dict[str, Any] = {name: PolicySpec(kind=name) for name in RIVALS}
    for name in ("last", "best"):
        policies[name] = load_checkpoint(folder / "checkpoints" / f"{name}.safetensors")
    tables: dict[str, dict[str, dict[str, float]]] = {name: {} for name in policies}
    for scenario in names:
        prepared = [prepare(find_scenario(scenario).config(seed)) for seed in block[: options.judge_seeds]]
        for name, policy in policies.items():
            outcomes = simulate(prepared, options.threads, policies=[policy] * len(prepared))
            metrics = {key: np.array([one.metrics[key] for one in outcomes]) for key in outcomes[0].metrics}
            metrics["cost"] = objective.cost(metrics)
            tables[name][scenario] = {key: float(metrics[key].mean()) for key in METRICS}
        print(scenario, flush=True)
    return {
        "judged_on": {"scenarios": names, "seeds": list(block[: options.judge_seeds])},
        **{
            name: {
                rival: {
                    scenario: {
                        key: tables[name][scenario][key] / tables[rival][scenario][key] for key in METRICS
                    }
                    for scenario in names
                }
                for rival in RIVALS
            }
            for name in ("last", "best")
        },
    }


# The table --------------------------------------------------------------------------------------------------


def changes(judged: dict[str, Any], rival: str) -> dict[str, float]:
    """Geometric mean over scenarios of the ratio to a rival, in per cent, by metric."""
    import numpy as np

    rows = judged[rival].values()
    return {key: 100 * float(np.expm1(np.mean([np.log(row[key]) for row in rows]))) for key in METRICS}


def _summary(judged: dict[str, Any]) -> str:
    return "; ".join(
        f"against {rival}: "
        + ", ".join(f"{key} {value:+.1f} %" for key, value in changes(judged, rival).items())
        for rival in RIVALS
    )


def print_table(results: list[dict[str, Any]]) -> None:
    judged_on = results[0]["judged_on"]
    first, num_scenarios = judged_on["seeds"][0], len(judged_on["scenarios"])
    print(f"\n{num_scenarios} scenarios, {len(judged_on['seeds'])} seeds from {first}")

    for which in ("last", "best"):
        for rival in RIVALS:
            print(f"\n{which} policy against {rival} [%]:  " + "".join(f"{key:>13}" for key in METRICS))
            rows = [changes(result[which], rival) for result in results]
            for result, row in zip(results, rows, strict=True):
                label = f"seed {result['seed']} (best {result['best_update']:.0f}/{result['updates']}, "
                label += f"back {result['times_back']:.0f})"
                print(f"{label:<42}" + "".join(f"{row[key]:>13.1f}" for key in METRICS))
            mean = {key: sum(row[key] for row in rows) / len(rows) for key in METRICS}
            worst = {key: max(row[key] for row in rows) for key in METRICS}
            print(f"{'mean':<42}" + "".join(f"{mean[key]:>13.1f}" for key in METRICS))
            print(f"{'worst':<42}" + "".join(f"{worst[key]:>13.1f}" for key in METRICS))
    if len(judged_on["scenarios"]) > 1:
        for rival in RIVALS:
            print(f"\nbest policy by scenario against {rival}, mean over training seeds (worst) [%]")
            for scenario in judged_on["scenarios"]:
                cells = []
                for key in METRICS:
                    ratios = [100 * (result["best"][rival][scenario][key] - 1) for result in results]
                    cells.append(f"{sum(ratios) / len(ratios):>7.1f} ({max(ratios):>5.1f})")
                print(f"{scenario:<18}" + "".join(f"{cell:>16}" for cell in cells))


if __name__ == "__main__":
    main()
