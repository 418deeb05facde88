"""Ours and the others, each called as its users call it, in the layout that it is made for.

All get a group of K ranks, the whole world, that share each sequence, and a kernel that takes whole sequences of H/K
heads.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch.distributed as dist
from torch import Tensor

from megatron_basp import __version__
from megatron_basp.attention import BaspAttention
from megatron_basp.copy_counter import CopyCounter
from megatron_basp.ledger import Ledger
from megatron_basp.peers import four_collectives, transformer_engine
from megatron_basp.peers.kernels import Attend, Kernel
from megatron_basp.peers.shapes import Layout, Shape
from megatron_basp.plan import Limits, PlanHolder, plan_batch
from megatron_basp.process_groups import create_sequence_groups

OURS = "megatron_basp"
NAMES = (OURS, "transformer_engine", "deepspeed", "yunchang")
FORM = "its form, in code of ours"

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Query, key and value of a rank, in the implementation's layout -> the output, in the same."""


@dataclass(frozen=True)
class Implementation:
    """what: its version, or what stands for it. layout: of what it takes and gives. make: its attention for a shape;
    called on every rank."""

    name: str
    what: str
    layout: Layout
    make: Callable[[Shape, Attend, CopyCounter], Attention]


def installed() -> list[Implementation]:
    """Those that can run here, in the order of `NAMES`. Imports them: before ranks are forked, once for all."""
    found = [Implementation(OURS, __version__, Layout(), _basp), _transformer_engine()]
    if importlib.util.find_spec("deepspeed"):
        importlib.import_module("deepspeed.sequence.layer")
        found.append(Implementation("deepspeed", version("deepspeed"), Layout(), _deepspeed))
    if importlib.util.find_spec("yunchang"):
        importlib.import_module("yunchang")
        found.append(Implementation("yunchang", version("yunchang"), Layout(batch_first=True), _yunchang))
    return found


def _basp(shape: Shape, attend: Attend, counter: CopyCounter) -> Attention:
    """One wave at K = N: what `--sequence-parallel-mode ulysses` does. Its stream is [T, 1, heads, d], T = S/K·B."""
    ranks, kernel = dist.get_world_size(), Kernel(attend, counter)
    groups = create_sequence_groups(
        [range(ranks)], [ranks], dist.group.WORLD, lambda members, name: dist.new_group(members, group_desc=name)
    )
    holder = PlanHolder()
    holder.set(plan_batch((shape.length,) * shape.rows, ranks, Limits(shape.heads, shape.kv_heads, ranks)))
    kernels = {ranks: lambda *qkv: kernel(*qkv).flatten(2)}
    attention = BaspAttention(groups, holder, kernels, Ledger(), layer=1)

    def call(*qkv: Tensor) -> Tensor:
        output = attention(*(x.flatten(0, 1)[:, None] for x in qkv), None)
        return output.view(-1, shape.rows, shape.heads, shape.head_size)

    return call


def _transformer_engine() -> Implementation:
    """Its own code where it is installed, else its form."""
    name, layout = "transformer_engine", Layout(zig_zag=True)
    try:
        version("transformer-engine-torch")  # its extension, which no search for modules finds before it is loaded
    except PackageNotFoundError:
        return Implementation(name, FORM, layout, four_collectives_attention)
    importlib.import_module(transformer_engine.MODULE)
    return Implementation(name, version("transformer-engine"), layout, transformer_engine.make)


def four_collectives_attention(shape: Shape, attend: Attend, counter: CopyCounter) -> Attention:
    kernel = Kernel(attend, counter)
    return lambda *qkv: four_collectives.attention(*qkv, kernel, dist.group.WORLD)


def _deepspeed(shape: Shape, attend: Attend, counter: CopyCounter) -> Attention:
    import deepspeed.comm
    from deepspeed.sequence.layer import DistributedAttention

    # An all-reduce through shared memory, which it would compile for a minute; no all-to-all takes that way.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not deepspeed.comm.is_initialized():
        deepspeed.comm.init_distributed(dist.get_backend(), verbose=False)
    attention = DistributedAttention(Kernel(attend, counter), dist.group.WORLD, scatter_idx=2, gather_idx=0)
    return lambda *qkv: attention(*qkv, batch_dim_idx=1)


def _yunchang(shape: Shape, attend: Attend, counter: CopyCounter) -> Attention:
    from yunchang import UlyssesAttention
    from yunchang.kernels import AttnType

    kernel = Kernel(attend, counter, batch_first=True)
    attention = UlyssesAttention(dist.group.WORLD, attn_type=AttnType.TORCH_FLASH)
    attention.attn_fn = lambda query, key, value, **options: kernel(query, key, value)
    return attention
