"""Micro-batch to token streams and back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_basp.batch import join_streams, roll_stream, stream_positions, take_stream
from megatron_basp.plan import Limits, plan_batch


@st.composite
def plans(draw):
    ranks = draw(st.integers(1, 12))
    rows, length = draw(st.integers(1, 9)), ranks * draw(st.integers(1, 3))
    return plan_batch((length,) * rows, ranks, Limits(ranks, ranks))


def numbered(plan):
    """A micro-batch in which no two tokens are the same: row·S + position."""
    rows, length = len(plan.lengths), plan.lengths[0]
    return torch.arange(rows * length).view(rows, length)


def streams(plan, batch):
    return [take_stream(plan, rank, batch) for rank in range(plan.ranks)]


@given(plans())
def test_joining_all_streams_gives_the_micro_batch_back(plan):
    batch = numbered(plan)
    joined = join_streams(plan, streams(plan, batch))
    assert joined.dtype == batch.dtype
    assert torch.equal(joined, batch)


@given(plans())
def test_between_them_streams_hold_each_token_once_and_t_of_them_each(plan):
    batch = numbered(plan)
    parts = streams(plan, batch)
    assert all(part.shape == (1, plan.tokens) and part.is_contiguous() for part in parts)
    assert sorted(torch.cat(parts, dim=1)[0].tolist()) == batch.flatten().tolist()


@given(plans())
def test_positions_are_those_of_the_tokens_in_their_own_sequences(plan):
    position_of = numbered(plan) % plan.lengths[0]
    for rank in range(plan.ranks):
        assert torch.equal(stream_positions(plan, rank, position_of.device), take_stream(plan, rank, position_of)[0])


@given(plans())
def test_a_wave_of_the_stream_is_position_major_and_waves_follow_one_another(plan):
    length = plan.lengths[0]
    for rank in range(plan.ranks):
        expected = [
            row * length + position
            for share in plan.shares(rank)
            for position in range(share.start, share.stop)
            for row in share.rows
        ]
        assert take_stream(plan, rank, numbered(plan))[0].tolist() == expected


def edges(plan, parts, rank):
    """Of each wave, the tokens at the first position of a rank's shards."""
    shares = plan.shares(rank)
    waves = parts[rank].split([share.tokens for share in shares], dim=1)
    return [wave[:, : len(share.rows)] for share, wave in zip(shares, waves, strict=True)]


def rolled(plan, parts, rank):
    """A rank's rolled stream; the edges are looked up in the others' streams."""

    def edge_of_next(wave, share, edge):
        assert share == plan.shares(rank)[wave]
        assert torch.equal(edge, edges(plan, parts, rank)[wave])
        if share.rank_in_group == share.group_size - 1:
            return torch.zeros_like(edge)
        return edges(plan, parts, rank + 1)[wave]

    return roll_stream(plan, rank, parts[rank], edge_of_next)


@given(plans())
def test_rolled_streams_are_those_of_the_rolled_micro_batch_and_may_be_rolled_again(plan):
    batch = 1 + numbered(plan)
    parts = streams(plan, batch)
    for _ in range(2):
        batch = torch.cat([batch[:, 1:], torch.zeros_like(batch[:, :1])], dim=1)
        parts = [rolled(plan, parts, rank) for rank in range(plan.ranks)]
        assert all(map(torch.equal, parts, streams(plan, batch)))


def test_streams_of_two_rows_on_two_ranks_by_hand():
    batch = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33], [40, 41, 42, 43]])
    plan = plan_batch((4,) * 4, 4, Limits(4, 4, group_size=2))
    assert [stream[0].tolist() for stream in streams(plan, batch)] == [
        [10, 20, 11, 21],
        [12, 22, 13, 23],
        [30, 40, 31, 41],
        [32, 42, 33, 43],
    ]


def test_a_transposed_batch_is_read_by_its_shape_and_not_by_its_memory():
    plan = plan_batch((8,) * 4, 4, Limits(4, 4, group_size=4))
    batch = torch.arange(32).view(8, 4).t()
    assert torch.equal(join_streams(plan, streams(plan, batch)), batch)


def test_streams_can_be_joined_from_one_dimension_and_keep_their_type():
    plan = plan_batch((4,) * 3, 4, Limits(4, 4))
    batch = torch.rand(3, 4, dtype=torch.float64)
    assert torch.equal(join_streams(plan, [stream[0] for stream in streams(plan, batch)]), batch)


@pytest.mark.parametrize("shape", [(3, 8), (2, 4), (8, 2), (16,), (2, 8, 1)])
def test_a_batch_of_another_shape_is_refused_with_both_shapes(shape):
    plan = plan_batch((8,) * 2, 4, Limits(4, 4))
    with pytest.raises(ValueError) as caught:
        take_stream(plan, 0, torch.zeros(shape))
    assert "[2, 8]" in str(caught.value) and str(list(shape)) in str(caught.value)
