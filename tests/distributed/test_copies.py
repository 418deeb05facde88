"""What the exchange of a layer costs beside the wire: collectives and bytes copied, counted by torch's dispatcher."""

import pytest
import torch
import torch.nn.functional as F

from megatron_basp.attention import BaspAttention
from megatron_basp.copy_counter import CopyCounter
from megatron_basp.ledger import Ledger
from megatron_basp.plan import PlanHolder
from tests.distributed.small_attention import LENGTH, RANKS, Case, groups_of_all_ranks, stream_of

pytestmark = pytest.mark.distributed

CASES = {
    "K=4": Case(rows=1, heads=8, kv_heads=4),
    "K=2": Case(rows=2, heads=8, kv_heads=4),
    "K=2, 2 rows a group": Case(rows=4, heads=8, kv_heads=4, group_size=2),
    "K=4, 1 kv head": Case(rows=1, heads=4, kv_heads=1),
    "K=4, values wider than keys": Case(rows=1, heads=8, kv_heads=4, value_size=5),
    "K=1": Case(rows=4, heads=8, kv_heads=4),
    "K=1, 2 rows": Case(rows=8, heads=8, kv_heads=4),
    "K=2 and K=4": Case(rows=3, heads=8, kv_heads=4),
    "K=1 and K=2": Case(rows=6, heads=8, kv_heads=4, group_size=None),
}


class FreeKernel(torch.autograd.Function):
    """Allocates what attention would give and computes nothing, so that all that is counted is the exchange's."""

    @staticmethod
    def forward(ctx, query, key, value):
        ctx.like = query, key, value
        length, rows, heads, _ = query.shape
        return query.new_empty(length, rows, heads * value.shape[3])

    @staticmethod
    def backward(ctx, gradient):
        return tuple(x.new_empty(x.shape) for x in ctx.like)


def count(case, rank, groups):
    """(entries of the ledger, collectives, bytes copied) forward, and backward; the node that autograd got."""
    plan, (query, key, value, gradient) = case.plan(), case.draw()
    holder = PlanHolder()
    holder.set(plan)
    ledger = Ledger()
    attention = BaspAttention(groups, holder, dict.fromkeys((1, 2, 4), FreeKernel.apply), ledger, layer=1)
    inputs = [stream_of(plan, rank, x).requires_grad_() for x in (query, key, value)]
    gradient = stream_of(plan, rank, gradient)
    with CopyCounter() as forward:
        output = attention(*inputs, None)
    launches = ledger.page.collectives.total()
    with CopyCounter() as backward:
        torch.autograd.grad(output, inputs, gradient)
    launches = launches, ledger.page.collectives.total() - launches
    counted = [(len(counter.collectives), counter.copied_bytes) for counter in (forward, backward)]
    return *((each, *found) for each, found in zip(launches, counted, strict=True)), output.grad_fn.name()


@pytest.fixture(scope="module")
def counted(on_ranks):
    def all_cases(rank):
        groups = groups_of_all_ranks()
        return {name: count(case, rank, groups) for name, case in CASES.items()}

    return on_ranks(all_cases, RANKS)


def bytes_of(case, wave):
    """(q, k and v as they are sent, q, k and v, output) of a rank's part of a wave, in fp64."""
    tokens, (size, value_size) = len(wave.rows) * LENGTH // RANKS, case.sizes
    copied = max(case.kv_heads, wave.group_size)
    per_token = [
        case.heads * size + copied * (size + value_size),
        case.heads * size + case.kv_heads * (size + value_size),
        case.heads * value_size,
    ]
    return [8 * tokens * elements for elements in per_token]


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("K=1") and "and" not in name])
def test_a_rank_that_has_whole_sequences_copies_nothing_sends_nothing_and_has_no_node_of_ours(counted, name):
    for found in counted:
        forward, backward, node = found[name]
        assert forward == backward == (0, 0, 0)
        assert "Attend" not in node


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("K=1")])
def test_two_launches_and_one_pass_over_each_tensor_each_way(counted, name):
    """What is sent is packed or unpacked once: q, k and v forward before the wire, and backward after it. Of several
    waves all that goes to heads is packed, and sent, before any is attended to."""
    case = CASES[name]
    waves = [bytes_of(case, wave) for wave in case.plan().waves]
    # Copies of a key-value head are read in a sum; where there is one, what is written is as much as was sent.
    once = sum(sent + output for sent, _, output in waves)
    for found in counted:
        forward, backward, _ = found[name]
        assert forward == backward == (2 * len(waves), 4 * len(waves), once), "q, k and v together, and the output"


def test_a_wave_of_whole_sequences_beside_others_is_copied_into_the_stream_and_not_sent(counted):
    case = CASES["K=1 and K=2"]
    alone, shared = (bytes_of(case, wave) for wave in case.plan().waves)
    for found in counted:
        forward, backward, _ = found["K=1 and K=2"]
        assert forward == (2, 4, alone[2] + shared[0] + shared[2])
        assert backward == (2, 4, alone[1] + shared[0] + shared[2])


def test_the_count_sees_a_copy(counted):
    with CopyCounter() as counter:
        F.pad(torch.ones(3, 4).T.contiguous(), (0, 0))
    assert counter.copied_bytes >= 48
