"""Rotary embedding fused into packing, against Megatron's own."""

from types import SimpleNamespace

import pytest
import torch

from megatron_basp.kernels import Rotary, pack_heads, unpack_heads

pytestmark = pytest.mark.end_to_end

TOKENS, RANKS, SHAPES = 24, 4, ((8, 64), (2, 64), (2, 64))


def angles_and_mscale(kind, interleaved):
    """Megatron's table for every third position, as a stream of three rows has them."""
    from megatron.core.models.common.embeddings import rotary_pos_embedding, yarn_rotary_pos_embedding

    options = {"rotary_interleaved": interleaved, "use_cpu_initialization": True}
    if kind == "yarn":
        table, _ = yarn_rotary_pos_embedding.YarnRotaryEmbedding(64, scaling_factor=4.0, **options)(3 * TOKENS)
        return table[::3], yarn_rotary_pos_embedding._yarn_get_concentration_factor(4.0, 1.0, 0.0)
    share = 0.5 if kind == "partial" else 1.0
    return rotary_pos_embedding.RotaryEmbedding(64, share, **options)(3 * TOKENS)[::3], 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "interleaved"),
    [("rope", False), ("rope", True), ("partial", False), ("partial", True), ("yarn", False)],
)
def test_packing_with_rotary_embedding_is_megatrons_and_then_packing(trainer, kind, interleaved, dtype):
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

    angles, mscale = angles_and_mscale(kind, interleaved)
    assert (kind == "yarn") == (mscale != 1.0)
    generator = torch.Generator().manual_seed(7)
    tensors = [torch.randn(TOKENS, 1, *shape, generator=generator).to(dtype).requires_grad_() for shape in SHAPES]
    config = SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=interleaved, multi_latent_attention=False)
    rotated = [
        *(apply_rotary_pos_emb(x, angles, config, mscale=mscale, cp_group=object()) for x in tensors[:2]),
        tensors[2],
    ]
    stock, ours, gradients = (
        [torch.zeros(RANKS, TOKENS, max(heads // RANKS, 1), size, dtype=dtype) for heads, size in SHAPES]
        for _ in range(3)
    )
    rotary = Rotary.from_angles(angles, dtype, (0, 1), interleaved, mscale)
    pack_heads([x.detach().squeeze(1) for x in rotated], stock)
    pack_heads([x.detach().squeeze(1) for x in tensors], ours, rotary)
    # Both round two products and a sum of numbers up to 4; where a sum is rounded once, ours.
    tolerance = 8 * torch.finfo(dtype).eps
    for x, wanted in zip(ours, stock, strict=True):
        assert (x - wanted).abs().max() <= tolerance

    for gradient in gradients:
        gradient.copy_(torch.randn(gradient.shape, generator=generator))
    back, rotated_back = ([torch.zeros_like(x.squeeze(1)) for x in tensors] for _ in range(2))
    unpack_heads(gradients, back)
    unpack_heads(gradients, rotated_back, rotary)
    torch.autograd.backward(rotated, [x[:, None] for x in back])
    for x, tensor in zip(rotated_back, tensors, strict=True):
        assert (x - tensor.grad.squeeze(1)).abs().max() <= 2 * tolerance
