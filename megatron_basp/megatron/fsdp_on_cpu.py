"""What Megatron-FSDP needs to write and read its checkpoints without CUDA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_basp.megatron.seam import replace


def install() -> None:
    """Called by `megatron_basp.megatron.on_cpu.install`."""
    replace(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_param_state_fsdp_dtensor",
        ["is_loading"],
        _with_states_of_empty_shards,
    )


def _with_states_of_empty_shards(original: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's Adam keeps no state of a parameter of which this rank's shard is empty, and its peers do. Megatron asks
    all ranks for the shape of their shards, state by state, so that every rank must have each, in the same order."""

    @functools.wraps(original)
    def sharded_param_state_fsdp_dtensor(self: Any, is_loading: bool = False) -> Any:
        if is_loading:
            self._init_optimizer_states_with_dummy_values()
        states = self.optimizer.state
        if states:
            pattern = next(iter(states.values()))
            ordered = {
                parameter: states.get(parameter) or _empty_state(parameter, pattern)
                for group in self.optimizer.param_groups
                for parameter in group["params"]
            }
            states.clear()
            states.update(ordered)
        return original(self)

    return sharded_param_state_fsdp_dtensor


def _empty_state(parameter: torch.Tensor, pattern: dict[str, Any]) -> dict[str, Any]:
    """Moments without elements; the number of steps is that of every parameter."""
    moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
    return {name: moments.get(name, value) for name, value in pattern.items()}
