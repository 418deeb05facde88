"""The exchange through symmetric memory: a contract with torch's `all_to_all_nd`, played over gloo."""

from contextlib import ExitStack
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
from megatron_basp.symmetric_memory import SymmetricMemory, Wanted, open_where_possible
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
        for size in sorted(transports):
            transports[size].connect()
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
        memory.connect()
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


def opened(rank):
    groups = groups_of_all_ranks()
    inside = dict.fromkeys(groups.by_size, True)
    settings = small_settings(3, ranks=RANKS, limits=Case(rows=3, heads=8, kv_heads=8).limits)

    def said(transport, **changes):
        try:
            return with_transports(groups, replace(settings, transport=transport, **changes), inside)[1]
        except ConfigurationError as error:
            return str(error)

    found = {name: said(name) for name in ("nccl", "auto", "symmetric-memory")}
    odd = replace(settings.attention, query_head_size=3, value_head_size=3, element_bytes=2)
    found["odd sizes"] = said("auto", attention=odd, seq_length=8)

    def reasons(inside=inside):
        """And by which K something is exchanged."""
        wanted = {size: Wanted(group, 4096, frozenset({64}), inside[size]) for size, group in groups.by_size.items()}
        memories, reasons = open_where_possible(wanted)
        for memory in memories.values():
            memory.close()
        return sorted(memories), reasons

    def zeros_from_rank_1(self, sent, *arguments):
        if rank == 1 and self._group.size() == 2:
            sent[0].zero_()
        return start(self, sent, *arguments)

    def no_memory_on_rank_1(self, group, *arguments):
        if rank == 1 and group.size() == 2:
            raise RuntimeError("no memory left")
        make(self, group, *arguments)

    # From here on NCCL is played.
    world = {group.group_name: group for group in groups.by_size.values()}
    empty, arange = torch.empty, torch.arange
    start, make = SymmetricMemory.start, SymmetricMemory.__init__
    with ExitStack() as stack:
        for patch in (
            mock.patch.object(ours, "_set_backend", lambda: None),
            mock.patch.object(ours, "SideStream", LateStream),
            mock.patch.object(torch.cuda, "current_device", lambda: 0),
            mock.patch.object(torch, "empty", lambda *shape, device=None, **options: empty(*shape, **options)),
            mock.patch.object(torch, "arange", lambda *ends, device=None, **options: arange(*ends, **options)),
            symmetric_memory(world),
        ):
            stack.enter_context(patch)
        found["both"] = reasons()
        found["crossing"] = reasons({2: True, 4: False})
        with mock.patch.object(SymmetricMemory, "start", zeros_from_rank_1):
            found["wrong"] = reasons()
        with mock.patch.object(SymmetricMemory, "__init__", no_memory_on_rank_1):
            found["no memory"] = reasons()
    return found


def test_each_k_is_opened_or_refused_with_a_reason_on_all_ranks_alike(on_ranks):
    results = on_ranks(opened, RANKS)
    assert all(result == results[0] for result in results)
    found = results[0]
    over_gloo = "it needs NCCL, and the backend is gloo"
    assert found["nccl"] == "the backend's all-to-all"
    refused = f"--basp-transport symmetric-memory cannot carry the exchange of groups of K=2: {over_gloo}"
    assert found["symmetric-memory"].startswith(refused)
    assert found["auto"] == "; ".join(f"K = {k}: the backend's all-to-all, since {over_gloo}" for k in (2, 4))
    assert "parts of 24 bytes are no multiple of 16" in found["odd sizes"]
    assert found["both"] == ([2, 4], {})
    assert found["crossing"] == ([2], {4: "its ranks are not all joined by fast links"})
    assert found["wrong"] == ([4], {2: "a trial of it received something else than NCCL's all-to-all"})
    assert found["no memory"] == ([4], {2: "no memory left"}), "and no rank waits for the one that has none"
