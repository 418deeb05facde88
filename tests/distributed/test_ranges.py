"""What a profiler is told: ranges named after our functions, forward and backward, that nest; nothing at K = 1."""

import pytest
import torch

from megatron_basp.attention import BaspAttention
from megatron_basp.ledger import Ledger
from megatron_basp.plan import PlanHolder
from megatron_basp.ranges import Ranges
from megatron_basp.sdpa import CausalSDPA
from tests.distributed.small_attention import RANKS, SCALE, Case, groups_of_all_ranks, stream_of

pytestmark = pytest.mark.distributed

CASES = {"K=2 and K=4": Case(rows=3, heads=8), "K=1 and K=2": Case(rows=6, heads=8), "K=1": Case(rows=4, heads=8)}
CHUNKS = {4: 2}


class Profiler:
    """Writes down each range with its depth, and that it ends as it began."""

    def __init__(self):
        self.found, self.open = [], []

    def push(self, name):
        self.found.append((len(self.open), name.removeprefix("megatron_basp.")))
        self.open.append(name)

    def pop(self, name):
        assert self.open.pop() == name


class NamedKernel(CausalSDPA):
    """Has a range of its own, as Transformer Engine's kernel does."""

    def __init__(self, profiler):
        super().__init__(SCALE)
        self.profiler = profiler

    def forward(self, *arguments):
        with Ranges(self.profiler.push, self.profiler.pop).of("kernel", ""):
            return super().forward(*arguments)


def profiled(case, rank, groups):
    """The ranges of a forward pass, and of its backward."""
    plan, (*qkv, gradient) = case.plan(), case.draw()
    holder, profiler = PlanHolder(), Profiler()
    holder.set(plan)
    kernels = dict.fromkeys((1, 2, 4), NamedKernel(profiler))
    ranges = Ranges(profiler.push, profiler.pop)
    attention = BaspAttention(groups, holder, kernels, Ledger(), layer=1, chunks=CHUNKS, ranges=ranges)
    inputs = [stream_of(plan, rank, x).requires_grad_() for x in qkv]
    output = attention(*inputs, None)
    forward, profiler.found = profiler.found, []
    torch.autograd.grad(output, inputs, stream_of(plan, rank, gradient))
    assert not profiler.open
    return forward, profiler.found


@pytest.fixture(scope="module")
def ranges(on_ranks):
    def all_cases(rank):
        groups = groups_of_all_ranks()
        return {name: profiled(case, rank, groups) for name, case in CASES.items()}

    return on_ranks(all_cases, RANKS)


def sent(operation, direction, *sizes, packed=True):
    functions = ("pack_heads", "all_to_all") if packed else ("all_to_all",)
    return [(0, f"{function} {operation} {direction} K={size}") for size in sizes for function in functions]


def attended(direction, size, part=1, parts=1):
    return (0, f"attend {direction} K={size} part {part} of {parts}")


KERNEL = (1, "kernel ")


def unpacked(direction, *pieces):
    return [(0, f"unpack {direction} K={size} part {part} of {parts}") for size, part, parts in pieces]


def test_each_step_of_the_exchange_has_a_range_in_the_order_in_which_it_is_taken(ranges):
    forward_expected = [
        *sent("qkv", "forward", 4, 4, 2),
        attended("forward", 2),
        KERNEL,
        *sent("output", "forward", 2, packed=False),
        attended("forward", 4, 1, 2),
        KERNEL,
        *sent("output", "forward", 4, packed=False),
        attended("forward", 4, 2, 2),
        KERNEL,
        *sent("output", "forward", 4, packed=False),
        *unpacked("forward", (2, 1, 1), (4, 1, 2), (4, 2, 2)),
    ]
    backward_expected = [
        *sent("output", "backward", 4, 4, 2),
        attended("backward", 4, 2, 2),
        *sent("qkv", "backward", 4, packed=False),
        attended("backward", 4, 1, 2),
        *sent("qkv", "backward", 4, packed=False),
        attended("backward", 2),
        *sent("qkv", "backward", 2, packed=False),
        *unpacked("backward", (4, 2, 2), (4, 1, 2), (2, 1, 1)),
    ]
    for found in ranges:
        assert found["K=2 and K=4"] == (forward_expected, backward_expected)


def test_a_wave_of_whole_sequences_is_attended_to_and_not_sent(ranges):
    for found in ranges:
        forward, backward = found["K=1 and K=2"]
        assert forward[2:5] == [attended("forward", 1), KERNEL, attended("forward", 2)]
        assert [name for _, name in backward if name.endswith(" K=1")] == []
        assert attended("backward", 1) in backward


def test_a_rank_that_has_whole_sequences_only_has_no_range_of_ours(ranges):
    assert all(found["K=1"] == ([(0, "kernel ")], []) for found in ranges)
