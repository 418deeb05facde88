"""The exchange through symmetric memory: a contract with torch's `all_to_all_nd`, played over gloo."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_basp import symmetric_memory as ours
from megatron_basp.attention import BaspAttention
from megatron_basp.errors import ConfigurationError
from megatron_basp.ledger import Ledger
from megatron_basp.megatron.transports import with_transports
from megatron_basp.plan import PlanHolder
from megatron_basp.sdpa import CausalSDPA
from megatron_basp.symmetric_memory import SymmetricMemory, probe
from tests.distributed.small_attention import GROUP_SIZES, RANKS, SCALE, Case, groups_of_all_ranks, stream_of
from tests.distributed.symmetric import LateStream, symmetric_memory
from tests.settings import small_settings

pytestmark = pytest.mark.distributed

CASES = {
    "K=4": Case(rows=1, heads=8, kv_heads=4, head_size=4),
    "K=4, 1 kv head": Case(rows=1, kv_heads=1, head_size=4),
    "K=2 and K=4": Case(rows=3, heads=8, kv_heads=4, head_size=4),
    "K=1 and K=2": Case(rows=6, heads=8, kv_heads=4, head_size=4),
}
CHUNKED = {
    "K=2 and K=4, in 2 parts": Case(rows=3, heads=8, kv_heads=8, head_size=4),
    "K=4, in 2 parts": Case(rows=1, heads=8, kv_heads=8, head_size=4),
}


def train(case, rank, groups, chunks):
    """Output and gradients of two layers, one after the other: the second finds the ring used."""
    plan, drawn = case.plan(), case.draw()
    holder = PlanHolder()
    holder.set(plan)
    kernels = dict.fromkeys(GROUP_SIZES, CausalSDPA(SCALE))
    layers = [
        BaspAttention(groups, holder, kernels, Ledger(), layer, chunks=dict.fromkeys((2, 4), chunks))
        for layer in (1, 2)
    ]
    *inputs, gradient = (stream_of(plan, rank, x) for x in drawn)
    inputs = [x.requires_grad_() for x in inputs]
    first = layers[0](*inputs, None)
    output = layers[1](first.view_as(inputs[0]) + inputs[0], *inputs[1:], None)
    return [output.detach(), *torch.autograd.grad(output, inputs, gradient)]


def room_for(case):
    """Settings whose rings hold what a layer of the case has under way."""
    shape = replace(small_settings().attention, heads=case.heads, kv_heads=case.kv_heads, element_bytes=8)
    shape = replace(shape, query_head_size=case.head_size, value_head_size=case.head_size)
    return small_settings(case.rows, ranks=RANKS, limits=case.limits, seq_length=8, attention=shape)


def both_ways(case, rank, groups, chunks=1, room=1.0):
    """room: the share of what is under way that the rings are made for."""
    side = LateStream()
    expected = train(case, rank, groups, chunks)
    with symmetric_memory({group.group_name: group for group in groups.by_size.values()}) as known:
        transports = {
            size: SymmetricMemory(
                groups.by_size[size], side, int(room * room_for(case).in_flight_bytes(size)), torch.device("cpu")
            )
            for size in case.plan().group_sizes
            if size > 1
        }
        found = train(case, rank, replace(groups, transports=transports), chunks)
    return found, expected, side.given, len(known)


@pytest.fixture(scope="module")
def by_rank(on_ranks):
    def all_cases(rank):
        groups = groups_of_all_ranks()
        found = {name: both_ways(case, rank, groups) for name, case in CASES.items()}
        found |= {name: both_ways(case, rank, groups, chunks=2) for name, case in CHUNKED.items()}
        # Rings that hold q, k and v of one part of two, which are written again while they are under way.
        return found | {"tight": both_ways(CHUNKED["K=4, in 2 parts"], rank, groups, chunks=2, room=3 / 16)}

    return on_ranks(all_cases, RANKS)


@pytest.mark.parametrize("name", [*CASES, *CHUNKED])
def test_output_and_gradients_are_bit_by_bit_those_of_the_collective(by_rank, name):
    for rank, ranks in enumerate(by_rank):
        found, expected, launches, _ = ranks[name]
        for what, x, y in zip(("output", "dq", "dk", "dv"), found, expected, strict=True):
            assert torch.equal(x, y), f"rank {rank}: {what}"
        case = CASES.get(name) or CHUNKED[name]
        waves = sum(wave.group_size > 1 for wave in case.plan().waves) * (2 if name in CHUNKED else 1)
        assert launches == 2 * 4 * waves, "two layers, there and back, forward and backward"


def test_what_is_under_way_is_not_written_again(by_rank):
    for rank, ranks in enumerate(by_rank):
        found, expected, *_ = ranks["tight"]
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True)), f"rank {rank}"


def test_there_is_one_ring_for_each_group(by_rank):
    for found in by_rank:
        assert found["K=4"][3] == found["K=1 and K=2"][3] == 1 and found["K=2 and K=4"][3] == 2


def refusals(rank):
    group, side = dist.group.WORLD, LateStream()
    said = []
    with symmetric_memory({group.group_name: group}):
        memory = SymmetricMemory(group, side, 1024, torch.device("cpu"))
        like = torch.empty(0)
        for size, rows in ((4, [1, 1]), (8, [1, 3]), (10_000, [1, 1])):
            try:
                sent = memory.empty([like], [(2, size)])
                memory.start(sent, [like.new_empty(2, size)], rows, [1, 1])
            except ValueError as error:
                said.append(str(error))
        uneven = memory.empty([like], [(2, 3)])
        try:
            memory.start(uneven, [like.new_empty(2, 3)], [1, 1], [1, 1])
        except ValueError as error:
            said.append(str(error))
    return said


def test_what_the_kernel_does_not_take_is_refused_and_names_the_remedy(on_ranks):
    for unequal, too_long, odd in on_ranks(refusals, 2):
        assert "equal parts, got rows [1, 3] to and [1, 1] from" in unequal
        assert "80000 bytes are to be exchanged at once in groups of K=2" in too_long
        assert "a multiple of 16 bytes, got [2, 3] of torch.float32 for K=2 ranks, 12 bytes each" in odd
        assert all(text.endswith("use --basp-transport nccl") for text in (unequal, too_long, odd))


def probed(rank):
    groups = groups_of_all_ranks()
    inside = dict.fromkeys(groups.by_size, True)
    over_gloo = probe(groups.by_size, inside)
    try:
        with_transports(groups, small_settings(transport="symmetric-memory"), inside)
        asked = "accepted"
    except ConfigurationError as error:
        asked = str(error)
    _, auto = with_transports(groups, small_settings(transport="auto"), inside)
    same, plain = with_transports(groups, small_settings(), inside)
    assert same is groups
    # From here on NCCL is played.
    world = {group.group_name: group for group in groups.by_size.values()}
    patches = [
        mock.patch.object(ours, "_missing", lambda: None),
        mock.patch.object(ours, "SideStream", LateStream),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
    ]
    empty, arange = torch.empty, torch.arange
    patches += [
        mock.patch.object(torch, "empty", lambda *shape, device=None, **options: empty(*shape, **options)),
        mock.patch.object(torch, "arange", lambda *ends, device=None, **options: arange(*ends, **options)),
        symmetric_memory(world),
    ]
    for patch in patches:
        patch.__enter__()
    try:
        crossing = probe(groups.by_size, {2: True, 4: False})
        both = probe(groups.by_size, inside)
        broken = SymmetricMemory.start

        def fails_on_rank_1(self, sent, *arguments):
            if rank == 1 and self._group.size() == 2:
                sent[0].zero_()
            return broken(self, sent, *arguments)

        with mock.patch.object(SymmetricMemory, "start", fails_on_rank_1):
            wrong = probe(groups.by_size, inside)
    finally:
        for patch in reversed(patches):
            patch.__exit__(None, None, None)
    return over_gloo, asked, auto, plain, crossing, both, wrong


def test_a_probe_says_on_all_ranks_alike_for_which_k_it_works_and_why_not(on_ranks):
    results = on_ranks(probed, RANKS)
    assert all(result == results[0] for result in results)
    over_gloo, asked, auto, plain, crossing, both, wrong = results[0]
    assert over_gloo == dict.fromkeys((2, 4), "it needs NCCL, and the backend is gloo")
    assert asked.startswith(
        "--basp-transport symmetric-memory cannot carry the exchange of groups of K=2: it needs NCCL"
    )
    assert auto.startswith("K = 2: the backend's all-to-all, since it needs NCCL, and the backend is gloo; K = 4: ")
    assert plain == "the backend's all-to-all"
    assert crossing == {4: "its ranks are not all joined by fast links"}
    assert both == {}
    assert wrong == {2: "a trial of it received something else than NCCL's all-to-all"}
