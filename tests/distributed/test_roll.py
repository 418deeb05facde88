"""A rolled stream is the stream of the rolled micro-batch, to the last id, on every rank and under every plan."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from megatron_basp.batch import take_stream
from megatron_basp.ledger import Collective, Ledger
from megatron_basp.megatron.multi_token import roll_over_ranks, rolling
from megatron_basp.megatron.runtime import Runtime
from megatron_basp.plan import Limits, plan_batch
from tests.distributed.small_attention import RANKS, group_name, groups_of_all_ranks
from tests.settings import small_settings

pytestmark = pytest.mark.distributed

DEPTH = 3  # more than the shortest shard has tokens: some come from the rank after the next one
LENGTHS = (4, 8)
GROUP_SIZES = {None: range(1, 8), 1: (4, 8), 2: (2, 4, 6), 4: (1, 2, 3)}  # the B that fit K
PLANS = {
    f"B={rows}, K={group_size or 'planned'}, S={length}": plan_batch((length,) * rows, RANKS, Limits(4, 4, group_size))
    for group_size, batches in GROUP_SIZES.items()
    for rows in batches
    for length in LENGTHS
}


def micro_batch(plan):
    """By name, [B, S] tensors of all types that are rolled; no two ids are the same, and none is 0."""
    rows, length = len(plan.lengths), plan.lengths[0]
    ids = 1 + torch.arange(rows * length).view(rows, length)
    return {"ids": ids, "loss mask": (ids % 3 > 0).float() * ids, "padding mask": ids % 5 > 1}


def rolled_micro_batch(batch):
    """One position to the left, row by row, and nothing at the end."""
    return torch.cat([batch[:, 1:], torch.zeros_like(batch[:, :1])], dim=1)


def stock_roll_tensor(tensor, shifts=-1, dims=-1, cp_group=None, packed_seq_params=None):
    """Megatron's signature; never called while a mode is on."""
    raise AssertionError


def hooked(plan, groups):
    runtime = Runtime()
    runtime.set_settings(small_settings())
    runtime.set_groups(groups)
    runtime.plan_holder.set(plan)
    return rolling(runtime, stock_roll_tensor)


def refusals(plan, groups):
    roll_tensor, stream = hooked(plan, groups), torch.zeros(1, plan.tokens)
    messages = []
    for arguments in (
        {"tensor": stream, "packed_seq_params": object()},
        {"tensor": stream, "shifts": 1},
        {"tensor": stream, "dims": 0},
        {"tensor": stream[0]},
        {"tensor": stream[:, 1:]},
    ):
        with pytest.raises(ValueError) as caught:
            roll_tensor(**arguments)
        messages.append(str(caught.value))
    return messages


def on_this_rank(rank):
    """For each plan: by name and depth the found and the expected stream, the sums, and what was sent."""
    groups, found = groups_of_all_ranks(), {}
    for name, plan in PLANS.items():
        ledger, streams, sums = Ledger(), {}, []
        for kind, batch in micro_batch(plan).items():
            stream = take_stream(plan, rank, batch)
            for depth in range(1, DEPTH + 1):
                batch = rolled_micro_batch(batch)
                stream = roll_over_ranks(plan, groups, ledger, stream)
                streams[kind, depth] = stream, take_stream(plan, rank, batch)
        batch = micro_batch(plan)["loss mask"]
        for group in (groups.alone, dist.group.WORLD):
            rolled, total = hooked(plan, groups)(take_stream(plan, rank, batch), cp_group=group)
            sums.append((total.item(), rolled.sum().item(), rolled_micro_batch(batch).sum().item()))
        found[name] = streams, sums, ledger
    return found, refusals(plan, groups)


@pytest.fixture(scope="module")
def results(on_ranks):
    return on_ranks(on_this_rank, RANKS)


@pytest.mark.parametrize("name", PLANS)
def test_rolling_again_and_again_gives_the_streams_of_the_rolled_micro_batch(results, name):
    for found, _ in results:
        for stream, expected in found[name][0].values():
            assert stream.dtype == expected.dtype
            assert torch.equal(stream, expected)


@pytest.mark.parametrize("name", PLANS)
def test_the_sum_is_that_of_the_group_that_the_caller_names(results, name):
    for found, _ in results:
        (alone, of_this_rank, _), (everywhere, _, of_the_micro_batch) = found[name][1]
        assert alone == of_this_rank and everywhere == of_the_micro_batch


@pytest.mark.parametrize("name", PLANS)
def test_a_wave_sends_one_token_of_each_row_to_the_rank_before(results, name):
    element_bytes = 8 + 4 + 1  # an id, a weight, a flag
    for rank, (found, _) in enumerate(results):
        collectives, sent, to_peer = Counter(), Counter(), Counter()
        for wave, share in enumerate(PLANS[name].shares(rank)):
            if share.group_size > 1:
                group = group_name(share.group_size)
                exchange = Collective("exchange", "roll", group, share.group_size, None, wave, "forward")
                collectives[exchange] += 3 * DEPTH
                sent[exchange] += 0
                if share.rank_in_group > 0:
                    sent[exchange] += DEPTH * len(share.rows) * element_bytes
                    to_peer[rank - 1] += DEPTH * len(share.rows) * element_bytes
        page = found[name][2].page
        assert page.collectives == collectives
        assert page.sent_bytes == sent and page.sent_bytes_to_peer == to_peer


def test_what_is_not_the_planned_stream_or_not_a_roll_by_one_is_refused(results):
    for _, (packed, forward, by_row, flat, short) in results:
        assert "packed sequences" in packed and "rolled by 1 " in forward and "along 0" in by_row
        assert "rolls streams [1, T]" in flat and "T = B·S/N" in short
