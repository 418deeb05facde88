"""Which ranks form a group. (The groups themselves: tests/distributed/test_sequence_groups.py)"""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_basp.process_groups import SequenceGroups, aligned_blocks, aligned_domain_size


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


def connected(monkeypatch, backend):
    """What `connect` gives on a device of 1000 bytes of which each communicator takes 100, and the calls it makes.

    A contract with stand-ins: this has not run on a GPU.
    """
    calls = []

    def zeros(size, device):
        calls.append(f"{size} elements on {device}")
        return torch.ones(size)

    def exchange(received, sent, group):
        assert received.shape == sent.shape and received is not sent
        calls.append(group)

    def free():
        calls.append("free")
        return 1000 - 100 * sum(call in ("two", "cp") for call in calls), 2000

    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    return SequenceGroups("cp", 0, {2: "two", 4: "cp"}, "alone", created=6).connect(), calls


def test_communicators_are_made_at_the_start_and_their_memory_is_what_the_device_has_less(monkeypatch):
    memory, calls = connected(monkeypatch, "nccl")
    assert memory == 200
    # Nothing is allocated, and nothing runs, between the two looks at the memory but the exchanges.
    assert calls == ["2 elements on cuda", "4 elements on cuda", "wait", "free", "two", "cp", "wait", "free"]


def test_over_gloo_there_is_nothing_to_measure_and_nothing_is_sent(monkeypatch):
    assert connected(monkeypatch, "gloo") == (None, [])
