"""All implementations in turns, in one process group: what they send and copy, how long they take, and errors.

Times are of forward and backward, from a barrier to the end of the slowest rank. The bare wire is the time of the same
collectives, as they were counted, one after the other on buffers that stay; what is above it is spent outside the
wire.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_basp.copy_counter import Collective, CopyCounter
from megatron_basp.peers.implementations import OURS, Attention, Implementation
from megatron_basp.peers.kernels import PARTS
from megatron_basp.peers.shapes import Shape, largest_error, undivided

WARM_UP_CALLS = 3


@dataclass(frozen=True)
class Row:
    """Of one rank, forward and backward.

    collectives: those that start together, with nothing copied between them, count as one: one launch over NCCL.
    operations: what gloo was given, which does not coalesce.
    bytes_sent: to other ranks. bytes_copied: see `copy_counter.py`; without the attention's own.
    milliseconds: the median; low and high: the quartiles.
    wire_milliseconds: of the bare collectives. outside_wire_milliseconds: the rest.
    cpu_milliseconds: of the thread that calls, the mean over ranks. Threads of gloo drive the wire, so this is what is
    computed and copied; that other processes share the cores shows less in it than in any other time.
    ratio_to_ours, outside_wire_ratio_to_ours: its time over ours; the latter None where ours is lost in the wire's.
    max_error: see `largest_error`, of the output and the three gradients.
    page_faults: of a call on the first rank, the median.
    """

    implementation: str
    part: str
    K: int
    shape: str
    collectives: int
    operations: int
    bytes_sent: int
    bytes_copied: int
    milliseconds: float
    milliseconds_low: float
    milliseconds_high: float
    ratio_to_ours: float
    max_error: float
    wire_milliseconds: float
    outside_wire_milliseconds: float
    cpu_milliseconds: float
    outside_wire_ratio_to_ours: float | None
    page_faults: float


class Taken(NamedTuple):
    """By a call, in each repetition: seconds of the slowest rank, CPU seconds of all ranks' threads that called, page
    faults of this rank."""

    seconds: list[float]
    cpu_seconds: list[float]
    page_faults: list[float]


@dataclass(frozen=True)
class Unsupported:
    """What an implementation says to a shape that it does not take."""

    implementation: str
    K: int
    shape: str
    reason: str


@dataclass
class Case:
    """One shape and part, on this rank; `rows` is called once, by all ranks. unsupported: filled by it."""

    shape: Shape
    part: str
    implementations: list[Implementation]
    repetitions: int
    unsupported: list[Unsupported] = field(default_factory=list)

    def rows(self) -> list[Row]:
        contestants: dict[str, _Contestant] = {}
        for implementation in self.implementations:
            try:
                contestants[implementation.name] = _Contestant(implementation, self.shape, self.part)
            except (AssertionError, RuntimeError, ValueError) as error:
                # What a shape that does not fit leads to, on all ranks alike. Ours takes all that come here.
                if implementation.name == OURS:
                    raise
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                self.unsupported.append(
                    Unsupported(implementation.name, dist.get_world_size(), self.shape.name, reason)
                )
        errors = self._errors(contestants)
        wires = {contestant.collectives: _bare(contestant.collectives) for contestant in contestants.values()}
        calls = {**{name: one.call for name, one in contestants.items()}, **wires}
        return list(self._compared(contestants, _in_turns(calls, self.repetitions), errors))

    def _errors(self, contestants: dict[str, _Contestant]) -> dict[str, float]:
        """On the first rank; it alone computes what is right."""
        gathered = {name: one.gathered() for name, one in contestants.items()}
        if dist.get_rank():
            return dict.fromkeys(contestants, 0.0)
        expected = undivided(self.shape, PARTS[self.part])
        return {name: largest_error(found, expected) for name, found in gathered.items()}

    def _compared(
        self,
        contestants: dict[str, _Contestant],
        taken: dict[object, Taken],
        errors: dict[str, float],
    ) -> Iterator[Row]:
        def times(key: object) -> float:
            return 1e3 * statistics.median(taken[key].seconds)

        def outside(name: str) -> float:
            return times(name) - times(contestants[name].collectives)

        for name, contestant in contestants.items():
            low, _, high = statistics.quantiles(taken[name].seconds, n=4)
            yield Row(
                implementation=name,
                part=self.part,
                K=dist.get_world_size(),
                shape=self.shape.name,
                collectives=contestant.counter.launches,
                operations=len(contestant.collectives),
                bytes_sent=contestant.counter.sent_bytes,
                bytes_copied=contestant.counter.copied_bytes,
                milliseconds=times(name),
                milliseconds_low=1e3 * low,
                milliseconds_high=1e3 * high,
                ratio_to_ours=times(name) / times(OURS),
                max_error=errors[name],
                wire_milliseconds=times(contestant.collectives),
                outside_wire_milliseconds=outside(name),
                outside_wire_ratio_to_ours=outside(name) / outside(OURS) if outside(OURS) > 0 else None,
                cpu_milliseconds=1e3 * statistics.median(taken[name].cpu_seconds) / dist.get_world_size(),
                page_faults=statistics.median(taken[name].page_faults),
            )


class _Contestant:
    """An implementation, called and counted."""

    def __init__(self, implementation: Implementation, shape: Shape, part: str) -> None:
        self.counter = CopyCounter()
        self._layout = implementation.layout
        self._attention: Attention = implementation.make(shape, PARTS[part], self.counter)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        *inputs, self._gradient = (self._layout.part(x, rank, ranks) for x in shape.draw())
        self._inputs = [x.requires_grad_() for x in inputs]
        self.call()  # what is made once and kept, such as orders of chunks, is not of each call
        with self.counter:
            self._found = self.call()
        # In an order of their own: implementations that make the same ones are held to the same bare wire.
        self.collectives = tuple(sorted(self.counter.collectives))

    def call(self) -> list[Tensor]:
        """Output and gradients."""
        output = self._attention(*self._inputs)
        return [output.detach(), *torch.autograd.grad(output, self._inputs, self._gradient)]

    def gathered(self) -> list[Tensor]:
        """What the counted call gave, of all ranks together, [S, B, heads, d]; on the first rank."""
        ranks = dist.get_world_size()
        whole = []
        for x in self._found:
            parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks)]
            dist.gather(x.contiguous(), None if dist.get_rank() else parts)
            if dist.get_rank() == 0:
                whole.append(self._layout.whole(parts))
        self._found = []
        return whole


def _bare(collectives: tuple[Collective, ...]) -> Callable[[], None]:
    """These collectives and nothing else, on buffers that stay."""
    prepared = []
    for one in collectives:
        received, sent = (torch.zeros(sum(x), dtype=getattr(torch, one.dtype_name)) for x in (one.received, one.sent))
        lengths = (None, None) if one.evenly else (list(one.received), list(one.sent))
        prepared.append((received, sent, *lengths))

    def call() -> None:
        for arguments in prepared:
            dist.all_to_all_single(*arguments)

    return call


def _in_turns(calls: dict[object, Callable[[], object]], repetitions: int) -> dict[object, Taken]:
    """Each repetition begins with another call, so that none always comes after the same."""
    names = list(calls)
    wall, cpu, faults = (torch.zeros(len(calls), repetitions, dtype=torch.float64) for _ in range(3))
    for repetition in range(-WARM_UP_CALLS, repetitions):
        for turn in range(len(calls)):
            index = (turn + repetition) % len(calls)
            dist.barrier()
            before = _clocks()
            calls[names[index]]()
            if repetition >= 0:
                passed = [after - start for after, start in zip(_clocks(), before, strict=True)]
                wall[index, repetition], cpu[index, repetition], faults[index, repetition] = passed
    dist.all_reduce(wall, dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    rows = zip(wall.tolist(), cpu.tolist(), faults.tolist(), strict=True)
    return {name: Taken(*row) for name, row in zip(names, rows, strict=True)}


def _clocks() -> tuple[float, float, int]:
    """Seconds, this thread's CPU seconds, this process's page faults."""
    return time.perf_counter(), time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
