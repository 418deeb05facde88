"""The local attention of a CPU: torch's scaled dot-product attention, with what Megatron's models ask of a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_basp.documents import Boundaries

Kernel = Callable[..., Tensor]
"""(query, key, value), `documents` of packed rows and `softmax_offset` of attention sinks where there are such."""


class CausalSDPA(torch.nn.Module):
    """Torch's scaled dot-product attention as a kernel: causal, grouped queries, `sbhd` in and out.

    Args:
        window: tokens before its own that a query sees, or None for all of them.
        dropout: the share of attention weights that training sets to 0.
        dropout_state: the random state to draw these from, entered for the draw.
    """

    def __init__(
        self,
        softmax_scale: float,
        window: int | None = None,
        dropout: float = 0.0,
        dropout_state: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.window = window
        self.dropout = dropout
        self.dropout_state = dropout_state

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Sequence[Boundaries] | None = None,
        softmax_offset: Tensor | None = None,
    ) -> Tensor:
        """[S, rows, h, d] -> [S, rows, h·d_v].

        Args:
            documents: of each of the rows, where they are packed.
            softmax_offset: [h], the logit of an attention sink for each head, where there are such.
        """
        if documents is not None:
            return by_document(partial(self, softmax_offset=softmax_offset), query, key, value, documents)
        # [S, rows, h, d] -> [rows, h, S, d]
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        length = query.shape[2]
        mask = None if self.window is None else sliding_window(length, self.window, query.device)
        if softmax_offset is not None:
            seen = sliding_window(length, length, query.device) if mask is None else mask
            query, key, value, mask = with_sink(query, key, value, seen, softmax_offset / self.softmax_scale)
        dropout = self.dropout if self.training else 0.0
        with self.dropout_state() if dropout else nullcontext():
            output = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=mask is None,
                scale=self.softmax_scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        return output.permute(2, 0, 1, 3).flatten(2)


def by_document(attend: Kernel, query: Tensor, key: Tensor, value: Tensor, documents: Sequence[Boundaries]) -> Tensor:
    """Attention over each document of each row by itself.

    Args:
        attend: attention over whole rows, [S, rows, h, d] -> [S, rows, h·d_v].
        documents: of each of the rows.
    """
    outputs = []
    for row, boundaries in enumerate(documents):
        whole = [x[:, row : row + 1] for x in (query, key, value)]
        outputs.append(torch.cat([attend(*(x[start:stop] for x in whole)) for start, stop in pairwise(boundaries)]))
    return torch.cat(outputs, dim=1)


def with_sink(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, offset: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One key more, which every query sees: its score is the head's offset, its value 0.

    Queries carry the offset in a channel of its own, which is 1 in that key and 0 in all others.

    Args:
        query, key, value: [rows, heads, S, d]. seen: [S, S] bool. offset: [heads of query], before the scale.

    Returns:
        query [rows, h, S, d_qk + 1], key [rows, hkv, S + 1, d_qk + 1], value [rows, hkv, S + 1, d_v], seen [S, S + 1].
    """
    offset = offset.to(query.dtype)[:, None, None].expand(*query.shape[:3], 1)
    sink = F.pad(torch.zeros_like(key[:, :, :1]), (0, 1), value=1.0)
    key = torch.cat([F.pad(key, (0, 1)), sink], dim=2)
    return torch.cat([query, offset], dim=3), key, F.pad(value, (0, 0, 0, 1)), F.pad(seen, (0, 1), value=True)


@lru_cache(maxsize=2)
def sliding_window(length: int, window: int, device: torch.device) -> Tensor:
    """What each query (row) sees of the keys: itself and `window` tokens before it, [S, S] bool.

    A byte for each pair of tokens: for the lengths of tests and demos. On a GPU Transformer Engine needs no mask.
    """
    seen = torch.ones(length, length, dtype=torch.bool, device=device)
    return seen.tril().triu(-window)
