"""The packing kernels in torch: the path of a CPU, and what the Triton kernel is held to.

One strided copy or sum a tensor, without temporaries. Columns that are rotated are written twice, since a product and
its partner's are two operations to torch; the sum over copies of such a head is a temporary, rounded on its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_basp.kernels.pieces import Piece, pieces
from megatron_basp.kernels.rotary import Rotary


def pack_heads(sources: Sequence[Tensor], targets: Sequence[Tensor], rotary: Rotary | None = None) -> None:
    for piece, source, target in _views(sources, targets, rotary):
        if piece.rotated:
            _rotate(source, target[:, :1], rotary, back=False)
            target[:, 1:].copy_(target[:, :1])
        else:
            target.copy_(source)


def unpack_heads(sources: Sequence[Tensor], targets: Sequence[Tensor], rotary: Rotary | None = None) -> None:
    for piece, target, source in _views(targets, sources, rotary):
        if piece.rotated:
            _rotate(source.sum(1, keepdim=True) if piece.copies > 1 else source, target, rotary, back=True)
        elif piece.copies > 1:
            torch.sum(source, 1, keepdim=True, out=target)
        else:
            target.copy_(source)


def _views(
    sequence_side: Sequence[Tensor], ranks_side: Sequence[Tensor], rotary: Rotary | None
) -> Iterator[tuple[Piece, Tensor, Tensor]]:
    """Each piece with both its sides in the same order of dimensions, [K/copies, 1, t, g, columns] and
    [K/copies, copies, t, g, columns]."""
    shapes = [tuple(x.shape for x in side) for side in (sequence_side, ranks_side)]
    for piece in pieces(*shapes, *((rotary.cos.shape, rotary.rotated) if rotary else ())):
        columns = slice(piece.first, piece.first + piece.columns)
        heads = sequence_side[piece.tensor][..., columns].unflatten(1, (-1, 1, piece.per_rank))
        by_rank = ranks_side[piece.tensor][..., columns].unflatten(0, (-1, piece.copies))
        yield piece, heads.permute(1, 2, 0, 3, 4), by_rank


def _rotate(source: Tensor, target: Tensor, rotary: Rotary, back: bool) -> None:
    """[..., t, g, r], rotated by the tables [t, r], or by their transpose."""
    half = rotary.columns // 2
    ends = (slice(0, None, 2), slice(1, None, 2)) if rotary.interleaved else (slice(0, half), slice(half, None))
    (a, b), (to_a, to_b) = ([x[..., end] for end in ends] for x in (source, target))
    sin_a, sin_b = (rotary.sin[:, None, end] for end in ends)
    torch.mul(source, rotary.cos[:, None], out=target)
    if back:
        to_a.addcmul_(b, sin_b)
        to_b.addcmul_(a, sin_a, value=-1)
    else:
        to_a.addcmul_(b, sin_a, value=-1)
        to_b.addcmul_(a, sin_b)
