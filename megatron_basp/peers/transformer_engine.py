"""Transformer Engine's own `cp_comm_type="a2a"`, on the CPU: its autograd function and its communication, with our
kernels in place of the fused attention that it calls."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_basp.copy_counter import CopyCounter
from megatron_basp.cpu import answer_device_queries, make_streams_no_ops
from megatron_basp.peers.kernels import Attend, Kernel
from megatron_basp.peers.shapes import Shape

MODULE = "transformer_engine.pytorch.attention.dot_product_attention.context_parallel"


def make(shape: Shape, attend: Attend, counter: CopyCounter) -> Any:
    context_parallel = importlib.import_module(MODULE)
    # It asks which device there is, and communicates on a stream of its own.
    answer_device_queries()
    make_streams_no_ops()
    kernel, kept = Kernel(attend, counter), []
    ends = torch.arange(0, (shape.rows + 1) * shape.length, shape.length, dtype=torch.int32)
    members = list(range(dist.get_world_size()))

    def fused_attn_fwd(is_training: bool, *arguments: Any, **options: Any) -> tuple[Tensor, list[Tensor]]:
        output, needed = kernel.forward(*arguments[4:7])
        kept.append(needed)
        return output, []

    def fused_attn_bwd(*arguments: Any, **options: Any) -> list[Tensor]:
        return kernel.backward(kept.pop(), arguments[8])

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # It calls them by these names; several attentions take turns.
        context_parallel.fused_attn_fwd, context_parallel.fused_attn_bwd = fused_attn_fwd, fused_attn_bwd
        return context_parallel.attn_forward_func_with_cp(
            True,
            *(query, key, value, ends, ends, shape.length, shape.length, None, None, 0.0),
            *(dist.group.WORLD, members, None, "a2a"),
            qkv_format="sbhd",
            attn_mask_type="causal",
            use_fused_attention=True,
            window_size=(-1, 0),
        )

    return attention
