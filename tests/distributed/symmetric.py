"""Torch's symmetric memory and CUDA's streams, played on a CPU: what runs beside runs as late as it may."""

from collections import deque
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory


class LateStream:
    """A side stream whose work is done when somebody waits for it, and no sooner: memory that is written again before
    shows up as a wrong number."""

    def __init__(self):
        self._pending = deque()
        self.done = self.given = 0

    def run(self, work):
        self._pending.append(work)
        self.given += 1
        return _Work(self, self.given)

    def join(self):
        self.do(self.given)

    def do(self, count):
        while self.done < count:
            self._pending.popleft()()
            self.done += 1


class _Work:
    def __init__(self, stream, number):
        self._stream, self._number = stream, number

    def wait(self):
        self._stream.do(self._number)


@contextmanager
def symmetric_memory(groups):
    """Over gloo. Yields the tensors that were made known to a group; only from these can be sent.

    Args:
        groups: by name.
    """
    known = []

    def rendezvous(tensor, group):
        dist.barrier(group)
        known.append(tensor)

    def all_to_all_nd(sent, out, scatter_dim, gather_dim, *, group):
        assert (scatter_dim, gather_dim) == (1, 0) and out.is_contiguous() and sent.stride(-1) == 1
        storages = {x.untyped_storage().data_ptr() for x in known}
        assert sent.untyped_storage().data_ptr() in storages, "what is sent is in symmetric memory"
        assert out.untyped_storage().data_ptr() not in storages
        assert sent.storage_offset() * sent.element_size() % 16 == 0
        # [rows, K, columns]: the block at this rank's place of each peer's, [K, rows, columns].
        dist.all_to_all_single(out, sent.transpose(0, 1).contiguous(), group=groups[group])

    with (
        mock.patch.object(
            _symmetric_memory, "empty", lambda size, dtype, device: torch.full((size,), 255, dtype=dtype)
        ),
        mock.patch.object(_symmetric_memory, "rendezvous", rendezvous),
        mock.patch.object(_symmetric_memory, "all_to_all_nd", all_to_all_nd),
    ):
        yield known
