"""What Transformer Engine's attention gets from ours is what it gets from stock Megatron without context parallelism.

Recorded where the real `TEDotProductAttention` calls into Transformer Engine, and further in: the memory layout that
it finds, and everything by which it chooses a kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_basp.ledger import Ledger
from megatron_basp.plan import BatchPlan, Limits, PlanHolder, plan_batch
from megatron_basp.process_groups import create_sequence_groups
from megatron_basp.ranges import Ranges

S, RANKS, HEADS, KV_HEADS, D = 16, 4, 8, 4, 8
PLANS = {"K=1, 1 row": (4, 1), "K=1, 2 rows": (8, 1), "K=2": (2, 2), "K=2, 2 rows": (4, 2), "K=4": (1, 4)}


def plan_of(rows: int, group_size: int) -> BatchPlan:
    return plan_batch((S,) * rows, RANKS, Limits(HEADS, KV_HEADS, group_size))


def split_of_qkv(tokens: int, rows: int, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as Megatron makes them: views into one tensor of query groups, [tokens, rows, heads, d]."""
    mixed = torch.randn(tokens, rows, kv_heads, heads // kv_heads + 2, D)
    query, key, value = mixed.split([heads // kv_heads, 1, 1], dim=3)
    return query.flatten(2, 3), key.squeeze(3), value.squeeze(3)


def recorded(attend: Callable[[], Tensor]) -> dict[str, Any]:
    """What `DotProductAttention` was called with, and what it made of that, in its one call."""
    from transformer_engine.pytorch import DotProductAttention
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    record: dict[str, Any] = {}
    forward, get_qkv_layout, attention_params = (
        DotProductAttention.forward,
        utils.get_qkv_layout,
        utils.AttentionParams,
    )

    def recording_forward(self: Any, *tensors: Any, **arguments: Any) -> Any:
        assert not record, "one call"
        *qkv, mask = tensors
        record.update(arguments=arguments, mask=mask, training=self.training)
        record["tensors"] = [(x.shape, x.stride(), x.storage_offset(), x.dtype) for x in qkv]
        return forward(self, *tensors, **arguments)

    def recording_layout(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Any:
        result = get_qkv_layout(query, key, value, **arguments)
        record["layout"], record["layout arguments"] = (result[0], *result[4:]), arguments
        pairs = zip((query, key, value), result[1:4], strict=True)
        record["copied"] = [before.data_ptr() != after.data_ptr() for before, after in pairs]
        return result

    def recording_params(**arguments: Any) -> Any:
        params = attention_params(**arguments)
        record["params"] = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
        record["params"].pop("fp8_meta")
        return params

    DotProductAttention.forward = recording_forward
    utils.get_qkv_layout, utils.AttentionParams = recording_layout, recording_params
    try:
        attend()
    finally:
        DotProductAttention.forward = forward
        utils.get_qkv_layout, utils.AttentionParams = get_qkv_layout, attention_params
    return record


def transformer_config(heads: int = HEADS, kv_heads: int = KV_HEADS) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * D,
        num_attention_heads=heads,
        num_query_groups=kv_heads,
        kv_channels=D,
        attention_dropout=0.1,
    )


def built_with() -> dict[str, Any]:
    """As `core/transformer/attention.py` builds a core attention."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType

    return {
        "layer_number": 3,
        "attn_mask_type": AttnMaskType.causal,
        "attention_type": "self",
        "softmax_scale": 0.3,
        "pg_collection": ProcessGroupCollection(tp=None, cp=None),
    }


def from_stock(rows: int, heads: int = HEADS, kv_heads: int = KV_HEADS, contiguous: bool = False) -> dict[str, Any]:
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    arguments = built_with()
    attention = TEDotProductAttention(transformer_config(heads, kv_heads), cp_comm_type="p2p", **arguments)
    qkv = split_of_qkv(S, rows, heads, kv_heads)
    if contiguous:
        qkv = tuple(x.contiguous() for x in qkv)
    return recorded(lambda: attention(*qkv, None, attn_mask_type=arguments["attn_mask_type"]))


def from_ours(plan: BatchPlan) -> dict[str, Any]:
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    from megatron_basp.megatron.core_attention import attention_class, make_te

    groups = create_sequence_groups(
        [range(RANKS)], plan.group_sizes, dist.group.WORLD, lambda ranks, name: dist.new_group(ranks, group_desc=name)
    )
    holder = PlanHolder()
    holder.set(plan)
    runtime = SimpleNamespace(
        settings=SimpleNamespace(
            group_sizes=lambda: plan.group_sizes,
            limits=Limits(HEADS, KV_HEADS),
            chunks=dict.fromkeys(plan.group_sizes, 1),
        ),
        groups=groups,
        plan_holder=holder,
        ledger=Ledger(),
        ranges=Ranges(),
    )
    arguments = built_with()
    attention = attention_class(TEDotProductAttention, make_te(TEDotProductAttention), runtime)(
        config=transformer_config(), cp_comm_type="p2p", **arguments
    )
    qkv = split_of_qkv(plan.tokens, 1, HEADS, KV_HEADS)
    return recorded(lambda: attention(*qkv, None, attn_mask_type=arguments["attn_mask_type"]))


@pytest.fixture(scope="module")
def records(on_ranks: Callable[..., list[Any]]) -> dict[str, list[tuple[dict[str, Any], ...]]]:
    """By plan and rank: what came from ours, from stock with all heads, from stock with a share of the heads."""

    def all_plans(rank: int) -> dict[str, tuple[dict[str, Any], ...]]:
        found = {}
        for name, (rows, group_size) in PLANS.items():
            plan = plan_of(rows, group_size)
            here = len(plan.shares(rank)[0].rows)
            share = from_stock(here, HEADS // group_size, KV_HEADS // group_size, contiguous=group_size > 1)
            found[name] = from_ours(plan), from_stock(here), share
        return found

    by_rank = on_ranks(all_plans)
    return {name: [found[name] for found in by_rank] for name in PLANS}


@pytest.mark.parametrize("name", PLANS)
def test_transformer_engine_gets_what_stock_gives_it_for_these_heads(records: Any, name: str) -> None:
    for ours, _, stock in records[name]:
        assert ours == stock
        assert ours["mask"] is None and ours["arguments"] == {"attn_mask_type": "causal"}
        assert ours["params"]["context_parallel"] is False and ours["params"]["attention_dropout"] == 0.1
        assert ours["params"]["softmax_scale"] == 0.3 and ours["layout arguments"]["qkv_format"] == "sbhd"


@pytest.mark.parametrize("name", [name for name in PLANS if name.startswith("K=1")])
def test_in_a_group_of_one_nothing_differs_from_stock(records: Any, name: str) -> None:
    for ours, stock, _ in records[name]:
        assert ours == stock


@pytest.mark.parametrize("name", [name for name in PLANS if not name.startswith("K=1")])
def test_in_larger_groups_only_heads_differ_and_nothing_is_copied(records: Any, name: str) -> None:
    for ours, stock, _ in records[name]:
        differing = {key for key, value in ours["params"].items() if value != stock["params"][key]}
        assert differing == {"num_heads", "num_gqa_groups"}
        assert ours["layout"] == ("sbhd_sbhd_sbhd", "sbhd", "sbhd") == stock["layout"]
        assert ours["copied"] == [False] * 3, "q, k and v lie where the kernel wants them"
        assert all(offset == 0 for _, _, offset, _ in ours["tensors"])
