"""Drawn inputs of the packing kernels, and what they shall make of them, element by element."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from megatron_basp.kernels import Rotary


@dataclass(frozen=True)
class Case:
    """One call: shapes [t, heads, d] of the tensors, K, how they lie in memory, and the rotary embedding's sizes.

    layout: for the sequence's side an order of its dimensions in memory (the last stays innermost) and unused columns
    between the rows. one_buffer: the ranks' side is one buffer [K, t, Σ g·d], else a tensor for each.
    """

    ranks: int
    shapes: tuple[tuple[int, int, int], ...]
    layout: tuple[tuple[int, int], int]
    one_buffer: bool
    rotary_columns: int
    rotated: tuple[int, ...]
    interleaved: bool
    mscale: float
    seed: int

    def by_rank_shape(self, shape: tuple[int, int, int]) -> tuple[int, int, int, int]:
        tokens, heads, size = shape
        return self.ranks, tokens, max(heads, self.ranks) // self.ranks, size

    def sequence_side(self, dtype: torch.dtype) -> list[Tensor]:
        order, unused = self.layout
        made = []
        for shape in self.shapes:
            rows = torch.zeros(shape[order[0]], shape[order[1]], shape[2] + unused, dtype=dtype)
            made.append(rows[..., : shape[2]].permute(order.index(0), order.index(1), 2))
        return made

    def ranks_side(self, dtype: torch.dtype) -> list[Tensor]:
        shapes = [self.by_rank_shape(shape) for shape in self.shapes]
        if not self.one_buffer:
            return [torch.zeros(shape, dtype=dtype) for shape in shapes]
        widths = [per_rank * size for _, _, per_rank, size in shapes]
        buffer = torch.zeros(self.ranks, self.shapes[0][0], sum(widths), dtype=dtype)
        parts = buffer.split(widths, dim=2)
        return [part.unflatten(2, shape[2:]) for part, shape in zip(parts, shapes, strict=True)]

    def filled(self, tensors: list[Tensor]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        for x in tensors:
            x.copy_(torch.randn(x.shape, generator=generator, dtype=torch.float64).clamp(-4, 4))
        return tensors

    def angles(self) -> Tensor:
        """Megatron's `freqs`, [t, 1, 1, r], but with an angle of its own for each column."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return 3 * torch.randn(self.shapes[0][0], 1, 1, self.rotary_columns, generator=generator, dtype=torch.float64)

    def rotary(self, dtype: torch.dtype) -> Rotary | None:
        if not self.rotated:
            return None
        return Rotary.from_angles(self.angles(), dtype, self.rotated, self.interleaved, self.mscale)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    tokens = draw(st.integers(0, 9))
    divisors = [n for n in range(1, ranks) if ranks % n == 0]
    heads = st.one_of(st.integers(1, 4).map(lambda n: n * ranks), *([st.sampled_from(divisors)] if divisors else []))
    sizes = st.integers(1, 24)
    shapes = draw(st.lists(st.tuples(st.just(tokens), heads, sizes), min_size=1, max_size=4))
    columns = 2 * draw(st.integers(1, 12))
    wide_enough = [index for index, shape in enumerate(shapes) if shape[2] >= columns]
    return Case(
        ranks=ranks,
        shapes=tuple(shapes),
        layout=(draw(st.sampled_from([(0, 1), (1, 0)])), draw(st.integers(0, 3))),
        one_buffer=draw(st.booleans()),
        rotary_columns=columns,
        rotated=tuple(draw(st.sets(st.sampled_from(wide_enough)))) if wide_enough else (),
        interleaved=draw(st.booleans()),
        mscale=draw(st.sampled_from([1.0, 1.25])),
        seed=draw(st.integers(0, 1000)),
    )


def packed_by_the_formula(case: Case, sources: list[Tensor]) -> list[Tensor]:
    """[t, heads, d] -> [K, t, g, d], in fp64, a head at a time."""
    packed = []
    for index, source in enumerate(sources):
        heads = source.shape[1]
        target = torch.zeros(case.by_rank_shape(source.shape), dtype=torch.float64)
        x = source.double()
        if index in case.rotated:
            x = rotated_by_the_formula(x, case.angles()[:, 0, 0], case.interleaved, case.mscale)
        for rank in range(case.ranks):
            for h in range(target.shape[2]):
                head = rank * target.shape[2] + h if heads >= case.ranks else rank // (case.ranks // heads)
                target[rank, :, h] = x[:, head]
        packed.append(target)
    return packed


def rotated_by_the_formula(x: Tensor, angles: Tensor, interleaved: bool, mscale: float) -> Tensor:
    """[t, heads, d], the first r columns of each head rotated by angles [t, r], a number at a time."""
    out, columns = x.clone(), angles.shape[1]
    for i in range(columns // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + columns // 2)
        for token in range(len(x)):
            for to, other, sign in ((a, b, -1), (b, a, 1)):
                angle = angles[token, to].item()
                turned = x[token, :, to] * math.cos(angle) + sign * x[token, :, other] * math.sin(angle)
                out[token, :, to] = mscale * turned
    return out
