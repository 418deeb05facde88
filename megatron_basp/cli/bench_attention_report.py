"""The attention benchmark on the terminal and as a plot."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

COLORS = {
    "megatron_basp": "tab:orange",
    "transformer_engine": "tab:green",
    "deepspeed": "tab:blue",
    "yunchang": "tab:purple",
}
NUMBERS = (
    *("collec-\ntives", "MB\nsent", "MB\ncopied", "ms", "quartiles", "time\nto ours"),
    *("bare\nwire, ms", "outside,\nms", "outside\nto ours", "CPU,\nms", "largest\nerror"),
)
WIDTH = 132  # less would cut numbers


def show(document: dict[str, Any], file: Path) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for part, in_part in groupby(sorted(document["rows"], key=_by_part), key=_by_part):
        table = Table(title=part, title_justify="left", box=box.SIMPLE, pad_edge=False, padding=(0, 0, 0, 1))
        table.add_column("", no_wrap=True)
        for name in NUMBERS:
            table.add_column(name, justify="right", no_wrap=True)
        for (group_size, shape), rows in groupby(in_part, key=_by_case):
            table.add_row(f"K={group_size}, {shape}", style="bold")
            for row in rows:
                table.add_row(*_cells(row))
        Console(width=WIDTH).print(table)
    for one in document["unsupported"]:
        console.print(
            f"{one['implementation']} does not support {one['shape']} at K={one['K']}: {one['reason']}",
            highlight=False,
            soft_wrap=True,
        )
    if document["missing"]:
        console.print(f"Not installed: {', '.join(document['missing'])}; `make bench` brings them.", highlight=False)
    which = ", ".join(f"{name} {what}" for name, what in document["implementations"].items())
    console.print(
        f"Of one rank, forward and backward, in fp32; memory {document['settings']['memory']}; {which}. "
        f"Written: {file}, {file.with_suffix('.csv').name}, {file.with_suffix('.svg').name}",
        highlight=False,
        soft_wrap=True,
    )


def _by_part(row: dict[str, Any]) -> str:
    return row["part"]


def _by_case(row: dict[str, Any]) -> tuple[int, str]:
    return row["K"], row["shape"]


def _cells(row: dict[str, Any]) -> list[str]:
    outside = row["outside_wire_ratio_to_ours"]
    return [
        f"  {row['implementation']}",
        str(row["collectives"]),
        f"{row['bytes_sent'] / 1e6:.2f}",
        f"{row['bytes_copied'] / 1e6:.2f}",
        f"{row['milliseconds']:.1f}",
        f"{row['milliseconds_low']:.1f}–{row['milliseconds_high']:.1f}",
        f"{row['ratio_to_ours']:.2f}",
        f"{row['wire_milliseconds']:.1f}",
        f"{row['outside_wire_milliseconds']:.1f}",
        "–" if outside is None else f"{outside:.2f}",
        f"{row['cpu_milliseconds']:.1f}",
        f"{row['max_error']:.0e}",
    ]


def draw(document: dict[str, Any], file: Path) -> None:
    """Times over ours, by K and shape: the exchange above, with attention below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = document["rows"]
    parts = list(dict.fromkeys(row["part"] for row in rows))
    cases = list(dict.fromkeys((row["K"], row["shape"]) for row in rows))
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    figure, axes = pyplot.subplots(
        len(parts), 1, sharex=True, squeeze=False, figsize=(max(8, 3 + 0.7 * len(cases)), 8), layout="constrained"
    )
    width = 0.8 / len(names)
    for axis, part in zip(axes[:, 0], parts, strict=True):
        for index, name in enumerate(names):
            own = [row for row in rows if (row["part"], row["implementation"]) == (part, name)]
            ours = [row["milliseconds"] / row["ratio_to_ours"] for row in own]
            ratios = [row["ratio_to_ours"] for row in own]
            spread = [
                [(row["milliseconds"] - row["milliseconds_low"]) / base for row, base in zip(own, ours, strict=True)],
                [(row["milliseconds_high"] - row["milliseconds"]) / base for row, base in zip(own, ours, strict=True)],
            ]
            places = [cases.index((row["K"], row["shape"])) + (index - (len(names) - 1) / 2) * width for row in own]
            label = name if document["implementations"][name][0].isdigit() else f"{name} (form)"
            axis.bar(places, ratios, width, yerr=spread, label=label, color=COLORS[name], error_kw={"linewidth": 0.8})
        axis.axhline(1, color="0.3", linewidth=0.8)
        axis.set_ylabel(f"{part}: time over ours")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), ncols=len(names), loc="outside upper center")
    axes[-1, 0].set_xticks(range(len(cases)), [f"K={k}\n{shape}" for k, shape in cases], rotation=45, ha="right")
    figure.savefig(file)
    pyplot.close(figure)
