"""What runs of `megatron-basp bench train` say of a row; their document: `megatron_basp/emulated/results.py`.

On the emulated cluster a small model stands for the row's, and the link is set so that Ulysses spends the same share
of its step in the exchange as on the row's own cluster. What is kept is the batch, the number of ranks and whether
there are fewer key-value heads than ranks in a group. On GPUs the run is the row's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_basp.model_spec import ModelSpec
from megatron_basp.reproduction.cases import Case

PAPER_RANKS = 8  # 2 nodes of 4; the emulated cluster has the same
# How far Ulysses' share of the exchange may be from the row's, in points, for a run to stand for it.
SHARE_TOLERANCE = 0.05


@dataclass(frozen=True)
class Point:
    """One run at one rate of the link.

    document: what `bench train` wrote. rows: by mode, of this rate.
    """

    document: Mapping[str, Any]
    link_mbit: float | None
    rows: Mapping[str, Mapping[str, Any]]

    @property
    def ranks(self) -> int:
        return int(self.document["shape"]["ranks"])

    @property
    def micro_batch_size(self) -> int:
        return int(self.document["shape"]["micro_batch_size"])

    @property
    def copies_kv_heads(self) -> bool:
        """Whether BASP's groups are larger than there are key-value heads."""
        return bool(self.document["shape"]["kv_heads"] < max(self.document["modes"]["basp"]["group_sizes"]))

    @property
    def ulysses_share(self) -> float | None:
        """None where it was not measured."""
        share = self.rows["ulysses"]["exchange_share"]
        return None if share is None else float(share)

    @property
    def place(self) -> str:
        """Which link and how much of the step: the beginning of a note."""
        cluster, basp = self.document["cluster"], self.rows["basp"]
        nodes = f"{cluster['nodes']}x{cluster['ranks_per_node']}"
        link = nodes if self.link_mbit is None else f"{nodes}, {self.link_mbit:g} Mbit/s"
        parts = [link, f"K = {', '.join(map(str, self.document['modes']['basp']['group_sizes']))}"]
        if self.ulysses_share is not None:
            parts.append(f"Ulysses' share {100 * self.ulysses_share:.1f} %")
        if basp["share_of_bound"] is not None:
            parts.append(f"{100 * basp['share_of_bound']:.0f} % of the bound")
        if self.document["compute"] == "sleep":
            parts.append("attention is a pause")
        if not self.document["is_finished"]:
            parts.append("interrupted")
        return ", ".join(parts)


@dataclass(frozen=True)
class Measured:
    """A figure, and where it is from. value: None where that run has none."""

    value: float | None
    point: Point
    note: str


def is_document(content: Any) -> bool:
    """Whether `bench train` wrote it."""
    needed = ("rows", "shape", "cluster", "modes", "link", "compute", "backend", "is_finished", "command", "date")
    return isinstance(content, dict) and all(key in content for key in needed)


def points(documents: Iterable[Mapping[str, Any]]) -> list[Point]:
    """The runs with Ulysses and BASP over a link that packets really crossed; a modelled link is no measurement."""
    found = []
    for document in documents:
        if document["link"] != "measured":
            continue
        for link_mbit in dict.fromkeys(row["link_mbit"] for row in document["rows"]):
            rows = {row["mode"]: row for row in document["rows"] if row["link_mbit"] == link_mbit}
            if {"ulysses", "basp"} <= rows.keys():
                found.append(Point(document, link_mbit, rows))
    return found


def emulated(case: Case, copies_kv_heads: bool, share: float, found: Sequence[Point]) -> Measured | str:
    """The run with the nearest share, or why there is none.

    Args:
        copies_kv_heads: whether the row's groups are larger than the number of its key-value heads.
        share: of Ulysses' step in the exchange, on the row's cluster.
    """
    if why := why_not_emulated(case):
        return why
    distance, nearest = nearest_share(case, copies_kv_heads, share, found)
    if nearest is None:
        return "not measured"
    if distance > SHARE_TOLERANCE:
        return f"not measured at a share of {100 * share:.0f} %, the nearest is {100 * distance:.0f} points off"
    return Measured(figure(case, nearest), nearest, nearest.place)


def nearest_share(
    case: Case, copies_kv_heads: bool, share: float, found: Sequence[Point]
) -> tuple[float, Point | None]:
    """Of the runs that can stand for the row, the one with the nearest share, and how far it is."""
    alike = [
        (abs(point.ulysses_share - share), point)
        for point in found
        if point.ulysses_share is not None and stands_for(point, case, copies_kv_heads)
    ]
    return min(alike, key=lambda one: one[0], default=(float("inf"), None))


def why_not_emulated(case: Case) -> str:
    """Empty where the emulated cluster can stand for the row."""
    if case.ranks != PAPER_RANKS:
        return f"more than the {PAPER_RANKS} ranks of the emulated cluster"
    if "2x4" not in case.cluster:
        return "the emulated cluster has two nodes"
    if case.quantity == "memory_ratio":
        return "a CPU's processes do not show it"
    if case.quantity == "over_plain" and (case.micro_batches > 1 or PAPER_RANKS % case.micro_batch_size):
        return "not measured"
    return ""


def stands_for(point: Point, case: Case, copies_kv_heads: bool) -> bool:
    return (
        point.ranks == case.ranks
        and point.micro_batch_size == case.micro_batch_size
        and point.copies_kv_heads == copies_kv_heads
    )


def on_gpus(case: Case, model: ModelSpec, found: Sequence[Point]) -> Measured | None:
    """The run of the row's own model and batch, over as many ranks.

    A row of the paper's size may take one over fewer, and the note says so; a larger one is about its number of ranks.
    """
    shape = {
        "layers": model.layers,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_size": model.head_size,
        "seq_length": case.seq_length,
        "micro_batch_size": case.micro_batch_size,
        "micro_batches": case.micro_batches,
    }
    alike = [
        point
        for point in found
        if shape.items() <= dict(point.document["shape"]).items() and case.ranks in (point.ranks, PAPER_RANKS)
    ]
    point = max(alike, key=lambda point: (point.ranks == case.ranks, point.ranks), default=None)
    if point is None:
        return None
    other = "" if point.ranks == case.ranks else f"N = {point.ranks}, "
    return Measured(figure(case, point), point, f"{point.document['machine']['device']}, {other}{point.place}")


def figure(case: Case, point: Point) -> float | None:
    """What a run says of the row's quantity; None where it has not measured that."""
    ulysses, basp = point.rows["ulysses"], point.rows["basp"]
    match case.quantity:
        case "speedup":
            return _ratio(ulysses, basp, "step_milliseconds")
        case "step_time_cut":
            return 1 - float(basp["step_milliseconds"]) / float(ulysses["step_milliseconds"])
        case "exchange_share":
            share = point.rows[case.of]["exchange_share"]
            return None if share is None else float(share)
        case "exchange_ratio":
            return _ratio(ulysses, basp, "exchange_milliseconds")
        case "memory_ratio":
            return _ratio(basp, ulysses, "peak_memory_bytes")
        case "over_plain":
            return _ratio(point.rows.get("reflagged", {}), basp, "step_milliseconds")


def _ratio(above: Mapping[str, Any], below: Mapping[str, Any], key: str) -> float | None:
    return float(above[key]) / float(below[key]) if above.get(key) and below.get(key) else None
