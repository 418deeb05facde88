"""Rotary embedding as the packing kernels apply it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """Tables for the tokens of a stream, and which tensors they rotate.

    The first r columns of a head are rotated, the others pass. Column a and its partner b, with a before b, become
        a·cos_a - b·sin_a   and   b·cos_b + a·sin_b
    which is what Megatron's unfused `apply_rotary_pos_emb` does (`megatron/core/models/common/embeddings`).

    cos, sin: [t, r], of the tensors' dtype, as Megatron rounds them where it does not fuse, or in fp32; stride 1 in
        the last dimension.
    rotated: indices of the tensors that are rotated, of q, k and v usually (0, 1).
    interleaved: partners are neighbours (2i, 2i+1); else they are half of r apart (i, i + r/2).
    """

    cos: Tensor
    sin: Tensor
    rotated: tuple[int, ...] = (0, 1)
    interleaved: bool = False

    @classmethod
    def from_angles(
        cls,
        angles: Tensor,
        dtype: torch.dtype,
        rotated: tuple[int, ...] = (0, 1),
        interleaved: bool = False,
        mscale: float = 1.0,
    ) -> Rotary:
        """From Megatron's `freqs` for the tokens of a stream, [t, r] or [t, 1, 1, r]; mscale is that of YaRN."""
        angles = angles.reshape(len(angles), angles.shape[-1])
        return cls((angles.cos() * mscale).to(dtype), (angles.sin() * mscale).to(dtype), rotated, interleaved)

    def of(self, tokens: slice) -> Rotary:
        """Of a part of the stream."""
        return replace(self, cos=self.cos[tokens], sin=self.sin[tokens])

    @property
    def columns(self) -> int:
        """r, the rotated columns of each head."""
        return self.cos.shape[1]
