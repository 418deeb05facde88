"""Parameters and gradients as whole tensors, whoever holds them: the distributed optimizer leaves a rank the sums of a
shard of the gradients, Megatron-FSDP a shard of all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


def named_parameters(model: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter that the optimizer steps, by its name under Megatron's DDP. All ranks must ask together."""
    for index, chunk in enumerate(model):
        if is_sharded(chunk):
            for name, parameter in chunk.param_and_grad_buffer.optimizer_named_parameters:
                yield f"{index}.module.{name}", _whole(parameter)
        else:
            yield from ((f"{index}.{name}", _kept(p)) for name, p in chunk.named_parameters())


def named_gradients(model: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The gradients with which the latest step was made, by the same names; all ranks must ask together."""
    for index, chunk in enumerate(model):
        if is_sharded(chunk):
            for name, gradient in chunk.param_and_grad_buffer.dist_main_grad.items():
                yield f"{index}.module.{name}", _whole(gradient)
        else:
            if chunk.ddp_config.use_distributed_optimizer:
                _gather_gradients(chunk)
            yield from ((f"{index}.{name}", _kept(p.main_grad)) for name, p in chunk.named_parameters())


def is_sharded(chunk: Any) -> bool:
    return hasattr(chunk, "param_and_grad_buffer")


def _kept(x: torch.Tensor) -> torch.Tensor:
    return x.detach().to("cpu", copy=True)


def _gather_gradients(chunk: Any) -> None:
    """After a step the buffers are free, so that the shards of the others go where they belong."""
    for buffers in itertools.chain(chunk.bucket_groups, chunk.expert_parallel_bucket_groups):
        group = buffers.intra_distributed_optimizer_instance_group
        for bucket in buffers.buckets:
            shards = bucket.grad_data.chunk(group.size())
            dist.all_gather_into_tensor(bucket.grad_data, shards[group.rank()].clone(), group=group)


def _whole(tensor: Any) -> torch.Tensor:
    """A DTensor's shards over the data-parallel ranks, side by side: Megatron-FSDP cuts between rows of the first
    dimension, into parts of different size. Tensor-parallel ranks keep their parts."""
    mesh = tensor.device_mesh
    whole: torch.Tensor = tensor.to_local().detach().clone()
    for dimension in ("outer_fsdp_dp", "dp_cp"):
        if dimension in mesh.mesh_dim_names and tensor.placements[mesh.mesh_dim_names.index(dimension)].is_shard():
            group = mesh.get_group(dimension)
            shards: list[Any] = [None] * group.size()
            dist.all_gather_object(shards, whole, group=group)
            whole = torch.cat(shards)
    return _kept(whole)
