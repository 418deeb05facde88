"""The exchange of one group, without autograd: heads for sequence and back, in flight while something else computes.

Shapes, for a group of K ranks of which rank i holds t_i tokens (`tokens_per_rank`), t on this rank and Σ in all. The
tensors that travel together are q, k and v, or the output, or their gradients; each has heads and a size of its own:
    [t, heads, d]   in sequence shards
    [Σ, g, d]       in head shards: all tokens of the group, this rank's heads, g = max(heads, K)/K
Rank j gets heads [j·g, (j+1)·g); where heads < K, each goes to the K/heads ranks whose query heads attend to it, and
the gradients of its copies are summed.

One collective each way. One pass over memory packs what is sent to heads; it lands where it is read. What is sent back
to the sequence leaves from where it is, if it is one tensor, and one pass unpacks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from megatron_basp.kernels import pack_heads, unpack_heads
from megatron_basp.ledger import EXCHANGE, Collective, Direction, Ledger
from megatron_basp.ranges import NO_RANGES, Range, Ranges


@dataclass(frozen=True)
class ExchangeGroup:
    """Where an exchange takes place and who counts it.

    group: the process group of K ranks.
    tokens_per_rank: t_i, by rank in the group.
    ledger: where the bytes are written down.
    layer: under which layer number; None where tokens are exchanged and not a layer's activations.
    wave: the index of the wave in the plan.
    ranges: of a profiler.
    """

    group: dist.ProcessGroup
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
        return self.ranges.of(function, f"{operation} {direction} K={len(self.tokens_per_rank)}")


def sends_several_at_once(x: Tensor) -> bool:
    """Whether tensors like this one can travel together without being packed into one: over NCCL, not over gloo."""
    return x.device.type == "cuda"


class Buffers:
    """Tensors [rows, heads, d] that travel together: `parts`, and the `wires` [rows, width] that hold them.

    On a GPU each part has a wire of its own: Transformer Engine copies slices of a packed tensor, and refuses tensors
    that begin inside of another. Gloo sends one tensor at a time, so that on a CPU all share one wire.
    """

    def __init__(self, wires: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        self.wires, self.parts = wires, parts

    @classmethod
    def empty(cls, like: Tensor, rows: int, shapes: Sequence[tuple[int, int]]) -> Buffers:
        """Args: shapes: heads and d of each part."""
        widths = [heads * size for heads, size in shapes]
        if sends_several_at_once(like):
            wires = columns = [like.new_empty(rows, width) for width in widths]
        else:
            wires = [like.new_empty(rows, sum(widths))]
            columns = list(wires[0].split(widths, dim=1))
        return cls(wires, [x.unflatten(1, shape) for x, shape in zip(columns, shapes, strict=True)])

    @classmethod
    def holding(cls, tensors: Sequence[Tensor]) -> Buffers:
        """With these tensors in it: as they are, where they can be sent so, else copied."""
        if len(tensors) == 1 or sends_several_at_once(tensors[0]):
            # A strided gradient that is read as if it were contiguous is a silently wrong gradient.
            tensors = [x.contiguous() for x in tensors]
            return cls([x.flatten(1) for x in tensors], tensors)
        buffers = cls.empty(tensors[0], tensors[0].shape[0], [(x.shape[1], x.shape[2]) for x in tensors])
        for part, tensor in zip(buffers.parts, tensors, strict=True):
            part.copy_(tensor)
        return buffers


class InFlight:
    """An exchange that was started. It keeps both sides' buffers until it is over.

    On a GPU collectives run on a stream of their own. They begin after what the current stream was given before (the
    packing, the kernel), and whatever it is given after `arrived` waits for them. Buffers come from the current
    stream, and are let go after that wait: who gets their memory next comes later on the same stream. So none needs
    `record_stream`, which would keep memory for longer than it is used. It holds as long as each exchange is waited
    for on the stream that started it, as it is here: autograd runs backward on forward's stream.
    """

    def __init__(self, works: Sequence[dist.Work], sent: Buffers, received: Buffers, name: Collective, ledger: Ledger):
        self._works, self._sent, self._received = works, sent, received
        self._name, self._ledger = name, ledger

    def arrived(self) -> Sequence[Tensor]:
        """The received parts [rows, heads, d]. On a GPU the stream waits for them, and the host does not."""
        with self._ledger.timed(self._name):
            for work in self._works:
                work.wait()
        return self._received.parts


def start_to_heads(tensors: Sequence[Tensor], where: ExchangeGroup, operation: str, direction: Direction) -> InFlight:
    """Pack and send [t, heads, d]; what arrives is [Σ, g, d]."""
    ranks, tokens = where.size, where.tokens
    shapes = [(max(x.shape[1], ranks) // ranks, x.shape[2]) for x in tensors]
    sent = Buffers.empty(tensors[0], ranks * tokens, shapes)
    with where.range("pack_heads", operation, direction):
        pack_heads(tensors, [x.unflatten(0, (ranks, tokens)) for x in sent.parts])
    received = Buffers.empty(tensors[0], sum(where.tokens_per_rank), shapes)
    return start(sent, received, [tokens] * ranks, where.tokens_per_rank, where, operation, direction)


def start_to_sequence(
    tensors: Sequence[Tensor], where: ExchangeGroup, operation: str, direction: Direction
) -> InFlight:
    """Send [Σ, g, d], which nobody may write to until it has arrived; see `unpack`."""
    sent = Buffers.holding(tensors)
    shapes = [(x.shape[1], x.shape[2]) for x in tensors]
    received = Buffers.empty(tensors[0], where.size * where.tokens, shapes)
    return start(sent, received, where.tokens_per_rank, [where.tokens] * where.size, where, operation, direction)


def unpack(in_flight: InFlight, targets: Sequence[Tensor]) -> None:
    """Wait for what was sent to the sequence and write it to `targets`, [t, heads, d] with any strides."""
    tokens = targets[0].shape[0]
    unpack_heads([x.unflatten(0, (-1, tokens)) for x in in_flight.arrived()], targets)


def start(
    sent: Buffers,
    received: Buffers,
    sent_rows: Sequence[int],
    received_rows: Sequence[int],
    where: ExchangeGroup,
    operation: str,
    direction: Direction,
) -> InFlight:
    """Start the collective, and write it down.

    Args:
        sent_rows, received_rows: of the wires, to and from each rank of the group.
    """
    name = Collective(EXCHANGE, operation, where.group.group_desc, where.size, where.layer, where.wave, direction)
    with where.ledger.exchanging(name), where.range("all_to_all", operation, direction):
        works = _all_to_all(sent.wires, received.wires, list(sent_rows), list(received_rows), where.group)
    row_bytes = sum(wire.shape[1] * wire.element_size() for wire in sent.wires)
    ranks = dist.get_process_group_ranks(where.group)
    bytes_to = {rank: rows * row_bytes for rank, rows in zip(ranks, sent_rows, strict=True)}
    same_rank_bytes = bytes_to.pop(ranks[where.group.rank()])
    where.ledger.record(name, bytes_to, same_rank_bytes)
    return InFlight(works, sent, received, name, where.ledger)


def _all_to_all(
    sent: Sequence[Tensor],
    received: Sequence[Tensor],
    sent_rows: list[int],
    received_rows: list[int],
    group: dist.ProcessGroup,
) -> list[dist.Work]:
    """One launch for all wires: NCCL sends what is called inside of its coalescing manager together."""
    works: list[dist.Work] = []
    with ExitStack() as stack:
        if len(sent) > 1:
            manager = dist._coalescing_manager(group, sent[0].device, async_ops=True)
            works.append(stack.enter_context(manager))
        for to_send, to_receive in zip(sent, received, strict=True):
            work = dist.all_to_all_single(to_receive, to_send, received_rows, sent_rows, group=group, async_op=True)
            if work is not None and len(sent) == 1:
                works.append(work)
    return works
