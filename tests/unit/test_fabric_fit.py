"""Latency and rate are found again, and predict what the fit has not seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_basp.cluster import load_cluster
from megatron_basp.errors import ConfigurationError
from megatron_basp.fabric_fit import SHORTEST_LATENCY_SECONDS, fit_latency_and_rate

HARDWARE = Path(__file__).parents[2] / "configs" / "hardware"
# All-to-all in one node of 8 (Hetu-Galvatron, sp_time_1nodes_8gpus_per_node.json), milliseconds by MiB and GPUs.
PUBLISHED_MIB = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
PUBLISHED_MILLISECONDS = {
    2: (0.0709, 0.0994, 0.1101, 0.1047, 0.1203, 0.1788, 0.2928, 0.4756, 0.8806, 1.7752, 3.4954),
    4: (0.0524, 0.0799, 0.1065, 0.1255, 0.1514, 0.2237, 0.3654, 0.6439, 1.1567, 2.1003, 4.0389),
    8: (0.1124, 0.1135, 0.1109, 0.1502, 0.2003, 0.243, 0.3997, 0.7135, 1.2981, 2.4822, 4.8151),
}
FITTED_MIB, HELD_MIB = (8, 32, 128, 512), (16, 64, 256, 1024)


def published(gpus: int, mebibytes: tuple[int, ...]) -> list[tuple[float, float]]:
    """Pairs of bytes sent to peers, and seconds. The table's sizes are whole tensors of MiB; 1/n of them stays."""
    rows = dict(zip(PUBLISHED_MIB, PUBLISHED_MILLISECONDS[gpus], strict=True))
    return [(size * 2**20 * (gpus - 1) / gpus, rows[size] * 1e-3) for size in mebibytes]


def test_exact_times_give_back_their_latency_and_rate() -> None:
    fit = fit_latency_and_rate([(size, 50e-6 + size / 200e9) for size in (1e6, 4e6, 64e6, 256e6)])
    assert fit.latency_seconds == pytest.approx(50e-6)
    assert fit.bytes_per_second == pytest.approx(200e9)
    assert fit.largest_error == pytest.approx(0, abs=1e-9)


def test_small_messages_count_as_large_ones() -> None:
    """A tenth more on the largest must not hide the latency, as it would with absolute errors."""
    times = [(size, 50e-6 + size / 200e9) for size in (1e6, 4e6, 16e6, 64e6, 256e6)]
    times[-1] = (times[-1][0], times[-1][1] * 1.1)
    fit = fit_latency_and_rate(times)
    assert fit.latency_seconds == pytest.approx(50e-6, rel=0.05)
    assert 0.02 < fit.largest_error < 0.1


def test_a_latency_too_short_to_see_is_not_negative() -> None:
    fit = fit_latency_and_rate([(1e6, 9e-6), (2e6, 20e-6), (4e6, 40e-6)])
    assert fit.latency_seconds == SHORTEST_LATENCY_SECONDS
    assert fit.bytes_per_second == pytest.approx(1e11, rel=0.05)


@pytest.mark.parametrize("gpus", PUBLISHED_MILLISECONDS)
def test_a_fit_to_half_of_a_published_table_predicts_the_other_half_within_a_tenth(gpus: int) -> None:
    fit = fit_latency_and_rate(published(gpus, FITTED_MIB))
    for sent, seconds in published(gpus, HELD_MIB):
        assert fit.seconds(sent) == pytest.approx(seconds, rel=0.1)


@pytest.mark.parametrize("name", ["a100-40gb-2x4", "a100-80gb-8", "a100-80gb-8-4nic", "a100-80gb-8-8nic"])
@pytest.mark.parametrize("gpus", PUBLISHED_MILLISECONDS)
def test_the_hardware_files_hold_that_fit(name: str, gpus: int) -> None:
    cluster = load_cluster(name, HARDWARE)
    fit = fit_latency_and_rate(published(gpus, FITTED_MIB))
    assert cluster.within_latency_seconds(gpus) == pytest.approx(fit.latency_seconds, abs=0.5e-6)
    assert cluster.within_bytes_per_second(gpus) == pytest.approx(fit.bytes_per_second, rel=1e-3)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([(1e6, 1e-3)], "two sizes of messages or more, got 1"),
        ([(1e6, 1e-3), (1e6, 2e-3)], "two sizes of messages or more"),
        ([(1e6, 2e-3), (4e6, 1e-3)], "do not grow with the message .1 MB 2e.03 µs, 4 MB 1e.03 µs.: measure larger"),
    ],
)
def test_times_that_show_no_rate_are_refused(times: list[tuple[float, float]], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit_latency_and_rate(times)
