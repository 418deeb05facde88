"""Packing for the exchange: heads laid out by the rank that gets them, and back, in one pass for all tensors.

Two layouts of the same heads, for a group of K ranks and t tokens on this one:
    the sequence's side   [t, heads, d]   as the projections write them
    the ranks' side       [K, t, g, d]    with g = max(heads, K)/K: block j is what rank j gets, or what it sent
Rank j has heads [j·g, (j+1)·g); where heads < K it has a copy of head j // (K/heads), and so have K/heads ranks.

Each call moves several tensors (q, k and v, with head counts and head sizes of their own). On CUDA it is one launch of
a Triton kernel, which reads every element once and writes it once, rotated or not: `moved_bytes`. Elsewhere it is
torch's own strided copies (`torch_twin`), which are the reference as well. Neither is differentiable: each is the
transpose, hence the gradient, of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from torch import Tensor

from megatron_basp.kernels.rotary import Rotary

__all__ = ["Rotary", "moved_bytes", "pack_heads", "unpack_heads"]


def pack_heads(sources: Sequence[Tensor], targets: Sequence[Tensor], rotary: Rotary | None = None) -> None:
    """From the sequence's side to the ranks' side: targets[i][j, :, h] = sources[i][:, the h-th head of rank j].

    Args:
        sources: [t, heads_i, d_i] each, with any strides.
        targets: [K, t, g_i, d_i] each, with any strides but 1 in the last dimension: tensors of their own, or parts
            of one buffer [K, t, Σ g_i·d_i].
        rotary: the tables by which some of the sources are rotated on the way.

    Raises:
        ValueError: shapes that don't belong together, or a target whose heads are not contiguous.
    """
    _kernels(targets).pack_heads(sources, targets, rotary)


def unpack_heads(sources: Sequence[Tensor], targets: Sequence[Tensor], rotary: Rotary | None = None) -> None:
    """The transpose: sources [K, t, g_i, d_i], targets [t, heads_i, d_i]; copies of a head are summed.

    Sums over copies go in order of the ranks, those of bf16 and fp16 in fp32, and are rounded once. With `rotary` they
    are multiplied by the transpose of the rotation, `mscale` included: a gradient, not the inverse.
    """
    _kernels(targets).unpack_heads(sources, targets, rotary)


def moved_bytes(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> int:
    """Bytes that a call reads and writes, which is the least that it can: each input once, each output once.

    Rotary tables are not counted: [t, rotary columns], against [t, all heads, d].
    """
    return sum(x.numel() * x.element_size() for x in (*sources, *targets))


def _kernels(targets: Sequence[Tensor]) -> ModuleType:
    for index, x in enumerate(targets):
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(f"target {index}: the columns of a head must be contiguous, got strides {x.stride()}")
    # Imported late: Triton is not to be had everywhere, and takes a while to import.
    if targets and targets[0].device.type == "cuda":
        from megatron_basp.kernels import triton_pack as kernels
    else:
        from megatron_basp.kernels import torch_twin as kernels
    return kernels
