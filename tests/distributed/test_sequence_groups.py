"""The process groups: who is in them, that they work, and that they go away."""

import pytest
import torch
import torch.distributed as dist

from megatron_basp.ledger import Ledger
from megatron_basp.process_groups import create_sequence_groups
from tests.distributed.small_attention import Case, basp_attention, full_attention, relative_error, stream_of

pytestmark = pytest.mark.distributed

# Global ranks of each CP group; two of them strided, as with tensor parallelism.
WORLDS = {"one CP group": [(0, 1, 2, 3)], "two strided CP groups": [(0, 2, 4, 6), (1, 3, 5, 7)]}


def sum_of_ranks(group):
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=group)
    return total.item()


def make_use_and_destroy(rank, cp_groups):
    made = [(ranks, dist.new_group(list(ranks))) for ranks in cp_groups]
    cp_group = next(group for ranks, group in made if rank in ranks)
    asked = []

    def new_group(ranks, description):
        asked.append((ranks, description))
        return dist.new_group(ranks, group_desc=description)

    groups = create_sequence_groups(cp_groups, (4, 2, 1, 2), cp_group, new_group)
    everyone = [*groups.by_size.values(), groups.alone]
    found = {
        "asked": asked,
        "cp_rank": groups.cp_rank,
        "members": {size: dist.get_process_group_ranks(group) for size, group in groups.by_size.items()},
        "alone": dist.get_process_group_ranks(groups.alone),
        "named": {size: group.group_desc for size, group in groups.by_size.items()},
        "sums": {size: sum_of_ranks(group) for size, group in groups.by_size.items()},
        "sum alone": sum_of_ranks(groups.alone),
        "number": (groups.created, len(asked) + dist.get_world_size(), len(groups.own)),
        "reused": groups.by_size[4] is cp_group is groups.cp_group,
        "attention": attend(groups),
    }
    dist.barrier()
    groups.destroy()
    found["destroyed"] = [destroyed(group) for group in everyone]
    found["sum after"] = sum_of_ranks(cp_group)
    return found


def destroyed(group):
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        return True
    return False


def attend(groups):
    """The error of one attention over these groups, and the peers that it sent to."""
    case = Case(rows=3)
    plan, (*qkv, _) = case.plan(), case.draw()
    ledger = Ledger()
    output = basp_attention(plan, groups, ledger)(*(stream_of(plan, groups.cp_rank, x) for x in qkv), None)
    expected = stream_of(plan, groups.cp_rank, full_attention(*qkv))
    return relative_error(output, expected), sorted(ledger.page.sent_bytes_to_peer)


@pytest.fixture(scope="module", params=WORLDS)
def world(request, on_ranks):
    """The CP groups, and what each rank found."""
    cp_groups = WORLDS[request.param]
    return cp_groups, on_ranks(lambda rank: make_use_and_destroy(rank, cp_groups), sum(map(len, cp_groups)))


def cp_ranks_of(rank, cp_groups):
    return next(ranks for ranks in cp_groups if rank in ranks)


def test_every_rank_is_in_one_group_for_each_group_size_above_one_with_its_neighbours(world):
    cp_groups, by_rank = world
    for rank, found in enumerate(by_rank):
        cp_ranks = cp_ranks_of(rank, cp_groups)
        pair = cp_ranks[:2] if rank in cp_ranks[:2] else cp_ranks[2:]
        assert found["members"] == {2: list(pair), 4: list(cp_ranks)}
        assert found["sums"] == {2: sum(pair), 4: sum(cp_ranks)}, "they reach each other"
        assert found["cp_rank"] == cp_ranks.index(rank)


def test_every_rank_asks_for_the_same_groups_in_the_same_order(world):
    cp_groups, by_rank = world
    pairs = [list(cp_ranks[i : i + 2]) for cp_ranks in cp_groups for i in (0, 2)]
    for found in by_rank:
        assert found["asked"] == [(pair, "BASP_SEQUENCE_GROUP_OF_2") for pair in pairs]


def test_groups_say_what_they_are_for(world):
    for found in world[1]:
        assert found["named"][2] == "BASP_SEQUENCE_GROUP_OF_2"


def test_groups_are_counted_as_they_are_made(world):
    for found in world[1]:
        created, expected, own = found["number"]
        assert created == expected and own == 2, "of two ranks, and of one"


def test_a_group_of_all_ranks_is_the_one_that_megatron_made(world):
    assert all(found["reused"] for found in world[1])


def test_the_group_that_the_model_takes_for_its_own_holds_one_rank(world):
    for rank, found in enumerate(world[1]):
        assert found["alone"] == [rank] and found["sum alone"] == rank


def test_attention_over_the_groups_is_full_attention_and_its_peers_are_global_ranks(world):
    cp_groups, by_rank = world
    for rank, found in enumerate(by_rank):
        error, sent_to = found["attention"]
        assert error <= 1e-12
        assert sent_to == sorted(set(cp_ranks_of(rank, cp_groups)) - {rank})


def test_destroying_them_leaves_the_group_that_is_megatrons(world):
    cp_groups, by_rank = world
    for rank, found in enumerate(by_rank):
        assert found["destroyed"] == [True, False, True], "of two, of all (Megatron's), of one"
        assert found["sum after"] == sum(cp_ranks_of(rank, cp_groups))
