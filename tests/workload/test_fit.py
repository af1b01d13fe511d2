from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from pointsman.workload import fit
from pointsman.workload.tables import LEVELS, NUM_CELLS, load_table

from .factories import TRACES, vidur_file


def test_a_table_gives_back_marginals_and_dependence() -> None:
    rng = np.random.default_rng(5)
    prompt = rng.integers(1, 1000, 20_000).astype(np.int32)
    output = (prompt // 2 + rng.integers(1, 100, 20_000)).astype(np.int32)
    table = fit.fit_table(prompt, output, "made up")
    wanted = fit.length_figures(prompt, output)
    assert wanted["rank correlation"] > 0.95
    got = fit.length_figures(*table.sample(200_000, np.random.default_rng(0)))
    assert got == pytest.approx(wanted, rel=0.01)


def test_shuffled_outputs_lose_the_dependence() -> None:
    """The check above can fail: it sees the copula, not only the marginals."""
    rng = np.random.default_rng(5)
    prompt = rng.integers(1, 1000, 20_000).astype(np.int32)
    table = fit.fit_table(prompt, rng.permutation(prompt), "made up")
    got = fit.length_figures(*table.sample(200_000, np.random.default_rng(0)))
    assert abs(got["rank correlation"]) < 0.05


def test_rank_correlation_gives_equal_lengths_equal_ranks() -> None:
    prompt = np.array([1, 2, 2, 3], dtype=np.int32)
    assert fit.length_figures(prompt, prompt[::-1])["rank correlation"] == pytest.approx(-1.0)


def test_command_writes_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = vidur_file(tmp_path, *(f"{second}.0,{second + 1},{7 + second % 2}" for second in range(200)))
    arguments = ["fit", str(trace), "--name", "azure-conv", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    fit.main()
    table = json.loads((tmp_path / "azure-conv.json").read_text("utf-8"))
    assert table["source"] == "trace.csv"
    assert len(table["prompt_tokens"]) == len(LEVELS)
    assert len(table["cell_counts"]) == NUM_CELLS**2
    assert set(table["output_tokens"]) == {7, 8}


def test_shipped_table_is_what_the_command_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = TRACES / "AzureLLMInferenceTrace_code.csv"
    if not trace.exists():
        pytest.skip(f"{trace} is not here")
    arguments = ["fit", str(trace), "--name", "azure-code", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    fit.main()
    assert (tmp_path / "azure-code.json").read_text("utf-8") == load_table("azure-code").to_json()


@pytest.mark.parametrize("trace", [[], ["none.csv"]], ids=["none given", "missing file"])
def test_command_needs_a_trace(trace: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fit", *trace, "--name", "azure-conv"])
    with pytest.raises(SystemExit) as caught:
        fit.main()
    assert caught.value.code == 2
