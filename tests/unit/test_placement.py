"""Which ranks form a group, and what of it leaves a domain. (Groups: tests/distributed/test_sequence_groups.py)"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_basp.placement import Placement, aligned_blocks, aligned_domain_size, pairs_across, placement


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
def test_pairs_that_leave_a_domain_are_counted_link_by_link(arguments):
    group_size, ranks, domain_size = arguments
    links = [(rank, peer) for block in aligned_blocks(range(ranks), group_size) for rank in block for peer in block]
    apart = [(rank, peer) for rank, peer in links if rank // domain_size != peer // domain_size]
    assert pairs_across(group_size, ranks, domain_size) == len(apart)


def test_without_a_known_domain_nothing_is_known_to_leave_one():
    assert pairs_across(4, 8, None) == 0


@st.composite
def placements(draw):
    """K and a placement of several CP groups of N ranks, in no order."""
    group_size, groups = draw(st.integers(2, 6)), draw(st.integers(1, 3))
    domains = st.lists(st.integers(0, 3), min_size=group_size * groups, max_size=group_size * groups)
    return group_size, Placement(tuple(map(tuple, draw(st.lists(domains, min_size=1, max_size=3)))))


@given(placements())
def test_what_groups_ask_of_links_is_counted_link_by_link_in_the_domain_that_most_leave(arguments):
    group_size, placed = arguments
    leaving, ranks, together, spread = {}, {}, set(), set()
    for of_ranks in placed.domains:
        for block in aligned_blocks(of_ranks, group_size):
            spread.add(len(set(block)))
            for domain in block:
                ranks[domain] = ranks.get(domain, 0) + 1
                leaving[domain] = leaving.get(domain, 0) + sum(peer != domain for peer in block)
                together.add(block.count(domain))
    found = placed.crossing(group_size)
    assert found.together == tuple(sorted(together))
    assert found.domains == max(spread)
    assert found.leaving == max(leaving.values())
    assert found.across == max(leaving[d] / ranks[d] for d in ranks if leaving[d] == found.leaving)


def test_several_groups_of_ranks_load_the_node_that_they_share():
    """Nodes of 8, 2 replicas of 12 ranks: the node in the middle has 4 of each."""
    nodes = {rank: rank // 8 for rank in range(24)}
    found = placement([range(12), range(12, 24)], nodes).crossing(6)
    # Groups 0-5 and 18-23 sit in one node; of 6-11 and 12-17 two sit in the outer nodes, four in the middle one.
    assert found == (((2, 4, 6)), 2 * 4 * 2, 2, 2)
    alone = placement([range(12)], nodes).crossing(6)
    assert alone == ((2, 4, 6), 4 * 2, 2, 2)
