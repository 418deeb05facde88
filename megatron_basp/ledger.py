"""What was sent: collectives, bytes and peers, counted by the code that sends.

Nothing here knows the formulas; tests compare the count with them. Pure: no torch, no Megatron.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

Direction = Literal["forward", "backward"]
Phase = Literal["training", "evaluation", "outside"]

EXCHANGE = "exchange"


class Collective(NamedTuple):
    """One kind of collective.

    part: what it is for: the `exchange` of attention and of multi-token prediction, else the parallelism whose group
        it is in (`dp`, `tp`, `pp`, `ep`, `cp`), or `other`.
    operation: `qkv`, `output` or `roll`, else what torch calls it.
    group, group_size: the description of the process group, and its number of ranks (K).
    layer, wave: of an exchange: Megatron's number of the layer, from 1, None where no layer's activations are sent;
        the index of the wave in the plan.
    direction: of an exchange.
    """

    part: str
    operation: str
    group: str
    group_size: int
    layer: int | None = None
    wave: int | None = None
    direction: Direction | None = None


@dataclass(frozen=True)
class Amount:
    """Of one kind of collective: how many, the bytes that this rank sent to each class of peers, seconds.

    same_rank_bytes: what a rank passes to itself in an all-to-all, a gather or a scatter: copied, and never sent.
    seconds: how long this rank stood still for them, in starting them and in waiting for them: the stream's time on a
        GPU, the thread's on a CPU. What runs beside computation takes none. None where it was not measured: of calls
        that start together one measures the whole, under an operation of its own.
    """

    count: int
    same_rank_bytes: int
    same_node_bytes: int
    across_nodes_bytes: int
    seconds: float | None

    @property
    def sent_bytes(self) -> int:
        """What left this rank."""
        return self.same_node_bytes + self.across_nodes_bytes

    def __add__(self, other: Amount) -> Amount:
        timed = self.seconds is not None and other.seconds is not None
        return Amount(
            self.count + other.count,
            self.same_rank_bytes + other.same_rank_bytes,
            self.same_node_bytes + other.same_node_bytes,
            self.across_nodes_bytes + other.across_nodes_bytes,
            (self.seconds or 0.0) + (other.seconds or 0.0) if timed else None,
        )


class Span(Protocol):
    """A stretch of time that is being measured, or was."""

    def stop(self) -> None: ...

    def is_over(self) -> bool:
        """Whether `seconds` is known without waiting."""
        ...

    def seconds(self) -> float: ...


@dataclass
class Tally:
    """Of one kind of collective: how many, what stayed here, bytes by the global rank of the peer, the time they took.

    is_timed: whether `spans` hold the time of all of them.
    """

    count: int = 0
    same_rank_bytes: int = 0
    bytes_to: Counter[int] = field(default_factory=Counter)
    spans: list[Span] = field(default_factory=list)
    is_timed: bool = True

    def amount(self, rank: int, nodes: Sequence[Hashable]) -> Amount:
        """Waits for the time to be known. `nodes` says which fast domain each global rank is in."""
        inside = sum(n_bytes for peer, n_bytes in self.bytes_to.items() if nodes[peer] == nodes[rank])
        return Amount(
            self.count,
            self.same_rank_bytes,
            inside,
            self.bytes_to.total() - inside,
            sum(span.seconds() for span in self.spans) if self.is_timed else None,
        )


class Page(dict[Collective, Tally]):
    """What was sent from one turn of the ledger to the next."""

    @property
    def collectives(self) -> Counter[Collective]:
        return Counter({collective: tally.count for collective, tally in self.items()})

    @property
    def sent_bytes(self) -> dict[Collective, int]:
        return {collective: tally.bytes_to.total() for collective, tally in self.items()}

    @property
    def sent_bytes_to_peer(self) -> Counter[int]:
        return sum((tally.bytes_to for tally in self.values()), Counter[int]())

    @property
    def exchange(self) -> Page:
        """The part of it that groups for sequences take."""
        return Page({collective: tally for collective, tally in self.items() if collective.part == EXCHANGE})

    @property
    def spans(self) -> list[Span]:
        return [span for tally in self.values() for span in tally.spans]

    def amounts(self, rank: int, nodes: Sequence[Hashable]) -> dict[Collective, Amount]:
        return {collective: tally.amount(rank, nodes) for collective, tally in self.items()}


@dataclass
class Ledger:
    """Counts of one rank.

    clock: starts a span; None where nobody asked for the time.
    is_exchanging: the collective that is being called is counted by the exchange itself.
    page: what was counted since the last turn.
    """

    clock: Callable[[], Span] | None = None
    is_exchanging: bool = False
    page: Page = field(default_factory=Page)

    def turn(self) -> Page:
        """Begin a new page and return the one before."""
        page, self.page = self.page, Page()
        return page

    def record(
        self,
        collective: Collective,
        bytes_to: Mapping[int, int],
        same_rank_bytes: int = 0,
        is_timed: bool = True,
    ) -> None:
        """Count one collective.

        Args:
            bytes_to: by the global rank of the peer.
            same_rank_bytes: what this rank keeps.
            is_timed: whether its time is added under its name, where there is a clock.
        """
        tally = self._tally(collective)
        tally.count += 1
        tally.same_rank_bytes += same_rank_bytes
        tally.bytes_to.update(bytes_to)
        tally.is_timed &= is_timed and self.clock is not None

    @contextmanager
    def timed(self, collective: Collective) -> Iterator[None]:
        """Add the time that the code inside takes, if there is a clock."""
        if self.clock is None:
            yield
            return
        span = self.clock()
        yield
        span.stop()
        self._tally(collective).spans.append(span)

    @contextmanager
    def exchanging(self, collective: Collective) -> Iterator[None]:
        """The code inside calls one collective, is timed, and records it itself when it is over."""
        self.is_exchanging = True
        try:
            with self.timed(collective):
                yield
        finally:
            self.is_exchanging = False

    def _tally(self, collective: Collective) -> Tally:
        tally = self.page.get(collective)
        if tally is None:
            tally = self.page[collective] = Tally()
        return tally
