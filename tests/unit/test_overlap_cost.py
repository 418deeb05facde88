"""Exchanges behind arithmetic: against a clock that ticks, figures worked out by hand, and what pays where."""

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_basp import overlap_cost
from megatron_basp.exchange_cost import AttentionShape, ExchangeModel, Transfer
from megatron_basp.overlap_cost import TELLS_APART, Work, best_chunks, layer_seconds, possible_chunks, seconds_of
from megatron_basp.placement import Placement
from megatron_basp.plan import Limits, plan_batch
from tests.costs import CLUSTER, with_across

SHAPE = AttentionShape(heads=32, kv_heads=32, query_head_size=64, value_head_size=64, element_bytes=2)
LIMITS = Limits(32, 32, domain_size=4)
TWO_NODES = Placement(((0, 0, 0, 0, 1, 1, 1, 1),))
LONG, SHORT = 1 << 16, 1 << 10


def model(cluster=CLUSTER):
    return ExchangeModel(cluster, SHAPE, TWO_NODES)


def plan(rows, length=LONG, limits=LIMITS):
    return plan_batch((length,) * rows, 8, limits)


# The schedule, played through tick by tick.


def by_ticks(pieces):
    """Whole numbers: a device that does one thing after the other, and two links with a queue each."""
    order = sorted(range(len(pieces)), key=lambda i: (-pieces[i].group_size, i))
    exchanged = [i for i, piece in enumerate(pieces) if piece.to_heads is not None]
    program = [("pack", i) for i in order if i in exchanged]
    program += [("attend", i) for i in range(len(pieces))] + [("unpack", i) for i in exchanged]
    left = [getattr(pieces[i], f"{what}_seconds") for what, i in program]
    queues, travelling = (deque(), deque()), {}
    posts = {"pack": "to_heads", "attend": "to_sequence"}
    waits_for = {"attend": "to_heads", "unpack": "to_sequence"}

    def ready():
        what, i = program[0]
        return not travelling.get((waits_for.get(what), i), 0)

    def post(what, i):
        name = posts.get(what)
        transfer = name and getattr(pieces[i], name)
        if transfer:
            travelling[name, i] = 0
            for queue, ticks in zip(queues, (transfer.within_seconds, transfer.across_seconds), strict=True):
                if ticks:
                    queue.append([(name, i), transfer.latency_seconds + ticks])
                    travelling[name, i] += 1

    time = 0
    while True:
        while program and ready() and left[0] == 0:
            post(*program.pop(0))
            left.pop(0)
        if not program:
            return time
        time += 1
        if ready():
            left[0] -= 1
        for queue in queues:
            if queue:
                queue[0][1] -= 1
                if not queue[0][1]:
                    travelling[queue.popleft()[0]] -= 1


ticks = st.integers(0, 6)
transfers = st.builds(Transfer, latency_seconds=ticks, within_seconds=ticks, across_seconds=ticks)
alone = st.builds(Work, group_size=st.just(1), attend_seconds=ticks)
together = st.builds(Work, st.sampled_from([2, 4, 8]), ticks, transfers, transfers, ticks, ticks)


@given(st.lists(st.one_of(alone, together), max_size=7))
def test_the_schedule_is_that_of_a_clock_that_ticks(pieces):
    assert seconds_of(pieces) == by_ticks(pieces)


# By hand.


def across(seconds, latency=0):
    return Transfer(latency, 0, seconds)


def test_one_piece_has_nothing_to_travel_behind():
    assert seconds_of([Work(8, 10, across(6, latency=1), across(2, latency=1), 3, 4)]) == 3 + 7 + 10 + 3 + 4


def test_two_parts_hide_half_of_what_arithmetic_covers():
    # The second part arrives, and the first returns, while the other is attended to.
    assert seconds_of([Work(8, 5, across(3), across(1))] * 2) == 3 + 5 + 5 + 1
    # One with twice the work each: 6 + 10 + 2.
    assert seconds_of([Work(8, 10, across(6), across(2))]) == 18


def test_each_part_has_a_latency_of_its_own():
    assert seconds_of([Work(8, 0, across(3, latency=2), across(1, latency=2))] * 2) == 2 * (2 + 3) + 2 * (2 + 1)


def test_what_crosses_travels_behind_the_work_inside():
    inside = Work(4, 10, Transfer(0, 1, 0), Transfer(0, 1, 0))
    crossing = Work(8, 5, across(9), across(3))
    assert seconds_of([inside, crossing]) == 1 + 10 + 5 + 3
    # Were it attended to first, the work inside would cover its way back alone.
    assert seconds_of([crossing, inside]) == 9 + 5 + 10 + 1


def test_a_link_carries_one_thing_at_a_time_in_the_order_of_the_posts():
    wide, narrow = Work(8, 0, across(5), across(1)), Work(4, 0, across(2), across(1))
    # The wider one was sent first, and the narrower one, attended to first, waits for it.
    assert seconds_of([narrow, wide]) == 5 + 2 + 1 + 1


def test_in_one_part_everything_of_a_wave_follows_on_the_other():
    exchange, one = model(), plan(1)
    tokens = LONG / 8
    cost = exchange.of_wave(8, tokens)
    forward_flops = 2 * tokens * LONG * 32 * 64
    passes = 2 * 2 * 4 * tokens * 32 * 64 * 2 / (2e12 * 0.8)  # q, k, v and the output once each way, read and written
    expected = 2 * (cost.latency_seconds + cost.across_seconds) + 3.5 * forward_flops / 4e13 + passes
    assert cost.across_seconds > cost.within_seconds
    assert layer_seconds(exchange, one, {8: 1}) == pytest.approx(expected)


def test_backward_is_forward_run_the_other_way_round():
    """Largest K first: what comes back of it, q, k and v's gradients, travels behind the rest."""
    no_copies = replace(CLUSTER, memory_bytes_per_second=1e30)
    exchange, three = model(no_copies), plan(3)
    inside, crossing = (exchange.of_wave(k, tokens) for k, tokens in ((4, LONG / 4), (8, LONG / 8)))
    assert three.group_sizes == (4, 8)
    attention = 2 * LONG / 8 * LONG * 32 * 64 / 4e13  # of the crossing row, forward; those inside have twice as much
    assert 2 * attention > crossing.seconds
    # Of q, k, v and the output, in equal parts: 3 of 4 come forward, 1 of 4 backward.
    latency, quarter = crossing.latency_seconds / 2, crossing.across_seconds / 4
    latency_inside, quarter_inside = inside.latency_seconds / 2, inside.within_seconds / 4
    forward = latency_inside + 3 * quarter_inside + 3 * attention + latency + quarter
    backward = latency + quarter + 2.5 * 3 * attention + latency_inside + 3 * quarter_inside
    # The crossing exchange keeps the links inside busy for a while as well, before those of the rows inside.
    waits = crossing.within_seconds
    found = layer_seconds(exchange, three, {4: 1, 8: 1})
    assert forward + backward <= found <= forward + backward + 2 * (waits + latency)


# How many parts.


def test_a_slow_link_that_arithmetic_covers_wants_several_parts():
    slow = model(with_across(bytes_per_second_per_nic=1e9))
    chosen = best_chunks(slow, plan(1), LIMITS)
    assert chosen[8] > 1
    assert layer_seconds(slow, plan(1), chosen) < 0.9 * layer_seconds(slow, plan(1), {8: 1})


def test_a_fast_link_wants_one_part():
    fast = model(with_across(bytes_per_second_per_nic=1e14))
    assert best_chunks(fast, plan(1, SHORT), LIMITS) == {8: 1}


def test_where_latency_is_most_of_an_exchange_one_part_is_best():
    assert best_chunks(model(), plan(1, SHORT), LIMITS) == {8: 1}
    assert best_chunks(model(with_across(latency_seconds=1.0)), plan(1), LIMITS) == {8: 1}


def test_of_equal_times_the_fewest_parts_are_taken():
    within = replace(CLUSTER.within, latency_seconds={4: 1e-30}, bytes_per_second={4: 1e30})
    free = replace(with_across(latency_seconds=1e-30, bytes_per_second_per_nic=1e30), within=within)
    assert best_chunks(model(free), plan(3), LIMITS) == {4: 1, 8: 1}


def test_no_other_number_of_parts_is_faster_by_more_than_the_model_can_tell():
    for bytes_per_second in (1e8, 1e9, 1e10, 1e11):
        exchange = model(with_across(bytes_per_second_per_nic=bytes_per_second))
        chosen = best_chunks(exchange, plan(3), LIMITS)
        best = layer_seconds(exchange, plan(3), chosen)
        for of_four in possible_chunks(LIMITS, 4):
            for of_eight in possible_chunks(LIMITS, 8):
                assert best <= layer_seconds(exchange, plan(3), {4: of_four, 8: of_eight}) * (1 + TELLS_APART)


def test_a_plan_of_many_waves_is_not_tried_in_all_combinations_of_parts(monkeypatch):
    tried = []

    def counted(exchange, of_plan, chunks):
        tried.append(chunks)
        return layer_seconds(exchange, of_plan, chunks)

    monkeypatch.setattr(overlap_cost, "layer_seconds", counted)
    limits = Limits(64, 64)
    many = plan_batch((64 * 64,) * 63, 64, limits)
    nodes = Placement((tuple(rank // 8 for rank in range(64)),))
    assert many.group_sizes == (2, 4, 8, 16, 32, 64)
    chosen = best_chunks(ExchangeModel(CLUSTER, AttentionShape(64, 64, 64, 64, 2), nodes), many, limits)
    assert tuple(chosen) == many.group_sizes
    assert len(tried) == sum(len(possible_chunks(limits, size)) for size in many.group_sizes) == 21


def test_a_rank_alone_has_one_part():
    assert best_chunks(model(), plan(8), LIMITS) == {1: 1}


@pytest.mark.parametrize(
    ("kv_heads", "group_size", "possible"),
    [(32, 1, [1]), (32, 4, [1, 2, 4, 8]), (8, 4, [1, 2]), (8, 8, [1]), (4, 8, [1]), (12, 2, [1, 2])],
)
def test_parts_divide_the_query_and_key_value_heads_of_a_rank(kv_heads, group_size, possible):
    assert possible_chunks(Limits(32, kv_heads), group_size) == possible
