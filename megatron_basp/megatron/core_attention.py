"""BASP's core attention as Megatron builds it, around the kernel that Megatron would have used.

On a GPU with Transformer Engine the kernel is `TEDotProductAttention`, one module for each distinct K because it
asserts its head counts; else torch's SDPA.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any

import torch

from megatron_basp.attention import BaspAttention
from megatron_basp.documents import Boundaries, Documents
from megatron_basp.errors import ConfigurationError
from megatron_basp.megatron.offloading import keep_storage_of, offloads_core_attention
from megatron_basp.megatron.runtime import Runtime
from megatron_basp.megatron.seam import Function
from megatron_basp.megatron.settings import Settings
from megatron_basp.overlap_cost import possible_chunks
from megatron_basp.plan import heads_fit
from megatron_basp.sdpa import CausalSDPA, Kernel


class MegatronBaspAttention(BaspAttention):
    """Takes the arguments with which Megatron builds a core attention (`core/transformer/attention.py`).

    Args:
        stock: the class that Megatron would have used; attention sinks are made, and saved, by one of these.
        make_kernel: builds the kernel for one K from that many ranks' share of heads.
        runtime: the run's groups, plans and ledger.
    """

    def __init__(
        self,
        stock: type[torch.nn.Module],
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
                config=share_of_heads(config, group_size * chunks),
                layer_number=layer_number,
                attn_mask_type=attn_mask_type,
                attention_type=attention_type,
                **kernel_arguments,
            )
            for group_size, chunks in runtime.settings.chunks.items()
        }
        sinks = []
        if config.softmax_type != "vanilla":
            sinks = [
                stock(
                    config=config,
                    layer_number=layer_number,
                    attn_mask_type=attn_mask_type,
                    attention_type=attention_type,
                    pg_collection=kernel_arguments["pg_collection"],
                )
            ]
        super().__init__(
            runtime.groups,
            runtime.plan_holder,
            kernels,
            runtime.ledger,
            layer_number,
            softmax_offset=sinks[0].softmax_offset if sinks else None,
            chunks=runtime.settings.chunks,
            recompute=recompute if recomputes_core_attention(config) else None,
            ranges=runtime.ranges,
        )
        self._offloads = offloads_core_attention(config)
        self._sinks = sinks  # in a list, so that its parameter is registered once, as ours and under stock's name

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents | None
    ) -> torch.Tensor:
        takes_them_apart = documents is not None or self.exchanges
        if self._offloads and self.training and takes_them_apart:
            keep_storage_of((query, key, value))
        return super()._attend(query, key, value, documents)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """As stock's: learnt sinks are split over tensor-parallel ranks, as heads are."""
        if not self._sinks:
            return {}
        self._sinks[0].softmax_offset = self.softmax_offset
        return self._sinks[0].sharded_state_dict(prefix, sharded_offsets, metadata)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.pop(f"{prefix}_extra_state", None)  # of Transformer Engine's module: FP8 state, empty
        super()._load_from_state_dict(state_dict, prefix, *args)


def check_heads(config: Any, layer: int, settings: Settings) -> None:
    """A script may build models of other sizes than the arguments say, which is what the run was planned for.

    Raises:
        ConfigurationError: its heads cannot be divided among the K ranks of some wave, or into parts.
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
    for group_size, chunks in settings.chunks.items():
        possible = possible_chunks(limits, group_size)
        if chunks not in possible:
            raise ConfigurationError(
                f"layer {layer}: its heads at K={group_size}, H={heads} and Hkv={limits.kv_heads} per tensor-parallel "
                f"rank, cannot be exchanged in {chunks} parts: the model was built with other heads than the "
                f"arguments say; set --basp-overlap-chunks to one of {possible}"
            )


def recomputes_core_attention(config: Any) -> bool:
    """As `core/transformer/attention.py` decides it."""
    return config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules


def recompute(kernel: Kernel, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    """By Megatron's own checkpoint, which puts its random states back."""
    from megatron.core import tensor_parallel

    return tensor_parallel.checkpoint(partial(kernel, **options), False, *tensors)


def recompute_inside_of_the_exchange(model: torch.nn.Module) -> None:
    """Megatron's layers recompute the whole of core attention, exchange included: here it recomputes its kernel."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "core_attention", None), MegatronBaspAttention):
            if not hasattr(module, "checkpoint_core_attention"):
                raise RuntimeError(f"{name} has no checkpoint_core_attention, with which this Megatron recomputes it")
            module.checkpoint_core_attention = False


def share_of_heads(config: Any, parts: int) -> Any:
    """A copy of a TransformerConfig with one of so many parts of the heads, H/parts and at least one of Hkv/parts."""
    tensor_parallel = config.tensor_model_parallel_size
    kv_heads = config.num_query_groups // tensor_parallel
    config = copy.copy(config)
    config.num_attention_heads //= parts
    config.num_query_groups = max(kv_heads, parts) // parts * tensor_parallel
    return config


def make_sdpa(
    *,
    config: Any,
    layer_number: int,
    softmax_scale: float | None = None,
    attention_dropout: float | None = None,
    **ignored: Any,
) -> Kernel:
    """Torch's scaled dot-product attention; it takes any number of heads, so only scale, window and dropout are of
    interest. Dropout draws from the state that Megatron's own `DotProductAttention` draws from."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.transformer.utils import is_layer_window_attention

    windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
    return CausalSDPA(
        softmax_scale if softmax_scale is not None else 1 / math.sqrt(config.kv_channels),
        window=config.window_size[0] if windowed else None,
        dropout=config.attention_dropout if attention_dropout is None else attention_dropout,
        # With tensor-parallel sequence parallelism the whole block is within that state already.
        dropout_state=nullcontext if config.sequence_parallel else lambda: get_cuda_rng_tracker().fork(),
    )


def make_te(te_attention: type[torch.nn.Module]) -> Callable[..., Kernel]:
    """The maker of Transformer Engine kernels: causal, without a mask; `sbhd`, or `thd` where rows are packed."""

    def make(*, attn_mask_type: Any, **arguments: Any) -> Kernel:
        module = te_attention(attn_mask_type=attn_mask_type, cp_comm_type=None, **arguments)
        if getattr(module, "softmax_offset", None) is not None:
            del module.softmax_offset  # a parameter, maybe; it is given the slice of the layer's own before each call
        return _TEKernel(module, attn_mask_type)

    return make


class _TEKernel(torch.nn.Module):
    def __init__(self, attention: torch.nn.Module, attn_mask_type: Any) -> None:
        super().__init__()
        self.attention = attention
        self.attn_mask_type = attn_mask_type

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        documents: Sequence[Boundaries] | None = None,
        softmax_offset: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if softmax_offset is not None:
            self.attention.softmax_offset = softmax_offset
        if documents is None:
            return self.attention(query, key, value, None, attn_mask_type=self.attn_mask_type)
        # Rows strung together: [S, rows, h, d] -> [rows·S, h, d], a copy where there are several rows. For `thd` the
        # module itself turns `causal` into `padding_causal`, as it does for stock.
        length, rows = query.shape[:2]
        output = self.attention(
            *(x.transpose(0, 1).flatten(0, 1) for x in (query, key, value)),
            None,
            attn_mask_type=self.attn_mask_type,
            packed_seq_params=_thd_params(tuple(documents), query.device),
        )
        return output.reshape(rows, length, -1).transpose(0, 1)


@lru_cache(maxsize=16)  # the same for all layers of a micro-batch: a wave or two
def _thd_params(documents: tuple[Boundaries, ...], device: torch.device) -> Any:
    """Megatron's description of packed rows that are strung together."""
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = [stop - start for boundaries in documents for start, stop in pairwise(boundaries)]
    cumulative = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


def choosing_core_attention(runtime: Runtime, original: Function) -> Function:
    def core_attention(self: Any) -> Any:
        from megatron.core.transformer.dot_product_attention import DotProductAttention

        stock = original(self)
        if not runtime.is_active:
            return stock
        make_kernel = make_sdpa if stock is DotProductAttention else make_te(stock)
        return attention_class(stock, make_kernel, runtime)

    return core_attention


def attention_class(
    stock: type[torch.nn.Module], make_kernel: Callable[..., Kernel], runtime: Runtime
) -> type[MegatronBaspAttention]:
    """A class that is built from Megatron's arguments alone. (A `functools.partial` would do for plain attention;
    multi-latent attention builds its core by `core/transformer/spec_utils.py`, which takes a class.)"""

    class PlannedAttention(MegatronBaspAttention):
        # Here, and not where it is written: this imports the compiler, which reads its settings when it is imported.
        forward = torch.compiler.disable(MegatronBaspAttention.forward, reason="it talks to other ranks")

        def __init__(self, **arguments: Any) -> None:
            super().__init__(stock, make_kernel, runtime, **arguments)

    return PlannedAttention
