"""Ranks compare their plans: all of them say what differs, and nobody waits for ever."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_basp.plan import Limits, plan_batch
from megatron_basp.plan_agreement import PlanMismatch, check_agreement, describe, fingerprint

pytestmark = pytest.mark.distributed


def plan(rows, group_size=None):
    return plan_batch((64,) * rows, 2, Limits(heads=4, kv_heads=4, group_size=group_size))


def said(plans, mode="basp", group=None, timeout=timedelta(seconds=30)):
    try:
        check_agreement(plans, mode, group or dist.group.WORLD, timeout)
    except PlanMismatch as error:
        return str(error)
    return None


def compare(rank):
    found = {
        "same": said([plan(3), plan(2)]),
        "other K": said([plan(2, group_size=1 + rank)]),
        "other B": said([plan(2 + rank)]),
        "other mode": said([plan(1)], mode=("basp", "ulysses")[rank]),
    }
    group = dist.new_group([0, 1])
    if rank == 0:
        found["alone"] = said([plan(3)], group=group, timeout=timedelta(seconds=1))
    return found


@pytest.fixture(scope="module")
def found(on_ranks):
    return on_ranks(compare, 2)


def test_the_same_plans_agree(found):
    assert [result["same"] for result in found] == [None, None]


@pytest.mark.parametrize(
    ("case", "listed"),
    [
        ("other K", ["rank 0 (", "[basp; B=2 S=64 N=2: 2 at K=1], rank 1 (", "[basp; B=2 S=64 N=2: 2 at K=2]"]),
        ("other B", ["[basp; B=2 S=64 N=2: 2 at K=1]", "[basp; B=3 S=64 N=2: 2 at K=1, 1 at K=2]"]),
        ("other mode", ["[basp; B=1 S=64 N=2: 1 at K=2]", "[ulysses; B=1 S=64 N=2: 1 at K=2]"]),
    ],
)
def test_every_rank_lists_the_plans_that_differ(found, case, listed):
    assert found[0][case] == found[1][case]
    assert all(part in found[0][case] for part in listed)


def test_a_rank_that_compares_alone_does_not_wait_for_ever(found):
    assert found[0]["alone"].startswith("rank 0 has the plan [basp; B=3 S=64 N=2: 2 at K=1, 1 at K=2]")
    assert "did not compare theirs within 1 s" in found[0]["alone"]


def test_the_fingerprint_is_of_everything_that_decides_who_sends_what():
    different = {
        fingerprint([plan(2)], "basp"),
        fingerprint([plan(2)], "ulysses"),
        fingerprint([plan(2, group_size=2)], "basp"),
        fingerprint([plan(2), plan(2)], "basp"),
        fingerprint([plan_batch((32,) * 2, 2, Limits(4, 4))], "basp"),
        fingerprint([plan_batch((64,) * 2, 1, Limits(4, 4))], "basp"),
    }
    assert len(different) == 6
    assert fingerprint([plan(3)], "basp") == fingerprint([plan(3)], "basp")
    assert describe([plan(3)], "basp") == "basp; B=3 S=64 N=2: 2 at K=1, 1 at K=2"
