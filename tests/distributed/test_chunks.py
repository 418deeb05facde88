"""Heads exchanged in parts: the same numbers and bytes, and the order in which pieces are sent and attended to."""

from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_basp import overlap
from megatron_basp.attention import BaspAttention
from megatron_basp.documents import Documents
from megatron_basp.ledger import Ledger
from megatron_basp.plan import PlanHolder
from megatron_basp.sdpa import CausalSDPA
from tests.distributed.small_attention import (
    GROUP_SIZES,
    LENGTH,
    RANKS,
    SCALE,
    Case,
    groups_of_all_ranks,
    relative_error,
    stream_of,
)

pytestmark = pytest.mark.distributed

TENSORS = ("output", "query gradient", "key gradient", "value gradient", "sink gradient")
HEADS = {"mha": (16, 16, 3, None), "gqa": (32, 16, 3, None), "keys of 6 and values of 4": (16, 16, 6, 4)}
CASES = {
    f"{name}, B={rows}": Case(rows, *heads[:2], None, *heads[2:])
    for name, heads in HEADS.items()
    for rows in (1, 2, 3, 6)
}
CHUNKS = (1, 2, 4)
EXTRAS = ("plain", "sinks", "documents")


def documents(rows):
    return Documents(tuple((0, 1 + row % 3, LENGTH) if row % 2 else (0, LENGTH) for row in range(rows)))


class Watched:
    """What is sent and attended to, in order: (what, K, number of the piece among those of its K)."""

    def __init__(self):
        self.events = []
        self._counts = Counter()

    def note(self, what, group_size):
        number = self._counts[what, group_size]
        self.events.append((what, group_size, number))
        self._counts[what, group_size] += 1
        return number

    def arriving(self, wait, direction, group_size, number):
        """Notes the number that it was sent with."""

        def arrived():
            self.events.append((f"arrived {direction}", group_size, number))
            return wait()

        return arrived

    def kernel(self, group_size):
        attend = CausalSDPA(SCALE)

        def noted(gradient):
            self.note("attend backward", group_size)

        def kernel(*tensors, **options):
            self.note("attend", group_size)
            output = attend(*tensors, **options)
            output.register_hook(noted)
            return output

        return kernel

    def starting(self, what, start):
        def started(tensors, where, operation, direction, *rotary):
            number = self.note(f"{what} {direction}", where.size)
            in_flight = start(tensors, where, operation, direction, *rotary)
            if what == "to heads":
                in_flight.arrived = self.arriving(in_flight.arrived, direction, where.size, number)
            return in_flight

        return started


def attend(case, rank, groups, chunks, extra):
    """Output and gradients of this rank, its ledger, and what happened in which order."""
    plan, drawn = case.plan(), case.draw()
    holder, ledger, watched = PlanHolder(), Ledger(), Watched()
    holder.set(plan)
    kernels = {size: watched.kernel(size) for size in GROUP_SIZES}
    attention = BaspAttention(groups, holder, kernels, ledger, 1, chunks={2: chunks, 4: chunks})
    inputs = [stream_of(plan, rank, x).requires_grad_() for x in drawn[:3]]
    of_all, options = list(inputs), {}
    if extra == "sinks":
        attention.softmax_offset = torch.nn.Parameter(torch.linspace(-1, 2, case.heads, dtype=torch.float64))
        of_all.append(attention.softmax_offset)
    if extra == "documents":
        options["packed_seq_params"] = SimpleNamespace(documents=documents(case.rows))
    with (
        mock.patch.object(overlap, "start_to_heads", watched.starting("to heads", overlap.start_to_heads)),
        mock.patch.object(overlap, "start_to_sequence", watched.starting("to sequence", overlap.start_to_sequence)),
    ):
        output = attention(*inputs, None, **options)
        output.backward(stream_of(plan, rank, drawn[3]))
    if extra == "sinks":
        dist.all_reduce(attention.softmax_offset.grad)  # as data parallelism does over the CP group
    return [output.detach(), *(x.grad for x in of_all)], ledger.page, watched.events


@pytest.fixture(scope="module")
def found(on_ranks):
    """By case, extra and number of chunks, of each rank."""

    def all_cases(rank):
        groups = groups_of_all_ranks()
        return {
            (name, extra, chunks): attend(case, rank, groups, chunks, extra)
            for name, case in CASES.items()
            for extra in EXTRAS
            for chunks in CHUNKS
        }

    by_rank = on_ranks(all_cases, RANKS)
    return {key: [of_rank[key] for of_rank in by_rank] for key in by_rank[0]}


def pieces_by_size(case, chunks):
    """Pieces of each K: the plan's waves are of distinct K."""
    return {wave.group_size: 1 if wave.group_size == 1 else chunks for wave in case.plan().waves}


@pytest.mark.parametrize("chunks", CHUNKS[1:])
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("name", CASES)
def test_parts_of_the_heads_give_the_very_numbers_of_the_whole(found, name, extra, chunks):
    for whole, parts in zip(found[name, extra, 1], found[name, extra, chunks], strict=True):
        for tensor, expected, got in zip(TENSORS, whole[0], parts[0], strict=False):
            if tensor == "sink gradient":
                # A head's is the sum over waves, of which other ranks have other parts: added in another order.
                assert relative_error(got, expected) <= 1e-12
            else:
                assert torch.equal(got, expected), (tensor, relative_error(got, expected))


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", CASES)
def test_each_part_is_an_exchange_and_all_parts_together_send_the_bytes_of_one(found, name, chunks):
    for whole, parts in zip(found[name, "plain", 1], found[name, "plain", chunks], strict=True):
        assert parts[1].collectives == Counter({key: chunks * count for key, count in whole[1].collectives.items()})
        assert parts[1].sent_bytes == whole[1].sent_bytes
        assert parts[1].sent_bytes_to_peer == whole[1].sent_bytes_to_peer
        waves = sum(size > 1 for size in pieces_by_size(CASES[name], chunks))
        assert sum(parts[1].collectives.values()) == 4 * chunks * waves


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", ["gqa, B=3", "gqa, B=6", "mha, B=1"])
def test_the_largest_group_is_sent_first_and_the_smallest_attended_to_first_and_backward_mirrors_it(
    found, name, chunks
):
    sizes = pieces_by_size(CASES[name], chunks)
    ascending = [(size, index) for size in sorted(sizes) for index in range(sizes[size])]
    largest_first = [(size, i) for size in sorted(sizes, reverse=True) if size > 1 for i in range(sizes[size])]
    expected = [("to heads forward", *piece) for piece in largest_first]
    for size, index in ascending:
        expected += [("arrived forward", size, index)] * (size > 1)
        expected.append(("attend", size, index))
        expected += [("to sequence forward", size, index)] * (size > 1)
    expected += [("to heads backward", *piece) for piece in largest_first]
    # Backward attends in the reverse order: the largest K first.
    for size in sorted(sizes, reverse=True):
        for index in range(sizes[size]):
            expected += [("arrived backward", size, index)] * (size > 1)
            expected.append(("attend backward", size, index))
            expected += [("to sequence backward", size, index)] * (size > 1)
    for _, _, events in found[name, "plain", chunks]:
        assert events == expected


def test_the_order_is_looked_at_where_a_batch_has_groups_of_different_sizes():
    assert pieces_by_size(CASES["gqa, B=3"], 4) == {2: 4, 4: 4}
    assert pieces_by_size(CASES["gqa, B=6"], 4) == {1: 1, 2: 4}
