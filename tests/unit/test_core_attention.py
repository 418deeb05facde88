"""What Megatron's core attention is made of: one kernel for each K, with that many ranks' share of the heads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_basp.ledger import Ledger
from megatron_basp.megatron.core_attention import MegatronBaspAttention, make_sdpa, make_te, share_of_heads
from megatron_basp.plan import Limits, PlanHolder

CAUSAL, PADDING = SimpleNamespace(name="causal"), SimpleNamespace(name="padding")


def transformer_config(heads: int = 8, kv_heads: int = 4, tensor_parallel: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        num_attention_heads=heads,
        num_query_groups=kv_heads,
        tensor_model_parallel_size=tensor_parallel,
        kv_channels=16,
        context_parallel_size=1,
    )


def runtime(*group_sizes: int) -> SimpleNamespace:
    settings = SimpleNamespace(group_sizes=lambda: group_sizes, limits=Limits(heads=8, kv_heads=4))
    return SimpleNamespace(settings=settings, groups=None, plan_holder=PlanHolder(), ledger=Ledger())


class RecordingAttention(torch.nn.Module):
    """Stands for `TEDotProductAttention`: keeps what it was built and called with."""

    def __init__(self, **arguments: object) -> None:
        super().__init__()
        self.arguments = arguments

    def forward(self, *tensors: object, **arguments: object) -> tuple[object, ...]:
        return tensors, arguments


@pytest.mark.parametrize(
    ("group_size", "tensor_parallel", "heads", "kv_heads"),
    [(1, 1, 8, 4), (2, 1, 4, 2), (4, 1, 2, 1), (8, 1, 1, 1), (1, 2, 8, 4), (2, 2, 4, 2), (4, 2, 2, 2)],
)
def test_a_share_of_heads_counts_replicated_kv_heads_and_all_tensor_parallel_ranks(
    group_size: int, tensor_parallel: int, heads: int, kv_heads: int
) -> None:
    whole = transformer_config(tensor_parallel=tensor_parallel)
    share = share_of_heads(whole, group_size)
    assert (share.num_attention_heads, share.num_query_groups) == (heads, kv_heads)
    assert (whole.num_attention_heads, whole.num_query_groups) == (8, 4)


def test_transformer_engine_gets_one_module_for_each_group_size_and_no_context_parallelism() -> None:
    attention = MegatronBaspAttention(
        make_te(RecordingAttention),
        runtime(1, 4),
        config=transformer_config(),
        layer_number=3,
        attn_mask_type=CAUSAL,
        attention_type="self",
        softmax_scale=0.5,
        cp_comm_type="p2p",
        pg_collection="groups",
    )
    assert attention.layer == 3 and sorted(attention.kernels) == [1, 4]
    for group_size, kernel in attention.kernels.items():
        built = kernel.attention.arguments
        assert built["config"].num_attention_heads == 8 // group_size
        assert built["config"].context_parallel_size == 1
        assert (built["cp_comm_type"], built["softmax_scale"], built["pg_collection"]) == (None, 0.5, "groups")
        assert (built["layer_number"], built["attn_mask_type"], built["attention_type"]) == (3, CAUSAL, "self")
        tensors, arguments = kernel("q", "k", "v")
        assert tensors == ("q", "k", "v", None) and arguments == {"attn_mask_type": CAUSAL}
    # Checkpoints have no key of these modules, and training and evaluation reach them all the same.
    assert not list(attention.children())
    attention.eval()
    assert not any(kernel.training or kernel.attention.training for kernel in attention.kernels.values())


@pytest.mark.parametrize(("mask", "kind"), [(PADDING, "self"), (CAUSAL, "cross")])
def test_attention_that_is_not_causal_self_attention_is_refused(mask: SimpleNamespace, kind: str) -> None:
    with pytest.raises(ValueError, match="layer 1: BASP attention is causal self-attention"):
        MegatronBaspAttention(
            make_sdpa,
            runtime(1),
            config=transformer_config(),
            layer_number=1,
            attn_mask_type=mask,
            attention_type=kind,
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="Transformer Engine computes on CUDA devices only")
@pytest.mark.parametrize("group_size", [1, 2, 4, 8])
def test_transformer_engine_attends_as_sdpa_does(group_size: int) -> None:
    te = pytest.importorskip("megatron.core.extensions.transformer_engine")
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=512, num_attention_heads=8, num_query_groups=4, attention_dropout=0.0, bf16=True
    )
    share = share_of_heads(config, group_size)
    kernel = make_te(te.TEDotProductAttention)(
        config=share,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        softmax_scale=None,
        pg_collection=ProcessGroupCollection(tp=None, cp=None),
    )
    heads = (share.num_attention_heads, share.num_query_groups, share.num_query_groups)
    tensors = [torch.randn(128, 2, h, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in heads]
    outputs = [kernel(*tensors), make_sdpa(config=share)(*tensors)]
    gradients = [torch.autograd.grad(output.float().square().sum(), tensors) for output in outputs]
    torch.testing.assert_close(*outputs, rtol=2e-2, atol=2e-2)
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)
