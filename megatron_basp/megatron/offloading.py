"""Megatron's fine-grained activation offloading around an attention that takes its input apart."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megatron_basp.errors import ConfigurationError

# Modules whose offloading was held to one process. Those of experts need Transformer Engine's layers.
MODULES = frozenset({"attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"})


def check_offloading(args: argparse.Namespace) -> None:
    """Raise `ConfigurationError` for what offloading was not shown to go with."""
    if not args.fine_grained_activation_offloading:
        return
    if others := sorted(set(args.offload_modules or ()) - MODULES):
        raise ConfigurationError(
            f"--offload-modules {' '.join(others)} is not shown to be exact yet: use some of "
            f"{' '.join(sorted(MODULES))}"
        )
    stages = args.pipeline_model_parallel_size
    if stages > 1 and set(args.offload_modules or ()) != {"core_attn"}:
        raise ConfigurationError(
            f"--offload-modules {' '.join(args.offload_modules or ())} with --pipeline-model-parallel-size {stages}: "
            f"Megatron 0.19 loses count of the groups and stops in backward; use core_attn alone"
        )
    if args.recompute_granularity == "full":
        raise ConfigurationError(
            "--fine-grained-activation-offloading with --recompute-granularity full: what would be offloaded is made "
            "anew instead of kept, and the two together failed in a test; use --recompute-granularity selective"
        )


def offloads_core_attention(config: Any) -> bool:
    """As `core/transformer/attention.py` decides it."""
    return config.fine_grained_activation_offloading and "core_attn" in config.offload_modules


def keep_storage_of(streams: Sequence[Tensor]) -> None:
    """Once the tensors that attention kept are offloaded, Megatron empties the storage of q, k and v that it was
    given. Where attention kept parts of them, which may be too small to be offloaded, they would be gone: so these
    are taken off its hands, and freed like others, when nobody holds them."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
        FineGrainedActivationOffloadingInterface,
    )

    for stream in streams:
        FineGrainedActivationOffloadingInterface.mark_not_offload(stream)
