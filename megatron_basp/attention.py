"""The core attention of a rank that holds a token stream: exchange · local kernel · exchange, wave by wave.

Shapes: query [T, 1, H, d_qk], key [T, 1, Hkv, d_qk], value [T, 1, Hkv, d_v] in the stream's order, H and Hkv per
tensor-parallel rank; the output is [T, 1, H·d_v]. A kernel sees whole sequences of its own heads, in Megatron's `sbhd`
order: [S, rows, H/K, d] -> [S, rows, (H/K)·d_v].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_basp.all_to_all import ExchangeGroup, heads_to_sequence, sequence_to_heads
from megatron_basp.ledger import Ledger
from megatron_basp.plan import PlanHolder, Share
from megatron_basp.process_groups import SequenceGroups

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]


class BaspAttention(torch.nn.Module):
    """Causal core attention over the groups of the plan in force.

    Args:
        groups: this rank's groups and its rank in the CP group.
        plan_holder: where the plan of the current micro-batch is found.
        kernels: the local attention for each K that plans may use.
        ledger, layer: where the exchanges are written down.
    """

    def __init__(
        self,
        groups: SequenceGroups,
        plan_holder: PlanHolder,
        kernels: Mapping[int, Kernel],
        ledger: Ledger,
        layer: int,
    ) -> None:
        super().__init__()
        self.groups = groups
        self.plan_holder = plan_holder
        # A plain dict: kernels hold no parameters, and registered ones would add keys to checkpoints that stock has
        # not.
        self.kernels = dict(kernels)
        self.ledger = ledger
        self.layer = layer

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Megatron's core-attention signature (`megatron/core/transformer/attention.py`).

        Raises:
            ValueError: anything but plain causal attention over a whole stream is asked for.
        """
        refused = [
            name
            for name, value in {
                "an attention mask tensor": attention_mask,
                "an attention bias": attention_bias,
                "packed sequences": packed_seq_params,
            }.items()
            if value is not None
        ]
        if attn_mask_type is not None and attn_mask_type.name != "causal":
            refused.append(f"the mask type {attn_mask_type.name}")
        if refused:
            raise ValueError(
                f"layer {self.layer}: {' and '.join(refused)} would be ignored: BASP attention is causal only"
            )
        return self._attend(query, key, value)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        plan = self.plan_holder.plan
        tokens, batch = query.shape[:2]
        if (tokens, batch) != (plan.tokens, 1):
            raise ValueError(
                f"context-parallel rank {self.groups.cp_rank}, layer {self.layer}: a rank's stream is [T, 1] with "
                f"T = B·S/N = {plan.tokens}, got {[tokens, batch]}: this attention was handed something else than the "
                f"batch that was planned"
            )
        shares = plan.shares(self.groups.cp_rank)
        counts = [share.tokens for share in shares]
        parts = [x.squeeze(1).split(counts) for x in (query, key, value)]
        outputs = [self._attend_wave(share, *qkv) for share, *qkv in zip(shares, *parts, strict=True)]
        return torch.cat(outputs).flatten(1)[:, None]

    def _attend_wave(self, share: Share, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[t, heads, d] of this rank's part of a wave -> [t, H, d_v]."""
        kernel, rows = self.kernels[share.group_size], len(share.rows)
        if share.group_size == 1:
            return self._run_kernel(kernel, rows, query, key, value)
        where = ExchangeGroup(self.groups.by_size[share.group_size], share.tokens_per_rank, self.ledger, self.layer)
        output = self._run_kernel(kernel, rows, *sequence_to_heads(query, key, value, where))
        return heads_to_sequence(output, where)

    @staticmethod
    def _run_kernel(kernel: Kernel, rows: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Position-major tokens are [S, rows] already: [S·rows, h, d] -> [S·rows, h, d_v] without a copy."""
        output = kernel(*(x.unflatten(0, (-1, rows)) for x in (query, key, value)))  # [S, rows, h·d_v]
        return output.reshape(query.shape[0], query.shape[1], -1)

    def train(self, mode: bool = True) -> BaspAttention:
        for kernel in self.kernels.values():
            if isinstance(kernel, torch.nn.Module):
                kernel.train(mode)
        return super().train(mode)


class CausalSDPA:
    """Torch's scaled dot-product attention as a kernel: causal, grouped queries, `sbhd` in and out.

    Args:
        window: tokens before its own that a query sees, or None for all of them.
    """

    def __init__(self, softmax_scale: float, window: int | None = None) -> None:
        self.softmax_scale = softmax_scale
        self.window = window

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # [S, rows, h, d] -> [rows, h, S, d]
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        mask = None if self.window is None else sliding_window(query.shape[2], self.window, query.device)
        output = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.permute(2, 0, 1, 3).flatten(2)


@lru_cache(maxsize=1)
def sliding_window(length: int, window: int, device: torch.device) -> Tensor:
    """What each query (row) sees of the keys: itself and `window` tokens before it, [S, S] bool.

    A byte for each pair of tokens: for the lengths of tests and demos. On a GPU Transformer Engine needs no mask.
    """
    seen = torch.ones(length, length, dtype=torch.bool, device=device)
    return seen.tril().triu(-window)
