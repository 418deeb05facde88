"""What Megatron's core attention is made of: one kernel for each K, with that many ranks' share of the heads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_basp.errors import ConfigurationError
from megatron_basp.ledger import Ledger
from megatron_basp.megatron.core_attention import (
    MegatronBaspAttention,
    check_heads,
    make_sdpa,
    make_te,
    share_of_heads,
)
from megatron_basp.plan import Limits, PlanHolder
from megatron_basp.ranges import Ranges
from tests.settings import small_settings

CAUSAL, PADDING = SimpleNamespace(name="causal"), SimpleNamespace(name="padding")


def transformer_config(heads: int = 8, kv_heads: int = 4, tensor_parallel: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        num_attention_heads=heads,
        num_query_groups=kv_heads,
        tensor_model_parallel_size=tensor_parallel,
        kv_channels=16,
        context_parallel_size=1,
        softmax_type="vanilla",
        recompute_granularity=None,
        fine_grained_activation_offloading=False,
    )


def runtime(*group_sizes: int) -> SimpleNamespace:
    settings = SimpleNamespace(
        group_sizes=lambda: group_sizes, limits=Limits(heads=8, kv_heads=4), chunks=dict.fromkeys(group_sizes, 1)
    )
    return SimpleNamespace(settings=settings, groups=None, plan_holder=PlanHolder(), ledger=Ledger(), ranges=Ranges())


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


@pytest.mark.parametrize(("kv_heads", "possible"), [(8, r"\[1, 2\]"), (4, r"\[1\]")])
def test_a_model_whose_heads_cannot_be_exchanged_in_the_parts_of_the_run_is_refused(
    kv_heads: int, possible: str
) -> None:
    settings = small_settings(1, ranks=4, limits=Limits(16, 16), overlap_chunks=4)
    assert settings.chunks == {4: 4}
    check_heads(transformer_config(16, 16), 3, settings)
    with pytest.raises(
        ConfigurationError, match=f"layer 3: .* in 4 parts: .* set --basp-overlap-chunks to one of {possible}"
    ):
        check_heads(transformer_config(8, kv_heads), 3, settings)


def test_transformer_engine_gets_one_module_for_each_group_size_and_no_context_parallelism() -> None:
    attention = MegatronBaspAttention(
        RecordingAttention,
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


class SinkAttention(RecordingAttention):
    """As Transformer Engine's with learnt sinks: a parameter of its own, one for each head, read in each call."""

    def __init__(self, *, config: SimpleNamespace, **arguments: object) -> None:
        super().__init__(config=config, **arguments)
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.softmax_offset = torch.nn.Parameter(torch.zeros(heads))

    def forward(self, query: torch.Tensor, *tensors: object, **arguments: object) -> torch.Tensor:
        return query * self.softmax_offset.reshape(1, 1, -1, 1)

    def sharded_state_dict(self, prefix: str, sharded_offsets: object, metadata: object) -> dict[str, object]:
        return {f"{prefix}softmax_offset": self.softmax_offset}


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_transformer_engine_modules_share_the_sinks_of_one_parameter(tensor_parallel: int) -> None:
    config = transformer_config(tensor_parallel=tensor_parallel)
    config.softmax_type = "learnable"
    attention = MegatronBaspAttention(
        SinkAttention,
        make_te(SinkAttention),
        runtime(1, 2),
        config=config,
        layer_number=1,
        attn_mask_type=CAUSAL,
        attention_type="self",
        pg_collection="groups",
    )
    heads = 8 // tensor_parallel
    assert {name: len(parameter) for name, parameter in attention.named_parameters()} == {"softmax_offset": heads}
    assert not any(list(kernel.parameters()) for kernel in attention.kernels.values())

    # What is saved is the parameter that is trained, after it was exchanged for another one too.
    attention.softmax_offset = torch.nn.Parameter(torch.arange(1.0, heads + 1))
    assert attention.sharded_state_dict("core_attention.")["core_attention.softmax_offset"] is attention.softmax_offset

    # The second rank of a group of two has the second half of the heads, and its gradient lies there.
    second = attention.softmax_offset.chunk(2)[1]
    query = torch.ones(3, 1, heads // 2, 2)
    output = attention.kernels[2](query, "k", "v", softmax_offset=second)
    assert torch.equal(output, query * torch.arange(heads // 2 + 1.0, heads + 1).reshape(1, 1, -1, 1))
    output.sum().backward()
    assert torch.equal(attention.softmax_offset.grad, torch.tensor([0.0] * (heads // 2) + [6.0] * (heads // 2)))

    # A checkpoint of Transformer Engine's module has one key more, which is empty.
    attention.load_state_dict({"softmax_offset": torch.zeros(heads), "_extra_state": torch.empty(0)})


@pytest.mark.parametrize(("mask", "kind"), [(PADDING, "self"), (CAUSAL, "cross")])
def test_attention_that_is_not_causal_self_attention_is_refused(mask: SimpleNamespace, kind: str) -> None:
    with pytest.raises(ValueError, match="layer 1: BASP attention is causal self-attention"):
        MegatronBaspAttention(
            RecordingAttention,
            make_sdpa,
            runtime(1),
            config=transformer_config(),
            layer_number=1,
            attn_mask_type=mask,
            attention_type=kind,
        )
