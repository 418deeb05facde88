"""Rotary embedding left to the exchange, which rotates q and k while it packs them.

Megatron's self-attention rotates q and k between its projection and its core attention
(`core/transformer/attention.py`): a pass over both, and without fusion several. Here the table is taken out of its
arguments and given to the core attention. Where nothing is exchanged there is no packing either, and Megatron rotates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_basp.attention import BaspAttention
from megatron_basp.kernels import Rotary


def rotate_while_packing(model: torch.nn.Module) -> None:
    """Of each self-attention of a built model. Multi-latent attention rotates inside of its projections, and a fused
    rotation of the packed projection (`--fused-single-qkv-rope`) is one pass with Transformer Engine's split of it:
    both stay as they are."""
    tables = _Tables()
    for module in model.modules():
        if type(module).__name__ == "SelfAttention" and isinstance(module.core_attention, BaspAttention):
            config = module.config
            if config.fused_single_qkv_rope or (config.no_rope_freq and config.no_rope_freq[module.layer_number - 1]):
                continue
            module.register_forward_pre_hook(tables.hand_over, with_kwargs=True)


class _Tables:
    """Cosines and sines, made once for all layers that are given the same angles."""

    def __init__(self) -> None:
        self._latest: tuple[Tensor, Rotary] | None = None

    def hand_over(self, attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward pre-hook of Megatron's `SelfAttention`, which its layers call with keywords."""
        angles = kwargs.get("rotary_pos_emb")
        if angles is None or not attention.core_attention.exchanges:
            attention.core_attention.rotate_next(None)
            return None
        if not isinstance(angles, Tensor) or kwargs.get("inference_context") is not None:
            raise ValueError(
                f"layer {attention.layer_number}: rotary embedding is taken over from training's one table of angles, "
                f"got {type(angles).__name__} and inference context {kwargs.get('inference_context')}"
            )
        attention.core_attention.rotate_next(self._rotary(attention.config, angles))
        return args, kwargs | {"rotary_pos_emb": None}

    def _rotary(self, config: Any, angles: Tensor) -> Rotary:
        if self._latest is None or self._latest[0] is not angles:
            from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn

            scale = yarn._yarn_get_concentration_factor_from_config(config)
            # The fused kernel that Megatron would have called has cosines and sines in fp32; it knows no scale.
            dtype = torch.float32 if config.apply_rope_fusion and scale == 1.0 else config.params_dtype
            rotary = Rotary.from_angles(angles, dtype, interleaved=config.rotary_interleaved, mscale=scale)
            self._latest = angles, rotary
        return self._latest[1]
