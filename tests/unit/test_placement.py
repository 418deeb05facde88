"""Which ranks form a group, and what of it leaves a domain. (Groups: tests/distributed/test_sequence_groups.py)"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_basp.placement import aligned_blocks, aligned_domain_size, pairs_across, peers


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 5))
def test_blocks_are_consecutive_disjoint_and_cover_the_group(blocks, group_size, stride):
    cp_ranks = list(range(3, 3 + blocks * group_size * stride, stride))
    found = aligned_blocks(cp_ranks, group_size)
    assert [len(block) for block in found] == [group_size] * blocks
    assert [rank for block in found for rank in block] == cp_ranks


def test_blocks_of_a_strided_group_hold_its_global_ranks():
    assert aligned_blocks([1, 3, 5, 7], 2) == [(1, 3), (5, 7)]


def test_ranks_that_do_not_divide_into_blocks_are_refused():
    with pytest.raises(ValueError, match="got N=6 and K=4"):
        aligned_blocks(range(6), 4)


def hosts(sizes):
    """Domains of consecutive ranks: {0: 0, 1: 0, 2: 1, …} for sizes 2, 1, …"""
    return dict(enumerate(host for host, size in enumerate(sizes) for _ in range(size)))


@pytest.mark.parametrize(
    ("cp_groups", "host_sizes", "expected"),
    [
        ([range(8)], [8], 8),
        ([range(8)], [4, 4], 4),
        ([range(8)], [16], 8),
        # Blocks must divide N, and be aligned: of hosts of 3 no block of 3 in 8 ranks, and none of 2 inside each.
        ([range(6)], [3, 3], 3),
        ([range(8)], [3, 3, 2], 1),
        ([range(8)], [6, 2], 2),
        # Uneven hosts: the smallest decides.
        ([range(8)], [4, 2, 2], 2),
        ([range(8)], [2, 6], 2),
        # Two CP groups side by side on each host, and one of them torn: both count.
        ([range(4), range(4, 8)], [4, 4], 4),
        ([range(4), range(4, 8)], [6, 2], 2),
        # With tensor parallelism of 2, CP ranks are every second device: a host of 4 devices is 2 of them.
        ([range(0, 8, 2), range(1, 8, 2)], [4, 4], 2),
        ([range(1)], [1], 1),
    ],
)
def test_the_fast_domain_is_the_largest_whose_aligned_blocks_each_lie_on_one_host(cp_groups, host_sizes, expected):
    assert aligned_domain_size(cp_groups, hosts(host_sizes)) == expected


def test_ranks_dealt_out_over_hosts_one_by_one_have_no_fast_domain():
    host_of_rank = {rank: f"host{rank % 2}" for rank in range(8)}
    assert aligned_domain_size([list(range(8))], host_of_rank) == 1
    # Launched that way, CP groups of every second rank lie on one host each.
    assert aligned_domain_size([[0, 2, 4, 6], [1, 3, 5, 7]], host_of_rank) == 4


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_the_fast_domain_found_lies_on_one_host_and_no_larger_one_does(host_of_rank):
    ranks = list(range(len(host_of_rank)))

    def lies_on_one_host(size):
        return all(len({host_of_rank[r] for r in ranks[i : i + size]}) == 1 for i in range(0, len(ranks), size))

    expected = max(size for size in range(1, len(ranks) + 1) if len(ranks) % size == 0 and lies_on_one_host(size))
    assert aligned_domain_size([ranks], dict(enumerate(host_of_rank))) == expected


@st.composite
def groups_and_domains(draw):
    """K, N and D; D need not divide anything."""
    group_size = draw(st.integers(1, 8))
    ranks = group_size * draw(st.integers(1, 6))
    return group_size, ranks, draw(st.integers(1, ranks + 2))


@given(groups_and_domains())
def test_peers_are_counted_link_by_link_in_the_domain_that_has_most_elsewhere(arguments):
    group_size, ranks, domain_size = arguments
    across = {rank: 0 for rank in range(ranks)}
    for block in aligned_blocks(range(ranks), group_size):
        for rank in block:
            across[rank] = sum(peer // domain_size != rank // domain_size for peer in block)
    domains = [[across[rank] for rank in range(first, min(first + domain_size, ranks))]
               for first in range(0, ranks, domain_size)]  # fmt: skip
    worst = max(sum(of_domain) / len(of_domain) for of_domain in domains)
    found = peers(group_size, ranks, domain_size)
    assert found.across == pytest.approx(worst)
    assert found.within + found.across == group_size - 1
    assert pairs_across(group_size, ranks, domain_size) == sum(across.values())


def test_without_a_known_domain_nothing_is_known_to_leave_one():
    assert peers(4, 8, None) == (3, 0)
    assert pairs_across(4, 8, None) == 0
