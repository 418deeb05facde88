"""The ledger's totals for people: which part of a training step sends how much, where to, and for how long."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.table import Table

from megatron_basp.ledger import Amount, Collective
from megatron_basp.ledger_file import Header

PARTS = {
    "exchange": "exchange of attention",
    "dp": "data parallelism",
    "tp": "tensor parallelism",
    "pp": "pipeline, embeddings",
    "ep": "experts",
    "cp": "losses of CP groups",
    "other": "norms, logs, the rest",
}
MEBIBYTE = 2**20


def print_summary(header: Header, steps: int, totals: Mapping[Collective, Amount]) -> None:
    """Print the table of one rank; `totals` are sums over so many training steps."""
    parts = {part: [a for c, a in totals.items() if c.part == part] for part in PARTS}
    whole_bytes, whole_seconds = _sent_bytes(totals.values()), _seconds(totals.values())
    table = Table(
        title=f"sent by rank {header.rank}, a training step of {steps} ({header.mode})", title_justify="left"
    )
    for name in ("", "collectives", "MiB inside nodes", "MiB across nodes", "share of bytes", "ms", "share of ms"):
        table.add_column(name, justify="right" if name else "left")
    for part, amounts in parts.items():
        if amounts:
            table.add_row(
                PARTS[part],
                f"{sum(amount.count for amount in amounts) / steps:.4g}",
                f"{sum(amount.same_node_bytes for amount in amounts) / steps / MEBIBYTE:.3f}",
                f"{sum(amount.across_nodes_bytes for amount in amounts) / steps / MEBIBYTE:.3f}",
                _share(_sent_bytes(amounts), whole_bytes),
                f"{_seconds(amounts) / steps * 1e3:.3f}",
                _share(_seconds(amounts), whole_seconds),
            )
    Console(width=120).print(table)


def _sent_bytes(amounts: Iterable[Amount]) -> int:
    return sum(amount.sent_bytes for amount in amounts)


def _seconds(amounts: Iterable[Amount]) -> float:
    """Of calls without a time of their own it is that of their batch, which is among them."""
    return sum(amount.seconds for amount in amounts if amount.seconds is not None)


def _share(amount: float, whole: float) -> str:
    return f"{amount / whole:.1%}" if whole else "–"
