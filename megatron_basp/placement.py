"""Which ranks share fast links: aligned blocks of context-parallel (CP) ranks, and what of a group leaves a domain.

A fast domain is what fast links join: a node, or a rack that NVLink spans. N ranks in a CP group, K of them in a group
that shares a sequence, D consecutive CP ranks in a domain. Pure.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def aligned_blocks[Rank](cp_ranks: Sequence[Rank], group_size: int) -> list[tuple[Rank, ...]]:
    """The groups of K ranks of one CP group: consecutive, disjoint, covering it."""
    if len(cp_ranks) % group_size:
        raise ValueError(f"N % K must be 0, got N={len(cp_ranks)} and K={group_size}")
    return [tuple(cp_ranks[i : i + group_size]) for i in range(0, len(cp_ranks), group_size)]


def is_inside_domains(
    cp_groups: Iterable[Sequence[int]], group_size: int, domain_of_rank: Mapping[int, Hashable]
) -> bool:
    """Whether each group of K ranks lies in one fast domain."""
    blocks = (block for cp_ranks in cp_groups for block in aligned_blocks(cp_ranks, group_size))
    return all(len({domain_of_rank[rank] for rank in block}) == 1 for block in blocks)


def aligned_domain_size(cp_groups: Iterable[Sequence[int]], domain_of_rank: Mapping[int, Hashable]) -> int:
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


class Crossing(NamedTuple):
    """What groups of K ranks, all exchanging at once, ask of the links.

    together: each number of ranks of one group that share a domain.
    leaving: ordered pairs (sender, receiver) of which the sender is in the domain that most leave, and the receiver
        in another one.
    across: of these, those of the mean rank of that domain.
    domains: the most that one group is spread over.
    """

    together: tuple[int, ...]
    leaving: int
    across: float
    domains: int


@dataclass(frozen=True)
class Placement:
    """Where ranks sit: for each CP group of the job, the domain of each of its ranks, in their order.

    Several groups may have ranks in one domain: those of other tensor-parallel ranks and of other replicas.
    """

    domains: tuple[tuple[Hashable, ...], ...]
    _counted: dict[int, Crossing] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def ranks(self) -> int:
        """N."""
        return len(self.domains[0])

    def crossing(self, group_size: int) -> Crossing:
        """Counted once for each K: a job has thousands of ranks, and plans are made for every batch."""
        if group_size not in self._counted:
            self._counted[group_size] = self._count(group_size)
        return self._counted[group_size]

    def _count(self, group_size: int) -> Crossing:
        leaving: Counter[Hashable] = Counter()
        together, most_domains = set(), 1
        for of_ranks in self.domains:
            for block in aligned_blocks(of_ranks, group_size):
                of_block = Counter(block)
                most_domains = max(most_domains, len(of_block))
                for domain, count in of_block.items():
                    together.add(count)
                    leaving[domain] += count * (group_size - count)
        ranks = Counter(itertools.chain.from_iterable(self.domains))
        most, across = max((pairs, pairs / ranks[domain]) for domain, pairs in leaving.items())
        return Crossing(tuple(sorted(together)), most, across, most_domains)


def placement(cp_groups: Iterable[Sequence[int]], domain_of_rank: Mapping[int, Hashable]) -> Placement:
    """Args: as of `aligned_domain_size`."""
    return Placement(tuple(tuple(domain_of_rank[rank] for rank in cp_ranks) for cp_ranks in cp_groups))


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
