"""The exchange through memory that the GPUs of a node read in each other, by torch's `all_to_all_nd`. Not measured.

It is a kernel that waits until all ranks of the group have come to it, reads each one's part over NVLink, and ends
when all have read (`torch/csrc/distributed/c10d/symm_mem/ops/nccl_all_to_all_nd.cu`). So it runs on a stream of its
own, as NCCL's collectives do, and one for all groups of a process: ranks that are in several launch in the same order.
What is sent lies in a ring of such memory; what is received, in ordinary memory. The output of attention and the
gradients of q, k and v are copied into the ring first, a pass that NCCL does without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

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
        device: where the ring is. Making it is collective over the group.
    """

    def __init__(self, group: dist.ProcessGroup, side: SideStream, capacity_bytes: int, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory

        self._group, self._side, self._next = group, side, 0
        self._ring = _symmetric_memory.empty(2 * _aligned(capacity_bytes), dtype=torch.uint8, device=device)
        _symmetric_memory.rendezvous(self._ring, group)

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


def probe(groups: Mapping[int, dist.ProcessGroup], inside_a_domain: Mapping[int, bool]) -> dict[int, str]:
    """Why each K of this rank cannot use it; K that can are left out. Collective over the world, with the same result
    on all ranks.

    Args:
        groups: by K, as in `SequenceGroups.by_size`.
        inside_a_domain: by K, whether fast links join all ranks of each group of that size.
    """
    missing = _missing()
    reasons = {
        size: missing
        or (None if inside_a_domain[size] else "its ranks are not all joined by fast links")
        or (f"K ≤ {MOST_RANKS} is what the kernel takes" if size > MOST_RANKS else None)
        for size in groups
    }
    side = None
    for size in sorted(groups):
        # Agreed upon before a trial, which takes all ranks of a group.
        if reason := _first_of_all(reasons[size]):
            reasons[size] = reason
            continue
        side = side or SideStream()
        reasons[size] = _first_of_all(_trial(groups[size], side))
    return {size: reason for size, reason in reasons.items() if reason is not None}


def _missing() -> str | None:
    if "nccl" not in dist.get_backend():
        return f"it needs NCCL, and the backend is {dist.get_backend()}"
    from torch.distributed import _symmetric_memory

    if not hasattr(_symmetric_memory, "all_to_all_nd"):
        return f"torch {torch.__version__} has no all_to_all_nd"
    try:
        _symmetric_memory.set_backend("NCCL")
    except RuntimeError as error:
        return f"torch does not use NCCL's symmetric memory: {_line(error)}"
    return None


def _trial(group: dist.ProcessGroup, side: SideStream) -> str | None:
    """One exchange both ways of carrying it; None where both receive the same."""
    ranks = group.size()
    received = []
    try:
        like = torch.empty(0, device="cuda")
        for transport in (
            AllToAll(group),
            SymmetricMemory(group, side, ranks * 64 * like.element_size(), like.device),
        ):
            (sent,) = transport.empty([like], [(ranks, 64)])
            sent.copy_(torch.arange(sent.numel(), device="cuda").view_as(sent) + group.rank() * sent.numel())
            received.append(like.new_empty(ranks, 64))
            for work in transport.start([sent], received[-1:], [1] * ranks, [1] * ranks):
                work.wait()
    except (RuntimeError, NotImplementedError) as error:
        return f"a trial of it failed: {_line(error)}"
    return None if torch.equal(*received) else "a trial of it received something else than NCCL's all-to-all"


def _first_of_all(reason: str | None) -> str | None:
    """The reason of the first rank of the world that has one."""
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next((each for each in reasons if each is not None), None)


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
