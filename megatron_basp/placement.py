"""Which ranks share fast links: aligned blocks of context-parallel (CP) ranks, and what of a group leaves a domain.

A fast domain is what fast links join: a node, or a rack that NVLink spans. N ranks in a CP group, K of them in a group
that shares a sequence, D consecutive CP ranks in a domain. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def aligned_blocks(cp_ranks: Sequence[int], group_size: int) -> list[tuple[int, ...]]:
    """The groups of K ranks of one CP group: consecutive, disjoint, covering it."""
    if len(cp_ranks) % group_size:
        raise ValueError(f"N % K must be 0, got N={len(cp_ranks)} and K={group_size}")
    return [tuple(cp_ranks[i : i + group_size]) for i in range(0, len(cp_ranks), group_size)]


def aligned_domain_size(cp_groups: Iterable[Sequence[int]], domain_of_rank: Mapping[int, object]) -> int:
    """The largest D such that every aligned block of D ranks, in every CP group, lies in one fast domain.

    Args:
        cp_groups: global ranks of each CP group; all of the same size N.
        domain_of_rank: for each global rank something that its domain has and others have not, such as a host name.
    """
    cp_groups = list(cp_groups)
    size = len(cp_groups[0])
    for domain_size in reversed(divisors(size)):
        blocks = [block for cp_ranks in cp_groups for block in aligned_blocks(cp_ranks, domain_size)]
        if all(len({domain_of_rank[rank] for rank in block}) == 1 for block in blocks):
            return domain_size
    raise AssertionError("a block of one rank lies in one domain")


class Peers(NamedTuple):
    """Of one rank in its group, itself left out: in its own domain, and in others."""

    within: float
    across: float


def peers(group_size: int, ranks: int, domain_size: int | None) -> Peers:
    """Of the mean rank of the domain that has most peers elsewhere: what a collective in all groups waits for."""
    if domain_size is None or domain_size >= ranks or domain_size % group_size == 0:
        return Peers(group_size - 1, 0)
    if group_size % domain_size == 0:
        return Peers(domain_size - 1, group_size - domain_size)
    across: dict[int, list[int]] = {}
    for start, stop in _runs(group_size, ranks, domain_size):
        across.setdefault(start // domain_size, []).extend([group_size - (stop - start)] * (stop - start))
    worst = max(sum(of_domain) / len(of_domain) for of_domain in across.values())
    return Peers(group_size - 1 - worst, worst)


def pairs_across(group_size: int, ranks: int, domain_size: int | None) -> int:
    """Ordered pairs of ranks that share a group of K but not a fast domain."""
    if domain_size is None:
        return 0
    within = sum((stop - start) ** 2 for start, stop in _runs(group_size, ranks, domain_size))
    return ranks * group_size - within


def _runs(group_size: int, ranks: int, domain_size: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of the ranks that share both a group and a domain: where either ends, so does a run."""
    start = 0
    while start < ranks:
        stop = min(start // size * size + size for size in (group_size, domain_size))
        stop = min(stop, ranks)
        yield start, stop
        start = stop
