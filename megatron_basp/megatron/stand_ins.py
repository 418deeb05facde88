"""What takes the place of a part of training where a benchmark wants to know what the part costs.

Each is put in by the same `replace` as the hooks of Megatron, for the life of the process.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_basp.arithmetic_cost import ATTENTION_BACKWARD
from megatron_basp.kernels import Rotary, pack_heads, unpack_heads
from megatron_basp.megatron import core_attention
from megatron_basp.megatron.seam import Function, replace
from megatron_basp.overlap import Piece
from megatron_basp.sdpa import Kernel


def leave_out_exchange() -> None:
    """Each rank attends with its own share of heads to data of the same shapes, and sends nothing. The losses mean
    nothing."""
    replace(
        "megatron_basp.attention:attend",
        ["pieces", "kernels", "query", "key", "value", "softmax_offset", "rotary"],
        lambda original: attend_without_exchange,
    )


def attend_without_exchange(
    pieces: Sequence[Piece],
    kernels: Sequence[Kernel],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax_offset: Tensor | None,
    rotary: Rotary | None = None,
) -> Tensor:
    """As `overlap.attend`. What a rank holds, [t, heads, d], is read as if it were whole sequences of its own heads,
    [t·K, heads/K, d]: no byte is moved."""
    if rotary is not None:
        query, key = _Rotated.apply(rotary, query, key)
    outputs = []
    for _, of_wave in groupby(zip(pieces, kernels, strict=True), key=lambda one: one[0].tokens.start):
        parts = []
        for piece, kernel in of_wave:
            own = piece.parts_of([query, key, value])
            if piece.where is not None:
                own = [as_whole_sequences(x, piece.share.group_size) for x in own]
            attended = piece.attend(kernel, *own, softmax_offset)
            parts.append(attended.reshape(piece.share.tokens, -1, attended.shape[2]))
        outputs.append(torch.cat(parts, dim=1))
    return torch.cat(outputs)


class _Rotated(torch.autograd.Function):
    """Query and key as packing would rotate them, for a group of one."""

    @staticmethod
    def forward(ctx: Any, rotary: Rotary, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.rotary = rotary
        rotated = [x.new_empty(1, *x.shape) for x in tensors]
        pack_heads(tensors, rotated, rotary)
        return tuple(x[0] for x in rotated)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        back = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in gradients]
        unpack_heads([x[None] for x in gradients], back, ctx.rotary)
        return None, *back


def as_whole_sequences(x: Tensor, group_size: int) -> Tensor:
    """[t, heads, d] -> [t·K, max(heads, K)/K, d]; where heads < K, each is there K/heads times."""
    tokens, heads, size = x.shape
    if heads < group_size:
        x = x.repeat_interleave(group_size // heads, dim=1)
    return x.reshape(tokens * group_size, -1, size)


def pause_for_attention(seconds_per_pair: float) -> None:
    """In place of a CPU's attention a pause, in proportion to what it would have to compute."""

    def make_pause(*, config: Any, layer_number: int, **ignored: Any) -> Kernel:
        return Pause(seconds_per_pair)

    replace("megatron_basp.megatron.core_attention:make_sdpa", ["config", "layer_number"], lambda original: make_pause)


class Pause(torch.nn.Module):
    """A kernel whose output is q + k + v, so that each of them gets a gradient, after a pause.

    Args:
        seconds_per_pair: of a query and a key of one head, forward and backward together.
    """

    def __init__(self, seconds_per_pair: float) -> None:
        super().__init__()
        self.seconds_per_pair = seconds_per_pair

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[S, rows, h, d] -> [S, rows, h·d]."""
        length, rows, heads, _ = query.shape
        seconds = self.seconds_per_pair * length * length * rows * heads
        copies = heads // key.shape[2]
        together = query + (key + value).repeat_interleave(copies, dim=2)
        return _Paused.apply(together, seconds).flatten(2)


class _Paused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        of_forward = seconds / (1 + ATTENTION_BACKWARD)
        ctx.of_backward = seconds - of_forward
        time.sleep(of_forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.of_backward)
        return grad, None


def attend_as_ours_does() -> None:
    """Stock Megatron, without context parallelism, on the kernel that the modes use on a CPU: its own, unfused, takes
    longer, and a comparison of what is sent should not win by that."""
    replace(
        "megatron.core.models.backends:LocalSpecProvider.core_attention", [], lambda original: lambda self: _OurKernel
    )


class _OurKernel(torch.nn.Module):
    """Built and called as Megatron's core attention is."""

    def __init__(self, *, config: Any, layer_number: int, **arguments: Any) -> None:
        super().__init__()
        self.kernel = core_attention.make_sdpa(config=config, layer_number=layer_number)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any) -> Tensor:
        return self.kernel(query, key, value)


@dataclass
class ModelledLink:
    """Each all-to-all takes as long as links between nodes would let it: the real one first, in this machine's memory,
    and then a pause until its time is over. What is sent meanwhile queues up behind it.

        seconds = latency + bytes that this rank sends to other nodes · ranks of a node / rate

    All ranks of a node send at the same time and share its link.

    nodes: of each global rank. mbit: of a node's link, each way; None for no limit.
    """

    nodes: Sequence[int]
    latency_seconds: float
    mbit: int | None = None
    _free_at: float = field(default=0.0, init=False)

    def install(self) -> None:
        replace(
            "torch.distributed:all_to_all_single",
            ["output", "input", "output_split_sizes", "input_split_sizes", "group", "async_op"],
            self._delaying,
        )

    def _delaying(self, original: Function) -> Function:
        def all_to_all_single(
            output: Tensor,
            input: Tensor,
            output_split_sizes: list[int] | None = None,
            input_split_sizes: list[int] | None = None,
            group: dist.ProcessGroup | None = None,
            async_op: bool = False,
        ) -> Any:
            begin = time.perf_counter()
            work = original(output, input, output_split_sizes, input_split_sizes, group, True)
            ranks = dist.get_process_group_ranks(group)
            rows = input_split_sizes or [len(input) // len(ranks)] * len(ranks)
            row_bytes = input.numel() // max(1, len(input)) * input.element_size()
            delayed = _Delayed(work, self._arrival(begin, ranks, [n * row_bytes for n in rows]))
            return delayed if async_op else delayed.wait()

        return all_to_all_single

    def _arrival(self, begin: float, ranks: Sequence[int], n_bytes: Sequence[int]) -> float:
        """When all has crossed that goes from this rank to each of the group."""
        here = self.nodes[dist.get_rank()]
        leaving = sum(n for rank, n in zip(ranks, n_bytes, strict=True) if self.nodes[rank] != here)
        if not leaving or self.mbit is None:
            return begin
        sharing = sum(node == here for node in self.nodes)
        seconds = self.latency_seconds + leaving * sharing * 8 / (self.mbit * 1e6)
        self._free_at = max(begin, self._free_at) + seconds
        return self._free_at


class _Delayed:
    """A collective that is over when both the real one and its time are."""

    def __init__(self, work: Any, arrival: float) -> None:
        self._work, self._arrival = work, arrival

    def wait(self, *arguments: Any) -> Any:
        done = self._work.wait(*arguments)
        time.sleep(max(0.0, self._arrival - time.perf_counter()))
        return done
