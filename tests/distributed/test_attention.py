"""Attention over groups of ranks is full attention: output and all gradients, in fp64, for every plan of 4 ranks."""

from types import SimpleNamespace

import pytest
import torch

from megatron_basp.attention import BaspAttention
from megatron_basp.ledger import Ledger
from megatron_basp.plan import BatchPlan, PlanHolder, Wave
from megatron_basp.sdpa import CausalSDPA
from tests.distributed.small_attention import (
    RANKS,
    SCALE,
    Case,
    basp_attention,
    full_attention,
    groups_of_all_ranks,
    relative_error,
    stream_of,
)

TOLERANCE = 1e-12
TENSORS = ("output", "query gradient", "key gradient", "value gradient")
HEADS = {"mha": (4, 4), "gqa": (8, 4), "2 kv heads": (8, 2), "1 kv head": (4, 1)}

CASES = {f"{name}, B={rows}": Case(rows, *heads) for name, heads in HEADS.items() for rows in range(1, 7)}
CASES |= {
    "2 rows a group": Case(rows=4, group_size=2),
    "3 rows a group, 1 kv head": Case(rows=6, group_size=2, heads=4, kv_heads=1),
    "3 rows on all ranks": Case(rows=3, group_size=4, heads=8, kv_heads=2),
    "values wider than keys": Case(rows=3, heads=8, kv_heads=2, value_size=5),
    "values narrower than keys": Case(rows=3, heads=8, kv_heads=2, value_size=2),
}
ODD_MEMORY = Case(rows=3, heads=8, kv_heads=2)
# Gradients that lie in memory as views do; "expanded" is one number for all channels.
LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "expanded": lambda x: x[..., :1].expand_as(x),
}


def errors(plan, rank, found, expected):
    """By tensor, how far this rank's part is from what the plan says it should be."""
    return {
        name: relative_error(x, stream_of(plan, rank, whole))
        for name, x, whole in zip(TENSORS, found, expected, strict=True)
    }


def on_one_process(query, key, value, gradient):
    inputs = [x.clone().requires_grad_() for x in (query, key, value)]
    output = full_attention(*inputs)
    return output.detach(), *torch.autograd.grad(output, inputs, gradient)


def on_this_rank(attend, plan, rank, query, key, value, gradient, lay_out=lambda x: x):
    inputs = [stream_of(plan, rank, x).requires_grad_() for x in (query, key, value)]
    output = attend(*inputs)
    return output.detach(), *torch.autograd.grad(output, inputs, lay_out(stream_of(plan, rank, gradient)))


def attention_of(plan, groups):
    attention = basp_attention(plan, groups)
    return lambda query, key, value: attention(query, key, value, None)


def exact(case, rank, groups):
    plan, drawn = case.plan(), case.draw()
    found = on_this_rank(attention_of(plan, groups), plan, rank, *drawn)
    return errors(plan, rank, found, on_one_process(*drawn))


def with_odd_gradient(lay_out, rank, groups):
    plan, (*qkv, gradient) = ODD_MEMORY.plan(), ODD_MEMORY.draw()
    gradient = lay_out(gradient)
    assert not lay_out(stream_of(plan, rank, gradient)).is_contiguous()
    found = on_this_rank(attention_of(plan, groups), plan, rank, *qkv, gradient, lay_out)
    return errors(plan, rank, found, on_one_process(*qkv, gradient))


def with_packed_inputs(rank, groups):
    """Query, key and value are views of one tensor, as a fused projection gives them."""
    plan, (*qkv, gradient) = ODD_MEMORY.plan(), ODD_MEMORY.draw()
    packed = torch.cat([stream_of(plan, rank, x) for x in qkv], dim=2).requires_grad_()
    parts = packed.split([x.shape[2] for x in qkv], dim=2)
    output = attention_of(plan, groups)(*parts)
    (packed_gradient,) = torch.autograd.grad(output, packed, stream_of(plan, rank, gradient))
    found = output.detach(), *packed_gradient.split([x.shape[2] for x in qkv], dim=2)
    return errors(plan, rank, found, on_one_process(*qkv, gradient))


def with_swapped_rows(case, rank, groups):
    """Rank 0 has the rows of its plan in another order."""
    plan, drawn = case.plan(), case.draw()
    (wave,) = plan.waves
    swapped = BatchPlan(plan.lengths, plan.ranks, (Wave(wave.rows[::-1], wave.lengths, wave.group_size),))
    own = swapped if rank == 0 else plan
    return errors(plan, rank, on_this_rank(attention_of(own, groups), own, rank, *drawn), on_one_process(*drawn))


def with_own_shard_only(case, rank):
    """What stock attention does in a model that believes in CP = 1: it attends to what lies on the rank."""
    plan, drawn = case.plan(), case.draw()
    (share,) = plan.shares(rank)

    def attend(*qkv):
        rows = len(share.rows)
        output = CausalSDPA(SCALE)(*(x.squeeze(1).unflatten(0, (-1, rows)) for x in qkv))
        return output.flatten(0, 1)[:, None]

    return errors(plan, rank, on_this_rank(attend, plan, rank, *drawn), on_one_process(*drawn))


@pytest.fixture(scope="module")
def measured(on_ranks):
    """By kind and case, the errors on each rank."""

    def all_cases(rank):
        groups = groups_of_all_ranks()
        return {
            "exact": {name: exact(case, rank, groups) for name, case in CASES.items()},
            "gradient": {name: with_odd_gradient(lay_out, rank, groups) for name, lay_out in LAYOUTS.items()},
            "packed": with_packed_inputs(rank, groups),
            "rows of other groups": with_swapped_rows(Case(rows=2, group_size=2), rank, groups),
            "rows of one group": with_swapped_rows(Case(rows=2, group_size=4), rank, groups),
            "own shard": with_own_shard_only(Case(rows=2, group_size=2), rank),
        }

    by_rank = on_ranks(all_cases, RANKS)

    def of(*path):
        found = by_rank
        for key in path:
            found = [errors[key] for errors in found]
        return found

    return of


def negligible(errors):
    return all(error <= TOLERANCE for error in errors)  # false for NaN


@pytest.mark.distributed
@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("case", CASES)
def test_every_plan_gives_full_attention(measured, case, tensor):
    assert negligible(measured("exact", case, tensor))


@pytest.mark.distributed
@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_that_is_not_contiguous_counts_like_any_other(measured, layout, tensor):
    assert negligible(measured("gradient", layout, tensor))


@pytest.mark.distributed
@pytest.mark.parametrize("tensor", TENSORS)
def test_inputs_may_be_views_of_one_fused_projection(measured, tensor):
    assert negligible(measured("packed", tensor))


# What these comparisons must not let pass.


@pytest.mark.distributed
def test_rows_swapped_on_one_rank_show_in_its_group_and_nowhere_else(measured):
    for tensor in TENSORS:
        wrong = measured("rows of other groups", tensor)
        assert wrong[0] > 1e-2, "rank 0 worked on another group's row"
        assert negligible(wrong[2:]), "ranks 2 and 3 share nothing with it"
    assert measured("rows of other groups", "output")[1] > 1e-2, "rank 1 attended to another row's keys"
    assert all(error > 1e-2 for tensor in TENSORS for error in measured("rows of one group", tensor))


@pytest.mark.distributed
def test_a_kernel_that_sees_its_own_shard_only_shows_everywhere(measured):
    outputs = measured("own shard", "output")
    assert negligible(outputs[::2]), "the first shard of a sequence has no past to miss"
    assert all(error > 1e-2 for error in outputs[1::2])
    for tensor in ("key gradient", "value gradient"):
        misses_later_queries = measured("own shard", tensor)[::2]
        assert all(error > 1e-2 for error in misses_later_queries)


# What it refuses, before anything is exchanged.


def attend_alone(tokens=2, batch=1, mask=None, **arguments):
    """One rank of one: no process group is needed."""
    groups = SimpleNamespace(cp_rank=0, by_size={})
    attention = basp_attention(BatchPlan((2,), 1, (Wave((0,), (2,), 1),)), groups, layer=7)
    qkv = [torch.ones(tokens, batch, 2, 3, dtype=torch.float64)] * 3
    return attention(*qkv, mask, **arguments)


def test_one_rank_alone_needs_no_group():
    causal = SimpleNamespace(name="causal")
    assert torch.allclose(attend_alone(attn_mask_type=causal), torch.ones(2, 1, 6, dtype=torch.float64))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"mask": torch.ones(2, 2)}, "an attention mask tensor"),
        ({"attention_bias": torch.ones(2, 2)}, "an attention bias"),
        ({"packed_seq_params": object()}, "packed sequences"),
        ({"attn_mask_type": SimpleNamespace(name="padding")}, "the mask type padding"),
    ],
)
def test_what_would_be_ignored_is_refused_by_name_and_layer(arguments, named):
    with pytest.raises(ValueError, match=f"layer 7: {named} would be ignored"):
        attend_alone(**arguments)


@pytest.mark.parametrize("shape", [{"tokens": 4}, {"tokens": 1, "batch": 2}])
def test_a_stream_that_was_not_planned_is_refused(shape):
    with pytest.raises(ValueError, match="T = B·S/N = 2"):
        attend_alone(**shape)


def test_attention_without_a_plan_is_refused():
    attention = basp_attention(None, SimpleNamespace(cp_rank=0, by_size={}))
    with pytest.raises(RuntimeError, match="no batch plan is in force"):
        attention(*[torch.ones(2, 1, 2, 3)] * 3, None)


def test_kernels_add_no_parameters_and_no_keys_to_a_checkpoint_and_follow_the_mode():
    kernel = torch.nn.Linear(1, 1)
    attention = BaspAttention(None, PlanHolder(), {1: CausalSDPA(SCALE), 2: kernel}, Ledger(), layer=1)
    assert not attention.state_dict() and not list(attention.parameters())
    attention.eval()
    assert not kernel.training
    attention.train()
    assert kernel.training
