"""How many rows of a micro-batch go to which K, at the least cost.

It is coin change in which a coin also has a set-up cost: a wave at K takes rows by N/K, one for each of its groups,
and costs so much for itself (latency) and so much for each N/K rows (bytes). Costs are numbers of any one kind: bytes
where nothing is known of the links, seconds where the cluster is (`exchange_cost.py`). Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class WaveCost(NamedTuple):
    """per_wave: of a wave, however many rows it takes. per_step: of each N/K rows."""

    per_wave: float
    per_step: float


def cheapest_counts(
    rows: int, ranks: int, sizes: Sequence[int], cost_of: Callable[[int], WaveCost]
) -> dict[int, int] | None:
    """Rows for each K with the least cost and all rows used; None if there is no way to use them all.

    Of equal costs the one with the smaller K is taken. Time and memory grow with the rows times the sizes.
    """
    infinite = float("inf")
    best: list[float] = [0] + [infinite] * rows
    # steps[i][total]: how many N/K rows the i-th size takes in the best way to use `total` rows with sizes up to it.
    steps: list[list[int]] = []
    for size in sizes:
        groups = ranks // size
        per_wave, per_step = cost_of(size)
        with_size, taken, chosen = [infinite] * (rows + 1), [0] * (rows + 1), [0] * (rows + 1)
        for total in range(groups, rows + 1):
            first, further = best[total - groups] + per_wave, with_size[total - groups]
            if further < first:
                with_size[total], taken[total] = further + per_step, taken[total - groups] + 1
            else:
                with_size[total], taken[total] = first + per_step, 1
        for total in range(groups, rows + 1):
            if with_size[total] < best[total]:
                best[total], chosen[total] = with_size[total], taken[total]
        steps.append(chosen)
    if best[rows] == infinite:
        return None
    counts, left = {}, rows
    for size, chosen in zip(reversed(sizes), reversed(steps), strict=True):
        if chosen[left]:
            counts[size] = chosen[left] * (ranks // size)
            left -= counts[size]
    return counts
