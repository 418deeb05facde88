"""The training benchmark on the terminal and as a plot."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

NUMBERS = (
    *("step,\nms", "quartiles", "exchange", "speed-\nup", "of\nbound", "loss dif-\nference"),
    *("MB by\ncounters", "the ex-\nchange's", "by\nledger", "by\nformula", "CPU,\ns", "others,\ns"),
)
COLORS = {"basp": "tab:orange", "reflagged": "tab:green", "no_exchange": "0.4"}
LABELS = {"basp": "BASP", "reflagged": "plain flags", "no_exchange": "no exchange (the bound)"}
# Share of Ulysses' step and speed-up, as the paper has them (arXiv 2609.03151); ranges where it gives those.
PAPER = {
    "Qwen1.5-1.8B, paper": (0.377, (1.31, 1.32)),
    "Llama 3.2-1B, paper: within": (0.335, (1.17, 1.32)),
}


def show(document: dict[str, Any], file: Path) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    cluster, rows = document["cluster"], document["rows"]
    for link_mbit, at_rate in groupby(rows, key=lambda row: row["link_mbit"]):
        rate = "" if link_mbit is None else f", {link_mbit} Mbit/s"
        pause = document["pause_milliseconds"]
        compute = "" if pause is None else f"; attention is a pause of {pause:g} ms a step"
        table = Table(
            title=f"{cluster['nodes']} nodes of {cluster['ranks_per_node']}{rate}, link {document['link']}{compute}",
            title_justify="left",
            box=box.SIMPLE,
            pad_edge=False,
            padding=(0, 0, 0, 1),
        )
        table.add_column("", no_wrap=True)
        for name in NUMBERS:
            table.add_column(name, justify="right", no_wrap=True)
        for row in at_rate:
            table.add_row(*_cells(row))
        Console(width=132).print(table)
    console = Console()
    for mode, one in document["modes"].items():
        console.print(f"{mode}: {one['what']}", highlight=False, soft_wrap=True)
    for mode, why in document["left_out"].items():
        console.print(f"{mode} is left out: {why}", highlight=False, soft_wrap=True)
    console.print(
        f"Medians of {document['steps']} steps; speed-up over ulysses. Exchange: share of the step that a rank stood "
        f"still for. MB that left a node in a step, of all nodes: by the counters of links; the exchange's, which is "
        f"these without those of no_exchange; by the ledger; by the formula. Written: {file}, "
        f"{file.with_suffix('.csv').name}, {file.with_suffix('.png').name}",
        highlight=False,
        soft_wrap=True,
    )


def _cells(row: dict[str, Any]) -> list[str]:
    by_counters = row["bytes_by"] == "counters"
    return [
        row["mode"],
        f"{row['step_milliseconds']:.0f}",
        f"{row['step_milliseconds_low']:.0f}–{row['step_milliseconds_high']:.0f}",
        _number(row["exchange_share"], ".1%"),
        _number(row["speedup_over_ulysses"], ".3f"),
        _number(row["share_of_bound"], ".1%"),
        _number(row["max_loss_difference"], ".1e"),
        _megabytes(row["across_node_bytes_per_step"]),
        _megabytes(row["across_node_exchange_bytes_per_step"] if by_counters else None),
        _megabytes(row["ledger_bytes_per_step"]),
        _megabytes(row["formula_bytes_per_step"]),
        _number(row["cpu_seconds"], ".1f"),
        _number(row["others_cpu_seconds"], ".1f"),
    ]


def _megabytes(n_bytes: float | None) -> str:
    return _number(None if n_bytes is None else n_bytes / 1e6, ".3f")


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def draw(document: dict[str, Any], file: Path) -> None:
    """Speed-up over the share that the exchange has of Ulysses' step, a point for each rate of the link."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shares = {row["link_mbit"]: row["exchange_share"] for row in document["rows"] if row["mode"] == "ulysses"}
    figure, axis = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    most = max([0.5, *(share * 1.1 for share in shares.values())])
    grid = [most * step / 50 for step in range(50)]
    axis.plot(grid, [1 / (1 - share) for share in grid], color="0.8", linewidth=1, label="all of the exchange saved")
    for mode, color in COLORS.items():
        own = [row for row in document["rows"] if row["mode"] == mode]
        if not own:
            continue
        points = sorted((shares[row["link_mbit"]], row["speedup_over_ulysses"]) for row in own)
        axis.plot(*zip(*points, strict=True), "o-", color=color, label=LABELS[mode], linewidth=1, markersize=5)
    for index, (label, (share, (low, high))) in enumerate(PAPER.items()):
        axis.plot([share] * 2, [low, high], "_-", color=("tab:blue", "tab:purple")[index], label=label, markersize=8)
    axis.set_xlabel("share of the exchange in Ulysses' step")
    axis.xaxis.set_major_formatter("{x:.0%}")
    axis.set_ylabel("speed-up over Ulysses")
    cluster, compute = document["cluster"], document["compute"]
    what = "" if compute == "real" else ", attention is a pause"
    axis.set_title(f"{cluster['nodes']} nodes of {cluster['ranks_per_node']}, link {document['link']}{what}")
    axis.legend(fontsize="small")
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
