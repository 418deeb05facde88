"""The exchange: heads for sequence inside one group, and back.

Shapes, for a group of K ranks of which rank i holds t_i tokens (`tokens_per_rank`), t on this rank and Σ in all:
    q [t, H, d_qk]   k [t, Hkv, d_qk]   v [t, Hkv, d_v]   in sequence shards
    q [Σ, H/K, d_qk]  k, v [Σ, G, ·]                       in head shards, with G = max(Hkv, K)/K

Where Hkv < K each key-value head is sent to the K/Hkv ranks whose query heads use it: rank j gets head j // (K/Hkv),
which is the head that query heads [j·H/K, (j+1)·H/K) attend to.

One collective carries q, k and v; one carries the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_basp.ledger import EXCHANGE, Collective, Direction, Ledger


@dataclass(frozen=True)
class ExchangeGroup:
    """Where an exchange takes place and who counts it.

    group: the process group of K ranks.
    tokens_per_rank: t_i, by rank in the group.
    ledger: where the bytes are written down.
    layer: under which layer number; None where tokens are exchanged and not a layer's activations.
    wave: the index of the wave in the plan.
    """

    group: dist.ProcessGroup
    tokens_per_rank: tuple[int, ...]
    ledger: Ledger
    layer: int | None
    wave: int

    @property
    def size(self) -> int:
        return len(self.tokens_per_rank)

    @property
    def tokens(self) -> int:
        return self.tokens_per_rank[self.group.rank()]


def sequence_to_heads(
    query: Tensor, key: Tensor, value: Tensor, where: ExchangeGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens of the group, for this rank's share of the heads; q, k and v each in a tensor of its own."""
    return _SequenceToHeads.apply(query, key, value, where)


def heads_to_sequence(output: Tensor, where: ExchangeGroup) -> Tensor:
    """The inverse for the attention output: [Σ, H/K, d_v] -> [t, H, d_v]."""
    return _HeadsToSequence.apply(output, where)


def from_next_rank(x: Tensor, where: ExchangeGroup) -> Tensor:
    """What the next rank of the group passed, and zeros on the last one; x is [n], the same n on all ranks.

    It is for ids, positions, labels and masks, which have no gradient.
    """
    here, last = where.group.rank(), where.size - 1
    sent_rows, received_rows = [0] * where.size, [0] * where.size
    if here > 0:
        sent_rows[here - 1] = len(x)
    if here < last:
        received_rows[here + 1] = len(x)
    received = x.new_zeros(len(x), 1)
    sent = x[: sum(sent_rows), None].contiguous()
    _all_to_all(received[: sum(received_rows)], sent, received_rows, sent_rows, where, "roll", "forward")
    return received[:, 0]


class _SequenceToHeads(torch.autograd.Function):
    """Forward is a permutation P of elements across ranks, after each KV head was copied r = max(1, K/Hkv) times.

    The transpose of a permutation is its inverse, so the gradient of P is the exchange the other way round, which is
    what `_exchange_to_sequence` does; the transpose of a copy is a sum, so the gradient of a key-value head is the
    sum over its r copies. Both are linear in the incoming gradient and nothing of the forward is needed but the
    shapes.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, where: ExchangeGroup) -> tuple[Tensor, ...]:
        ctx.where, ctx.shapes = where, [query.shape, key.shape, value.shape]
        blocks = [_by_rank(x, where.size) for x in (query, key, value)]
        heads = [x.shape[2] for x in blocks]
        received = _exchange_to_heads(torch.cat([x.flatten(2) for x in blocks], dim=2), where, "qkv", "forward")
        widths = [h * x.shape[2] for h, x in zip(heads, (query, key, value), strict=True)]
        parts = received.split(widths, dim=1)
        return tuple(part.contiguous().unflatten(1, (h, -1)) for part, h in zip(parts, heads, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        where = ctx.where
        packed = torch.cat([grad.flatten(1) for grad in grads], dim=1)
        received = _exchange_to_sequence(packed, where, "qkv", "backward")
        widths = [grad.shape[1] * grad.shape[2] for grad in grads]
        parts = received.split(widths, dim=2)
        return *(_from_ranks(part, shape) for part, shape in zip(parts, ctx.shapes, strict=True)), None


class _HeadsToSequence(torch.autograd.Function):
    """Forward is a permutation of elements across ranks; its transpose, hence its gradient, is the inverse
    exchange."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, where: ExchangeGroup) -> Tensor:
        ctx.where = where
        tokens, (_, heads, head_size) = where.tokens, output.shape
        received = _exchange_to_sequence(output.flatten(1), where, "output", "forward")
        return _from_ranks(received, torch.Size((tokens, heads * where.size, head_size)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        where = ctx.where
        received = _exchange_to_heads(_by_rank(grad, where.size).flatten(2), where, "output", "backward")
        return received.reshape(received.shape[0], -1, grad.shape[2]), None


def _by_rank(x: Tensor, ranks: int) -> Tensor:
    """The heads that each rank is to get: [t, heads, d] -> view [K, t, max(heads, K)/K, d]."""
    tokens, heads, head_size = x.shape
    if heads < ranks:
        copies = ranks // heads
        x = x[:, :, None].expand(tokens, heads, copies, head_size)  # [t, heads, r, d], K = heads·r
        return x.permute(1, 2, 0, 3).reshape(ranks, tokens, 1, head_size)
    return x.reshape(tokens, ranks, heads // ranks, head_size).transpose(0, 1)


def _from_ranks(x: Tensor, shape: torch.Size) -> Tensor:
    """The transpose of `_by_rank`: [K, t, (max(heads, K)/K)·d] -> [t, heads, d], with the copies of a head summed."""
    tokens, heads, head_size = shape
    ranks = x.shape[0]
    if heads < ranks:
        return x.reshape(heads, ranks // heads, tokens, head_size).sum(1).transpose(0, 1).contiguous()
    return x.transpose(0, 1).reshape(shape)


def _exchange_to_heads(x: Tensor, where: ExchangeGroup, operation: str, direction: Direction) -> Tensor:
    """Block j of x [K, t, c] goes to rank j; what arrives, in order of the ranks, is [Σ, c]."""
    x = x.contiguous()
    received = x.new_empty(sum(where.tokens_per_rank), x.shape[2])
    sent = x.flatten(0, 1)
    _all_to_all(received, sent, where.tokens_per_rank, [x.shape[1]] * where.size, where, operation, direction)
    return received


def _exchange_to_sequence(x: Tensor, where: ExchangeGroup, operation: str, direction: Direction) -> Tensor:
    """The tokens of rank j in x [Σ, c] go to rank j; what arrives is [K, t, c]. The inverse of
    `_exchange_to_heads`."""
    # Contiguous before anything is allocated "like" it: a strided gradient read as if it were contiguous is a silently
    # wrong gradient.
    x = x.contiguous()
    tokens = where.tokens
    received = x.new_empty(where.size * tokens, x.shape[1])
    _all_to_all(received, x, [tokens] * where.size, where.tokens_per_rank, where, operation, direction)
    return received.unflatten(0, (where.size, tokens))


def _all_to_all(
    received: Tensor,
    sent: Tensor,
    received_rows: Sequence[int],
    sent_rows: Sequence[int],
    where: ExchangeGroup,
    operation: str,
    direction: Direction,
) -> None:
    collective = Collective(
        EXCHANGE, operation, where.group.group_desc, where.size, where.layer, where.wave, direction
    )
    with where.ledger.exchanging(collective):
        dist.all_to_all_single(received, sent, list(received_rows), list(sent_rows), group=where.group)
    row_bytes = sent.shape[1] * sent.element_size()
    ranks = dist.get_process_group_ranks(where.group)
    bytes_to = {rank: rows * row_bytes for rank, rows in zip(ranks, sent_rows, strict=True)}
    same_rank_bytes = bytes_to.pop(ranks[where.group.rank()])
    where.ledger.record(collective, bytes_to, same_rank_bytes)
