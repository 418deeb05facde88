"""The exchange of one group, without autograd: heads for sequence and back, in flight while something else computes.

Shapes, for a group of K ranks of which rank i holds t_i tokens (`tokens_per_rank`), t on this rank and Σ in all. The
tensors that travel together are q, k and v, or the output, or their gradients; each has heads and a size of its own:
    [t, heads, d]   in sequence shards
    [Σ, g, d]       in head shards: all tokens of the group, this rank's heads, g = max(heads, K)/K
Rank j gets heads [j·g, (j+1)·g); where heads < K, each goes to the K/heads ranks whose query heads attend to it, and
the gradients of its copies are summed.

Each tensor is copied once on its way: packed before it is sent to heads, unpacked after it was sent to the sequence.
At the other end it lands, or leaves, in storage of its own: Transformer Engine copies slices of a packed tensor, and
refuses tensors that begin inside of another. Those that travel together are one launch over NCCL, which coalesces
them, and as many operations, all started before any is waited for, over gloo, which does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from megatron_basp.kernels import Rotary, pack_heads, unpack_heads
from megatron_basp.ledger import EXCHANGE, Collective, Direction, Ledger
from megatron_basp.ranges import NO_RANGES, Range, Ranges
from megatron_basp.transport import Transport, Work


@dataclass(frozen=True)
class ExchangeGroup:
    """Where an exchange takes place and who counts it.

    group: the process group of K ranks.
    transport: what carries it.
    tokens_per_rank: t_i, by rank in the group.
    ledger: where the bytes are written down.
    layer: under which layer number; None where tokens are exchanged and not a layer's activations.
    wave: the index of the wave in the plan.
    ranges: of a profiler.
    """

    group: dist.ProcessGroup
    transport: Transport
    tokens_per_rank: tuple[int, ...]
    ledger: Ledger
    layer: int | None
    wave: int
    ranges: Ranges = NO_RANGES

    @property
    def size(self) -> int:
        return len(self.tokens_per_rank)

    @property
    def tokens(self) -> int:
        return self.tokens_per_rank[self.group.rank()]

    def range(self, function: str, operation: str, direction: Direction) -> Range:
        return self.ranges.of(function, f"{operation} {direction} K={self.size}")


class InFlight:
    """An exchange that was started. It keeps both sides' tensors until it is over.

    On a GPU collectives run on a stream of their own. They begin after what the current stream was given before (the
    packing, the kernel), and whatever it is given after `arrived` waits for them. Memory comes from the current
    stream, and is let go after that wait: who gets it next comes later on the same stream. So none needs
    `record_stream`, which would keep memory for longer than it is used. It holds as long as each exchange is waited
    for on the stream that started it, as it is here: autograd runs backward on forward's stream.
    """

    def __init__(
        self,
        works: Sequence[Work],
        sent: Sequence[Tensor],
        received: Sequence[Tensor],
        name: Collective,
        ledger: Ledger,
    ):
        self._works, self._sent, self._received = works, sent, received
        self._name, self._ledger = name, ledger

    def arrived(self) -> Sequence[Tensor]:
        """What was received, [rows, ...] each. On a GPU the stream waits for it, and the host does not."""
        with self._ledger.timed(self._name):
            for work in self._works:
                work.wait()
        return self._received


def start_to_heads(
    tensors: Sequence[Tensor],
    where: ExchangeGroup,
    operation: str,
    direction: Direction,
    rotary: Rotary | None = None,
) -> InFlight:
    """Pack and send [t, heads, d], rotated on the way if there is `rotary`; what arrives is [Σ, g, d]."""
    ranks, tokens = where.size, where.tokens
    shapes = [(max(x.shape[1], ranks) // ranks, x.shape[2]) for x in tensors]
    sent = where.transport.empty(tensors, [(ranks, tokens, *shape) for shape in shapes])
    with where.range("pack_heads", operation, direction):
        pack_heads(tensors, sent, rotary)
    received = [x.new_empty(sum(where.tokens_per_rank), *shape) for x, shape in zip(tensors, shapes, strict=True)]
    flat = [x.flatten(0, 1) for x in sent]
    return start(flat, received, [tokens] * ranks, where.tokens_per_rank, where, operation, direction)


def start_to_sequence(
    tensors: Sequence[Tensor], where: ExchangeGroup, operation: str, direction: Direction
) -> InFlight:
    """Send [Σ, g, d], which nobody may write to until it has arrived; see `unpack`."""
    sent = where.transport.holding(tensors)
    received = [x.new_empty(where.size * where.tokens, *x.shape[1:]) for x in tensors]
    return start(sent, received, where.tokens_per_rank, [where.tokens] * where.size, where, operation, direction)


def unpack(in_flight: InFlight, targets: Sequence[Tensor], rotary: Rotary | None = None) -> None:
    """Wait for what was sent to the sequence and write it to `targets`, [t, heads, d] with any strides; rotated back,
    as gradients of what was rotated are, if there is `rotary`."""
    tokens = targets[0].shape[0]
    unpack_heads([x.unflatten(0, (-1, tokens)) for x in in_flight.arrived()], targets, rotary)


def start(
    sent: Sequence[Tensor],
    received: Sequence[Tensor],
    sent_rows: Sequence[int],
    received_rows: Sequence[int],
    where: ExchangeGroup,
    operation: str,
    direction: Direction,
) -> InFlight:
    """Start the collective, and write it down.

    Args:
        sent, received: [rows, ...] each, contiguous.
        sent_rows, received_rows: of each, to and from each rank of the group.
    """
    name = Collective(EXCHANGE, operation, where.group.group_desc, where.size, where.layer, where.wave, direction)
    with where.ledger.exchanging(name), where.range("all_to_all", operation, direction):
        works = where.transport.start(sent, received, sent_rows, received_rows)
    row_bytes = sum(x.shape[1:].numel() * x.element_size() for x in sent)
    ranks = dist.get_process_group_ranks(where.group)
    bytes_to = {rank: rows * row_bytes for rank, rows in zip(ranks, sent_rows, strict=True)}
    same_rank_bytes = bytes_to.pop(ranks[where.group.rank()])
    where.ledger.record(name, bytes_to, same_rank_bytes)
    return InFlight(works, sent, received, name, where.ledger)
