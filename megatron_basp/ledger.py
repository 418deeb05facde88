"""What was sent: collectives, bytes and peers, counted by the code that sends.

Nothing here knows the formulas; tests compare the count with them. Pure: no torch, no Megatron.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Direction = Literal["forward", "backward"]


MICRO_BATCH = 0  # stands for a layer's number, which starts at 1, where tokens are exchanged and not activations


class Exchange(NamedTuple):
    """One kind of collective: which layer, which of its exchanges, which way, in groups of what size."""

    layer: int
    operation: str
    direction: Direction
    group_size: int


@dataclass
class Ledger:
    """Counts of one rank since the last `reset`.

    timing: makes the context that each collective is sent in; something that measures, where somebody asked for it.
    """

    collectives: Counter[Exchange] = field(default_factory=Counter)
    sent_bytes: Counter[Exchange] = field(default_factory=Counter)
    sent_bytes_to_peer: Counter[int] = field(default_factory=Counter)
    timing: Callable[[], AbstractContextManager[None]] = nullcontext

    def record(self, exchange: Exchange, peers: Sequence[int], bytes_per_peer: Sequence[int]) -> None:
        """Count one collective.

        Args:
            peers: global ranks of the group, without this rank.
            bytes_per_peer: bytes sent to each of them.
        """
        self.collectives[exchange] += 1
        self.sent_bytes[exchange] += sum(bytes_per_peer)
        for peer, n_bytes in zip(peers, bytes_per_peer, strict=True):
            self.sent_bytes_to_peer[peer] += n_bytes

    def reset(self) -> None:
        self.collectives.clear()
        self.sent_bytes.clear()
        self.sent_bytes_to_peer.clear()

    @property
    def total_bytes(self) -> int:
        return sum(self.sent_bytes.values())

    def as_dict(self) -> dict[str, Any]:
        """For JSON: totals, one entry a kind of exchange, bytes to each peer."""
        return {
            "collectives": sum(self.collectives.values()),
            "sent_bytes": self.total_bytes,
            "exchanges": [
                {**exchange._asdict(), "collectives": count, "sent_bytes": self.sent_bytes[exchange]}
                for exchange, count in sorted(self.collectives.items())
            ],
            "sent_bytes_to_peer": {str(peer): n_bytes for peer, n_bytes in sorted(self.sent_bytes_to_peer.items())},
        }
