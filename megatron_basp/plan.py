"""Which ranks share which sequence of a micro-batch.

Letters, here and everywhere: N ranks in the context-parallel (CP) group, B sequences ("rows") in a micro-batch, S
tokens in a row, K ranks that share one row, g = N/K groups side by side, T = B·S/N tokens on a rank, H query heads,
Hkv key-value heads (both per tensor-parallel rank), d head size.

A plan is a list of *waves*. A wave is some rows and a K; its rows are dealt out to g aligned groups of K ranks, every
group gets the same number of them, and inside a group each rank holds one contiguous K-th of every row. N=8, B=3 is
two rows at K=4, then one row at K=8.

Invariants (asserted by tests/unit/test_plan.py):
  * each token of each row lies on exactly one rank;
  * every rank holds exactly T = B·S/N tokens, with no padding;
  * in every wave each rank is in exactly one group; groups are aligned blocks of consecutive ranks;
  * K divides N and H, and Hkv % K == 0 or K % Hkv == 0;
  * the plan depends on its arguments alone, so every rank computes the same plan and nobody has to be asked.

Pure: no torch, no Megatron, no globals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_basp.decomposition import WaveCost, cheapest_counts
from megatron_basp.errors import ConfigurationError
from megatron_basp.placement import divisors, pairs_across

CostOf = Callable[[int], WaveCost]


@dataclass(frozen=True)
class Limits:
    """What bounds the choice of K.

    heads, kv_heads: H and Hkv of one tensor-parallel rank.
    group_size: K for all rows, or None to let the plan choose.
    domain_size: consecutive CP ranks joined by fast links (a node), or None where that is not known. Bytes that leave
        a domain are avoided first, bytes inside it second.
    """

    heads: int
    kv_heads: int
    group_size: int | None = None
    domain_size: int | None = None


@dataclass(frozen=True)
class Wave:
    """Rows that are worked on side by side in groups of the same size.

    rows: indices into the micro-batch, in the order in which groups take them.
    lengths: tokens in each of them.
    group_size: K.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    group_size: int


@dataclass(frozen=True)
class Share:
    """What one rank holds of one wave: tokens [start, stop) of each of `rows`.

    The group's ranks hold `tokens_per_rank` tokens each, in the order of their ranks in the group; this rank's own
    count is `tokens`. In the stream these are position-major, [stop - start, rows], so that an exchange which strings
    the shards of the group together yields [S, rows] without moving anything.
    """

    rows: tuple[int, ...]
    start: int
    stop: int
    length: int
    group_size: int
    group_index: int
    rank_in_group: int
    tokens_per_rank: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.tokens_per_rank[self.rank_in_group]


@dataclass(frozen=True)
class BatchPlan:
    """How the rows of one micro-batch are spread over the ranks of a CP group."""

    lengths: tuple[int, ...]
    ranks: int
    waves: tuple[Wave, ...]

    @cached_property
    def tokens(self) -> int:
        """T, the tokens on each rank."""
        return sum(self.lengths) // self.ranks

    @cached_property
    def group_sizes(self) -> tuple[int, ...]:
        """The distinct K of the waves, in ascending order."""
        return tuple(sorted({wave.group_size for wave in self.waves}))

    def shares(self, rank: int) -> tuple[Share, ...]:
        """What `rank` (of 0..N-1 in the CP group) holds, wave by wave: the order of its token stream."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is not in 0..{self.ranks - 1}")
        shares = []
        for wave in self.waves:
            groups = self.ranks // wave.group_size
            rows_per_group = len(wave.rows) // groups
            group_index, rank_in_group = divmod(rank, wave.group_size)
            length = wave.lengths[0]
            shard = length // wave.group_size
            first = group_index * rows_per_group
            shares.append(
                Share(
                    rows=wave.rows[first : first + rows_per_group],
                    start=rank_in_group * shard,
                    stop=(rank_in_group + 1) * shard,
                    length=length,
                    group_size=wave.group_size,
                    group_index=group_index,
                    rank_in_group=rank_in_group,
                    tokens_per_rank=(shard * rows_per_group,) * wave.group_size,
                )
            )
        return tuple(shares)


class PlanHolder:
    """The plan in force, handed to the modules that need it when they are built.

    Megatron's layers pass no plan along, so the schedule sets it for the length of one call and the modules read it.
    It is empty outside of a call: a module that runs where no plan was made fails instead of using an old one.
    """

    def __init__(self) -> None:
        self._plan: BatchPlan | None = None

    def set(self, plan: BatchPlan | None) -> None:
        self._plan = plan

    @property
    def is_set(self) -> bool:
        return self._plan is not None

    @property
    def plan(self) -> BatchPlan:
        if self._plan is None:
            raise RuntimeError(
                "no batch plan is in force: the model ran outside of Megatron's forward-backward schedule, which is "
                "where megatron_basp makes the plan"
            )
        return self._plan


def exchanged_elements_per_token(group_size: int, limits: Limits) -> int:
    """Elements, in units of the head size d, that an exchange at K moves per token and direction before the part that
    stays at home is taken off: q and the output have H heads each, k and v max(Hkv, K) each."""
    return 2 * limits.heads + 2 * max(limits.kv_heads, group_size)


def heads_fit(group_size: int, limits: Limits) -> bool:
    """Whether K ranks can divide the heads among them."""
    heads, kv_heads = limits.heads, limits.kv_heads
    return heads % group_size == 0 and (kv_heads % group_size == 0 or group_size % kv_heads == 0)


def plan_batch(lengths: Sequence[int], ranks: int, limits: Limits, cost_of: CostOf | None = None) -> BatchPlan:
    """Deal the rows of a micro-batch out to groups of ranks, at the least cost.

    Args:
        lengths: tokens in each row; equal for now.
        ranks: N.
        limits: heads, a forced K, the fast domain.
        cost_of: what a wave at K costs, for rows of these lengths. Without it, the bytes that it sends across domains
            come first and all the bytes that it sends second (`bytes_of_wave`).

    Raises:
        ConfigurationError (a ValueError): no decomposition exists; says which formula fails, and the remedy.
    """
    lengths = tuple(lengths)
    _check_sizes(lengths, ranks, limits)
    rows, length = len(lengths), lengths[0]
    if limits.group_size is not None:
        _check_forced(rows, length, ranks, limits)
        return plan_of_counts(lengths, ranks, {limits.group_size: rows})
    sizes = fitting_sizes(length, ranks, limits)
    counts = cheapest_counts(rows, ranks, sizes, cost_of or bytes_of_wave(rows, ranks, limits))
    if counts is None:
        raise ConfigurationError(_why_nothing_fits(rows, length, ranks, limits))
    return plan_of_counts(lengths, ranks, counts)


def plan_of_counts(lengths: tuple[int, ...], ranks: int, counts: Mapping[int, int]) -> BatchPlan:
    """The plan that gives so many rows to each K, the smallest K first."""
    waves, first = [], 0
    for group_size in sorted(counts):
        stop = first + counts[group_size]
        waves.append(Wave(tuple(range(first, stop)), lengths[first:stop], group_size))
        first = stop
    return BatchPlan(lengths, ranks, tuple(waves))


def fitting_sizes(length: int, ranks: int, limits: Limits) -> list[int]:
    """Each K that divides N, S and the heads."""
    return [k for k in divisors(ranks) if heads_fit(k, limits) and length % k == 0]


def bytes_of_wave(rows: int, ranks: int, limits: Limits) -> CostOf:
    """The cost where nothing is known of the links: bytes across domains, then bytes to any rank.

    A rank sends T·e·d·(2H + 2·max(Hkv, K))·(K-1)/K a layer and direction. Integers, up to factors that all K share.
    """

    # A rank holds S/K tokens of each of N/K rows and sends 1/K of their elements to a peer; N/K groups do so.
    def volume(group_size: int) -> int:
        return exchanged_elements_per_token(group_size, limits) * (ranks // group_size) ** 2

    # One byte across outweighs all bytes that a plan of these rows can send.
    heavy = 1 + rows * max(volume(size) * (size - 1) * ranks for size in divisors(ranks))

    def cost_of(group_size: int) -> WaveCost:
        across = volume(group_size) * pairs_across(group_size, ranks, limits.domain_size)
        return WaveCost(0, across * heavy + volume(group_size) * (group_size - 1) * ranks)

    return cost_of


def _check_sizes(lengths: tuple[int, ...], ranks: int, limits: Limits) -> None:
    if ranks < 1:
        raise ConfigurationError(f"a context-parallel group needs at least 1 rank, got N={ranks}")
    if not lengths:
        raise ConfigurationError(
            "a micro-batch needs at least 1 sequence, got B=0: set --micro-batch-size to 1 or more"
        )
    if min(lengths) < 1:
        raise ConfigurationError(f"a sequence needs at least 1 token, got lengths {lengths}")
    if len(set(lengths)) > 1:
        raise ConfigurationError(
            f"sequences of different lengths in one micro-batch are not supported yet, got lengths "
            f"{min(lengths)} to {max(lengths)}: pad or pack them to one length"
        )
    if limits.heads < 1 or limits.kv_heads < 1 or limits.heads % limits.kv_heads:
        raise ConfigurationError(
            f"H % Hkv must be 0 with both at least 1, got H={limits.heads}, Hkv={limits.kv_heads} per tensor-parallel "
            f"rank: use a number of KV heads that divides {limits.heads}"
        )
    if limits.domain_size is not None and limits.domain_size < 1:
        raise ConfigurationError(f"a fast domain needs at least 1 rank, got {limits.domain_size}")


def _check_forced(rows: int, length: int, ranks: int, limits: Limits) -> None:
    group_size = limits.group_size
    assert group_size is not None
    fitting = [k for k in divisors(ranks) if heads_fit(k, limits) and rows % (ranks // k) == 0 and length % k == 0]
    remedy = f"use a group size out of {fitting}" if fitting else "leave the group size to the planner"
    if group_size < 1 or ranks % group_size:
        raise ConfigurationError(f"N % K must be 0, got N={ranks} ranks and K={group_size}: {remedy}")
    if not heads_fit(group_size, limits):
        raise ConfigurationError(
            f"H % K must be 0, and Hkv % K or K % Hkv, got H={limits.heads}, Hkv={limits.kv_heads} per "
            f"tensor-parallel rank and K={group_size}: {remedy}"
        )
    groups = ranks // group_size
    if rows % groups:
        below, above = rows // groups * groups, (rows // groups + 1) * groups
        raise ConfigurationError(
            f"B % (N/K) must be 0 when K is fixed, got B={rows}, N={ranks}, K={group_size} (N/K={groups}): use a "
            f"micro-batch of {f'{below} or {above}' if below else above}, or leave the group size to the planner"
        )
    if length % group_size:
        raise ConfigurationError(
            f"S % K must be 0, got S={length} and K={group_size}: the next sequence length that works is "
            f"{_next_multiple(length, group_size)}"
        )


def _next_multiple(n: int, factor: int) -> int:
    return -(-n // factor) * factor


def _why_nothing_fits(rows: int, length: int, ranks: int, limits: Limits) -> str:
    by_heads = [k for k in divisors(ranks) if heads_fit(k, limits)]
    largest = by_heads[-1]
    if cheapest_counts(rows, ranks, by_heads, bytes_of_wave(rows, ranks, limits)) is not None:
        return (
            f"B={rows} sequences of S={length} tokens cannot be dealt out to N={ranks} ranks: S % K must be 0, and of "
            f"K in {by_heads} only {[k for k in by_heads if length % k == 0]} divide S: the next sequence length that "
            f"works is {_next_multiple(length, math.lcm(*by_heads))}"
        )
    return (
        f"B={rows} sequences cannot be dealt out to N={ranks} ranks: H={limits.heads}, Hkv={limits.kv_heads} per "
        f"tensor-parallel rank allow only K in {by_heads}, so the micro-batch must be a multiple of "
        f"{ranks // largest}: use {_next_multiple(rows, ranks // largest)}, or --context-parallel-size {largest}"
    )
