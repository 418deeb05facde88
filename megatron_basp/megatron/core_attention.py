"""BASP's core attention as Megatron builds it, around the kernel that Megatron would have used.

On a GPU with Transformer Engine the kernel is `TEDotProductAttention`, one module for each distinct K because it
asserts its head counts; else torch's SDPA.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from megatron_basp.attention import BaspAttention, CausalSDPA, Kernel
from megatron_basp.errors import ConfigurationError
from megatron_basp.megatron.runtime import Runtime
from megatron_basp.megatron.seam import Function
from megatron_basp.megatron.settings import Settings
from megatron_basp.plan import heads_fit


class MegatronBaspAttention(BaspAttention):
    """Takes the arguments with which Megatron builds a core attention (`core/transformer/attention.py`).

    Args:
        make_kernel: builds the kernel for one K from that many ranks' share of heads.
        runtime: the run's groups, plans and ledger.
    """

    def __init__(
        self,
        make_kernel: Callable[..., Kernel],
        runtime: Runtime,
        *,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        **kernel_arguments: Any,
    ) -> None:
        if attn_mask_type.name != "causal" or attention_type != "self":
            raise ValueError(
                f"layer {layer_number}: BASP attention is causal self-attention, got mask type {attn_mask_type.name} "
                f"and attention type {attention_type}: use --sequence-parallel-mode none"
            )
        check_heads(config, layer_number, runtime.settings)
        kernel_arguments.pop("cp_comm_type", None)
        kernels = {
            group_size: make_kernel(
                config=share_of_heads(config, group_size),
                layer_number=layer_number,
                attn_mask_type=attn_mask_type,
                attention_type=attention_type,
                **kernel_arguments,
            )
            for group_size in runtime.settings.group_sizes()
        }
        super().__init__(runtime.groups, runtime.plan_holder, kernels, runtime.ledger, layer_number)


def check_heads(config: Any, layer: int, settings: Settings) -> None:
    """A script may build models of other sizes than the arguments say, which is what the run was planned for.

    Raises:
        ConfigurationError: its heads cannot be divided among the K ranks of some wave.
    """
    tensor_parallel = config.tensor_model_parallel_size
    heads, kv_heads = config.num_attention_heads // tensor_parallel, config.num_query_groups // tensor_parallel
    limits = replace(settings.limits, heads=heads, kv_heads=max(1, kv_heads))
    unfit = [group_size for group_size in settings.group_sizes() if not heads_fit(group_size, limits)]
    if unfit:
        raise ConfigurationError(
            f"layer {layer}: H % K must be 0, and Hkv % K or K % Hkv, got H={heads}, Hkv={limits.kv_heads} per "
            f"tensor-parallel rank and K={unfit[0]}: the model was built with other heads than the arguments say, "
            f"H={settings.limits.heads}, Hkv={settings.limits.kv_heads}, for which the run was planned; set "
            f"--num-attention-heads and --num-query-groups to those of the model with the fewest"
        )


def share_of_heads(config: Any, group_size: int) -> Any:
    """A copy of a TransformerConfig with the heads that one of K ranks attends with: H/K and max(Hkv, K)/K."""
    tensor_parallel = config.tensor_model_parallel_size
    kv_heads = config.num_query_groups // tensor_parallel
    config = copy.copy(config)
    config.num_attention_heads //= group_size
    config.num_query_groups = max(kv_heads, group_size) // group_size * tensor_parallel
    return config


def make_sdpa(*, config: Any, layer_number: int, softmax_scale: float | None = None, **ignored: Any) -> Kernel:
    """Torch's scaled dot-product attention; it takes any number of heads, so only scale and window are of interest."""
    from megatron.core.transformer.utils import is_layer_window_attention

    windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
    return CausalSDPA(
        softmax_scale if softmax_scale is not None else 1 / math.sqrt(config.kv_channels),
        window=config.window_size[0] if windowed else None,
    )


def make_te(te_attention: type[torch.nn.Module]) -> Callable[..., Kernel]:
    """The maker of Transformer Engine kernels: causal, without a mask, `sbhd`."""

    def make(*, attn_mask_type: Any, **arguments: Any) -> Kernel:
        module = te_attention(attn_mask_type=attn_mask_type, cp_comm_type=None, **arguments)
        return _TEKernel(module, attn_mask_type)

    return make


class _TEKernel(torch.nn.Module):
    def __init__(self, attention: torch.nn.Module, attn_mask_type: Any) -> None:
        super().__init__()
        self.attention = attention
        self.attn_mask_type = attn_mask_type

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self.attention(query, key, value, None, attn_mask_type=self.attn_mask_type)


def choosing_core_attention(runtime: Runtime, original: Function) -> Function:
    def core_attention(self: Any) -> Any:
        from megatron.core.transformer.dot_product_attention import DotProductAttention

        stock = original(self)
        if not runtime.is_active:
            return stock
        make_kernel = make_sdpa if stock is DotProductAttention else make_te(stock)
        return functools.partial(MegatronBaspAttention, make_kernel, runtime)

    return core_attention
