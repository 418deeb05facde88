"""Megatron's own collectives, counted where Python hands them to a process group.

Megatron calls torch.distributed by many names, some of which modules bound when they were imported. All of them end in
a method of `ProcessGroup` that returns a `Work`; these methods are wrapped, on the class, for as long as a ledger is
written. C++ comes by another way, which functional collectives take, those of DTensor: a test holds the counts of
training steps, Megatron-FSDP's among them, to torch's own operators, and there are none.

Bytes are those that this rank sends, n ranks in the group, ranks and neighbours by their order in it:

    all_reduce       in a ring: all but this rank's n-th to the next rank, twice: 2·(n-1)/n of the tensor
    all_gather       in a ring: all but the next rank's part to the next rank: (n-1)/n of the whole
    reduce_scatter   in a ring: all but this rank's part to the next rank: (n-1)/n of the whole
    broadcast        down a ring from the root: the tensor to the next rank, but for the rank before the root
    reduce           down a ring to the root: the tensor to the next rank, but for the root
    all_to_all, gather, scatter, send    what is passed, to whom it is for: exact
    receive, barrier, batch              nothing

Libraries choose trees for small tensors, which send as much in sum and to other ranks. In a ring a rank sends to the
next one only, so all of it is inside of a node or across nodes by where that rank is.

Seconds are those of the call and of every `wait` for it. Calls that torch starts together count as `batched_send` and
so on, without seconds: one waits for all of them, and that time is the `batch`'s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup, Work

from megatron_basp.errors import ConfigurationError
from megatron_basp.ledger import Collective, Ledger


class Sent(NamedTuple):
    """By one collective: bytes by the peer's rank in the group, and what stays on this rank."""

    bytes_to: Mapping[int, int] = {}
    same_rank_bytes: int = 0


class Place(NamedTuple):
    """A rank in a group of `size`."""

    rank: int
    size: int

    def ring(self, n_bytes: int) -> Sent:
        """To the next rank; a group of one sends nothing."""
        return Sent({(self.rank + 1) % self.size: n_bytes}) if self.size > 1 and n_bytes else Sent()

    def exactly(self, bytes_by_rank: Sequence[int]) -> Sent:
        peers = {rank: n_bytes for rank, n_bytes in enumerate(bytes_by_rank) if rank != self.rank and n_bytes}
        return Sent(peers, bytes_by_rank[self.rank])

    def part(self, n_bytes: int) -> int:
        """This rank's n-th; over the ranks they add up."""
        return n_bytes * (self.rank + 1) // self.size - n_bytes * self.rank // self.size


def _bytes(x: Tensor | Sequence[Any]) -> int:
    """Of a tensor, or of all in nested lists."""
    return x.numel() * x.element_size() if isinstance(x, Tensor) else sum(_bytes(part) for part in x)


def _all_reduce(at: Place, tensors: Any, *options: Any) -> Sent:
    n_bytes = _bytes(tensors)
    return at.ring(2 * (n_bytes - at.part(n_bytes)))


def _all_gather(at: Place, outputs: Any, inputs: Any, *options: Any) -> Sent:
    """Of equal parts."""
    return at.ring((at.size - 1) * _bytes(inputs))


def _all_gather_list(at: Place, outputs: Any, inputs: Any, *options: Any) -> Sent:
    """Of parts that may differ: a list of the ranks' tensors for each input."""
    following = (at.rank + 1) % at.size
    return at.ring(sum(_bytes(parts) - _bytes(parts[following]) for parts in outputs))


def _reduce_scatter(at: Place, outputs: Any, inputs: Any, *options: Any) -> Sent:
    return at.ring(_bytes(inputs) - _bytes(outputs))


def _all_to_all_single(
    at: Place, output: Tensor, tensor: Tensor, received_rows: Sequence[int], sent_rows: Sequence[int], *options: Any
) -> Sent:
    n_bytes = _bytes(tensor)
    if not len(sent_rows):  # may be an array
        return at.exactly([n_bytes // at.size] * at.size)
    row_bytes = n_bytes // max(1, len(tensor))
    return at.exactly([int(rows) * row_bytes for rows in sent_rows])


def _all_to_all(at: Place, outputs: Any, inputs: Sequence[Tensor], *options: Any) -> Sent:
    return at.exactly([_bytes(tensor) for tensor in inputs])


def _broadcast(at: Place, tensors: Any, options: Any) -> Sent:
    is_last = (at.rank + 1) % at.size == options.rootRank
    return Sent() if is_last else at.ring(_bytes(tensors))


def _reduce(at: Place, tensors: Any, options: Any) -> Sent:
    return Sent() if at.rank == options.rootRank else at.ring(_bytes(tensors))


def _gather(at: Place, outputs: Any, inputs: Any, options: Any) -> Sent:
    is_root = at.rank == options.rootRank
    return Sent({}, _bytes(inputs)) if is_root else Sent({options.rootRank: _bytes(inputs)})


def _scatter(at: Place, outputs: Any, inputs: Any, options: Any) -> Sent:
    if at.rank != options.rootRank:
        return Sent()
    return at.exactly([_bytes(tensor) for tensor in inputs[0]])


def _send(at: Place, tensors: Any, destination: int, *options: Any) -> Sent:
    return Sent({destination: _bytes(tensors)})


def _nothing(at: Place, *arguments: Any, **options: Any) -> Sent:
    return Sent()


# By the methods of ProcessGroup: older and newer names of the same, of which a torch has some.
METHODS: dict[str, tuple[str, Callable[..., Sent]]] = {
    "allreduce": ("all_reduce", _all_reduce),
    "allreduce_coalesced": ("all_reduce", _all_reduce),
    "allgather": ("all_gather", _all_gather_list),
    "allgather_coalesced": ("all_gather", _all_gather),
    "_allgather_base": ("all_gather", _all_gather),
    "all_gather_single": ("all_gather", _all_gather),
    "allgather_into_tensor_coalesced": ("all_gather", _all_gather),
    "all_gather_single_coalesced": ("all_gather", _all_gather),
    "reduce_scatter": ("reduce_scatter", _reduce_scatter),
    "_reduce_scatter_base": ("reduce_scatter", _reduce_scatter),
    "reduce_scatter_single": ("reduce_scatter", _reduce_scatter),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", _reduce_scatter),
    "reduce_scatter_single_coalesced": ("reduce_scatter", _reduce_scatter),
    "alltoall_base": ("all_to_all", _all_to_all_single),
    "all_to_all_single": ("all_to_all", _all_to_all_single),
    "alltoall": ("all_to_all", _all_to_all),
    "broadcast": ("broadcast", _broadcast),
    "reduce": ("reduce", _reduce),
    "gather": ("gather", _gather),
    "gather_single": ("gather", _gather),
    "gather_into_tensor": ("gather", _gather),
    "scatter": ("scatter", _scatter),
    "send": ("send", _send),
    "recv": ("receive", _nothing),
    "recv_anysource": ("receive", _nothing),
    "barrier": ("barrier", _nothing),
    "_end_coalescing": ("batch", _nothing),
}
_SENDS_NOTHING = {"reconfigure"}  # returns a Work as well


def uncounted_methods() -> list[str]:
    """Collectives of the installed torch that the ledger does not know: methods that return a `Work`."""
    returning = (name for name in dir(ProcessGroup) if "Work\n" in (getattr(ProcessGroup, name).__doc__ or ""))
    return sorted(set(returning) - METHODS.keys() - _SENDS_NOTHING)


@functools.cache
def part_of(description: str) -> str:
    """Which parallelism a process group of Megatron's belongs to, by the description that it gives the group."""
    if "DATA_PARALLEL" in description and "TENSOR" not in description:
        return "dp"
    beginnings = {
        "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "dp",
        "TENSOR_MODEL_PARALLEL_GROUP": "tp",
        "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
        "EMBEDDING_GROUP": "pp",
        "POSITION_EMBEDDING_GROUP": "pp",
        "EXPERT_MODEL_PARALLEL_GROUP": "ep",
        "EXPERT_TENSOR_PARALLEL_GROUP": "ep",
        "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "ep",
        "CONTEXT_PARALLEL_GROUP": "cp",
        "BASP_SEQUENCE_GROUP": "cp",
    }
    return next((part for beginning, part in beginnings.items() if description.startswith(beginning)), "other")


class OwnCollectives:
    """Counts into a ledger what is called while it is installed."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._waited_for: WeakKeyDictionary[Work, Collective] = WeakKeyDictionary()
        self._coalescing: set[str] = set()  # names of groups
        self._originals: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Wrap the methods.

        Raises:
            ConfigurationError: this torch has collectives that would not be counted.
        """
        if unknown := uncounted_methods():
            raise ConfigurationError(
                f"--basp-ledger does not know {', '.join(unknown)} of the installed torch's process groups, and "
                f"shares would be wrong: drop --basp-ledger, or use a torch that is known to work"
            )
        for name, (operation, sent_by) in METHODS.items():
            if hasattr(ProcessGroup, name):
                self._replace(ProcessGroup, name, self._counted(getattr(ProcessGroup, name), operation, sent_by))
        self._replace(ProcessGroup, "_start_coalescing", self._starting(ProcessGroup._start_coalescing))
        self._replace(Work, "wait", self._waiting(Work.wait))

    def uninstall(self) -> None:
        for holder, name, original in self._originals:
            setattr(holder, name, original)
        self._originals.clear()

    def _replace(self, holder: Any, name: str, replacement: Any) -> None:
        # What the class holds, and not what it gives: a function of C++ given by its class binds to no instance.
        self._originals.append((holder, name, vars(holder)[name]))
        setattr(holder, name, replacement)

    def _counted(self, original: Callable[..., Any], operation: str, sent_by: Callable[..., Sent]) -> Any:
        ledger = self._ledger

        def counted(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if ledger.is_exchanging:
                return original(group, *args, **kwargs)
            if operation == "batch":
                self._coalescing.discard(group.group_name)
            in_batch = group.group_name in self._coalescing
            name, description = f"batched_{operation}" if in_batch else operation, group.group_desc
            collective = Collective(part_of(description), name, description, group.size())
            with ledger.timed(collective):
                work = original(group, *args, **kwargs)
            bytes_to, same_rank_bytes = sent_by(Place(group.rank(), group.size()), *args, **kwargs)
            ranks = dist.get_process_group_ranks(group)
            peers = {ranks[peer]: n_bytes for peer, n_bytes in bytes_to.items()}
            ledger.record(collective, peers, same_rank_bytes, is_timed=not in_batch)
            if work is not None and not in_batch:
                self._waited_for[work] = collective
            return work

        return counted

    def _starting(self, original: Callable[..., Any]) -> Any:
        def start_coalescing(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            self._coalescing.add(group.group_name)
            return original(group, *args, **kwargs)

        return start_coalescing

    def _waiting(self, original: Callable[..., Any]) -> Any:
        def wait(work: Work, *args: Any, **kwargs: Any) -> Any:
            collective = self._waited_for.get(work)
            if collective is None:
                return original(work, *args, **kwargs)
            with self._ledger.timed(collective):
                return original(work, *args, **kwargs)

        return wait
