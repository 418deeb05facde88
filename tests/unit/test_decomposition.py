"""Rows for each K at the least cost, against every other way."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_basp.decomposition import WaveCost, cheapest_counts
from tests.decompositions import all_decompositions


def cost(counts, ranks, costs):
    return sum(costs[size].per_wave + costs[size].per_step * rows * size / ranks for size, rows in counts.items())


@st.composite
def coins(draw):
    ranks = draw(st.sampled_from([1, 2, 4, 6, 8, 12]))
    sizes = draw(st.sets(st.sampled_from([k for k in range(1, ranks + 1) if ranks % k == 0]), min_size=1))
    whole = st.integers(0, 9)
    costs = {size: WaveCost(draw(whole), draw(whole)) for size in sizes}
    return draw(st.integers(1, 14)), ranks, sorted(sizes), costs


@given(coins())
def test_no_other_decomposition_costs_less_setting_up_a_wave_included(arguments):
    rows, ranks, sizes, costs = arguments
    found = cheapest_counts(rows, ranks, sizes, costs.__getitem__)
    others = all_decompositions(rows, ranks, sizes)
    if not others:
        assert found is None
        return
    assert found in others
    assert cost(found, ranks, costs) == min(cost(other, ranks, costs) for other in others)


def test_a_wave_is_set_up_only_where_its_rows_save_more_than_that():
    # 3 rows on 8 ranks: two at K = 4 and one at K = 8, or all at K = 8.
    def costs(set_up):
        return {4: WaveCost(set_up, 1), 8: WaveCost(set_up, 3)}.__getitem__

    assert cheapest_counts(3, 8, [4, 8], costs(4)) == {4: 2, 8: 1}
    assert cheapest_counts(3, 8, [4, 8], costs(6)) == {8: 3}


def test_of_equal_costs_the_smaller_groups_are_taken():
    assert cheapest_counts(4, 4, [1, 2, 4], lambda size: WaveCost(0, 4 // size)) == {1: 4}
