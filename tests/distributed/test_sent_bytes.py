"""What the ledger counts is what is sent, and what is sent is what the formula says."""

import copy
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_basp.ledger import Collective, Ledger
from megatron_basp.plan import exchanged_elements_per_token
from tests.distributed.small_attention import (
    LENGTH,
    RANKS,
    Case,
    basp_attention,
    group_name,
    groups_of_all_ranks,
    stream_of,
)

pytestmark = pytest.mark.distributed

LAYER = 7
ELEMENT = 8  # bytes in fp64
CASES = {
    **{f"B={rows}": Case(rows, heads=8, kv_heads=4) for rows in range(1, 9)},
    "2 kv heads, B=3": Case(rows=3, heads=8, kv_heads=2),
    "1 kv head, B=3": Case(rows=3, heads=4, kv_heads=1),
    "values wider than keys": Case(rows=3, heads=8, kv_heads=2, value_size=5),
    "2 rows a group": Case(rows=4, heads=8, kv_heads=4, group_size=2),
}


def count(case, rank, groups):
    """What the ledger has after forward and after backward, and (calls, bytes to others) seen on the wire."""
    plan, (query, key, value, gradient) = case.plan(), case.draw()
    ledger, on_the_wire = Ledger(), Counter()

    def watched(received, sent, received_rows, sent_rows, group, async_op):
        assert sent.is_contiguous()
        on_the_wire["calls"] += 1
        on_the_wire["bytes"] += sent[: len(sent) - sent_rows[group.rank()]].numel() * sent.element_size()
        return all_to_all_single(received, sent, received_rows, sent_rows, group=group, async_op=async_op)

    all_to_all_single = dist.all_to_all_single
    inputs = [stream_of(plan, rank, x).requires_grad_() for x in (query, key, value)]
    with mock.patch.object(dist, "all_to_all_single", watched):
        output = basp_attention(plan, groups, ledger, LAYER)(*inputs, None)
        forward = copy.deepcopy(ledger)
        torch.autograd.grad(output, inputs, stream_of(plan, rank, gradient))
    return forward.page, ledger.page, on_the_wire


@pytest.fixture(scope="module")
def counted(on_ranks):
    def all_cases(rank):
        groups = groups_of_all_ranks()
        return {name: count(case, rank, groups) for name, case in CASES.items()}

    by_rank = on_ranks(all_cases, RANKS)
    return {name: [found[name] for found in by_rank] for name in CASES}


def waves_that_exchange(case):
    """(K, tokens on a rank) by the index of each wave with K > 1."""
    return {
        index: (wave.group_size, len(wave.rows) * LENGTH // RANKS)
        for index, wave in enumerate(case.plan().waves)
        if wave.group_size > 1
    }


def collective(operation, direction, wave, group_size):
    return Collective("exchange", operation, group_name(group_size), group_size, LAYER, wave, direction)


def formula(case, group_size, tokens):
    """Bytes that a rank sends for one wave in one direction, in q, k and v and in the output: T·e·(K-1)/K times
    H·d_qk + max(Hkv, K)·(d_qk + d_v), and times H·d_v."""
    qk_size, v_size = case.sizes
    kv_heads = max(case.kv_heads, group_size)
    away = tokens * ELEMENT * (group_size - 1)
    qkv, output = case.heads * qk_size + kv_heads * (qk_size + v_size), case.heads * v_size
    assert away * qkv % group_size == away * output % group_size == 0
    return away * qkv // group_size, away * output // group_size


@pytest.mark.parametrize("name", CASES)
def test_a_wave_with_groups_exchanges_twice_forward_and_twice_backward_and_others_never(counted, name):
    operations = [(operation, direction) for operation in ("qkv", "output") for direction in ("forward", "backward")]
    expected = Counter(
        collective(operation, direction, wave, group_size)
        for wave, (group_size, _) in waves_that_exchange(CASES[name]).items()
        for operation, direction in operations
    )
    for _, page, _ in counted[name]:
        assert page.collectives == expected


@pytest.mark.parametrize("name", CASES)
def test_forward_counts_nothing_of_backward_and_backward_sends_as_much_again(counted, name):
    for forward, page, _ in counted[name]:
        assert all(exchange.direction == "forward" for exchange in forward.collectives)
        assert 2 * sum(forward.collectives.values()) == sum(page.collectives.values())
        assert 2 * forward.sent_bytes_to_peer.total() == page.sent_bytes_to_peer.total()


@pytest.mark.parametrize("name", CASES)
def test_bytes_of_each_wave_and_direction_are_those_of_the_formula(counted, name):
    expected = {}
    for wave, (group_size, tokens) in waves_that_exchange(CASES[name]).items():
        qkv, output = formula(CASES[name], group_size, tokens)
        for direction in ("forward", "backward"):
            expected[collective("qkv", direction, wave, group_size)] = qkv
            expected[collective("output", direction, wave, group_size)] = output
    for _, page, _ in counted[name]:
        assert page.sent_bytes == expected


@pytest.mark.parametrize("name", CASES)
def test_peers_are_those_of_the_groups_and_get_equal_parts(counted, name):
    for rank, (_, page, _) in enumerate(counted[name]):
        expected = Counter()
        for group_size, tokens in waves_that_exchange(CASES[name]).values():
            first = rank // group_size * group_size
            for peer in set(range(first, first + group_size)) - {rank}:
                expected[peer] += 2 * sum(formula(CASES[name], group_size, tokens)) // (group_size - 1)
        assert page.sent_bytes_to_peer == expected


@pytest.mark.parametrize("name", CASES)
def test_the_ledger_holds_what_went_over_the_wire(counted, name):
    for _, page, on_the_wire in counted[name]:
        # The output travels by itself, and q, k and v together: over gloo in an operation for each.
        assert 2 * sum(page.collectives.values()) == on_the_wire["calls"]
        assert sum(page.sent_bytes.values()) == sum(page.sent_bytes_to_peer.values()) == on_the_wire["bytes"]


def test_one_sequence_a_rank_sends_nothing(counted):
    for _, page, on_the_wire in counted["B=4"]:
        assert page == {} and not on_the_wire


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.value_size is None])
def test_what_the_planner_counts_is_what_is_sent(counted, name):
    case = CASES[name]
    planned = sum(
        tokens * exchanged_elements_per_token(group_size, case.limits) * (group_size - 1) / group_size
        for group_size, tokens in waves_that_exchange(case).values()
    )
    for forward, _, _ in counted[name]:
        assert forward.sent_bytes_to_peer.total() == planned * case.head_size * ELEMENT
