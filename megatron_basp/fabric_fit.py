"""Latency and rate from measured times: seconds = latency + bytes / rate. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_basp.errors import ConfigurationError

# A fit may pass below zero where latency is too short to see; a cluster's must be positive.
SHORTEST_LATENCY_SECONDS = 1e-9


@dataclass(frozen=True)
class Fit:
    """largest_error: the largest relative difference of the fit from a measured time."""

    latency_seconds: float
    bytes_per_second: float
    largest_error: float

    def seconds(self, sent_bytes: float) -> float:
        return self.latency_seconds + sent_bytes / self.bytes_per_second


def fit_latency_and_rate(times: Iterable[tuple[float, float]]) -> Fit:
    """The least squares of relative errors, so that small messages, which show the latency, count as large ones do.

    Args:
        times: pairs of bytes that a rank sent to its peers, and seconds.

    Raises:
        ConfigurationError: fewer than two sizes, or times that do not grow with them.
    """
    times = list(times)
    if len({sent for sent, _ in times}) < 2:
        raise ConfigurationError(f"latency and rate need two sizes of messages or more, got {len(times)}")
    # With weights 1/seconds each equation reads: latency / t + slope · s / t = 1.
    latency, slope = _solve([(1 / t, s / t) for s, t in times])
    if latency < SHORTEST_LATENCY_SECONDS:
        latency = SHORTEST_LATENCY_SECONDS
        ratios = [s / t for s, t in times]
        slope = sum(ratio * (1 - latency / t) for ratio, (_, t) in zip(ratios, times, strict=True)) / sum(
            ratio * ratio for ratio in ratios
        )
    if slope <= 0:
        measured = ", ".join(f"{s / 1e6:.3g} MB {t * 1e6:.3g} µs" for s, t in times)
        raise ConfigurationError(
            f"the times do not grow with the message ({measured}): measure larger ones (--sizes-mb), or more often "
            f"(--repetitions), on a machine that does nothing else"
        )
    errors = [abs(latency + s * slope - t) / t for s, t in times]
    return Fit(latency, 1 / slope, max(errors))


def _solve(rows: list[tuple[float, float]]) -> tuple[float, float]:
    """x, y with the least squares of x·a + y·b - 1 over rows (a, b)."""
    aa = sum(a * a for a, _ in rows)
    ab = sum(a * b for a, b in rows)
    bb = sum(b * b for _, b in rows)
    a1 = sum(a for a, _ in rows)
    b1 = sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    return (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
