"""The plan's invariants, its cost against brute force, and whether the remedies in its messages work."""

import os
import subprocess
import sys
from fractions import Fraction
from functools import cache
from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_basp.errors import ConfigurationError
from megatron_basp.plan import BatchPlan, Limits, PlanHolder, plan_batch
from tests.decompositions import all_decompositions


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def waves(plan):
    """(rows, K) of each wave."""
    return [(len(wave.rows), wave.group_size) for wave in plan.waves]


def plan_rows(rows, ranks, limits=None, length=None):
    """A plan for `rows` sequences, by default of a length and with heads that every K divides."""
    return plan_batch((length or ranks,) * rows, ranks, limits or Limits(heads=ranks, kv_heads=ranks))


@st.composite
def heads_that_fit(draw, group_size):
    """H and Hkv with which K ranks can share a sequence."""
    if draw(st.booleans()):
        kv_heads = group_size * draw(st.integers(1, 3))
        return kv_heads * draw(st.integers(1, 3)), kv_heads
    return group_size * draw(st.integers(1, 3)), draw(st.sampled_from(divisors(group_size)))


@st.composite
def feasible_batches(draw):
    """Arguments of plan_batch that have at least one plan, the one at the largest K: any N, B, S, heads and domain."""
    ranks = draw(st.integers(1, 24))
    largest = draw(st.sampled_from(divisors(ranks)))
    groups = ranks // largest
    rows = groups * draw(st.integers(1, max(1, 20 // groups)))
    length = largest * draw(st.integers(1, 4))
    heads, kv_heads = draw(heads_that_fit(largest))
    group_size = draw(st.sampled_from([None, largest]))
    domain_size = draw(st.none() | st.integers(1, ranks))
    return (length,) * rows, ranks, Limits(heads, kv_heads, group_size, domain_size)


feasible_plans = feasible_batches().map(lambda arguments: plan_batch(*arguments))


# Invariants.


@given(feasible_plans)
def test_every_token_lies_on_exactly_one_rank(plan):
    held = [
        (row, position)
        for rank in range(plan.ranks)
        for share in plan.shares(rank)
        for row in share.rows
        for position in range(share.start, share.stop)
    ]
    assert sorted(held) == [(row, position) for row, length in enumerate(plan.lengths) for position in range(length)]


@given(feasible_plans)
def test_every_rank_holds_the_same_number_of_tokens(plan):
    for rank in range(plan.ranks):
        shares = plan.shares(rank)
        assert [share.tokens for share in shares] == [len(share.rows) * (share.stop - share.start) for share in shares]
        assert sum(share.tokens for share in shares) * plan.ranks == sum(plan.lengths)
        assert sum(share.tokens for share in shares) == plan.tokens


@given(feasible_plans)
def test_in_each_wave_each_rank_is_in_one_aligned_group_of_consecutive_ranks(plan):
    for index, wave in enumerate(plan.waves):
        shares = [plan.shares(rank)[index] for rank in range(plan.ranks)]
        places = [(share.group_index, share.rank_in_group) for share in shares]
        assert places == [(g, i) for g in range(plan.ranks // wave.group_size) for i in range(wave.group_size)]
        # Those of one group share rows, and groups between them have the wave's rows once each.
        rows_of_group = {share.group_index: share.rows for share in shares}
        assert all(share.rows == rows_of_group[share.group_index] for share in shares)
        assert [row for group in sorted(rows_of_group) for row in rows_of_group[group]] == list(wave.rows)
        assert len({len(rows) for rows in rows_of_group.values()}) == 1


@given(feasible_plans)
def test_all_ranks_of_a_group_know_how_many_tokens_each_of_them_holds(plan):
    for index in range(len(plan.waves)):
        shares = [plan.shares(rank)[index] for rank in range(plan.ranks)]
        for share in shares:
            group = [other for other in shares if other.group_index == share.group_index]
            assert share.tokens_per_rank == tuple(other.tokens for other in group)
            assert len(group) == share.group_size


@given(feasible_batches())
def test_group_sizes_divide_ranks_and_heads_and_a_wave_has_one_of_them(arguments):
    lengths, ranks, limits = arguments
    plan = plan_batch(*arguments)
    for wave in plan.waves:
        assert ranks % wave.group_size == 0
        assert limits.heads % wave.group_size == 0
        assert limits.kv_heads % wave.group_size == 0 or wave.group_size % limits.kv_heads == 0
        assert limits.group_size in (None, wave.group_size)
        assert wave.lengths == tuple(lengths[row] for row in wave.rows)
    assert plan.group_sizes == tuple(wave.group_size for wave in plan.waves), "one wave for each K, in ascending order"


@given(feasible_batches())
def test_the_same_arguments_give_the_same_plan(arguments):
    lengths, ranks, limits = arguments
    again = plan_batch(list(lengths), ranks, Limits(*vars(limits).values()))
    assert plan_batch(*arguments) == again
    assert hash(plan_batch(*arguments)) == hash(again), "equal plans are one key of a cache"


def test_a_fresh_interpreter_with_another_hash_seed_makes_the_same_plans_without_torch():
    choices = product(range(1, 9), (4, 8, 12), (2, 24), (None, 4))
    cases = [((24,) * rows, ranks, (24, kv_heads, None, domain)) for rows, ranks, kv_heads, domain in choices]
    program = (
        "import sys; from megatron_basp.plan import Limits, plan_batch\n"
        f"for lengths, ranks, limits in {cases}: print(plan_batch(lengths, ranks, Limits(*limits)))\n"
        "assert 'torch' not in sys.modules"
    )
    here = "".join(f"{plan_batch(lengths, ranks, Limits(*limits))}\n" for lengths, ranks, limits in cases)
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
        assert done.stdout == here, done.stderr


@given(feasible_plans)
def test_a_rank_outside_of_the_group_has_no_share(plan):
    for rank in (-1, plan.ranks):
        with pytest.raises(ValueError, match=f"rank {rank} is not in"):
            plan.shares(rank)


# Cost.


@cache
def elements_of_a_row(size, ranks, limits):
    """(across domains, in all) elements that an exchange sends for a row of one token with d = 1, link by link: a mean
    over the groups that the row may be dealt to."""
    # Of each token go H/K heads of q and of the output to one peer, and max(Hkv, K)/K of k and of v.
    to_one_peer = 2 * Fraction(limits.heads, size) + 2 * Fraction(max(limits.kv_heads, size), size)
    links = [
        (rank, peer) for first in range(0, ranks, size) for rank, peer in permutations(range(first, first + size), 2)
    ]
    across = [link for link in links if limits.domain_size and len({rank // limits.domain_size for rank in link}) > 1]
    return len(across) * to_one_peer / ranks, len(links) * to_one_peer / ranks


def elements_sent(counts, ranks, limits):
    """(across domains, in all), of a decomposition given as rows for each K."""
    by_size = [(rows, *elements_of_a_row(size, ranks, limits)) for size, rows in counts.items()]
    return sum(rows * across for rows, across, _ in by_size), sum(rows * everything for rows, _, everything in by_size)


def small_cases(ranks):
    """(rows, length, limits) for N ranks: all of up to 12 rows, of each Hkv and of each domain, and a length that not
    every K divides."""
    lengths = {ranks, ranks // 2} - {0}
    for rows, kv_heads, domain, length in product(range(1, 13), divisors(ranks), [None, *divisors(ranks)], lengths):
        yield rows, length, Limits(ranks, kv_heads, domain_size=domain)


def sizes_that_fit(ranks, length, limits):
    sizes = [size for size in divisors(ranks) if limits.heads % size == 0 and length % size == 0]
    return [size for size in sizes if limits.kv_heads % size == 0 or size % limits.kv_heads == 0]


@pytest.mark.parametrize("ranks", range(1, 25))
def test_no_other_decomposition_sends_less_across_domains_or_else_in_all(ranks):
    for rows, length, limits in small_cases(ranks):
        sizes = sizes_that_fit(ranks, length, limits)
        decompositions = all_decompositions(rows, ranks, sizes)
        if not decompositions:
            with pytest.raises(ConfigurationError):
                plan_batch((length,) * rows, ranks, limits)
            continue
        plan = plan_batch((length,) * rows, ranks, limits)
        counts = {size: rows for rows, size in waves(plan)}
        assert counts in decompositions
        least = min(elements_sent(other, ranks, limits) for other in decompositions)
        assert elements_sent(counts, ranks, limits) == least, (rows, length, limits)


@pytest.mark.parametrize("ranks", range(1, 25))
def test_where_a_decomposition_stays_inside_domains_the_cheapest_such_is_taken(ranks):
    for rows, length, limits in small_cases(ranks):
        if limits.domain_size is None:
            continue
        inside = [size for size in sizes_that_fit(ranks, length, limits) if limits.domain_size % size == 0]
        decompositions = all_decompositions(rows, ranks, inside)
        if not decompositions:
            continue
        plan = plan_batch((length,) * rows, ranks, limits)
        counts = {size: rows for rows, size in waves(plan)}
        assert counts in decompositions, (rows, length, limits)
        least = min(elements_sent(other, ranks, limits) for other in decompositions)
        assert elements_sent(counts, ranks, limits) == least, (rows, length, limits)


@pytest.mark.parametrize(
    ("ranks", "rows", "expected"),
    [
        (8, 8, [(8, 1)]),
        (8, 16, [(16, 1)]),
        (8, 4, [(4, 2)]),
        (8, 1, [(1, 8)]),
        (8, 3, [(2, 4), (1, 8)]),
        (8, 6, [(4, 2), (2, 4)]),
        (8, 7, [(4, 2), (2, 4), (1, 8)]),
        (12, 8, [(6, 2), (2, 6)]),
        (1, 3, [(3, 1)]),
    ],
)
def test_plans_of_the_design(ranks, rows, expected):
    assert waves(plan_rows(rows, ranks)) == expected


def test_rows_are_taken_in_order_and_shards_are_contiguous():
    plan = plan_rows(3, ranks=8, length=16)
    first, last = plan.shares(0), plan.shares(7)
    assert [(share.rows, share.start, share.stop) for share in first] == [((0,), 0, 4), ((2,), 0, 2)]
    assert [(share.rows, share.start, share.stop) for share in last] == [((1,), 12, 16), ((2,), 14, 16)]


@pytest.mark.parametrize(
    ("ranks", "rows", "domain", "by_bytes_alone", "inside_domains"),
    [
        # K = 3 fits a domain of 3, K = 2 and K = 6 leave it.
        (12, 8, 3, [(6, 2), (2, 6)], [(8, 3)]),
        # 3 nodes of 8: K = 3 straddles nodes, K = 24 spans them.
        (24, 21, 8, [(12, 2), (8, 3), (1, 24)], [(12, 2), (6, 4), (3, 8)]),
    ],
)
def test_a_plan_that_stays_inside_domains_is_preferred_to_one_that_sends_less(
    ranks, rows, domain, by_bytes_alone, inside_domains
):
    assert waves(plan_rows(rows, ranks)) == by_bytes_alone
    plan = plan_rows(rows, ranks, Limits(ranks, ranks, domain_size=domain))
    assert waves(plan) == inside_domains
    assert all(domain % size == 0 for size in plan.group_sizes)


def test_a_domain_changes_nothing_where_fewest_bytes_stay_inside_it():
    for domain in (1, 2, 4, 8):
        assert waves(plan_rows(6, 8, Limits(8, 8, domain_size=domain))) == [(4, 2), (2, 4)]


# Refusals.


@st.composite
def any_batches(draw):
    size = st.integers(0, 24)
    lengths = draw(st.lists(st.integers(0, 9), max_size=6) | st.builds(lambda s, b: [s] * b, st.integers(0, 60), size))
    optional = st.none() | size
    return lengths, draw(size), Limits(draw(size), draw(size), draw(optional), draw(optional))


@given(any_batches())
def test_arguments_without_a_plan_get_one_line_that_is_the_users_to_mend(arguments):
    try:
        plan = plan_batch(*arguments)
    except ConfigurationError as error:
        assert isinstance(error, ValueError)
        message = str(error)
        assert message and "\n" not in message
    else:
        assert isinstance(plan, BatchPlan)


def refused(lengths, ranks, limits):
    with pytest.raises(ConfigurationError) as caught:
        plan_batch(lengths, ranks, limits)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_length_that_a_forced_group_size_does_not_divide_gets_the_next_one_that_works():
    limits = Limits(4, 4, group_size=4)
    message = refused((30,), 4, limits)
    assert "S % K must be 0, got S=30 and K=4" in message and message.endswith(" 32")
    assert waves(plan_batch((32,), 4, limits)) == [(1, 4)]


def test_a_length_that_leaves_no_plan_gets_the_next_one_that_works():
    limits = Limits(8, 8)
    message = refused((30,), 8, limits)
    assert "S=30" in message and "of K in [1, 2, 4, 8] only [1, 2] divide S" in message and message.endswith(" 32")
    assert waves(plan_batch((32,), 8, limits)) == [(1, 8)]


def test_a_forced_group_size_that_does_not_divide_the_ranks_gets_those_that_do():
    message = refused((24,) * 8, 8, Limits(24, 24, group_size=3))
    assert "N % K must be 0, got N=8 ranks and K=3" in message and message.endswith("[1, 2, 4, 8]")
    for group_size in (1, 2, 4, 8):
        assert waves(plan_batch((24,) * 8, 8, Limits(24, 24, group_size=group_size))) == [(8, group_size)]


@pytest.mark.parametrize("group_size", [0, -2, 16])
def test_a_forced_group_size_out_of_range_is_refused(group_size):
    assert f"K={group_size}" in refused((16,) * 8, 8, Limits(16, 16, group_size=group_size))


def test_a_batch_that_a_forced_group_size_does_not_deal_out_gets_the_nearest_that_it_does():
    limits = Limits(8, 8, group_size=2)
    message = refused((16,) * 6, 8, limits)
    assert "got B=6, N=8, K=2 (N/K=4): use a micro-batch of 4 or 8, or leave the group size to the planner" in message
    for rows in (4, 8):
        assert waves(plan_batch((16,) * rows, 8, limits)) == [(rows, 2)]
    assert waves(plan_batch((16,) * 6, 8, Limits(8, 8))) == [(4, 2), (2, 4)]


def test_heads_that_a_forced_group_size_does_not_divide_get_those_that_work():
    message = refused((16,) * 2, 8, Limits(12, 12, group_size=8))
    assert "got H=12, Hkv=12 per tensor-parallel rank and K=8" in message and message.endswith(" [4]")
    assert waves(plan_batch((16,) * 2, 8, Limits(12, 12, group_size=4))) == [(2, 4)]


def test_key_value_heads_must_divide_the_group_or_be_divided_by_it():
    message = refused((16,), 4, Limits(12, 3, group_size=4))
    assert "Hkv=3" in message and "K=4" in message
    assert waves(plan_batch((16,), 4, Limits(12, 2, group_size=4))) == [(1, 4)]


def test_heads_that_leave_no_plan_get_a_batch_and_a_number_of_ranks_that_work():
    limits = Limits(4, 4)
    message = refused((16,) * 3, 8, limits)
    assert "H=4, Hkv=4 per tensor-parallel rank allow only K in [1, 2, 4]" in message
    assert message.endswith("must be a multiple of 2: use 4, or --context-parallel-size 4")
    assert waves(plan_batch((16,) * 4, 8, limits)) == [(4, 2)]
    assert waves(plan_batch((16,) * 3, 4, limits)) == [(2, 2), (1, 4)]


def test_a_micro_batch_of_no_sequences_is_refused():
    message = refused((), 4, Limits(4, 4))
    assert "got B=0" in message and "--micro-batch-size" in message


def test_sequences_of_different_lengths_are_refused():
    message = refused((16, 32, 8), 4, Limits(4, 4))
    assert "8 to 32" in message and "pad or pack" in message


@pytest.mark.parametrize(
    ("lengths", "ranks", "limits", "named"),
    [
        ((0, 0), 4, Limits(4, 4), "a sequence needs at least 1 token"),
        ((8,), 0, Limits(4, 4), "N=0"),
        ((8,), 4, Limits(0, 0), "H=0, Hkv=0"),
        ((8,), 4, Limits(4, 3), "H=4, Hkv=3"),
        ((8,), 4, Limits(4, 4, domain_size=0), "at least 1 rank, got 0"),
    ],
)
def test_sizes_that_mean_nothing_are_refused_by_name(lengths, ranks, limits, named):
    assert named in refused(lengths, ranks, limits)


# The holder.


def test_the_holder_gives_the_plan_of_the_call_and_fails_outside_of_one():
    holder, plan = PlanHolder(), plan_rows(2, 4)
    assert not holder.is_set
    with pytest.raises(RuntimeError, match="no batch plan is in force"):
        _ = holder.plan
    holder.set(plan)
    assert holder.is_set and holder.plan is plan
    holder.set(None)
    assert not holder.is_set
    with pytest.raises(RuntimeError, match="no batch plan is in force"):
        _ = holder.plan
