"""What Megatron's fine-grained activation offloading needs without CUDA: it copies from memory to memory, by the same
groups, tags and pools, and lets go of what it copied."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from megatron_basp.megatron.seam import replace

_VERSIONS = ("0.19",)  # with others it is refused


def install() -> None:
    """Called by `megatron_basp.megatron.on_cpu.install`."""
    replace(
        "megatron.training.arguments:validate_args",
        ["args", "defaults"],
        _with_offloading_on_local_layers,
        versions=_VERSIONS,
    )
    replace(
        "megatron.core.pipeline_parallel.fine_grained_activation_offload:PipelineOffloadManager.__enter__",
        [],
        _without_transformer_engine,
        versions=_VERSIONS,
    )
    replace(
        "megatron.core.pipeline_parallel.fine_grained_activation_offload:"
        "ChunkOffloadHandler._can_manage_tensor_for_offload",
        ["tensor"],
        lambda original: staticmethod(_is_activation),
        versions=_VERSIONS,
    )
    replace(
        "megatron.core.pipeline_parallel.utils:set_ideal_affinity_for_current_gpu",
        [],
        lambda original: lambda: None,
        versions=_VERSIONS,
    )


def _with_offloading_on_local_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron asserts --transformer-impl transformer_engine for it, and its layers do not ask."""

    @functools.wraps(original)
    def validate_args(args: Any, defaults: Any = {}) -> Any:  # noqa: B006  (Megatron's own signature)
        offloads, args.fine_grained_activation_offloading = args.fine_grained_activation_offloading, False
        result = original(args, defaults)
        args.fine_grained_activation_offloading = offloads
        return result

    return validate_args


def _without_transformer_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    """It tells Transformer Engine's attention that offloading is on, and fails where there is none to be told."""

    @functools.wraps(original)
    def __enter__(self: Any) -> None:
        from megatron.core.extensions import transformer_engine

        if transformer_engine.cpu_offload is None:
            transformer_engine.cpu_offload = SimpleNamespace()
        original(self)

    return __enter__


def _is_activation(tensor: torch.Tensor) -> bool:
    """It manages tensors on a GPU only."""
    return not isinstance(tensor, torch.nn.Parameter)
