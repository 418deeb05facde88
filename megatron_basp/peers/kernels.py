"""What stands between the two exchanges of the benchmark, the same for every implementation.

A kernel takes query [S, B, h, d] and key and value [S, B, g, d], all S tokens of h heads, and gives [S, B, h, d]. As
Transformer Engine's does, it takes and gives contiguous tensors: what comes in pieces it copies, which counts as the
exchange's; how torch gets to contiguous outputs and gradients does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_basp.copy_counter import CopyCounter

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def stand_in(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """q + k + v, each key-value head for all queries of its group: cheap, and wrong where any of the three is."""
    by_group = query.unflatten(2, (key.shape[2], -1))
    return (by_group + (key + value)[:, :, :, None]).flatten(2, 3)


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention with the usual scale 1/√d."""
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    output = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.permute(2, 0, 1, 3)


PARTS: dict[str, Attend] = {"exchange": stand_in, "with_attention": causal}


class Kernel:
    """One of the above, in a node of autograd's of its own, which a counter does not look into.

    Takes and gives [B, S, heads, d] where the rows come first.
    """

    def __init__(self, attend: Attend, counter: CopyCounter, batch_first: bool = False) -> None:
        self._attend, self._counter, self._batch_first = attend, counter, batch_first

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _Apart.apply(self, query, key, value)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The output, and what `backward` needs."""
        whole = [x.detach().contiguous() for x in (query, key, value)]
        with self._counter.paused(), torch.enable_grad():
            inputs = [x.requires_grad_() for x in whole]
            if self._batch_first:
                output = self._attend(*(x.transpose(0, 1) for x in inputs)).transpose(0, 1)
            else:
                output = self._attend(*inputs)
            return output.detach().contiguous(), [*inputs, output]

    def backward(self, kept: list[Tensor], gradient: Tensor) -> list[Tensor]:
        *inputs, output = kept
        gradient = gradient.contiguous()
        with self._counter.paused():
            return [x.contiguous() for x in torch.autograd.grad(output, inputs, gradient)]


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output, ctx.kept = kernel.forward(query, key, value)
        ctx.kernel = kernel
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.kernel.backward(ctx.kept, gradient)
