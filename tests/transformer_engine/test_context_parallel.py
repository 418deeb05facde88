"""Transformer Engine's own exchange of heads for sequence (`cp_comm_type="a2a"`) and ours give the same numbers.

Its autograd function and its communication run over gloo in fp64, with torch in place of the fused attention kernel.
It takes the sequence in zig-zag order: of 2·N chunks, rank r holds numbers r and 2·N-1-r.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_basp.attention import BaspAttention
from megatron_basp.ledger import Ledger
from megatron_basp.plan import BatchPlan, Limits, PlanHolder, plan_batch
from megatron_basp.process_groups import create_sequence_groups
from megatron_basp.sdpa import CausalSDPA
from tests.coalescing import launches_of_several_tensors
from tests.distributed.small_attention import relative_error, stream_of

S, D, SCALE, TOLERANCE = 16, 4, 0.7, 1e-12
NAMES = ("output", "query gradient", "key gradient", "value gradient")
# Ranks, rows, H, Hkv. Transformer Engine wants Hkv % N = 0.
CASES = {
    "2 ranks": (2, 1, 4, 4),
    "2 ranks, 3 rows, gqa": (2, 3, 4, 2),
    "4 ranks": (4, 1, 4, 4),
    "4 ranks, 2 rows, gqa": (4, 2, 8, 4),
}


class Part(NamedTuple):
    """Of one rank: output and gradients of its part; collectives forward and in all; bytes sent to others in all."""

    tensors: list[Tensor]
    forward_collectives: int
    collectives: int
    sent_bytes: int


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[S, rows, heads, d] -> [S, rows, heads, d]"""
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=SCALE, enable_gqa=True)
    return output.permute(2, 0, 1, 3)


def fused_attn_fwd(is_training: bool, *arguments: Any, **options: Any) -> tuple[Tensor, list[Tensor]]:
    query, key, value = arguments[4:7]
    assert options["qkv_layout"] == "sbhd_sbhd_sbhd" and options["attn_scale"] == SCALE
    assert options["attn_mask_type"] == "causal" and options["dropout"] == 0.0
    return attend(query, key, value).contiguous(), []


def fused_attn_bwd(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    *qkv, _, gradient = arguments[4:9]
    inputs = [x.detach().requires_grad_() for x in qkv]
    with torch.enable_grad():
        output = attend(*inputs)
    return tuple(x.contiguous() for x in torch.autograd.grad(output, inputs, gradient))


def draw(rows: int, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
    """Query, key, value and a gradient of the output, [S, rows, heads, d]; the same on all ranks."""
    generator = torch.Generator().manual_seed(rows)
    return tuple(
        torch.randn(S, rows, h, D, generator=generator, dtype=torch.float64)
        for h in (heads, kv_heads, kv_heads, heads)
    )


def zig_zag(ranks: int, rank: int) -> Tensor:
    chunks = torch.arange(S).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def measured(forward: Callable[..., Tensor], inputs: list[Tensor], gradient: Tensor) -> Part:
    calls: list[int] = []
    all_to_all_single = dist.all_to_all_single

    def counting(output: Tensor, given: Tensor, *arguments: Any, **options: Any) -> Any:
        away = given.numel() * given.element_size() // dist.get_world_size() * (dist.get_world_size() - 1)
        calls.append(away)
        return all_to_all_single(output, given, *arguments, **options)

    inputs = [x.requires_grad_() for x in inputs]
    dist.all_to_all_single = counting
    try:
        output = forward(*inputs)
        forward_collectives = len(calls)
        gradients = torch.autograd.grad(output, inputs, gradient.view_as(output))
    finally:
        dist.all_to_all_single = all_to_all_single
    tensors = [output.detach().view_as(gradient), *gradients]
    return Part(tensors, forward_collectives, len(calls), sum(calls))


def by_transformer_engine(rank: int, ranks: int, drawn: tuple[Tensor, ...]) -> Part:
    from transformer_engine.pytorch.attention.dot_product_attention import context_parallel

    context_parallel.fused_attn_fwd, context_parallel.fused_attn_bwd = fused_attn_fwd, fused_attn_bwd
    rows = drawn[0].shape[1]
    ends = torch.arange(0, (rows + 1) * S, S, dtype=torch.int32)

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return context_parallel.attn_forward_func_with_cp(
            True,
            *(query, key, value, ends, ends, S, S, None, None, 0.0),
            *(dist.group.WORLD, list(range(ranks)), torch.cuda.Stream(), "a2a"),
            softmax_scale=SCALE,
            qkv_format="sbhd",
            attn_mask_type="causal",
            use_fused_attention=True,
            window_size=(-1, 0),
        )

    *inputs, gradient = (x[zig_zag(ranks, rank)].clone() for x in drawn)
    return measured(forward, inputs, gradient)


def by_ours(rank: int, plan: BatchPlan, drawn: tuple[Tensor, ...]) -> Part:
    groups = create_sequence_groups(
        [range(plan.ranks)], plan.group_sizes, dist.group.WORLD, lambda ranks, name: dist.new_group(ranks)
    )
    holder, ledger = PlanHolder(), Ledger()
    holder.set(plan)
    attention = BaspAttention(groups, holder, {plan.ranks: CausalSDPA(SCALE)}, ledger, layer=1)
    *inputs, gradient = (stream_of(plan, rank, x) for x in drawn)
    with launches_of_several_tensors() as launches:
        part = measured(lambda *qkv: attention(*qkv, None), inputs, gradient)
    assert launches == [3, 3], "query, key and value forward, and their gradients backward"
    part = part._replace(forward_collectives=part.forward_collectives - 2, collectives=part.collectives - 4)
    assert (part.collectives, part.sent_bytes) == (
        ledger.page.collectives.total(),
        ledger.page.sent_bytes_to_peer.total(),
    )
    return part


def assembled(parts: list[Part], order: Callable[[int], Tensor], rows: int) -> list[Tensor]:
    """Whole tensors [S, rows, heads, d] from those of the ranks, each [S/N, rows, …] or [T, 1, …]."""
    where = torch.cat([order(rank) for rank in range(len(parts))]).argsort()
    whole = zip(*(part.tensors for part in parts), strict=True)
    return [torch.cat([x.reshape(-1, rows, *x.shape[2:]) for x in tensors])[where] for tensors in whole]


@pytest.fixture(scope="module")
def parts(on_ranks: Callable[..., list[Any]]) -> dict[str, tuple[list[Part], list[Part]]]:
    def plan_of(name: str) -> BatchPlan:
        ranks, rows, heads, kv_heads = CASES[name]
        return plan_batch((S,) * rows, ranks, Limits(heads, kv_heads, group_size=ranks))

    def of_rank(rank: int) -> dict[str, tuple[Part, Part]]:
        found = {}
        for name, (ranks, *shape) in CASES.items():
            if ranks == dist.get_world_size():
                drawn = draw(*shape)
                found[name] = by_transformer_engine(rank, ranks, drawn), by_ours(rank, plan_of(name), drawn)
        return found

    by_rank = {ranks: on_ranks(of_rank, ranks) for ranks in (2, 4)}
    return {
        name: tuple([found[name][index] for found in by_rank[ranks]] for index in (0, 1))
        for name, (ranks, *_) in CASES.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_those_of_transformer_engines_all_to_all(parts: Any, name: str) -> None:
    ranks, rows, *_ = CASES[name]
    theirs, ours = parts[name]
    theirs = assembled(theirs, lambda rank: zig_zag(ranks, rank), rows)
    ours = assembled(ours, lambda rank: torch.arange(S).chunk(ranks)[rank], rows)
    for what, found, expected in zip(NAMES, ours, theirs, strict=True):
        assert relative_error(found, expected) <= TOLERANCE, what


@pytest.mark.parametrize("name", CASES)
def test_the_same_bytes_are_sent_in_half_the_collectives(parts: Any, name: str) -> None:
    for theirs, ours in zip(*parts[name], strict=True):
        assert (theirs.forward_collectives, theirs.collectives) == (4, 8)
        assert (ours.forward_collectives, ours.collectives) == (2, 4)
        assert ours.sent_bytes == theirs.sent_bytes > 0
