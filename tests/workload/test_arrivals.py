"""Rates, burstiness and shapes against closed forms. Tolerances: about 5 standard errors."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from numpy.random import SeedSequence
from numpy.typing import NDArray

from pointsman.errors import InputError
from pointsman.workload.arrivals import ArrivalSeeds, arrival_times, think_times
from pointsman.workload.spec import (
    DiurnalArrivals,
    GammaArrivals,
    MmppArrivals,
    PoissonArrivals,
    RampArrivals,
    Rated,
)

RATE_RPS = 20.0


def seeds(seed: int = 0) -> ArrivalSeeds:
    return ArrivalSeeds(*SeedSequence(seed).spawn(2))


def first_times(spec: Rated, num_requests: int = 200_000, seed: int = 0) -> NDArray[np.float64]:
    return arrival_times(spec, RATE_RPS, num_requests, None, seeds(seed))


def cv(gaps: NDArray[np.float64]) -> float:
    return float(gaps.std() / gaps.mean())


def test_poisson_has_the_rate_and_its_long_gaps() -> None:
    gaps = np.diff(first_times(PoissonArrivals(rate=RATE_RPS)))
    assert gaps.mean() == pytest.approx(1 / RATE_RPS, rel=0.012)
    assert cv(gaps) == pytest.approx(1.0, rel=0.02)
    # Vidur would cut these off.
    assert np.mean(gaps > 3 / RATE_RPS) == pytest.approx(np.exp(-3), rel=0.05)


@pytest.mark.parametrize("wanted_cv", [0.25, 1.0, 3.0])
def test_gamma_has_the_rate_and_the_cv(wanted_cv: float) -> None:
    gaps = np.diff(first_times(GammaArrivals(rate=RATE_RPS, cv=wanted_cv)))
    assert gaps.mean() == pytest.approx(1 / RATE_RPS, rel=0.012 * wanted_cv)
    assert cv(gaps) == pytest.approx(wanted_cv, rel=0.03)


def test_gamma_of_cv_0_is_evenly_spaced() -> None:
    times = first_times(GammaArrivals(rate=RATE_RPS, cv=0), num_requests=100)
    np.testing.assert_allclose(np.diff(times), 1 / RATE_RPS)


def test_mmpp_has_the_mean_rate_and_the_dispersion_of_theory() -> None:
    spec = MmppArrivals(rate=RATE_RPS, burst_factor=8, burst_s=2, calm_s=6)
    duration_s = 40_000.0
    times = arrival_times(spec, RATE_RPS, None, duration_s, seeds())
    assert len(times) / duration_s == pytest.approx(RATE_RPS, rel=0.06)

    # Index of dispersion of counts in long windows: 1 + 2 * var(rate) * tau / mean rate, where tau is the
    # correlation time of the two-state chain.
    calm_rps = RATE_RPS * 8 / (6 + 8 * 2)
    variance = 0.25 * 0.75 * (8 * calm_rps - calm_rps) ** 2
    tau_s = 1 / (1 / 2 + 1 / 6)
    counts = np.histogram(times, bins=np.arange(0, duration_s + 1, 100.0))[0]
    assert counts.var() / counts.mean() == pytest.approx(1 + 2 * variance * tau_s / RATE_RPS, rel=0.25)


def test_mmpp_of_factor_1_is_the_poisson_process() -> None:
    bursts = first_times(MmppArrivals(rate=RATE_RPS, burst_factor=1), num_requests=2_000)
    np.testing.assert_allclose(bursts, first_times(PoissonArrivals(rate=RATE_RPS), num_requests=2_000))


def test_diurnal_follows_its_sinusoid_and_keeps_the_mean() -> None:
    period_s, amplitude, num_periods = 500.0, 0.8, 20
    spec = DiurnalArrivals(rate=RATE_RPS, period_s=period_s, amplitude=amplitude)
    times = arrival_times(spec, RATE_RPS, None, period_s * num_periods, seeds())
    assert len(times) == pytest.approx(RATE_RPS * period_s * num_periods, rel=0.012)

    edges = np.linspace(0, 1, 21)
    counts = np.histogram(times / period_s % 1.0, bins=edges)[0]
    swing = amplitude * -np.diff(np.cos(2 * np.pi * edges)) / (2 * np.pi)
    expected = RATE_RPS * period_s * num_periods * (np.diff(edges) + swing)
    assert np.all(np.abs(counts - expected) < 5 * np.sqrt(expected))


@pytest.mark.parametrize(("start", "end"), [(0.0, 2.0), (0.5, 1.5), (1.5, 0.1), (1.0, 1.0)])
def test_ramp_goes_from_start_to_end(start: float, end: float) -> None:
    duration_s = 5_000.0
    spec = RampArrivals(rate=RATE_RPS, start=start, end=end)
    times = arrival_times(spec, RATE_RPS, None, duration_s, seeds())
    edges = np.linspace(0, duration_s, 11)
    cumulative = RATE_RPS * (start * edges + (end - start) * edges**2 / (2 * duration_s))
    counts = np.histogram(times, bins=edges)[0]
    expected = np.diff(cumulative)
    assert np.all(np.abs(counts - expected) < 5 * np.sqrt(expected))


def test_ramp_by_requests_ends_where_its_mean_rate_says() -> None:
    times = first_times(RampArrivals(rate=RATE_RPS, start=0.5, end=1.5), num_requests=50_000)
    assert times[-1] == pytest.approx(50_000 / RATE_RPS, rel=0.02)
    assert np.all(np.diff(times) >= 0)


@pytest.mark.parametrize(
    "spec",
    [
        PoissonArrivals(rate=RATE_RPS),
        GammaArrivals(rate=RATE_RPS),
        MmppArrivals(rate=RATE_RPS),
        DiurnalArrivals(rate=RATE_RPS),
    ],
    ids=lambda spec: spec.kind,
)
class TestEveryProcess:
    def test_same_seed_same_bytes_other_seed_other_times(self, spec: Rated) -> None:
        first = first_times(spec, 1_000, seed=3)
        assert first.tobytes() == first_times(spec, 1_000, seed=3).tobytes()
        assert not np.array_equal(first, first_times(spec, 1_000, seed=4))

    def test_times_until_are_the_first_times_cut(self, spec: Rated) -> None:
        first = first_times(spec, 5_000)
        until = arrival_times(spec, RATE_RPS, None, 50.0, seeds())
        assert until.tobytes() == first[first <= 50.0].tobytes()
        both = arrival_times(spec, RATE_RPS, 100, 50.0, seeds())
        assert both.tobytes() == first[:100].tobytes()

    def test_times_ascend_from_above_0(self, spec: Rated) -> None:
        times = first_times(spec, 5_000)
        assert times[0] >= 0
        assert np.all(np.diff(times) >= 0)


def test_think_times_are_exponential() -> None:
    pauses = think_times(3.0, 100_000, seeds())
    assert pauses.mean() == pytest.approx(3.0, rel=0.02)
    assert cv(pauses) == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize(
    ("duration_s", "problem"), [(1e-9, "no request arrives"), (1e9, "more than 100000000")]
)
def test_impossible_durations(duration_s: float, problem: str) -> None:
    with pytest.raises(InputError, match=problem) as caught:
        arrival_times(PoissonArrivals(rate=RATE_RPS), RATE_RPS, None, duration_s, seeds())
    assert caught.value.field == "workload.duration_s"


def test_two_million_arrivals_need_little_more_memory_than_their_result() -> None:
    spec: Any = PoissonArrivals(rate=RATE_RPS)
    tracemalloc.start()
    times = first_times(spec, 2_000_000)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1.2 * times.nbytes
