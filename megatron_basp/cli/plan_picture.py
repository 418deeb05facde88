"""Which rank works on which sequence, in which node: a picture of a plan, wave by wave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from megatron_basp.plan import BatchPlan, Share
from megatron_basp.training_spec import TrainingSpec

COLOURS = ("#7fb2e5", "#f6b26b", "#93c47d", "#c9a0dc", "#ffd966", "#76c7c0", "#e6a0b4", "#b7b7b7")
CROSSING = "#cc0000"
LEAST_INCHES = 0.42  # a cell that letters fit into; racks of 72 make a wide picture
# In cells.
CELLS_PER_LINE, LEAST_WIDTH, GAP, LINE_HEIGHT, CAPTION_HEIGHT = 32, 9, 0.7, 2.0, 1.0


class Place(NamedTuple):
    """Of a rank: its node, and the how many-th rank there it is."""

    node: Hashable
    cell: int


def places(training: TrainingSpec) -> list[list[Place]]:
    """Of the ranks of each replica that sits in nodes in a way of its own; tensor-parallel ranks are one."""
    taken: Counter[Hashable] = Counter()
    found = []
    for nodes in training.placement.domains[:: training.parallelism.tensor_model_parallel_size]:
        found.append([])
        for node in nodes:
            found[-1].append(Place(node, taken[node]))
            taken[node] += 1
    return found


def crossing_groups(shares: Sequence[Share], where: Sequence[Place]) -> set[int]:
    """Groups of a wave whose ranks are in several nodes."""
    nodes: dict[int, set[Hashable]] = {}
    for share, place in zip(shares, where, strict=True):
        nodes.setdefault(share.group_index, set()).add(place.node)
    return {group for group, of_group in nodes.items() if len(of_group) > 1}


def draw(training: TrainingSpec, plan: BatchPlan, title: str, file: Path) -> None:
    """Draw one context-parallel group: of all replicas, one with the most groups that straddle nodes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    waves = list(zip(*(plan.shares(rank) for rank in range(plan.ranks)), strict=True))
    where = max(places(training), key=lambda of_group: sum(len(crossing_groups(wave, of_group)) for wave in waves))
    fullest = max(place.cell for of_group in places(training) for place in of_group) + 1
    cells = max(fullest, training.cluster.gpus_per_node // training.parallelism.tensor_model_parallel_size)
    lines = _lines(where, cells)
    height = LINE_HEIGHT * len(lines) + CAPTION_HEIGHT
    right, top = max(len(lines[0]) * (cells + GAP) - GAP, LEAST_WIDTH) + 0.3, 1.6
    bottom = -height * len(waves)
    scale = max(LEAST_INCHES, min(0.75, 14 / right))  # to a cell
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "plan"}):
        figure = pyplot.figure(figsize=((right + 0.3) * scale, (top - bottom) * scale))
        ax = figure.add_axes((0, 0, 1, 1))
        ax.set_xlim(-0.3, right)
        ax.set_ylim(bottom, top)
        ax.axis("off")
        ax.text(0, top - 0.2, f"{title}\n{_what(training, plan)}", fontsize=9, va="top")
        for index, wave in enumerate(waves):
            y = -height * index
            crossing = crossing_groups(wave, where)
            ax.text(0, y - 0.35, _caption(index, len(waves), wave, crossing), fontsize=9, weight="bold", va="center")
            _draw_wave(ax, y - CAPTION_HEIGHT, wave, where, lines, cells, crossing)
        # Without its date a picture of the same plan is the same file.
        figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
        pyplot.close(figure)


def _what(training: TrainingSpec, plan: BatchPlan) -> str:
    parallelism = training.parallelism
    tensor_parallel = parallelism.tensor_model_parallel_size
    cell = f"{tensor_parallel} GPUs" if tensor_parallel > 1 else "a GPU"
    replica = f", one of {parallelism.data_parallel_size} replicas" if parallelism.data_parallel_size > 1 else ""
    return (
        f"{len(plan.lengths)} sequence{'s' if len(plan.lengths) > 1 else ''} on {plan.ranks} ranks{replica}\n"
        f"box: node; cell: rank with its number ({cell}); colour: ranks that share sequences"
    )


def _caption(index: int, waves: int, wave: Sequence[Share], crossing: set[int]) -> str:
    size = wave[0].group_size
    groups = len(wave) // size
    rows = groups * len(wave[0].rows)
    if size == 1:
        said = "nothing is sent"
    elif crossing:
        said = f"{len(crossing)} of {groups} groups straddle nodes" if groups > 1 else "the group straddles nodes"
    else:
        said = "every group stays inside a node"
    number = f"wave {index + 1} of {waves}: " if waves > 1 else ""
    return f"{number}{rows} sequence{'s' if rows > 1 else ''} at K = {size}, {said}"


def _lines(where: Sequence[Place], cells: int) -> list[list[Hashable]]:
    """The nodes, some to a line."""
    nodes = list(dict.fromkeys(place.node for place in where))
    per_line = max(1, CELLS_PER_LINE // cells)
    return [nodes[i : i + per_line] for i in range(0, len(nodes), per_line)]


def _draw_wave(
    ax: Any,
    top: float,
    wave: Sequence[Share],
    where: Sequence[Place],
    lines: list[list[Hashable]],
    cells: int,
    crossing: set[int],
) -> None:
    from matplotlib.patches import FancyBboxPatch

    corner = {
        node: (column * (cells + GAP), top - line * LINE_HEIGHT)
        for line, nodes in enumerate(lines)
        for column, node in enumerate(nodes)
    }
    for node, (x, y) in corner.items():
        shape = FancyBboxPatch((x, y - 1), cells, 1, boxstyle="round,pad=0.12", facecolor="0.95", edgecolor="0.45")
        ax.add_patch(shape)
        ax.text(x, y + 0.2, f"node {node}", fontsize=7, color="0.35", va="bottom")
    spans: dict[tuple[int, float], list[float]] = {}
    ranks = enumerate(zip(wave, where, strict=True))
    for (group, node), run in groupby(ranks, key=lambda one: (one[1][0].group_index, one[1][1].node)):
        ranks_here = list(run)
        x, y = corner[node]
        left, right = x + ranks_here[0][1][1].cell, x + ranks_here[-1][1][1].cell + 1
        _draw_run(ax, left, right, y, ranks_here, is_crossing=group in crossing)
        if group in crossing:
            spans.setdefault((group, y), []).extend((left, right))
    for (_, y), ends in spans.items():
        arrow = {"arrowstyle": "<->", "color": CROSSING, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", (min(ends), y - 1.3), (max(ends), y - 1.3), arrowprops=arrow)


def _draw_run(ax: Any, left: float, right: float, y: float, cells: Sequence[Any], is_crossing: bool) -> None:
    """What a node has of a group: neighbouring ranks in one colour, with their sequences and numbers."""
    from matplotlib.patches import Rectangle

    share = cells[0][1][0]
    shape = Rectangle(
        (left + 0.03, y - 0.97),
        right - left - 0.06,
        0.94,
        facecolor=COLOURS[share.group_index % len(COLOURS)],
        edgecolor=CROSSING if is_crossing else "0.3",
        linewidth=2 if is_crossing else 0.7,
    )
    ax.add_patch(shape)
    label = _sequences(share.rows, is_long=len(cells) > 1)
    ax.text((left + right) / 2, y - 0.3, label, ha="center", va="center", fontsize=7.5)
    for rank, (_, place) in cells:
        x = left + place.cell - cells[0][1][1].cell
        ax.text(x + 0.5, y - 0.76, str(rank), ha="center", va="center", fontsize=5.5, color="0.25")
        if x > left:
            ax.plot([x, x], [y - 0.95, y - 0.55], color="0.3", linewidth=0.5)


def _sequences(rows: Sequence[int], is_long: bool) -> str:
    """Numbers of sequences, from 0; those of a group follow one another."""
    numbers = str(rows[0]) if len(rows) == 1 else f"{rows[0]}–{rows[-1]}"
    return f"sequence{'s' if len(rows) > 1 else ''} {numbers}" if is_long else numbers
