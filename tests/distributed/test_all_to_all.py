"""The exchange, element by element: every number says which row, position, head and channel it is."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from megatron_basp.all_to_all import ExchangeGroup, heads_to_sequence, sequence_to_heads
from megatron_basp.ledger import Ledger
from tests.distributed.small_attention import RANKS, groups_of_all_ranks

pytestmark = pytest.mark.distributed


@dataclass(frozen=True)
class Exchanged:
    """One exchange. tokens: positions that each rank of the group holds, in each of so many rows."""

    group_size: int
    heads: int
    kv_heads: int
    tokens: tuple[int, ...]
    rows: int = 1
    sizes: tuple[int, int, int] = (3, 3, 3)

    def place(self, rank):
        """The group and the index in it."""
        return divmod(rank, self.group_size)

    def shard(self, rank):
        """The positions that a rank holds."""
        index = self.place(rank)[1]
        first = sum(self.tokens[:index])
        return range(first, first + self.tokens[index])

    def rows_of(self, rank):
        group = self.place(rank)[0]
        return range(group * self.rows, (group + 1) * self.rows)

    def heads_of(self, rank):
        """The query heads that a rank attends with, and the key-value heads that these attend to."""
        count = self.heads // self.group_size
        index = self.place(rank)[1]
        queries = range(index * count, (index + 1) * count)
        return queries, sorted({head // (self.heads // self.kv_heads) for head in queries})

    def in_sequence(self, rank):
        """q, k and v of the rank's tokens with all heads."""
        heads = self.heads, self.kv_heads, self.kv_heads
        return self._qkv(rank, self.shard(rank), [range(h) for h in heads])

    def in_heads(self, rank):
        """q, k and v of all tokens with the rank's heads."""
        queries, keys = self.heads_of(rank)
        return self._qkv(rank, range(sum(self.tokens)), [queries, keys, keys])

    def _qkv(self, rank, positions, heads):
        parts = enumerate(zip(heads, self.sizes, strict=True))
        return [codes(which, positions, self.rows_of(rank), h, size) for which, (h, size) in parts]

    def where(self, groups):
        by_rank = tuple(self.rows * count for count in self.tokens)
        return ExchangeGroup(groups.by_size[self.group_size], by_rank, Ledger(), layer=1, wave=0)


def codes(which, positions, rows, heads, size):
    """[positions · rows, heads, size]: a number's digits are which of q, k and v, row, position, head and channel."""
    axes = [torch.tensor(list(axis), dtype=torch.float64) for axis in (positions, rows, heads, range(size))]
    position, row, head, channel = torch.meshgrid(*axes, indexing="ij")
    return ((((which + 1) * 100 + row) * 100 + position) * 100 + head).mul(100).add(channel).flatten(0, 1)


CASES = {
    "K=2": Exchanged(2, 4, 4, (4, 4)),
    "K=2, grouped queries": Exchanged(2, 8, 4, (4, 4)),
    "K=2, 2 kv heads": Exchanged(2, 4, 2, (4, 4)),
    "K=2, 1 kv head": Exchanged(2, 4, 1, (4, 4)),
    "K=2, 3 rows a group": Exchanged(2, 8, 4, (4, 4), rows=3),
    "K=4": Exchanged(4, 4, 4, (2, 2, 2, 2)),
    "K=4, grouped queries": Exchanged(4, 16, 8, (2, 2, 2, 2)),
    "K=4, 2 kv heads": Exchanged(4, 8, 2, (2, 2, 2, 2)),
    "K=4, 1 kv head": Exchanged(4, 4, 1, (2, 2, 2, 2)),
    "K=4, 2 rows a group, 2 kv heads": Exchanged(4, 8, 2, (2, 2, 2, 2), rows=2),
    "values wider than keys": Exchanged(4, 8, 2, (2, 2, 2, 2), sizes=(3, 3, 5)),
    "unequal shards": Exchanged(4, 8, 4, (3, 1, 2, 4)),
    "unequal shards, 2 kv heads, 2 rows": Exchanged(4, 8, 2, (3, 1, 2, 4), rows=2),
    "unequal shards, K=2": Exchanged(2, 4, 1, (1, 3)),
}
REPLICATED = ("K=2, 1 kv head", "K=4, 2 kv heads", "K=4, 1 kv head", "unequal shards, 2 kv heads, 2 rows")
LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "expanded": lambda x: x[:1, :1].expand_as(x),
}


def exchange(case, rank, groups):
    """There and back, and the gradients of both: of the codes themselves, and in `scaled` times rank + 1."""
    where = case.where(groups)
    sent = [x.requires_grad_() for x in case.in_sequence(rank)]
    received = sequence_to_heads(*sent, where)
    back = heads_to_sequence(received[0], where)
    arrived = case.in_heads(rank)
    scaled = torch.autograd.grad(received, sent, [(rank + 1) * x for x in arrived], retain_graph=True)
    only_query = torch.autograd.grad(received[0], sent, arrived[0], retain_graph=True, materialize_grads=True)
    output = arrived[0].clone().requires_grad_()
    (of_output,) = torch.autograd.grad(heads_to_sequence(output, where), output, sent[0].detach())
    odd = {}
    for name, lay_out in LAYOUTS.items():
        pairs = [(x, x.contiguous()) for x in map(lay_out, arrived)]
        assert not pairs[0][0].is_contiguous()
        odd[name] = [
            torch.autograd.grad(received, sent, gradients, retain_graph=True) for gradients in zip(*pairs, strict=True)
        ]
        gradient = lay_out(sent[0].detach())
        odd[name][0] += torch.autograd.grad(heads_to_sequence(output, where), output, gradient)
        odd[name][1] += torch.autograd.grad(heads_to_sequence(output, where), output, gradient.contiguous())
    return {
        "received": [x.detach() for x in received],
        "back": back.detach(),
        "scaled": scaled,
        "only query": only_query,
        "of output": of_output,
        "odd": odd,
        "offsets": [x.storage_offset() for x in received],
        "contiguous": [x.is_contiguous() for x in received],
        "memory": len({x.untyped_storage().data_ptr() for x in received}),
    }


def finite_differences(case, rank, groups):
    """The gradient of a weighted sum over all ranks: by autograd, and by moving each number of each rank in turn."""
    where = case.where(groups)
    generator = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in case.in_sequence(rank)]
    weights = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in case.in_heads(rank)]

    def total():
        received = sequence_to_heads(*inputs, where)
        weighted = torch.stack([(w * x).sum() for w, x in zip(weights, received, strict=True)]).sum()
        dist.all_reduce(weighted)
        return weighted

    differences = [torch.zeros_like(x) for x in inputs]
    for moving in range(RANKS):
        for x, difference in zip(inputs, differences, strict=True):
            for index in range(x.numel()):
                ends = []
                for step in (0.5, -1.0):
                    if moving == rank:
                        x.view(-1)[index] += step
                    ends.append(total())
                if moving == rank:
                    x.view(-1)[index] += 0.5
                    difference.view(-1)[index] = ends[0] - ends[1]
    leaves = [x.requires_grad_() for x in inputs]
    return torch.autograd.grad(sequence_to_heads(*leaves, where), leaves, weights), differences


@pytest.fixture(scope="module")
def exchanged(on_ranks):
    """By case, what each rank found; and by case of REPLICATED the two gradients of each rank."""

    def all_cases(rank):
        groups = groups_of_all_ranks()
        small = Exchanged(4, 4, 2, (1, 1, 1, 1), sizes=(1, 2, 2))
        return {name: exchange(case, rank, groups) for name, case in CASES.items()} | {
            "finite differences": finite_differences(small, rank, groups)
        }

    by_rank = on_ranks(all_cases, RANKS)
    return {name: [found[name] for found in by_rank] for name in by_rank[0]}


@pytest.mark.parametrize("name", CASES)
def test_each_element_arrives_where_its_head_is_attended_to_in_the_order_of_the_sequence(exchanged, name):
    for rank, found in enumerate(exchanged[name]):
        for received, expected in zip(found["received"], CASES[name].in_heads(rank), strict=True):
            assert torch.equal(received, expected), f"rank {rank}"


@pytest.mark.parametrize("name", CASES)
def test_there_and_back_is_the_identity(exchanged, name):
    for rank, found in enumerate(exchanged[name]):
        assert torch.equal(found["back"], CASES[name].in_sequence(rank)[0]), f"rank {rank}"


@pytest.mark.parametrize("name", CASES)
def test_gradients_return_to_the_elements_they_are_of(exchanged, name):
    case = CASES[name]
    for rank, found in enumerate(exchanged[name]):
        assert torch.equal(found["of output"], case.in_heads(rank)[0]), f"rank {rank}"
        first = rank - case.place(rank)[1]
        owners = [first + head // (case.heads // case.group_size) + 1 for head in range(case.heads)]
        expected = case.in_sequence(rank)[0] * torch.tensor(owners, dtype=torch.float64)[:, None]
        assert torch.equal(found["scaled"][0], expected), f"rank {rank}"


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_of_a_key_value_head_is_the_sum_over_the_ranks_that_got_it(exchanged, name):
    case = CASES[name]
    for rank, found in enumerate(exchanged[name]):
        first = rank - case.place(rank)[1]
        group = range(first, first + case.group_size)
        factors = [sum(peer + 1 for peer in group if head in case.heads_of(peer)[1]) for head in range(case.kv_heads)]
        for gradient, sent in zip(found["scaled"][1:], case.in_sequence(rank)[1:], strict=True):
            assert torch.equal(gradient, sent * torch.tensor(factors, dtype=torch.float64)[:, None]), f"rank {rank}"


def test_cases_with_fewer_key_value_heads_than_ranks_send_each_head_to_several():
    for name in REPLICATED:
        case = CASES[name]
        got = [head for rank in range(case.group_size) for head in case.heads_of(rank)[1]]
        assert all(got.count(head) == case.group_size // case.kv_heads > 1 for head in range(case.kv_heads))


def test_gradients_are_those_of_finite_differences_with_a_head_on_two_ranks(exchanged):
    for gradients, differences in exchanged["finite differences"]:
        for gradient, difference in zip(gradients, differences, strict=True):
            torch.testing.assert_close(gradient, difference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_an_output_without_a_gradient_gives_none_to_its_input(exchanged, name):
    case = CASES[name]
    for rank, found in enumerate(exchanged[name]):
        query, key, value = found["only query"]
        assert torch.equal(query, case.in_sequence(rank)[0])
        assert not key.any() and not value.any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_the_memory_layout_of_a_gradient_does_not_matter(exchanged, name, layout):
    for rank, found in enumerate(exchanged[name]):
        for of_view, of_contiguous in zip(*found["odd"][layout], strict=True):
            assert torch.equal(of_view, of_contiguous), f"rank {rank}"


@pytest.mark.parametrize("name", CASES)
def test_what_arrives_lies_in_three_contiguous_tensors_of_their_own(exchanged, name):
    """Transformer Engine copies what does not."""
    for found in exchanged[name]:
        assert found["offsets"] == [0, 0, 0] and all(found["contiguous"]) and found["memory"] == 3
