"""What carries an exchange: the collective of the group's backend, or memory that its ranks read in each other.

Both take and give the same, so that nothing else knows which it is: sent[i] is [rows, ...], its rows for the ranks of
the group one after the other, and so is received[i].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Work(Protocol):
    """Something under way. On a GPU `wait` makes the current stream wait, and not the host."""

    def wait(self) -> object: ...


class Transport(Protocol):
    """Of one group."""

    def empty(self, like: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """What is to be sent together is written into these; each of the dtype and on the device of its `like`."""

    def holding(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors, contiguous, where they can be sent from: as they are, if they can be."""

    def start(
        self,
        sent: Sequence[Tensor],
        received: Sequence[Tensor],
        sent_rows: Sequence[int],
        received_rows: Sequence[int],
    ) -> Sequence[Work]:
        """Exchange all; sent_rows and received_rows are for, and from, each rank of the group."""

    def close(self) -> None:
        """Give back what it holds, before its group is destroyed."""


class AllToAll:
    """The all-to-all of the group's backend, from and to any memory."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def empty(self, like: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        return [x.new_empty(shape) for x, shape in zip(like, shapes, strict=True)]

    def holding(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        # A strided gradient that is read as if it were contiguous is a silently wrong gradient.
        return [x.contiguous() for x in tensors]

    def start(
        self,
        sent: Sequence[Tensor],
        received: Sequence[Tensor],
        sent_rows: Sequence[int],
        received_rows: Sequence[int],
    ) -> Sequence[Work]:
        """One launch for all, where the backend can."""

        def start_all() -> list[Work]:
            return [
                dist.all_to_all_single(
                    to_receive, to_send, list(received_rows), list(sent_rows), group=self._group, async_op=True
                )
                for to_send, to_receive in zip(sent, received, strict=True)
            ]

        device = sent[0].device
        if len(sent) == 1 or not _coalesces(self._group, device):
            return start_all()
        with dist._coalescing_manager(self._group, device, async_ops=True) as launch:
            start_all()
        return [launch]

    def close(self) -> None:
        pass


def _coalesces(group: dist.ProcessGroup, device: torch.device) -> bool:
    return group._get_backend(device).supports_coalescing
