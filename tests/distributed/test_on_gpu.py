"""Transformer Engine's kernels on a GPU, which several ranks share; run by `make test-gpu`. Not measured yet.

NCCL takes no two ranks on one device, so that what goes between ranks goes over gloo.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_basp.attention import BaspAttention
from megatron_basp.ledger import Ledger
from megatron_basp.plan import PlanHolder
from megatron_basp.sdpa import CausalSDPA
from tests.distributed.small_attention import SCALE, Case, groups_of_all_ranks, relative_error, stream_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="Transformer Engine computes on CUDA devices only"),
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"
    ),
]
CASES = {f"B={rows}": Case(rows, heads=8, kv_heads=4, head_size=64) for rows in (1, 2, 3, 4)}


def te_kernel(case: Case, group_size: int) -> Any:
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_basp.megatron.core_attention import make_te, share_of_heads

    config = TransformerConfig(
        num_layers=1,
        hidden_size=case.heads * case.head_size,
        num_attention_heads=case.heads,
        num_query_groups=case.kv_heads,
        attention_dropout=0.0,
        bf16=True,
    )
    return make_te(TEDotProductAttention)(
        config=share_of_heads(config, group_size),
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        softmax_scale=SCALE,
        pg_collection=ProcessGroupCollection(tp=None, cp=None),
    )


def errors(case: Case, rank: int) -> list[float]:
    """Of output and gradients, between BASP with Transformer Engine's kernels and torch on whole sequences."""

    def differentiated(attend: Callable[..., Tensor], *qkv: Tensor, gradient: Tensor) -> list[Tensor]:
        inputs = [x.requires_grad_() for x in qkv]
        output = attend(*inputs)
        return [output.detach(), *torch.autograd.grad(output, inputs, gradient)]

    plan = case.plan()
    drawn = [x.to("cuda", torch.bfloat16) for x in case.draw()]
    *qkv, gradient = (stream_of(plan, rank, x) for x in drawn)
    holder = PlanHolder()
    holder.set(plan)
    kernels = {group_size: te_kernel(case, group_size) for group_size in plan.group_sizes}
    attention = BaspAttention(groups_of_all_ranks(), holder, kernels, Ledger(), layer=1)
    found = differentiated(lambda *qkv: attention(*qkv, None), *qkv, gradient=gradient)
    expected = differentiated(CausalSDPA(SCALE), *drawn[:3], gradient=drawn[3])
    return [relative_error(x, stream_of(plan, rank, y)) for x, y in zip(found, expected, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_basp_with_transformer_engines_kernels_is_full_attention(on_ranks: Callable[..., Any], name: str) -> None:
    for found in on_ranks(lambda rank: errors(CASES[name], rank)):
        assert max(found) <= 0.05, "bf16: 8 bits"
