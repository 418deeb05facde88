"""The exchange as Transformer Engine's `cp_comm_type="a2a"` makes it, written anew: where that is not installed.

Query, key, value and output travel each by itself, [S/K, B, heads, d], in zig-zag order. Each is copied once before it
is sent and once after, by a transposition on the one side and by a reordering of chunks on the other: four
collectives and eight passes a direction. While one travels the next is made ready, as there
(`flash_attn_a2a_communicate` of `transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py`,
2.20).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_basp.peers.kernels import Kernel


def attention(query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, group: dist.ProcessGroup) -> Tensor:
    return _FourCollectives.apply(query, key, value, kernel, group)


class _FourCollectives(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, group: dist.ProcessGroup
    ) -> Tensor:
        output, ctx.kept = kernel.forward(*_to_heads([query, key, value], group))
        ctx.kernel, ctx.group = kernel, group
        return _to_sequence([output], group)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.kernel.backward(ctx.kept, _to_heads([gradient], ctx.group)[0])
        return *_to_sequence(gradients, ctx.group), None, None


def _to_heads(tensors: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """[S/K, B, heads, d] in zig-zag order -> [S, B, heads/K, d] in order."""
    ranks = group.size()
    order = torch.tensor([*range(0, 2 * ranks, 2), *range(2 * ranks - 1, 0, -2)])  # rank r brings r and 2K-1-r

    def pack(x: Tensor) -> Tensor:
        if x.shape[2] % ranks:
            raise ValueError(f"heads % K must be 0, got {x.shape[2]} heads and K={ranks}")
        return x.unflatten(2, (ranks, -1)).movedim(2, 0).contiguous()

    def unpack(x: Tensor) -> Tensor:
        return x.view(2 * ranks, -1, *x.shape[2:]).index_select(0, order).flatten(0, 1)

    return _exchange(tensors, pack, unpack, group)


def _to_sequence(tensors: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """[S, B, heads/K, d] in order -> [S/K, B, heads, d] in zig-zag order."""
    ranks = group.size()
    order = torch.tensor([chunk for rank in range(ranks) for chunk in (rank, 2 * ranks - 1 - rank)])

    def pack(x: Tensor) -> Tensor:
        return x.unflatten(0, (2 * ranks, -1)).index_select(0, order)

    def unpack(x: Tensor) -> Tensor:
        # [K, 2, S/2K, B, heads/K, d], the first two in one dimension
        return x.unflatten(0, (ranks, 2)).movedim(0, 3).contiguous().flatten(0, 1).flatten(2, 3)

    return _exchange(tensors, pack, unpack, group)


def _exchange(
    tensors: list[Tensor],
    pack: Callable[[Tensor], Tensor],
    unpack: Callable[[Tensor], Tensor],
    group: dist.ProcessGroup,
) -> list[Tensor]:
    """Of three consecutive tensors one is packed and one unpacked while that between them travels."""
    travelling, done = [], []
    packed = torch.empty(0)
    for step in range(len(tensors) + 2):
        if 0 < step <= len(tensors):
            received = torch.empty_like(packed)
            travelling.append((received, dist.all_to_all_single(received, packed, group=group, async_op=True)))
        if step < len(tensors):
            packed = pack(tensors[step])
        if step > 1:
            received, work = travelling[step - 2]
            work.wait()
            done.append(unpack(received))
    return done
