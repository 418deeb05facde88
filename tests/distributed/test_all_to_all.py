"""The exchange, element by element: every number says which row, position, head and channel it is."""

from dataclasses import dataclass

import pytest
import torch

from megatron_basp.all_to_all import ExchangeGroup, start_to_heads, start_to_sequence, unpack
from megatron_basp.ledger import Ledger
from tests.coalescing import launches_of_several_tensors
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
        group, transport = groups.by_size[self.group_size], groups.transports[self.group_size]
        return ExchangeGroup(group, transport, by_rank, Ledger(), layer=1, wave=0)


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
NAMES = [*CASES, *(f"{name}, coalesced" for name in CASES)]
REPLICATED = ("K=2, 1 kv head", "K=4, 2 kv heads", "K=4, 1 kv head", "unequal shards, 2 kv heads, 2 rows")


def case_of(name):
    return CASES[name.removesuffix(", coalesced")]


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "expanded": lambda x: x[:1, :1].expand_as(x),
}


def to_heads(tensors, where):
    return start_to_heads(tensors, where, "qkv", "forward").arrived()


def to_sequence(tensors, where, like):
    """Unpacked into tensors of the shapes of `like`."""
    targets = [torch.full_like(x, torch.nan) for x in like]
    unpack(start_to_sequence(tensors, where, "qkv", "backward"), targets)
    return targets


def exchange(case, rank, groups):
    """To heads and back, of the codes themselves, and back once more of rank + 1 times the codes."""
    where, sent = case.where(groups), case.in_sequence(rank)
    arrived = case.in_heads(rank)
    received = to_heads(sent, where)
    odd = {}
    for name, lay_out in LAYOUTS.items():
        strided = [lay_out(x) for x in arrived]
        assert not strided[0].is_contiguous()
        odd[name] = [
            (to_sequence(strided, where, sent), to_sequence([x.contiguous() for x in strided], where, sent)),
            (to_sequence(strided[:1], where, sent[:1]), to_sequence([strided[0].contiguous()], where, sent[:1])),
        ]
        strided = [lay_out(x) for x in sent]
        odd[name].append((to_heads(strided, where), to_heads([x.contiguous() for x in strided], where)))
    return {
        "received": received,
        "back": to_sequence(received[:1], where, sent[:1])[0],
        "scaled": to_sequence([(rank + 1) * x for x in arrived], where, sent),
        "odd": odd,
    }


@pytest.fixture(scope="module")
def exchanged(on_ranks):
    """By case, what each rank found; and the same over a backend that coalesces."""

    def all_cases(rank):
        groups = groups_of_all_ranks()
        found = {name: exchange(case, rank, groups) for name, case in CASES.items()}
        with launches_of_several_tensors() as calls:
            coalesced = {f"{name}, coalesced": exchange(case, rank, groups) for name, case in CASES.items()}
        return found | coalesced | {"calls": calls}

    by_rank = on_ranks(all_cases, RANKS)
    return {name: [found[name] for found in by_rank] for name in by_rank[0]}


@pytest.mark.parametrize("name", NAMES)
def test_each_element_arrives_where_its_head_is_attended_to_in_the_order_of_the_sequence(exchanged, name):
    for rank, found in enumerate(exchanged[name]):
        for received, expected in zip(found["received"], case_of(name).in_heads(rank), strict=True):
            assert torch.equal(received, expected), f"rank {rank}"


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back_is_the_identity(exchanged, name):
    for rank, found in enumerate(exchanged[name]):
        assert torch.equal(found["back"], case_of(name).in_sequence(rank)[0]), f"rank {rank}"


@pytest.mark.parametrize("name", NAMES)
def test_what_returns_is_of_the_rank_that_had_the_head(exchanged, name):
    case = case_of(name)
    for rank, found in enumerate(exchanged[name]):
        first = rank - case.place(rank)[1]
        owners = [first + head // (case.heads // case.group_size) + 1 for head in range(case.heads)]
        expected = case.in_sequence(rank)[0] * torch.tensor(owners, dtype=torch.float64)[:, None]
        assert torch.equal(found["scaled"][0], expected), f"rank {rank}"


@pytest.mark.parametrize("name", NAMES)
def test_what_returns_of_a_key_value_head_is_the_sum_over_the_ranks_that_got_it(exchanged, name):
    case = case_of(name)
    for rank, found in enumerate(exchanged[name]):
        first = rank - case.place(rank)[1]
        group = range(first, first + case.group_size)
        factors = [sum(peer + 1 for peer in group if head in case.heads_of(peer)[1]) for head in range(case.kv_heads)]
        for gradient, sent in zip(found["scaled"][1:], case.in_sequence(rank)[1:], strict=True):
            assert torch.equal(gradient, sent * torch.tensor(factors, dtype=torch.float64)[:, None]), f"rank {rank}"


def test_cases_with_fewer_key_value_heads_than_ranks_send_each_head_to_several():
    for name in REPLICATED:
        case = case_of(name)
        got = [head for rank in range(case.group_size) for head in case.heads_of(rank)[1]]
        assert all(got.count(head) == case.group_size // case.kv_heads > 1 for head in range(case.kv_heads))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_the_memory_layout_of_what_is_sent_does_not_matter(exchanged, name, layout):
    for rank, found in enumerate(exchanged[name]):
        for of_views, of_contiguous in found["odd"][layout]:
            for of_view, expected in zip(of_views, of_contiguous, strict=True):
                assert torch.equal(of_view, expected), f"rank {rank}"


@pytest.mark.parametrize("name", NAMES)
def test_tensors_are_contiguous_and_begin_at_their_storage(exchanged, name):
    """Transformer Engine copies what is not, and refuses what begins inside of another tensor."""
    for found in exchanged[name]:
        for received in found["received"]:
            assert received.is_contiguous() and received.storage_offset() == 0
        assert len({x.untyped_storage().data_ptr() for x in found["received"]}) == 3


def test_where_the_backend_coalesces_q_k_and_v_travel_in_one_launch(exchanged):
    for calls in exchanged["calls"]:
        assert set(calls) == {3}, "q, k and v in one launch, and nothing else in any"
