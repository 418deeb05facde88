"""Each way to send something with torch.distributed, counted: how often, how many bytes, to whom."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup, Work

from megatron_basp.clock import HostSpan
from megatron_basp.errors import ConfigurationError
from megatron_basp.ledger import Collective, Ledger
from megatron_basp.megatron import own_collectives
from megatron_basp.megatron.own_collectives import METHODS, OwnCollectives, part_of, uncounted_methods

pytestmark = pytest.mark.distributed

RANKS = 4
GROUP = (1, 2, 3, 4)  # without rank 0, so that a rank in the group is not the rank in the world
BYTES = 48  # of 12 numbers in fp32


def numbers(count=12):
    return torch.ones(count)


def in_order(rank):
    """The rank in the group."""
    return GROUP.index(rank)


def send_and_receive(group):
    here = in_order(dist.get_rank())
    forward, back = GROUP[(here + 1) % RANKS], GROUP[here - 1]
    operations = [
        dist.P2POp(dist.isend, numbers(), forward, group),
        dist.P2POp(dist.irecv, numbers(), back, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def uneven_all_to_all(group):
    """To rank i of the group i rows of 2 numbers."""
    here = in_order(dist.get_rank())
    rows = list(range(RANKS))
    dist.all_to_all_single(torch.ones(RANKS * here, 2), torch.ones(sum(rows), 2), [here] * RANKS, rows, group=group)


def coalesced_all_reduce(group):
    with dist.distributed_c10d._coalescing_manager(group):
        dist.all_reduce(numbers(), group=group)
        dist.all_reduce(numbers(), group=group)


def in_the_background(group):
    dist.all_reduce(numbers(), group=group, async_op=True).wait()


def root(index):
    return GROUP[index]


def is_root(index):
    return dist.get_rank() == GROUP[index]


RING_ALL_REDUCE = [72] * RANKS  # 2·3/4·48
# By name: how it is called, as what it counts, and what each rank of the group sends on to the next.
RINGS = {
    "all_reduce": (lambda group: dist.all_reduce(numbers(), group=group), "all_reduce", RING_ALL_REDUCE),
    "async": (in_the_background, "all_reduce", RING_ALL_REDUCE),
    "coalesced": (coalesced_all_reduce, "all_reduce", [144] * RANKS),
    # 3 numbers in bytes 0, 1, 0, 2 of 3: the parts of four ranks, each of which keeps its own, twice.
    "all_reduce of few bytes": (
        lambda group: dist.all_reduce(torch.ones(3, dtype=torch.uint8), group=group),
        "all_reduce",
        [6, 4, 4, 4],
    ),
    "all_gather": (
        lambda group: dist.all_gather_into_tensor(numbers(12 * RANKS), numbers(), group=group),
        "all_gather",
        [3 * BYTES] * RANKS,
    ),
    "all_gather into a list": (
        lambda group: dist.all_gather([numbers() for _ in GROUP], numbers(), group=group),
        "all_gather",
        [3 * BYTES] * RANKS,
    ),
    "reduce_scatter": (
        lambda group: dist.reduce_scatter_tensor(numbers(), numbers(12 * RANKS), group=group),
        "reduce_scatter",
        [3 * BYTES] * RANKS,
    ),
    "broadcast": (
        lambda group: dist.broadcast(numbers(), root(2), group=group),
        "broadcast",
        [BYTES, 0, BYTES, BYTES],
    ),
    "reduce": (lambda group: dist.reduce(numbers(), root(2), group=group), "reduce", [BYTES, BYTES, 0, BYTES]),
    "barrier": (lambda group: dist.barrier(group), "barrier", [0] * RANKS),
    "sends": (send_and_receive, "send", [BYTES] * RANKS),
}
# By name: how it is called, as what it counts, and what each rank of the group sends to each; itself is what it keeps.
EXACT = {
    "all_to_all": (
        lambda group: dist.all_to_all_single(numbers(), numbers(), group=group),
        "all_to_all",
        [[12] * RANKS] * RANKS,
    ),
    "all_to_all of uneven rows": (uneven_all_to_all, "all_to_all", [[0, 8, 16, 24]] * RANKS),
    "gather": (
        lambda group: dist.gather(numbers(), [numbers() for _ in GROUP] if is_root(1) else None, root(1), group=group),
        "gather",
        [[0, BYTES, 0, 0]] * RANKS,
    ),
    "scatter": (
        lambda group: dist.scatter(
            numbers(), [numbers() for _ in GROUP] if is_root(1) else None, root(1), group=group
        ),
        "scatter",
        [[0] * RANKS, [BYTES] * RANKS, [0] * RANKS, [0] * RANKS],
    ),
}


def counted(rank):
    """What each call counts, and what is left when the ledger was taken out."""
    group = dist.new_group(list(GROUP), group_desc="DATA_PARALLEL_GROUP_WITH_CP")
    if rank not in GROUP:
        return None
    ledger = Ledger(clock=HostSpan)
    own = OwnCollectives(ledger)
    before = [vars(ProcessGroup).get(name) for name in METHODS], vars(Work)["wait"]
    own.install()
    found = {}
    for name, (call, *_) in {**RINGS, **EXACT}.items():
        call(group)
        page = ledger.turn()
        spans = {collective.operation: len(tally.spans) for collective, tally in page.items()}
        found[name] = dict(page.amounts(rank, range(1 + RANKS))), page.sent_bytes_to_peer, spans
    with ledger.exchanging(Collective("exchange", "qkv", "", 4)):
        dist.all_reduce(numbers(), group=group)
    found["exchange"] = [(c.operation, tally.count, len(tally.spans)) for c, tally in ledger.turn().items()]
    ledger.clock = None
    dist.all_reduce(numbers(), group=group)
    found["no clock"] = [amount.seconds for amount in ledger.turn().amounts(rank, range(1 + RANKS)).values()]
    own.uninstall()
    dist.all_reduce(numbers(), group=group)
    assert ledger.page == {}
    assert before == ([vars(ProcessGroup).get(name) for name in METHODS], vars(Work)["wait"])
    return found


@pytest.fixture(scope="module")
def by_rank(on_ranks):
    return on_ranks(counted, 1 + RANKS)[1:]


@pytest.mark.parametrize("name", RINGS)
def test_in_a_ring_each_rank_sends_to_the_next_of_its_group(by_rank, name):
    _, operation, expected = RINGS[name]
    for here, found in enumerate(by_rank):
        amounts, to_peer, _ = found[name]
        amount = amounts[Collective("dp", operation, "DATA_PARALLEL_GROUP_WITH_CP", RANKS)]
        assert (amount.count, amount.same_rank_bytes) == (1, 0)
        assert to_peer == Counter({GROUP[(here + 1) % RANKS]: expected[here]} if expected[here] else {})
        assert amounts.keys() - {Collective("dp", "receive", "DATA_PARALLEL_GROUP_WITH_CP", RANKS)} == {
            Collective("dp", operation, "DATA_PARALLEL_GROUP_WITH_CP", RANKS)
        }


@pytest.mark.parametrize("name", EXACT)
def test_what_is_passed_to_each_rank_is_counted_for_it_and_what_stays_apart(by_rank, name):
    _, operation, expected = EXACT[name]
    for here, found in enumerate(by_rank):
        amounts, to_peer, _ = found[name]
        (amount,) = amounts.values()
        assert list(amounts) == [Collective("dp", operation, "DATA_PARALLEL_GROUP_WITH_CP", RANKS)]
        assert amount.same_rank_bytes == expected[here][here]
        assert to_peer == {GROUP[i]: n for i, n in enumerate(expected[here]) if n and i != here}


def test_over_all_ranks_an_all_reduce_sends_the_formula_even_where_ranks_do_not_divide_it(by_rank):
    for name, n_bytes in {"all_reduce": BYTES, "all_reduce of few bytes": 3}.items():
        assert sum(found[name][1].total() for found in by_rank) == 2 * (RANKS - 1) * n_bytes


def test_time_is_that_of_the_call_and_of_the_wait(by_rank):
    for found in by_rank:
        for name in (*RINGS, *EXACT):
            amounts, _, spans = found[name]
            assert all(amount.seconds > 0 for amount in amounts.values())
            assert all(number == 2 for number in spans.values()), "the call, and the wait for it"


def test_what_the_exchange_counts_itself_is_not_counted_again(by_rank):
    for found in by_rank:
        assert found["exchange"] == [("qkv", 0, 1)]


def test_without_a_clock_the_time_is_unknown_and_not_zero(by_rank):
    assert all(found["no clock"] == [None] for found in by_rank)


def test_all_collectives_of_the_installed_torch_are_known(monkeypatch):
    assert uncounted_methods() == []
    monkeypatch.delitem(own_collectives.METHODS, "allreduce")
    with pytest.raises(ConfigurationError, match="does not know allreduce of the installed torch"):
        OwnCollectives(Ledger()).install()


class Batching:
    """A group whose backend starts calls together, as NCCL's does."""

    group_desc = group_name = "PIPELINE_MODEL_PARALLEL_GROUP"

    def size(self):
        return 2

    def rank(self):
        return 0


def test_calls_that_start_together_are_counted_each_and_waited_for_once(monkeypatch):
    """A contract with a stand-in: gloo starts nothing together."""
    ledger = Ledger(clock=HostSpan)
    own, group = OwnCollectives(ledger), Batching()
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [4, 5])
    calls = []

    def wrapped(name):
        operation, sent_by = METHODS[name]

        class Started:
            pass

        return own._counted(lambda group, *args: calls.append(name) or Started(), operation, sent_by)

    start = own._starting(lambda group, device: calls.append("start"))
    start(group, "cuda")
    wrapped("send")(group, [numbers()], 1, 0)
    wrapped("recv")(group, [numbers()], 1, 0)
    work = wrapped("_end_coalescing")(group, "cuda")
    assert calls == ["start", "send", "recv", "_end_coalescing"]
    own._waiting(lambda work: calls.append("wait"))(work)
    page = ledger.turn()
    amounts = {c.operation: a for c, a in page.amounts(4, [0] * 6).items()}
    assert {name: (a.count, a.sent_bytes, a.seconds is None) for name, a in amounts.items()} == {
        "batched_send": (1, BYTES, True),
        "batched_receive": (1, 0, True),
        "batch": (1, 0, False),
    }
    assert page.sent_bytes_to_peer == {5: BYTES}
    assert len(next(tally for c, tally in page.items() if c.operation == "batch").spans) == 2


@pytest.mark.parametrize(
    ("description", "part"),
    [
        ("DATA_PARALLEL_GROUP_WITH_CP", "dp"),
        ("DATA_PARALLEL_GROUP_GLOO", "dp"),
        ("INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", "dp"),
        ("EXPERT_DATA_PARALLEL_GROUP", "dp"),
        ("HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1", "dp"),
        ("INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", "dp"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tp"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
        ("EMBEDDING_GROUP", "pp"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "ep"),
        ("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "ep"),
        ("CONTEXT_PARALLEL_GROUP", "cp"),
        ("BASP_SEQUENCE_GROUP_OF_2", "cp"),
        ("TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", "other"),
        ("EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", "other"),
        ("MODEL_PARALLEL_GROUP", "other"),
        ("default_pg", "other"),
        ("undefined", "other"),
    ],
)
def test_a_group_belongs_to_the_parallelism_that_its_description_names(description, part):
    assert part_of(description) == part


def test_where_parts_differ_a_ring_sends_all_but_the_next_rank_s():
    """NCCL's groups take such lists, and gloo's do not."""
    parts = [numbers(count) for count in (1, 2, 3, 4)]
    sent_by = METHODS["allgather"][1]
    sent = [sent_by(own_collectives.Place(rank, RANKS), [parts], [parts[rank]]).bytes_to for rank in range(RANKS)]
    assert sent == [{1: 4 * 8}, {2: 4 * 7}, {3: 4 * 6}, {0: 4 * 9}]
