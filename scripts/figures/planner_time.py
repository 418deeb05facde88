"""How long choosing a plan takes, against N and B: writes docs/planner-time.svg and prints the table.

    .venv/bin/python scripts/figures/planner_time.py

Least of five runs of `plan_batch`, with a cluster's seconds for its costs and without; N = 720 has the most divisors
below 840, and B = N - 1 and B = 4N - 1 need the most waves.
"""

from __future__ import annotations

import platform
import time
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from rich.console import Console
from rich.table import Table

from megatron_basp.exchange_cost import AttentionShape, ExchangeModel
from megatron_basp.library import named_cluster
from megatron_basp.placement import Placement
from megatron_basp.plan import Limits, plan_batch

RANKS = (8, 16, 32, 64, 128, 256, 512, 720, 1024)
FIGURE = Path(__file__).parents[2] / "docs" / "planner-time.svg"


def milliseconds(ranks: int, rows: int, by_seconds: bool) -> float:
    limits = Limits(ranks, ranks, domain_size=8)
    nodes = Placement((tuple(rank // 8 for rank in range(ranks)),))
    exchange = ExchangeModel(named_cluster("h100-8"), AttentionShape(ranks, ranks, 128, 128, 2), nodes)
    lengths, least = (ranks * 64,) * rows, float("inf")
    for _ in range(5):
        start = time.perf_counter()
        plan_batch(lengths, ranks, limits, exchange.cost_of(lengths[0]) if by_seconds else None)
        least = min(least, time.perf_counter() - start)
    return least * 1e3


def main() -> None:
    pyplot.rcParams.update({"svg.hashsalt": "planner", "svg.fonttype": "none", "font.size": 9})
    table = Table(title=f"plan_batch, ms (Python {platform.python_version()}, {platform.machine()})")
    for heading in ("N", "B", "by bytes", "by seconds"):
        table.add_column(heading, justify="right")
    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for name, rows_of in (("B = N - 1", lambda n: n - 1), ("B = 4N - 1", lambda n: 4 * n - 1), ("B = 4096", None)):
        points = []
        for ranks in RANKS:
            rows = 4096 if rows_of is None else rows_of(ranks)
            by_bytes, by_seconds = (milliseconds(ranks, rows, kind) for kind in (False, True))
            table.add_row(str(ranks), str(rows), f"{by_bytes:.3f}", f"{by_seconds:.3f}")
            points.append(by_seconds)
        axes.plot(RANKS, points, "o-", label=name)
        table.add_section()
    axes.plot([8, 64], [1, 1], "k--", linewidth=1, label="limits: 1 ms to N = 64, 100 ms at N = 1024")
    axes.plot([900, 1150], [100, 100], "k--", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="N, ranks", ylabel="ms to choose a plan")
    axes.set_xticks(RANKS, [str(n) if n != 720 else "" for n in RANKS])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(FIGURE, metadata={"Date": None})
    Console().print(table)


if __name__ == "__main__":
    main()
