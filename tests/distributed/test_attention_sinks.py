"""Sinks of all heads, of which each rank of a group uses those of its own: exact in fp64, the sinks' gradient too."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

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

CASES = {f"{kv_heads} kv heads, B={rows}": Case(rows, 8, kv_heads) for kv_heads in (8, 2) for rows in (1, 2, 3, 4)}
TENSORS = ("output", "query gradient", "key gradient", "value gradient", "sink gradient")


def sinks():
    return torch.linspace(-1, 2, 8, dtype=torch.float64).requires_grad_()


def with_sinks(query, key, value, offset):
    """A sink takes its share of the softmax: what is left is 1 / (1 + exp(offset) / Σ exp(scores))."""
    repeated = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
    scores = SCALE * torch.einsum("sbhd,tbhd->bhst", query, repeated)
    future = torch.ones(len(query), len(query), dtype=torch.bool).triu(1)
    total = scores.masked_fill(future, -torch.inf).logsumexp(3, keepdim=True)
    return full_attention(query, key, value, torch.sigmoid(total - offset[:, None, None]))


def errors(case, rank, groups):
    plan, (*qkv, gradient) = case.plan(), case.draw()
    inputs = [*(x.clone().requires_grad_() for x in qkv), sinks()]
    output = with_sinks(*inputs)
    *expected, sink_gradient = output.detach(), *torch.autograd.grad(output, inputs, gradient)

    attention = basp_attention(plan, groups)
    attention.softmax_offset = torch.nn.Parameter(sinks().detach())
    inputs = [*(stream_of(plan, rank, x).requires_grad_() for x in qkv), attention.softmax_offset]
    output = attention(*inputs[:3], None)
    *found, own_gradient = output.detach(), *torch.autograd.grad(output, inputs, stream_of(plan, rank, gradient))
    dist.all_reduce(own_gradient)  # as data parallelism does over the CP group
    pairs = [(x, stream_of(plan, rank, whole)) for x, whole in zip(found, expected, strict=True)]
    pairs.append((own_gradient, sink_gradient))
    return {name: relative_error(*pair) for name, pair in zip(TENSORS, pairs, strict=True)}


@pytest.fixture(scope="module")
def measured(on_ranks):
    def all_cases(rank):
        groups = groups_of_all_ranks()
        return {name: errors(case, rank, groups) for name, case in CASES.items()}

    return on_ranks(all_cases, RANKS)


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("case", CASES)
def test_each_head_has_its_own_sink_wherever_it_is_attended_with(measured, case, tensor):
    assert all(found[case][tensor] <= 1e-12 for found in measured)
