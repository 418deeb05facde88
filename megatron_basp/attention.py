"""The core attention of a rank that holds a token stream: exchange · local kernel · exchange, wave by wave.

Shapes: query [T, 1, H, d_qk], key [T, 1, Hkv, d_qk], value [T, 1, Hkv, d_v] in the stream's order, H and Hkv per
tensor-parallel rank; the output is [T, 1, H·d_v]. A kernel sees whole sequences of its own heads, in Megatron's `sbhd`
order: [S, rows, H/K, d] -> [S, rows, (H/K)·d_v]. Where rows are packed it gets the documents of each row as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_basp.all_to_all import ExchangeGroup, heads_to_sequence, sequence_to_heads
from megatron_basp.documents import Documents
from megatron_basp.ledger import Ledger
from megatron_basp.plan import PlanHolder, Share
from megatron_basp.process_groups import SequenceGroups
from megatron_basp.sdpa import Kernel


class BaspAttention(torch.nn.Module):
    """Causal core attention over the groups of the plan in force.

    Args:
        groups: this rank's groups and its rank in the CP group.
        plan_holder: where the plan of the current micro-batch is found.
        kernels: the local attention for each K that plans may use.
        ledger, layer: where the exchanges are written down.
        softmax_offset: the logit of each head's attention sink, [H], a parameter where they are learnt; None without.
    """

    def __init__(
        self,
        groups: SequenceGroups,
        plan_holder: PlanHolder,
        kernels: Mapping[int, Kernel],
        ledger: Ledger,
        layer: int,
        softmax_offset: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.groups = groups
        self.plan_holder = plan_holder
        # A plain dict: kernels hold no parameters, and registered ones would add keys to checkpoints that stock has
        # not.
        self.kernels = dict(kernels)
        self.ledger = ledger
        self.layer = layer
        self.softmax_offset = softmax_offset

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

        Args:
            packed_seq_params: of packed rows, something with their `documents` (`megatron/packed.py`).

        Raises:
            ValueError: anything but causal attention over a whole stream, or its documents, is asked for.
        """
        documents = getattr(packed_seq_params, "documents", None)
        refused = [
            name
            for name, value in {
                "an attention mask tensor": attention_mask,
                "an attention bias": attention_bias,
                "packed sequences": packed_seq_params if documents is None else None,
            }.items()
            if value is not None
        ]
        if attn_mask_type is not None and attn_mask_type.name != "causal":
            refused.append(f"the mask type {attn_mask_type.name}")
        if refused:
            raise ValueError(
                f"layer {self.layer}: {' and '.join(refused)} would be ignored: BASP attention is causal only"
            )
        return self._attend(query, key, value, documents)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents | None) -> Tensor:
        plan = self.plan_holder.plan
        if documents is not None and documents.lengths != plan.lengths:
            raise ValueError(
                f"layer {self.layer}: the documents are of rows of {documents.lengths} tokens, and the plan is for "
                f"rows of {plan.lengths}"
            )
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
        outputs = [
            self._attend_wave(wave, share, documents, *qkv)
            for wave, (share, *qkv) in enumerate(zip(shares, *parts, strict=True))
        ]
        return torch.cat(outputs).flatten(1)[:, None]

    def _attend_wave(
        self, wave: int, share: Share, documents: Documents | None, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """[t, heads, d] of this rank's share of a wave -> [t, H, d_v]."""
        kernel, rows = self.kernels[share.group_size], len(share.rows)
        if documents is not None:
            kernel = partial(kernel, documents=documents.of_rows(share.rows))
        if self.softmax_offset is not None:
            # Those of this rank's heads, [H/K]. The gradients of all ranks' parts sum up in Megatron's reduction.
            kernel = partial(kernel, softmax_offset=self.softmax_offset.chunk(share.group_size)[share.rank_in_group])
        if share.group_size == 1:
            return self._run_kernel(kernel, rows, query, key, value)
        group = self.groups.by_size[share.group_size]
        where = ExchangeGroup(group, share.tokens_per_rank, self.ledger, self.layer, wave)
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
