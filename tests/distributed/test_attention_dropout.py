"""Attention dropout over groups of ranks is that of full attention with the same masks: output and all gradients."""

import pytest
import torch
import torch.distributed as dist

from megatron_basp.attention import BaspAttention
from megatron_basp.ledger import Ledger
from megatron_basp.plan import PlanHolder
from megatron_basp.sdpa import CausalSDPA
from tests.distributed.small_attention import (
    GROUP_SIZES,
    LENGTH,
    RANKS,
    SCALE,
    Case,
    full_attention,
    groups_of_all_ranks,
    relative_error,
    stream_of,
)
from tests.end_to_end.dropout_masks import whole_attention_mask

DROPOUT = 0.3
TOLERANCE = 1e-12
TENSORS = ("output", "query gradient", "key gradient", "value gradient")
CASES = {f"B={rows}": Case(rows, heads=8, kv_heads=4) for rows in (1, 2, 3, 4)}
CASES |= {
    "2 rows a group, 1 kv head": Case(rows=4, group_size=2, heads=4, kv_heads=1),
    "values wider than keys": Case(rows=3, heads=8, kv_heads=2, value_size=5),
}


class RecordingSDPA(CausalSDPA):
    """Keeps the mask of each call, [rows, h, S, S]."""

    def __init__(self):
        super().__init__(SCALE, dropout=DROPOUT)
        self.masks = []

    def forward(self, query, key, value):
        before = torch.get_rng_state()
        output = super().forward(query, key, value)
        after = torch.get_rng_state()
        if self.training:
            # With one-hot values the output is the weights themselves.
            _, rows, kv_heads, _ = value.shape
            one_hot = torch.eye(LENGTH, dtype=value.dtype)[:, None, None].expand(-1, rows, kv_heads, -1)
            torch.set_rng_state(before)
            weights = super().forward(query.detach(), key.detach(), one_hot)
            assert torch.equal(torch.get_rng_state(), after)
            self.masks.append(weights.unflatten(2, (-1, LENGTH)).permute(1, 2, 0, 3) != 0)
        return output


def attention_on_this_rank(plan, rank, groups, drawn, kernel, training=True):
    holder = PlanHolder()
    holder.set(plan)
    attention = BaspAttention(groups, holder, dict.fromkeys(GROUP_SIZES, kernel), Ledger(), layer=1).train(training)
    *qkv, gradient = drawn
    inputs = [stream_of(plan, rank, x).requires_grad_() for x in qkv]
    output = attention(*inputs, None)
    return output.detach(), *torch.autograd.grad(output, inputs, stream_of(plan, rank, gradient))


def attention_of_one_process(drawn, factors):
    *qkv, gradient = drawn
    inputs = [x.clone().requires_grad_() for x in qkv]
    output = full_attention(*inputs, factors)
    return output.detach(), *torch.autograd.grad(output, inputs, gradient)


def errors(case, rank, groups, training=True, masks_of_other_heads=False):
    """By tensor, how far this rank's part is from that of one process."""
    plan, drawn, kernel = case.plan(), case.draw(), RecordingSDPA()
    torch.manual_seed(rank)
    found = attention_on_this_rank(plan, rank, groups, drawn, kernel, training)
    by_rank = [None] * RANKS
    dist.all_gather_object(by_rank, kernel.masks)
    factors = whole_attention_mask(plan, by_rank).double() / (1 - DROPOUT) if training else 1.0
    if masks_of_other_heads:
        factors = factors.roll(1, dims=1)
    expected = attention_of_one_process(drawn, factors)
    return {
        name: relative_error(x, stream_of(plan, rank, whole))
        for name, x, whole in zip(TENSORS, found, expected, strict=True)
    }


@pytest.fixture(scope="module")
def measured(on_ranks):
    """By kind, and by case, the errors on each rank."""

    def all_cases(rank):
        groups = groups_of_all_ranks()
        hard = CASES["B=3"]
        return {
            **{name: errors(case, rank, groups) for name, case in CASES.items()},
            "evaluation": errors(hard, rank, groups, training=False),
            "masks of other heads": errors(hard, rank, groups, masks_of_other_heads=True),
        }

    by_rank = on_ranks(all_cases, RANKS)
    return lambda case, tensor: [errors[case][tensor] for errors in by_rank]


@pytest.mark.distributed
@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("case", [*CASES, "evaluation"])
def test_with_the_masks_that_ranks_drew_it_is_full_attention(measured, case, tensor):
    assert all(error <= TOLERANCE for error in measured(case, tensor))


@pytest.mark.distributed
def test_masks_of_other_heads_would_show(measured):
    for tensor in TENSORS:
        assert all(error > 1e-2 for error in measured("masks of other heads", tensor))
