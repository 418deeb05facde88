"""The ledger's totals for people: which part of a training step sends how much, where to, and for how long."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from megatron_basp.ledger import Amount, Collective
from megatron_basp.ledger_file import Header, total

PARTS = {
    "exchange": "exchange of attention (BASP)",
    "dp": "data parallelism",
    "tp": "tensor parallelism",
    "pp": "pipeline, embeddings",
    "ep": "experts",
    "cp": "losses and plans of CP groups",
    "other": "norms, logs, the rest",
}
MEBIBYTE = 2**20


def print_summary(header: Header, steps: int, totals: Mapping[Collective, Amount]) -> None:
    """Print the table of one rank; `totals` are sums over so many training steps."""
    table = Table(
        title=f"sent by rank {header.rank}, a training step of {steps} ({header.mode})", title_justify="left"
    )
    for name in ("", "collectives", "MiB inside nodes", "MiB across nodes", "share of bytes", "ms", "share of ms"):
        table.add_column(name, justify="right" if name else "left")
    parts = total({Collective(c.part, "", "", 0): amount} for c, amount in totals.items())
    amounts = {collective.part: amount for collective, amount in parts.items()}
    all_bytes = sum(amount.sent_bytes for amount in amounts.values())
    times = [amount.seconds for amount in amounts.values()]
    all_seconds = None if None in times else sum(time for time in times if time is not None)
    for part, name in PARTS.items():
        if (amount := amounts.get(part)) is None:
            continue
        table.add_row(
            name,
            f"{amount.count / steps:.4g}",
            f"{amount.same_node_bytes / steps / MEBIBYTE:.3f}",
            f"{amount.across_nodes_bytes / steps / MEBIBYTE:.3f}",
            _share(amount.sent_bytes, all_bytes),
            "not measured" if amount.seconds is None else f"{amount.seconds * 1e3 / steps:.3f}",
            _share(amount.seconds, all_seconds),
        )
    Console(width=120).print(table)


def _share(amount: float | None, whole: float | None) -> str:
    return f"{amount / whole:.1%}" if amount is not None and whole else "–"
