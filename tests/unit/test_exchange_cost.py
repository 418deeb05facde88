"""Bytes and seconds of an exchange, against sums over links and figures that are worked out by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_basp.exchange_cost import COPY_SHARE_OF_PEAK, OURS, AttentionShape, ExchangeCost, ExchangeModel
from megatron_basp.placement import Placement, aligned_blocks, divisors, placement
from megatron_basp.plan import Limits, plan_batch
from tests.costs import CLUSTER, with_across

SHAPE = AttentionShape(heads=8, kv_heads=4, query_head_size=64, value_head_size=32, element_bytes=2)
NO_COPIES = replace(OURS, query_key_value_passes=0, output_passes=0)


def model(cluster=CLUSTER, ranks=8, domain_size=4, shape=SHAPE, **rest):
    """Domains of D consecutive ranks, and as many CP groups as fill a node."""
    of_ranks = tuple(rank // domain_size for rank in range(ranks))
    groups = max(1, cluster.gpus_per_node // domain_size)
    return ExchangeModel(cluster, shape, Placement((of_ranks,) * groups), **rest)


def sent_by_links(group_size, tokens, ranks, domain_size):
    """{(rank, peer): bytes}, head by head: each peer gets its query heads, the key-value heads that these attend to,
    and is sent back the output of its tokens by those who have its heads."""
    sent = {}
    for block in aligned_blocks(range(ranks), group_size):
        for rank in block:
            for index, peer in enumerate(block):
                if peer == rank:
                    continue
                heads = [head for head in range(8) if head * group_size // 8 == index]
                kv_heads = {head // 2 for head in heads}
                # tokens·(queries + keys + values), and of the output this rank's heads for the peer's tokens.
                mine = 8 // group_size
                sent[rank, peer] = 2 * tokens * (len(heads) * 64 + len(kv_heads) * (64 + 32) + mine * 32)
    return sent


@pytest.mark.parametrize("group_size", [2, 4, 8])
@pytest.mark.parametrize("domain_size", [1, 2, 4, 8])
def test_bytes_are_those_of_the_links_inside_and_across_domains(group_size, domain_size):
    links = sent_by_links(group_size, 16, 8, domain_size)
    cost = model(domain_size=domain_size).of_wave(group_size, 16)
    across = sum(n for (rank, peer), n in links.items() if rank // domain_size != peer // domain_size)
    assert cost.across_bytes == across / 8
    assert cost.sent_bytes == sum(links.values()) / 8


def test_nothing_is_sent_or_copied_where_a_rank_has_the_sequence_alone():
    assert model().of_wave(1, 1024) == ExchangeCost()


def test_inside_a_node_time_is_latency_and_bytes_over_the_rate_of_so_many_gpus():
    cost = model(method=NO_COPIES).of_wave(4, 1000)
    assert cost.within_bytes == 1000 * 2 * (8 * 64 + 4 * 96 + 8 * 32) * 3 / 4 and cost.across_bytes == 0
    assert cost.seconds == pytest.approx(2 * 2e-5 + cost.within_bytes / 2e11)
    pairs = model(method=NO_COPIES).of_wave(2, 1000)
    assert pairs.seconds == pytest.approx(2 * 1e-5 + pairs.within_bytes / 1e11)


def test_all_gpus_of_a_node_share_its_interfaces():
    cost = model(method=NO_COPIES).of_wave(8, 1000)
    # 4 GPUs, 2 interfaces of 10 GB/s at 0.8 of their rate.
    assert cost.across_seconds == pytest.approx(cost.across_bytes * 4 / (2 * 1e10 * 0.8))
    assert cost.seconds == pytest.approx(2 * 5e-5 + cost.across_seconds)
    one = model(with_across(all_to_all_uses_all_nics=False), method=NO_COPIES).of_wave(8, 1000)
    assert one.across_seconds == pytest.approx(2 * cost.across_seconds)


def test_links_inside_and_across_work_at_the_same_time():
    fast = model(with_across(bytes_per_second_per_nic=1e12), method=NO_COPIES).of_wave(8, 1000)
    assert fast.within_seconds > fast.across_seconds > 0
    assert fast.seconds == pytest.approx(fast.latency_seconds + fast.within_seconds)


def test_more_nodes_get_a_smaller_share_of_the_rate():
    over_2 = model(ranks=8, method=NO_COPIES).of_wave(8, 1000)
    over_4 = model(ranks=16, method=NO_COPIES, shape=replace(SHAPE, heads=16)).of_wave(16, 1000)
    assert over_2.across_bytes * 4 / over_2.across_seconds == pytest.approx(2e10 * 0.8)
    assert over_4.across_bytes * 4 / over_4.across_seconds == pytest.approx(2e10 * 0.5)


def test_tensor_parallel_ranks_make_a_group_of_k_span_k_times_tp_gpus():
    # K = 4 with TP = 2 is two nodes of 4.
    nodes = {gpu: gpu // 4 for gpu in range(8)}
    placed = placement([[0, 2, 4, 6], [1, 3, 5, 7]], nodes)
    cost = ExchangeModel(CLUSTER, SHAPE, placed, NO_COPIES).of_wave(4, 1000)
    assert cost.across_bytes == pytest.approx(cost.within_bytes * 2)
    assert cost.within_seconds == pytest.approx(cost.within_bytes / 1e11)  # two of them share a node


def test_copies_are_charged_by_the_bytes_that_are_read_and_written():
    with_copies, without = model().of_wave(4, 1000), model(method=NO_COPIES).of_wave(4, 1000)
    query_key_value, output = 1000 * 2 * (8 * 64 + 4 * 96), 1000 * 2 * 8 * 32
    expected = 2 * (query_key_value + output) / (2e12 * COPY_SHARE_OF_PEAK)
    assert with_copies.seconds - without.seconds == pytest.approx(expected)


def test_fewer_key_value_heads_than_ranks_are_sent_as_often_as_they_are_needed():
    few = replace(SHAPE, kv_heads=2)
    assert model(shape=few).of_wave(2, 10).sent_bytes < model().of_wave(2, 10).sent_bytes
    assert model(shape=few).of_wave(4, 10) == model(shape=replace(SHAPE, kv_heads=4)).of_wave(4, 10)


def test_groups_that_straddle_nodes_wait_for_the_node_that_sends_most_and_the_most_ranks_inside_one():
    """K = 3 on nodes of 4: one rank of the second group of 6 sits in the first node, two in the other, and so on."""
    nodes = {rank: rank // 4 for rank in range(12)}
    shape, slow_inside = AttentionShape(6, 6, 64, 64, 2), replace(CLUSTER.within, bytes_per_second={2: 1e8, 3: 1e8})
    exchange = ExchangeModel(CLUSTER, shape, placement([range(6), range(6, 12)], nodes), NO_COPIES)
    cost = exchange.of_wave(3, 1000)
    to_a_peer = 1000 * 2 * 4 * 2 * 64
    # Of 3-5, one rank is in node 0 and two in node 1; of 6-8, two in node 1 and one in node 2.
    assert cost.leaving_bytes == 4 * to_a_peer
    assert cost.across_seconds == pytest.approx(4 * to_a_peer / (2e10 * 0.8))
    assert (cost.within_bytes, cost.across_bytes) == (to_a_peer, to_a_peer)
    # Ranks 0-2 have two peers each beside them.
    slow = replace(exchange, cluster=replace(CLUSTER, within=slow_inside)).of_wave(3, 1000)
    assert slow.within_seconds == pytest.approx(2 * to_a_peer / 1e8)
    assert slow.seconds == slow.latency_seconds + slow.within_seconds


def test_gpus_without_a_rank_send_nothing():
    """One rank on each node of 4 has its interfaces for itself."""
    spread = ExchangeModel(CLUSTER, SHAPE, placement([range(8)], {rank: rank for rank in range(8)}), NO_COPIES)
    full = model(domain_size=1, method=NO_COPIES)
    assert spread.of_wave(2, 1000).across_seconds == pytest.approx(full.of_wave(2, 1000).across_seconds / 4)


@st.composite
def batches(draw):
    ranks = draw(st.sampled_from([2, 4, 8, 12, 16]))
    return draw(st.integers(1, 20)), ranks, draw(st.sampled_from(divisors(ranks)))


@given(batches())
def test_what_the_planner_minimizes_is_what_the_plan_costs(arguments):
    rows, ranks, domain_size = arguments
    shape = AttentionShape(48, 48, 64, 64, 2)
    exchange = model(ranks=ranks, domain_size=domain_size, shape=shape)
    limits, lengths = Limits(48, 48, domain_size=domain_size), (480,) * rows
    cost_of = exchange.cost_of(480)
    plan = plan_batch(lengths, ranks, limits, cost_of)
    planned = 0
    for wave in plan.waves:
        per_wave, per_step = cost_of(wave.group_size)
        planned += per_wave + per_step * len(wave.rows) * wave.group_size / ranks
    assert planned == pytest.approx(exchange.of_plan(plan).seconds)
    for group_size in divisors(ranks):
        if rows % (ranks // group_size) == 0:
            fixed = plan_batch(lengths, ranks, replace(limits, group_size=group_size))
            assert exchange.of_plan(plan).seconds <= exchange.of_plan(fixed).seconds * (1 + 1e-12)


def test_latency_keeps_short_sequences_in_one_wave():
    """3 rows on 8 ranks of one node: two waves send less, one sets up less."""
    exchange = model(domain_size=8, method=NO_COPIES)

    def waves(seq_length):
        plan = plan_batch((seq_length,) * 3, 8, Limits(8, 4, domain_size=8), exchange.cost_of(seq_length))
        return [(len(wave.rows), wave.group_size) for wave in plan.waves]

    assert waves(64) == [(3, 8)]
    assert waves(65536) == [(2, 4), (1, 8)]
