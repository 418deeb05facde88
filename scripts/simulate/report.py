"""The comparison as a table on the terminal, as Markdown, as JSON, and as a picture."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from megatron_basp.atomic_files import write_json
from megatron_basp.version import __version__
from scripts.simulate.cases import SWEEP_RANKS
from scripts.simulate.result import BOUND, Comparison

COLUMNS = (
    "case", "GPUs", "sequences", "flow a", "modelled ms", "simulated ms", "difference",
    "modelled MB", "simulated MB", "difference",
)  # fmt: skip
LEGEND = (
    "One layer, one direction, all waves; latency included, copies left out. MB: out of the node that sends most, all "
    "its GPUs together. Flow a peer: each pair of GPUs has one; a node: all that a GPU sends to another node is one."
)
COLOURS = {"Ulysses": "tab:orange", "BASP": "tab:blue"}


def cells(one: Comparison) -> tuple[str, ...]:
    return (
        one.case.name,
        str(one.case.training.parallelism.devices),
        one.case.waves,
        one.case.flows,
        f"{one.modelled_seconds * 1e3:.3f}",
        f"{one.simulated_seconds * 1e3:.3f}",
        f"{one.time_difference:+.2%}",
        f"{one.modelled_node_bytes / 1e6:.1f}",
        f"{one.simulated_node_bytes / 1e6:.1f}",
        f"{one.bytes_difference:+.2%}",
    )


def print_table(comparisons: Sequence[Comparison]) -> None:
    table = Table(caption=LEGEND)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("case", "sequences", "flow a") else "right")
    for one in comparisons:
        table.add_row(*cells(one), style=None if one.agrees else "bold red")
    # Into a file or a pipe a row stays one line.
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def write_report(comparisons: Sequence[Comparison], folder: Path) -> None:
    versions = f"megatron_basp {__version__}, SimGrid {comparisons[0].simgrid}"
    rows = [COLUMNS, ["---"] * len(COLUMNS), *map(cells, comparisons)]
    lines = [f"`make simulate`, {versions}. {LEGEND}", "", *("| " + " | ".join(row) + " |" for row in rows)]
    (folder / "table.md").write_text("\n".join(lines) + "\n")
    result = {"versions": versions, "bound": BOUND, "cases": list(map(as_json, comparisons))}
    write_json(folder / "result.json", result)
    draw([one for one in comparisons if one.case.sweep], folder / "step_time.png")


def as_json(one: Comparison) -> dict[str, Any]:
    return {
        "case": one.case.name,
        "cluster": one.case.training.cluster.name,
        "gpus": one.case.training.parallelism.devices,
        "waves": [{"rows": len(wave.rows), "group_size": wave.group_size} for wave in one.case.plan.waves],
        "flows": one.flows,
        "flow_a": one.case.flows,
        "modelled": {
            "seconds": one.modelled_seconds,
            "node_bytes": one.modelled_node_bytes,
            "step_seconds": one.step.step_seconds,
        },
        "simulated": {
            "seconds": one.simulated_seconds,
            "node_bytes": one.simulated_node_bytes,
            "step_seconds": one.simulated_step_seconds,
        },
        "agrees": one.agrees,
    }


def draw(comparisons: Sequence[Comparison], file: Path) -> None:
    """Lines are modelled, dots simulated."""
    training = comparisons[0].case.training
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    seconds, node_bytes = figure.subplots(1, 2)
    for sweep, colour in COLOURS.items():
        ones = [one for one in comparisons if one.case.sweep == sweep]
        ranks = [one.case.plan.ranks for one in ones]
        for ax, modelled, simulated in (
            (seconds, [one.step.step_seconds for one in ones], [one.simulated_step_seconds for one in ones]),
            (
                node_bytes,
                [one.modelled_node_bytes / 1e9 for one in ones],
                [one.simulated_node_bytes / 1e9 for one in ones],
            ),
        ):
            ax.plot(ranks, modelled, color=colour, label=f"{sweep}, modelled")
            ax.plot(ranks, simulated, "o", color=colour, label=f"{sweep}, exchange simulated")
    computing = comparisons[0].step.arithmetic_seconds + comparisons[0].step.optimizer_seconds
    seconds.axhline(computing, color="0.5", linestyle=":", label="arithmetic and optimizer, modelled")
    decorate(seconds, "seconds a step")
    decorate(node_bytes, "GB out of a node, a layer and direction")
    size, head_size = training.model.heads, training.model.head_size
    figure.suptitle(
        f"{training.cluster.name}, {size} heads of {head_size}, {training.model.layers} layers, sequences of "
        f"{training.seq_length:,} tokens, B = N/8",
        fontsize=10,
    )
    figure.savefig(file, dpi=120, metadata={"Software": None})


def decorate(ax: Axes, label: str) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(SWEEP_RANKS, [str(ranks) for ranks in SWEEP_RANKS])
    ax.minorticks_off()
    ax.set_ylim(bottom=0)
    ax.set_xlabel("N, context-parallel ranks")
    ax.set_ylabel(label)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8)
