"""The exchange through memory that the GPUs of a node read in each other, by torch's `all_to_all_nd`. Not measured.

It is a kernel that waits until all ranks of the group have come to it, reads each one's part over NVLink, and ends
when all have read (`torch/csrc/distributed/c10d/symm_mem/ops/nccl_all_to_all_nd.cu`). So it runs on a stream of its
own, as NCCL's collectives do, and one for all groups of a process: ranks that are in several launch in the same order.
What is sent lies in a ring of such memory; what is received, in ordinary memory. The output of attention and the
gradients of q, k and v are copied into the ring first, a pass that NCCL does without.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_basp.transport import AllToAll, Work

MOST_RANKS = 64
ALIGNMENT_BYTES = 16


class SideStream:
    """A CUDA stream for what runs beside the current one, in order."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def run(self, work: Callable[[], None]) -> Work:
        """Run it after what the current stream was given until now."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
            event = torch.cuda.Event()
            event.record()
        return _Event(event)

    def join(self) -> None:
        """What the current stream is given from now on comes after all that runs here."""
        torch.cuda.current_stream().wait_stream(self._stream)


class _Event:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class SymmetricMemory:
    """The transport of one group whose ranks hold equally many tokens.

    Args:
        side: where its kernels run; the same for all groups of a process.
        capacity_bytes: of what is sent and not received yet; the ring is longer by what alignment takes.
        device: where the ring is.
    """

    def __init__(self, group: dist.ProcessGroup, side: SideStream, capacity_bytes: int, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory

        self._group, self._side, self._next = group, side, 0
        self._ring = _symmetric_memory.empty(2 * _aligned(capacity_bytes), dtype=torch.uint8, device=device)

    def connect(self) -> None:
        """Make the ring known to the group, whose ranks all call this once, before anything is exchanged."""
        from torch.distributed import _symmetric_memory

        _symmetric_memory.rendezvous(self._ring, self._group)

    def close(self) -> None:
        """Let the ring go, while its group is still there."""
        self._side.join()
        self._ring = self._ring[:0].clone()

    def empty(self, like: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Raises: ValueError: they are more than the ring was made for."""
        sizes = [math.prod(shape) * x.element_size() for x, shape in zip(like, shapes, strict=True)]
        needed = sum(_aligned(size) for size in sizes)
        if needed > len(self._ring):
            raise ValueError(
                f"--basp-transport symmetric-memory: {needed} bytes are to be exchanged at once in groups of K="
                f"{self._group.size()}, and there is room for {len(self._ring)}: the model has other heads than the "
                f"arguments say; use --basp-transport nccl"
            )
        if self._next + needed > len(self._ring):
            self._next = 0
            self._side.join()  # what is there may still be read by others
        slots = []
        for x, shape, size in zip(like, shapes, sizes, strict=True):
            slots.append(self._ring[self._next : self._next + size].view(x.dtype).view(*shape))
            self._next += _aligned(size)
        return slots

    def holding(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        slots = self.empty(tensors, [x.shape for x in tensors])
        for slot, x in zip(slots, tensors, strict=True):
            slot.copy_(x)
        return slots

    def start(
        self,
        sent: Sequence[Tensor],
        received: Sequence[Tensor],
        sent_rows: Sequence[int],
        received_rows: Sequence[int],
    ) -> Sequence[Work]:
        """One kernel for each tensor.

        Raises:
            ValueError: what ranks send each other is of different sizes, or of one that the kernel does not take.
        """
        if len({*sent_rows, *received_rows}) != 1:
            raise ValueError(
                f"--basp-transport symmetric-memory exchanges equal parts, got rows {list(sent_rows)} to and "
                f"{list(received_rows)} from the ranks of {self._group.group_desc}: use --basp-transport nccl"
            )
        ranks = len(sent_rows)
        for x in sent:
            part_bytes = x.numel() // ranks * x.element_size()
            if part_bytes % ALIGNMENT_BYTES:
                raise ValueError(
                    f"--basp-transport symmetric-memory exchanges parts of a multiple of {ALIGNMENT_BYTES} bytes, got "
                    f"{list(x.shape)} of {x.dtype} for K={ranks} ranks, {part_bytes} bytes each: use "
                    f"--basp-transport nccl"
                )

        def run() -> None:
            from torch.distributed import _symmetric_memory

            for to_send, to_receive in zip(sent, received, strict=True):
                # One row of K blocks: the block at this rank's place of each peer's, one below the other.
                _symmetric_memory.all_to_all_nd(
                    to_send.reshape(1, ranks, -1), to_receive.view(ranks, 1, -1), 1, 0, group=self._group.group_name
                )

        return [self._side.run(run)]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class Wanted:
    """What groups of one K need.

    capacity_bytes: see `SymmetricMemory`.
    part_bytes: what a rank sends to one other, of each tensor, in every exchange there will be.
    inside_a_domain: whether fast links join all ranks of each group of that size.
    """

    group: dist.ProcessGroup
    capacity_bytes: int
    part_bytes: frozenset[int]
    inside_a_domain: bool


def open_where_possible(wanted: Mapping[int, Wanted]) -> tuple[dict[int, SymmetricMemory], dict[int, str]]:
    """By K, the transport where it works, and why not where it does not; the same K on all ranks. Collective over the
    world: each step that can fail on one rank is agreed upon before the next, which waits for all. (A rendezvous that
    fails on one rank alone leaves the others waiting for torch's timeout.)"""
    opened, reasons = {}, {}
    side = functools.cache(SideStream)  # one for all, if any
    for size in sorted(wanted):
        try:
            opened[size] = _open(wanted[size], side)
        except _Refused as refused:
            reasons[size] = str(refused)
    return opened, reasons


class _Refused(Exception):
    """Why symmetric memory cannot be used."""


def _open(needs: Wanted, side: Callable[[], SideStream]) -> SymmetricMemory:
    def make() -> SymmetricMemory:
        device = torch.device("cuda", torch.cuda.current_device())
        return SymmetricMemory(needs.group, side(), needs.capacity_bytes, device)

    _together(lambda: _check(needs))
    memory = _together(make)
    _together(memory.connect)
    _together(lambda: _try_out(memory, needs.group))
    return memory


def _together[Result](step: Callable[[], Result]) -> Result:
    """What it gives here, unless it failed on some rank of the world: then all are refused, for the first's reason."""
    result, reason = None, None
    try:
        result = step()
    except (_Refused, RuntimeError, NotImplementedError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    for reason in reasons:
        if reason is not None:
            raise _Refused(reason)
    return result  # type: ignore[return-value]


def _check(needs: Wanted) -> None:
    if not needs.inside_a_domain:
        raise _Refused("its ranks are not all joined by fast links")
    if needs.group.size() > MOST_RANKS:
        raise _Refused(f"K ≤ {MOST_RANKS} is what the kernel takes")
    if odd := [size for size in sorted(needs.part_bytes) if size % ALIGNMENT_BYTES]:
        raise _Refused(f"parts of {odd[0]} bytes are no multiple of {ALIGNMENT_BYTES}")
    _set_backend()


def _set_backend() -> None:
    if "nccl" not in dist.get_backend():
        raise _Refused(f"it needs NCCL, and the backend is {dist.get_backend()}")
    from torch.distributed import _symmetric_memory

    if not hasattr(_symmetric_memory, "all_to_all_nd"):
        raise _Refused(f"torch {torch.__version__} has no all_to_all_nd")
    _symmetric_memory.set_backend("NCCL")


def _try_out(memory: SymmetricMemory, group: dist.ProcessGroup) -> None:
    """One exchange both ways of carrying it."""
    ranks, received = group.size(), []
    like = torch.empty(0, dtype=torch.uint8, device="cuda")
    for transport in (AllToAll(group), memory):
        (sent,) = transport.empty([like], [(ranks, ALIGNMENT_BYTES)])
        sent.copy_(torch.arange(sent.numel(), device="cuda").view_as(sent) + group.rank() * sent.numel())
        received.append(like.new_empty(ranks, ALIGNMENT_BYTES))
        for work in transport.start([sent], received[-1:], [1] * ranks, [1] * ranks):
            work.wait()
    if not torch.equal(*received):
        raise _Refused("a trial of it received something else than NCCL's all-to-all")
