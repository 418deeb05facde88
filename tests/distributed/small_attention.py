"""An attention small enough to be checked against the definition, in fp64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_basp.attention import BaspAttention
from megatron_basp.ledger import Ledger
from megatron_basp.plan import BatchPlan, Limits, PlanHolder, plan_batch
from megatron_basp.process_groups import SequenceGroups, create_sequence_groups
from megatron_basp.sdpa import CausalSDPA

RANKS = 4
GROUP_SIZES = (1, 2, 4)
LENGTH = 8
SCALE = 0.7  # not the usual 1/sqrt(d), so that it matters


@dataclass(frozen=True)
class Case:
    """rows: B. group_size: K, or None to let the plan choose. head_size: d_qk. value_size: d_v, or None for d_qk."""

    rows: int
    heads: int = 4
    kv_heads: int = 4
    group_size: int | None = None
    head_size: int = 3
    value_size: int | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """d_qk and d_v."""
        return self.head_size, self.value_size or self.head_size

    @property
    def limits(self) -> Limits:
        return Limits(self.heads, self.kv_heads, self.group_size)

    def plan(self) -> BatchPlan:
        return plan_batch((LENGTH,) * self.rows, RANKS, self.limits)

    def draw(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query, key and value of the whole micro-batch, [S, B, heads, d], and a gradient of the output [S, B, H·d_v].
        The same on all ranks."""
        generator = torch.Generator().manual_seed(self.rows)

        def normal(*shape: int) -> Tensor:
            return torch.randn(LENGTH, self.rows, *shape, generator=generator, dtype=torch.float64)

        qk_size, v_size = self.sizes
        query, key = normal(self.heads, qk_size), normal(self.kv_heads, qk_size)
        return query, key, normal(self.kv_heads, v_size), normal(self.heads * v_size)


def full_attention(query: Tensor, key: Tensor, value: Tensor, factors: Tensor | float = 1.0) -> Tensor:
    """softmax(Q·Kᵀ)·V of one process, written out. [S, B, heads, d] -> [S, B, H·d_v].

    Args:
        factors: of the weights, [B, H, S, S]; where dropout keeps one this is 1/(1-p), and 0 where it does not.
    """
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))
    scores = SCALE * torch.einsum("sbhd,tbhd->bhst", query, key)
    future = torch.ones(len(query), len(query), dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(dim=3)
    return torch.einsum("bhst,tbhd->sbhd", weights * factors, value).flatten(2)


def stream_of(plan: BatchPlan, rank: int, x: Tensor) -> Tensor:
    """A rank's part of [S, B, …], as its token stream [T, 1, …]."""
    parts = [x[share.start : share.stop, list(share.rows)].flatten(0, 1) for share in plan.shares(rank)]
    return torch.cat(parts)[:, None]


def groups_of_all_ranks() -> SequenceGroups:
    """One CP group, of the whole world."""
    return create_sequence_groups(
        [range(RANKS)], GROUP_SIZES, dist.group.WORLD, lambda ranks, name: dist.new_group(ranks, group_desc=name)
    )


def group_name(group_size: int) -> str:
    """The description of `groups_of_all_ranks`' groups; the CP group is the world."""
    return "default_pg" if group_size == RANKS else f"BASP_SEQUENCE_GROUP_OF_{group_size}"


def basp_attention(
    plan: BatchPlan, groups: SequenceGroups, ledger: Ledger | None = None, layer: int = 1
) -> BaspAttention:
    holder = PlanHolder()
    holder.set(plan)
    return BaspAttention(groups, holder, dict.fromkeys(GROUP_SIZES, CausalSDPA(SCALE)), ledger or Ledger(), layer)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest entry; NaN if there is one."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return ((found - expected).abs().max() / expected.abs().max()).item()
