"""The core attention of a rank that holds a token stream: exchange · local kernel · exchange, wave by wave.

Shapes: query [T, 1, H, d_qk], key [T, 1, Hkv, d_qk], value [T, 1, Hkv, d_v] in the stream's order, H and Hkv per
tensor-parallel rank; the output is [T, 1, H·d_v]. A kernel sees whole sequences of its own heads, in Megatron's `sbhd`
order: [S, rows, H/K, d] -> [S, rows, (H/K)·d_v]. Where rows are packed it gets the documents of each row as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_basp.all_to_all import ExchangeGroup
from megatron_basp.documents import Documents
from megatron_basp.kernels import Rotary
from megatron_basp.ledger import Ledger
from megatron_basp.overlap import Piece, attend
from megatron_basp.plan import BatchPlan, PlanHolder
from megatron_basp.process_groups import SequenceGroups
from megatron_basp.ranges import NO_RANGES, Ranges
from megatron_basp.sdpa import Kernel


class BaspAttention(torch.nn.Module):
    """Causal core attention over the groups of the plan in force.

    Args:
        groups: this rank's groups and its rank in the CP group.
        plan_holder: where the plan of the current micro-batch is found.
        kernels: the local attention for each K that plans may use, for H/(K·chunks) heads.
        ledger, layer: where the exchanges are written down.
        softmax_offset: the logit of each head's attention sink, [H], a parameter where they are learnt; None without.
        chunks: for each K in how many parts the heads are exchanged, so that one travels while another is attended
            to; 1 where it says nothing.
        recompute: runs a kernel, its first argument, and keeps none of what it computes for backward, which runs it
            again; the exchange is not repeated. None to keep it.
        ranges: of a profiler, for packing, collectives, kernels and unpacking; at K = 1 there are none of ours.
    """

    def __init__(
        self,
        groups: SequenceGroups,
        plan_holder: PlanHolder,
        kernels: Mapping[int, Kernel],
        ledger: Ledger,
        layer: int,
        softmax_offset: Tensor | None = None,
        chunks: Mapping[int, int] | None = None,
        recompute: Callable[..., Tensor] | None = None,
        ranges: Ranges = NO_RANGES,
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
        self.chunks = dict(chunks or {})
        self.recompute = recompute
        self._rotary: Rotary | None = None
        self.ranges = ranges
        self._pieces_of: BatchPlan | None = None
        self._pieces: list[Piece] = []

    @property
    def exchanges(self) -> bool:
        """Whether some wave of the plan in force is exchanged."""
        return self.plan_holder.plan.group_sizes != (1,)

    def rotate_next(self, rotary: Rotary | None) -> None:
        """Rotate q and k of the next call while they are packed: they come without rotary embedding. Only for a plan
        that `exchanges`."""
        self._rotary = rotary

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
        rotary, self._rotary = self._rotary, None
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
        if plan is not self._pieces_of:
            self._pieces_of, self._pieces = plan, self._make_pieces(plan)
        kernels = [self._kernel(piece, documents) for piece in self._pieces]
        if not self.exchanges:
            if rotary is not None:
                raise ValueError(f"layer {self.layer}: nothing is packed under this plan, so that nothing is rotated")
            return self._attend_alone(kernels[0], len(self._pieces[0].share.rows), query, key, value)
        query, key, value = (x.squeeze(1) for x in (query, key, value))
        output = attend(self._pieces, kernels, query, key, value, self.softmax_offset, rotary)
        return output.flatten(1)[:, None]

    def _attend_alone(self, kernel: Kernel, rows: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """This rank has whole sequences: [S·rows, 1, heads, d] is [S, rows, heads, d], and for one row at that."""
        if self.softmax_offset is not None:
            kernel = partial(kernel, softmax_offset=self.softmax_offset)
        if rows == 1:
            return kernel(query, key, value)
        output = kernel(*(x.reshape(-1, rows, *x.shape[2:]) for x in (query, key, value)))
        return output.reshape(query.shape[0], 1, -1)

    def _make_pieces(self, plan: BatchPlan) -> list[Piece]:
        """In the order in which they are attended to: the smallest K first, which waits for least."""
        pieces, start = [], 0
        for wave, share in enumerate(plan.shares(self.groups.cp_rank)):
            where, size = None, share.group_size
            if size > 1:
                group, transport, counts = (
                    self.groups.by_size[size],
                    self.groups.transports[size],
                    share.tokens_per_rank,
                )
                where = ExchangeGroup(group, transport, counts, self.ledger, self.layer, wave, self.ranges)
            chunks = self.chunks.get(size, 1)
            tokens = slice(start, start + share.tokens)
            pieces += [Piece(share, tokens, where, chunk, chunks, self.ranges) for chunk in range(chunks)]
            start += share.tokens
        return pieces

    def _kernel(self, piece: Piece, documents: Documents | None) -> Kernel:
        kernel = self.kernels[piece.share.group_size]
        if documents is not None:
            kernel = partial(kernel, documents=documents.of_rows(piece.share.rows))
        return partial(self.recompute, kernel) if self.recompute is not None and self.training else kernel

    def train(self, mode: bool = True) -> BaspAttention:
        for kernel in self.kernels.values():
            if isinstance(kernel, torch.nn.Module):
                kernel.train(mode)
        return super().train(mode)
