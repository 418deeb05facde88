"""The tables as a picture: what is published, modelled and measured, each in a colour of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_basp.reproduction.loss import LossCurves
from megatron_basp.reproduction.report import SHARES
from megatron_basp.reproduction.rows import Row

# Name in the legend, marker and colour, and the figure of a row.
SERIES: tuple[tuple[str, str, str, Callable[[Row], float | None]], ...] = (
    ("modelled", "s", "tab:blue", lambda row: row.modelled_value),
    ("measured, emulated cluster", "o", "tab:orange", lambda row: row.measured),
    ("measured, GPUs", "D", "tab:green", lambda row: row.gpus.value if row.gpus else None),
)
PANELS = (
    ("speedup", "speed-up over Ulysses, by model", lambda row: row.case.model),
    ("exchange_share", "exchange, % of a step", lambda row: f"{row.case.model}, {row.case.of}"),
    ("exchange_time", "exchange alone, times faster", lambda row: row.case.model),
    ("batch_sweep", "speed-up over Ulysses, by B", lambda row: f"B={row.case.micro_batch_size}"),
    ("sequence_sweep", "step-time cut, %, by S", lambda row: f"{row.case.seq_length // 1024}K"),
)


def draw(rows: Sequence[Row], losses: LossCurves | None, file: Path) -> None:
    """losses: of the last panel, which stays empty without."""
    figure = Figure(figsize=(13, 8), layout="constrained")
    axes = figure.subplots(2, 3).flat
    for (table, title, name), ax in zip(PANELS, axes, strict=False):
        of_table = [row for row in rows if row.case.table == table and row.modelled_value is not None]
        _panel(ax, of_table, [name(row) for row in of_table], title)
    _draw_losses(axes[len(PANELS)], losses)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(file, dpi=110, metadata={"Software": None})


def _panel(ax: Axes, rows: Sequence[Row], names: Sequence[str], title: str) -> None:
    unit = 100 if rows[0].case.quantity in SHARES else 1
    # A bar from one end of the published range to the other; a figure alone is a short one.
    for place, row in enumerate(rows):
        if row.case.paper is not None:
            low, high = row.case.paper if isinstance(row.case.paper, tuple) else (row.case.paper,) * 2
            ax.plot(
                [place] * 2, [unit * low, unit * high], color="0.6", linewidth=14, solid_capstyle="butt", alpha=0.6
            )
            marker = "x" if row.case.inconsistent else "_" if low == high else ""
            ax.plot([place], [unit * (low + high) / 2], marker, color="0.3", markersize=12)
    ax.plot([], [], "_", color="0.3", markersize=12, label="paper (bar: a range; ×: contradicts itself)")
    for name, marker, colour, value_of in SERIES:
        values = [value_of(row) for row in rows]
        shown = [(place, unit * value) for place, value in enumerate(values) if value is not None]
        ax.plot([place for place, _ in shown], [v for _, v in shown], marker, color=colour, label=name)
    ax.set_xticks(range(len(names)), names)
    if max(map(len, names)) > 5:
        ax.set_xticks(range(len(names)), names, rotation=40, ha="right")
    ax.set_title(title, fontsize=10)
    ax.grid(axis="y", alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)


def _draw_losses(ax: Axes, losses: LossCurves | None) -> None:
    ax.set_title("training loss, measured", fontsize=10)
    if losses is None:
        ax.text(0.5, 0.5, "not measured", ha="center", va="center", transform=ax.transAxes)
        return
    widths = {name: 4 - index for index, name in enumerate(losses.losses)}
    for name, curve in losses.losses.items():
        ax.plot(range(1, losses.steps + 1), curve, linewidth=widths[name], alpha=0.8, label=name)
    ax.set_xlabel(f"step; largest difference {losses.largest_difference:.1e}")
    ax.legend(frameon=False, fontsize=8)
