"""What the benchmark exchanges, and what has to come out."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_basp.errors import ConfigurationError
from megatron_basp.library import named_model
from megatron_basp.peers.kernels import Attend


@dataclass(frozen=True)
class Shape:
    """name: MODEL:SxB, as on the command line. Then H, Hkv, d, S and B."""

    name: str
    heads: int
    kv_heads: int
    head_size: int
    length: int
    rows: int

    def draw(self) -> list[Tensor]:
        """Query, key, value and a gradient of the output, each [S, B, heads, d] in fp32; the same on all ranks."""
        generator = torch.Generator().manual_seed(0)
        return [
            torch.randn(self.length, self.rows, heads, self.head_size, generator=generator)
            for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads)
        ]


def shape_of(text: str) -> Shape:
    """From MODEL:SxB, or MODEL:S for one row.

    Raises:
        ConfigurationError: it is not one, or there is no such model.
    """
    found = re.fullmatch(r"(.+):([1-9]\d*)(?:x([1-9]\d*))?", text)
    if found is None:
        raise ConfigurationError(
            f"a shape is MODEL:S or MODEL:SxB, a model of the library or its file, tokens and rows, as in "
            f"llama3.1-8b:512x2, got {text}"
        )
    model, length, rows = named_model(found[1]), int(found[2]), int(found[3] or 1)
    return Shape(text, model.heads, model.kv_heads, model.head_size, length, rows)


@dataclass(frozen=True)
class Layout:
    """How an implementation wants a sequence that K ranks share.

    batch_first: [B, S/K, heads, d] instead of [S/K, B, heads, d].
    zig_zag: of 2K chunks a rank holds numbers r and 2K-1-r, instead of one piece.
    """

    batch_first: bool = False
    zig_zag: bool = False

    def part(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """A rank's part of [S, B, heads, d]; memory of its own."""
        part = whole[self._tokens(len(whole), rank, ranks)]
        return part.transpose(0, 1).contiguous() if self.batch_first else part

    def whole(self, parts: list[Tensor]) -> Tensor:
        """[S, B, heads, d] of the ranks' parts."""
        ranks, time = len(parts), int(self.batch_first)
        order = torch.cat([self._tokens(ranks * parts[0].shape[time], rank, ranks) for rank in range(ranks)])
        return torch.cat([part.transpose(0, time) for part in parts])[order.argsort()]

    def _tokens(self, length: int, rank: int, ranks: int) -> Tensor:
        tokens = torch.arange(length)
        if not self.zig_zag:
            return tokens.chunk(ranks)[rank]
        chunks = tokens.chunk(2 * ranks)
        return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def undivided(shape: Shape, attend: Attend) -> list[Tensor]:
    """Output and gradients of query, key and value by one process in fp64, each [S, B, heads, d]."""
    *inputs, gradient = (x.double() for x in shape.draw())
    inputs = [x.requires_grad_() for x in inputs]
    output = attend(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, gradient)]


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference of any tensor's entries, relative to its largest entry; NaN if there is one."""
    errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True)]
    return max(errors, key=lambda error: (error != error, error))
