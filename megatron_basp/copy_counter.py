"""What code sends and copies, counted operation by operation while it runs, forward and backward.

    with CopyCounter() as counter:
        output = layer(x)
        torch.autograd.grad(output, x, gradient)
    counter.collectives, counter.sent_bytes, counter.copied_bytes

A pass over memory counts with the bytes that it writes; a sum, which reads more than it writes, with those it reads.
Every operation counts but views, allocations and collectives, so that nothing that moves data goes by another name.
What is none of the question, such as the attention between two exchanges, runs in `paused()`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
MOVE_NOTHING = {f"aten::{name}" for name in ALLOCATIONS | {"_unsafe_view"}}
SUMS = {"aten::sum"}
COLLECTIVES = {"c10d", "_c10d_functional", "symm_mem"}


@dataclass(frozen=True, order=True)
class Collective:
    """One all-to-all: enough to make it again with buffers of one's own.

    sent, received: elements that go to, and come from, each rank of the group.
    evenly: it was called without lengths, to divide the tensors evenly. sent_bytes: to others than this rank.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    evenly: bool
    dtype_name: str
    sent_bytes: int


class CopyCounter(TorchDispatchMode):
    """Counts while it is entered; on a second time it goes on counting.

    collectives: in the order of their calls. launches: the same, but those between which nothing is copied or computed
    count as one, which they are to a backend that coalesces. copied_bytes_by_operation: by the operation's name in
    torch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []
        self.launches = 0
        self._last_was_a_collective = False
        self.copied_bytes_by_operation: Counter[str] = Counter()
        self._paused = False

    @property
    def sent_bytes(self) -> int:
        return sum(collective.sent_bytes for collective in self.collectives)

    @property
    def copied_bytes(self) -> int:
        return sum(self.copied_bytes_by_operation.values())

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        self._last_was_a_collective = False
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        if self._paused or operation.is_view:
            return result
        name = operation._schema.name
        if operation.namespace in COLLECTIVES:
            self.launches += not self._last_was_a_collective
            self._last_was_a_collective = True
            self.collectives.append(_collective(name, args))
        elif name not in MOVE_NOTHING:
            written = {id(x): x for x in [*_tensors(result), *_tensors(_changed(operation, args, kwargs or {}))]}
            copied = sum(_bytes(x) for x in written.values())
            if name in SUMS:
                copied = max(copied, _bytes(args[0]))
            if copied:
                self._last_was_a_collective = False
                self.copied_bytes_by_operation[name] += copied
        return result


def _collective(name: str, args: Any) -> Collective:
    if name != "c10d::alltoall_base_":
        raise NotImplementedError(f"{name}: bytes sent are counted for all-to-alls of one tensor only")
    received, sent, group, received_rows, sent_rows = args[:5]
    group = dist.ProcessGroup.unbox(group)
    by_rank = _by_rank(sent, sent_rows, group.size())
    return Collective(
        sent=by_rank,
        received=_by_rank(received, received_rows, group.size()),
        evenly=not sent_rows and not received_rows,
        dtype_name=str(sent.dtype).removeprefix("torch."),
        sent_bytes=(sent.numel() - by_rank[group.rank()]) * sent.element_size(),
    )


def _by_rank(x: Tensor, rows: list[int], ranks: int) -> tuple[int, ...]:
    """Elements for each rank; rows of the first dimension, or none for even parts."""
    if not rows:
        return (x.numel() // ranks,) * ranks
    return tuple(count * x.shape[1:].numel() for count in rows)


def _changed(operation: Any, args: Any, kwargs: Any) -> list[Any]:
    """Arguments that the operation writes to."""
    arguments = operation._schema.arguments
    given = dict(zip([argument.name for argument in arguments], args, strict=False)) | kwargs
    return [given[argument.name] for argument in arguments if argument.is_write and argument.name in given]


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
