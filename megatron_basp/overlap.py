"""Attention over pieces of a stream, each exchanged while others are attended to: one node of autograd's graph.

A piece is some heads of one wave. All pieces are sent at once, those of the largest K first: they travel farthest.
They are attended to with the smallest K first, so that what crosses nodes travels behind the work inside of them, and
each output is sent as soon as it is there. Backward is the mirror image: the largest K is again sent first, and is now
attended to first. There the long way is that of the gradients of q, k and v, back to the sequence, and they travel
behind the work of the smaller K. (Forward 1.5 to 3 times as much comes as goes; backward it is the other way
round.) For this it is one node: of several autograd would not send all before it attends to any.

The gradient of an exchange is the exchange back: forward permutes elements among ranks and backward permutes them
back, summing over the copies of a key-value head, since each copy was one use of it. The gradient of the kernel is its
own, by a graph that forward records and backward runs. Rotary embedding, where it is left to this node, is applied to
q and k while they are packed and, transposed, to their gradients while these are unpacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from megatron_basp.all_to_all import ExchangeGroup, InFlight, start_to_heads, start_to_sequence, unpack
from megatron_basp.kernels import Rotary, pack_heads, unpack_heads
from megatron_basp.ledger import Direction
from megatron_basp.plan import Share
from megatron_basp.ranges import NO_RANGES, Range, Ranges
from megatron_basp.sdpa import Kernel


@dataclass(frozen=True, eq=False)  # a key of its own
class Piece:
    """One of `chunks` parts of the heads of a wave.

    share: what this rank holds of the wave.
    tokens: where that is in its stream.
    where: the group to exchange with; None where the rank has whole sequences, at K = 1.
    ranges: of a profiler.
    """

    share: Share
    tokens: slice
    where: ExchangeGroup | None
    chunk: int
    chunks: int
    ranges: Ranges = NO_RANGES

    @cached_property
    def _name(self) -> str:
        return f"K={self.share.group_size} part {self.chunk + 1} of {self.chunks}"

    def range(self, function: str, direction: Direction) -> Range:
        return self.ranges.of(function, f"{direction} {self._name}")

    def parts_of(self, streams: Sequence[Tensor]) -> list[Tensor]:
        """[T, heads, d] of the stream -> [t, heads/chunks, d], views."""
        return [x[self.tokens].chunk(self.chunks, dim=1)[self.chunk] for x in streams]

    def attend(self, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, offset: Tensor | None) -> Tensor:
        """[S·rows, h, d] -> [S·rows, h, d_v]: position-major tokens are [S, rows] as they are.

        Args:
            offset: [H], of all heads of the tensor-parallel rank.
        """
        if offset is not None:
            # Of this rank's heads. The gradients of all ranks' parts sum up in Megatron's reduction.
            of_chunk = offset.chunk(self.chunks)[self.chunk]
            of_rank = of_chunk.chunk(self.share.group_size)[self.share.rank_in_group]
            output = kernel(*self._rows(query, key, value), softmax_offset=of_rank)
        else:
            output = kernel(*self._rows(query, key, value))  # [S, rows, h·d_v]
        return output.reshape(query.shape[0], query.shape[1], -1)

    def _rows(self, *tensors: Tensor) -> list[Tensor]:
        return [x.unflatten(0, (-1, len(self.share.rows))) for x in tensors]


def attend(
    pieces: Sequence[Piece],
    kernels: Sequence[Kernel],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax_offset: Tensor | None,
    rotary: Rotary | None = None,
) -> Tensor:
    """[T, heads, d] of a stream -> [T, H, d_v].

    Args:
        pieces: all of the stream, in the order in which they are to be attended to.
        kernels: of each piece.
        softmax_offset: [H], of attention sinks, where there are such.
        rotary: of the stream, where q and k are not rotated yet.
    """
    if softmax_offset is not None and not torch.is_grad_enabled():
        # A parameter asks for a gradient even where none is wanted, and kernels would keep what backward needs.
        softmax_offset = softmax_offset.detach()
    return _Attend.apply(pieces, kernels, query, key, value, softmax_offset, rotary)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        pieces: Sequence[Piece],
        kernels: Sequence[Kernel],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        offset: Tensor | None,
        rotary: Rotary | None,
    ) -> Tensor:
        has_graph = any(ctx.needs_input_grad)
        offset = None if offset is None else offset.detach().requires_grad_(has_graph)
        output = query.new_empty(*query.shape[:2], value.shape[2])
        to_heads = _start_all(pieces, [query, key, value], "qkv", "forward", rotary)
        to_sequence = _ToSequence([output], "output", "forward")
        graphs, anchor = [], query.new_empty(0).requires_grad_(has_graph)
        for piece, kernel in zip(pieces, kernels, strict=True):
            gradients: list[Tensor] = []
            landed = [x.detach() for x in to_heads.arrived(piece)]
            with piece.range("attend", "forward"), torch.set_grad_enabled(has_graph):
                attended = piece.attend(kernel, *_Landed.apply(gradients, anchor, *landed), offset)
            to_sequence.start(piece, [attended.detach()])
            # The edge, and not the output itself: what was sent need not be kept, if the kernel does not keep it.
            graphs.append((gradients, get_gradient_edge(attended) if has_graph else None))
        to_sequence.finish()
        if has_graph:
            ctx.pieces, ctx.graphs, ctx.offset, ctx.rotary = pieces, graphs, offset, rotary
            ctx.shapes = [x.shape for x in (query, key, value)]
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.graphs is None:
            raise RuntimeError("backward a second time: attention keeps what it needs for one")
        pieces = ctx.pieces[::-1]
        to_heads = _start_all(pieces, [grad], "output", "backward")
        grads = [grad.new_empty(shape) for shape in ctx.shapes]
        to_sequence = _ToSequence(grads, "qkv", "backward", ctx.rotary)
        graphs, ctx.graphs = ctx.graphs, None
        for piece in pieces:
            # Each is forgotten with the next, so that what a piece keeps is freed before the others are done.
            gradients, attended = graphs.pop()
            arrived = to_heads.arrived(piece)
            with piece.range("attend", "backward"):
                # Not torch.autograd.grad: within it a kernel could not be recomputed (`torch.utils.checkpoint`).
                torch.autograd.backward(attended, *arrived)
            to_sequence.start(piece, gradients)
        to_sequence.finish()
        return None, None, *grads, None if ctx.offset is None else ctx.offset.grad, None


class _Landed(torch.autograd.Function):
    """Where the graph of a piece begins, and where its gradients are found once backward was there.

    Tensors that are leaves would do, but their graph keeps leaves: what saved-tensor hooks took away, to offload it,
    would stay where it was all the same.
    """

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tensors as they are. `anchor` asks for a gradient, and gets none."""
        ctx.gradients = gradients
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.gradients.extend(gradients)
        return (None,) * (2 + len(gradients))


class _ToHeads:
    """Whole sequences of some heads for each piece, on their way or here already."""

    def __init__(
        self, streams: Sequence[Tensor], in_flight: dict[Piece, InFlight], rotary: Rotary | None = None
    ) -> None:
        self._streams, self._in_flight, self._rotary = streams, in_flight, rotary

    def arrived(self, piece: Piece) -> Sequence[Tensor]:
        if piece.where is not None:
            return self._in_flight.pop(piece).arrived()
        parts = piece.parts_of(self._streams)
        if self._rotary is None:
            return parts
        rotated = [parts[index] for index in self._rotary.rotated]
        targets = [x.new_empty(1, *x.shape) for x in rotated]
        pack_heads(rotated, targets, replace(self._rotary.of(piece.tokens), rotated=tuple(range(len(rotated)))))
        for index, target in zip(self._rotary.rotated, targets, strict=True):
            parts[index] = target[0]
        return parts


def _start_all(
    pieces: Sequence[Piece],
    streams: Sequence[Tensor],
    operation: str,
    direction: Direction,
    rotary: Rotary | None = None,
) -> _ToHeads:
    """Send all pieces, the largest K first, and those of one K in the order in which they are attended to."""
    in_flight = {
        piece: start_to_heads(
            piece.parts_of(streams), piece.where, operation, direction, rotary and rotary.of(piece.tokens)
        )
        for piece in sorted(pieces, key=lambda piece: -piece.share.group_size)
        if piece.where is not None
    }
    return _ToHeads(streams, in_flight, rotary)


class _ToSequence:
    """Sends what belongs to the stream's tokens back, piece by piece, into whole tensors [T, heads, d]."""

    def __init__(
        self, targets: Sequence[Tensor], operation: str, direction: Direction, rotary: Rotary | None = None
    ) -> None:
        self._targets, self._operation, self._direction, self._rotary = targets, operation, direction, rotary
        self._in_flight: list[tuple[Piece, InFlight]] = []

    def start(self, piece: Piece, tensors: Sequence[Tensor]) -> None:
        if piece.where is not None:
            sent = start_to_sequence(tensors, piece.where, self._operation, self._direction)
            self._in_flight.append((piece, sent))
            return
        # A group of one: from here to here.
        unpack_heads([x[None] for x in tensors], piece.parts_of(self._targets), self._rotary_of(piece))

    def finish(self) -> None:
        for piece, in_flight in self._in_flight:
            with piece.range("unpack", self._direction):
                unpack(in_flight, piece.parts_of(self._targets), self._rotary_of(piece))

    def _rotary_of(self, piece: Piece) -> Rotary | None:
        return self._rotary and self._rotary.of(piece.tokens)
