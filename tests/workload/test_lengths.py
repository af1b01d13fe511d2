"""Length distributions against their closed forms, and the shipped tables against their traces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pointsman.workload import sample_lengths
from pointsman.workload.fit import length_figures
from pointsman.workload.lengths import Tokens
from pointsman.workload.readers import read_trace
from pointsman.workload.spec import NamedDistribution, TraceFile
from pointsman.workload.tables import load_table

from .factories import TRACES, spec, synthetic, vidur_file

NUM = 200_000


def draw(lengths: Any, num: int = NUM, seed: int = 0, **workload: Any) -> tuple[Tokens, Tokens]:
    return sample_lengths(synthetic(lengths=lengths, **workload), num, seed)


@pytest.mark.parametrize(
    ("name", "trace"),
    [
        ("azure-conv", "AzureLLMInferenceTrace_conv.csv"),
        ("azure-code", "AzureLLMInferenceTrace_code.csv"),
        ("mooncake-conv", "mooncake_conversation_trace.jsonl"),
    ],
)
class TestNamed:
    def test_figures_are_those_of_the_trace(self, name: NamedDistribution, trace: str) -> None:
        path = TRACES / trace
        if not path.exists():
            pytest.skip(f"{path} is not here")
        source = read_trace(TraceFile(path=str(path)))
        wanted = length_figures(source.num_prefill_tokens, source.num_decode_tokens)
        got = length_figures(*draw(name))
        correlation = wanted.pop("rank correlation")
        assert got.pop("rank correlation") == pytest.approx(correlation, abs=0.015)
        assert got == pytest.approx(wanted, rel=0.03)

    def test_table_holds_the_trace(self, name: NamedDistribution, trace: str) -> None:
        table = load_table(name)
        assert table.source == trace
        assert table.cell_counts.sum() == table.num_requests


def test_the_output_depends_on_the_prompt_as_in_the_trace() -> None:
    path = TRACES / "AzureLLMInferenceTrace_conv.csv"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    source = read_trace(TraceFile(path=str(path)))
    edges = np.quantile(source.num_prefill_tokens, [0.0, 0.25, 0.5, 0.75, 0.9, 1.0])

    def mean_output_by_prompt(prompt: Tokens, output: Tokens) -> list[float]:
        part = np.searchsorted(edges[1:-1], prompt)
        return [float(output[part == index].mean()) for index in range(5)]

    wanted = mean_output_by_prompt(source.num_prefill_tokens, source.num_decode_tokens)
    assert max(wanted) > 1.5 * min(wanted), "the trace has no dependence to lose"
    assert mean_output_by_prompt(*draw("azure-conv")) == pytest.approx(wanted, rel=0.05)


def test_context_limit_stays_an_atom() -> None:
    prompt, _ = draw("azure-code")
    assert np.mean(prompt == 7436) == pytest.approx(0.0228, abs=0.003)


def test_long_summarization_has_the_published_figures() -> None:
    figures = length_figures(*draw("long-summarization"))
    wanted = {"prompt P50": 7059, "prompt P90": 12985, "output P50": 208, "output P90": 371}
    assert {name: figures[name] for name in wanted} == pytest.approx(wanted, rel=0.02)


def test_lognormal_has_its_moments_and_correlation() -> None:
    lengths = {
        "kind": "lognormal",
        "prompt_mean": 2000,
        "prompt_cv": 0.8,
        "output_mean": 300,
        "output_cv": 0.5,
        "correlation": 0.6,
    }
    prompt, output = draw(lengths)
    assert prompt.mean() == pytest.approx(2000, rel=0.01)
    assert prompt.std() / prompt.mean() == pytest.approx(0.8, rel=0.03)
    assert output.mean() == pytest.approx(300, rel=0.01)
    assert output.std() / output.mean() == pytest.approx(0.5, rel=0.03)
    assert np.corrcoef(np.log(prompt), np.log(output))[0, 1] == pytest.approx(0.6, abs=0.01)


def test_zipf_weights_and_split() -> None:
    prompt, output = draw(
        {"kind": "zipf", "theta": 1.2, "min_total": 100, "max_total": 103, "prompt_to_output": 3.0}
    )
    weights = np.array([1.0, 2.0, 3.0, 4.0]) ** -1.2
    shares = np.bincount(prompt + output - 100) / NUM
    np.testing.assert_allclose(shares, weights / weights.sum(), atol=0.006)
    assert np.all(output == np.ceil((prompt + output) / 4.0))


def test_uniform_reaches_both_bounds() -> None:
    prompt, output = draw(
        {"kind": "uniform", "prompt_min": 5, "prompt_max": 7, "output_min": 1, "output_max": 2}
    )
    np.testing.assert_allclose(np.bincount(prompt)[5:] / NUM, 1 / 3, atol=0.006)
    np.testing.assert_allclose(np.bincount(output)[1:] / NUM, 1 / 2, atol=0.006)


def test_mixture_draws_its_parts_by_weight_and_keeps_pairs_together() -> None:
    parts = [
        {"weight": 3, "lengths": {"kind": "fixed", "prompt": 1000, "output": 10}},
        {"weight": 1, "lengths": {"kind": "fixed", "prompt": 50, "output": 400}},
    ]
    prompt, output = draw({"kind": "mixture", "parts": parts})
    is_first = prompt == 1000
    assert is_first.mean() == pytest.approx(0.75, abs=0.006)
    assert np.array_equal(output, np.where(is_first, 10, 400))


def test_trace_lengths_are_rows_of_the_file(tmp_path: Any) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n10,1\n20,2\n30,3\n", encoding="utf-8")
    prompt, output = draw({"kind": "trace", "path": str(path)}, num=30_000)
    assert np.array_equal(prompt, output * 10)
    np.testing.assert_allclose(np.bincount(output)[1:] / 30_000, 1 / 3, atol=0.015)


def test_sample_lengths_of_a_replayed_trace_draws_its_rows(tmp_path: Any) -> None:
    path = vidur_file(tmp_path, "0.0,10,1", "5.0,20,2")
    prompt, output = sample_lengths(spec(trace=str(path)), 1_000, seed=0)
    assert set(zip(prompt.tolist(), output.tolist(), strict=True)) == {(10, 1), (20, 2)}


@pytest.mark.parametrize("lengths", ["azure-conv", {"kind": "lognormal", "prompt_mean": 9, "output_mean": 9}])
def test_first_lengths_don_t_depend_on_how_many_follow(lengths: Any) -> None:
    short, long = draw(lengths, num=5_000), draw(lengths, num=20_000)
    for few, many in zip(short, long, strict=True):
        assert few.tobytes() == many[:5_000].tobytes()


def test_other_seed_other_lengths() -> None:
    assert not np.array_equal(draw("azure-conv", 100, seed=1)[0], draw("azure-conv", 100, seed=2)[0])
