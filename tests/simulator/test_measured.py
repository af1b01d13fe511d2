"""The shipped replica against the runs of the real server that it describes."""

from __future__ import annotations

import pytest

from .factories import ROOT, load_benchmark

LOADS = ROOT / "benchmarks" / "gpu" / "h200" / "loads"
SERVER = {"kind": "vllm-v1", "max_num_seqs": 1024, "max_num_batched_tokens": 8192, "num_blocks": 57512}


@pytest.mark.parametrize("share", ["0.3", "0.6"])
def test_measured_runs_are_predicted(share: str) -> None:
    replay = load_benchmark("gpu/replay_load")
    run = replay.pl.read_csv(LOADS / f"load_{share}.csv")
    cluster = {"replicas": 1, "device": "H200", "model": "Llama-3-8B", "scheduler": SERVER}
    truth, guess = replay.measured(run), replay.predicted(run, cluster)
    for name, limit in (("ttft_mean", 0.05), ("e2e_mean", 0.05), ("ttft_p99", 0.1), ("e2e_p99", 0.1)):
        assert guess[name] == pytest.approx(truth[name], rel=limit), name
    # A check that cannot fail is none: the roofline misses some of these limits.
    computed = replay.predicted(run, cluster | {"cost": {"kind": "roofline"}})
    assert abs(computed["ttft_p99"] / truth["ttft_p99"] - 1) > 0.1
