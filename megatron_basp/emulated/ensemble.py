"""The ranks of one mode, alive and waiting for their turn: one mode at a time takes a step.

A rank says `READY` before each step and at its end, and is told to go on; in between it reports a `RankStep`. All of
it by pipes, so that no word of it crosses the network that is measured.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from megatron_basp.emulated.results import Turn
from megatron_basp.emulated.runs import Run
from megatron_basp.errors import ConfigurationError
from megatron_basp.local_ranks import StartedRanks, started_ranks
from megatron_basp.megatron.measured_run import RankStep, time_training
from megatron_basp.megatron.stand_ins import ModelledLink

READY = "ready"


class Ensemble:
    """Raises, from each of its methods, ConfigurationError where a rank's flags were refused, and RankFailed where one
    raised or died."""

    def __init__(self, run: Run, started: StartedRanks[None], connections: Sequence[Connection]) -> None:
        self.run = run
        self._started, self._connections = started, connections

    @property
    def pids(self) -> list[int]:
        return self._started.pids

    def wait_until_ready(self) -> None:
        self._from_each()

    def step(self, link_mbit: int | None) -> list[RankStep]:
        """Have all take one, and wait until they could take the next: nothing of it is on its way then."""
        for connection in self._connections:
            connection.send(link_mbit)
        steps = self._from_each()
        self.wait_until_ready()
        return steps

    def _from_each(self) -> list[Any]:
        """The next message of each rank, by rank."""
        messages: dict[Connection, Any] = {}
        while len(messages) < len(self._connections):
            silent = [connection for connection in self._connections if connection not in messages]
            for connection in wait(silent, timeout=1):
                assert isinstance(connection, Connection)
                messages[connection] = message = connection.recv()
                if isinstance(message, ConfigurationError):
                    raise message
            if len(messages) < len(self._connections):
                self._started.are_over()
        return [messages[connection] for connection in self._connections]


@contextmanager
def ensemble(
    run: Run,
    ranks: int,
    nodes: Sequence[int],
    link: ModelledLink | None,
    place: Callable[[int], Mapping[str, str]],
    log_folder: Path,
) -> Iterator[Ensemble]:
    """Start one mode's ranks; ready once it is yielded.

    Args:
        ranks: to start here.
        nodes: of each global rank.
        link: in place of a real one.
        place: called in each, with its number here: puts it where it belongs, and returns what of torchrun's
            environment is special there.
    """
    pipes = [multiprocessing.Pipe() for _ in range(ranks)]

    def on_rank(number: int) -> None:
        os.environ.update(place(number))
        connection = pipes[number][1]

        def wait_for_turn() -> int | None:
            connection.send(READY)
            return connection.recv()

        try:
            time_training(run.timed, nodes, link, wait_for_turn, connection.send)
        except ConfigurationError as error:
            connection.send(error)
            raise
        connection.send(READY)

    with started_ranks(on_rank, ranks, log_folder) as started:
        here = Ensemble(run, started, [ours for ours, _ in pipes])
        here.wait_until_ready()
        yield here
    for both in pipes:
        for end in both:
            end.close()


def turn_of(run: Run, link_mbit: int | None, steps: Sequence[RankStep], **measured: Any) -> Turn:
    """One step from what all ranks saw of it; `measured` is what somebody else saw."""
    peaks = [step.peak_memory_bytes for step in steps if step.peak_memory_bytes is not None]
    return Turn(
        run.mode,
        link_mbit,
        max(step.seconds for step in steps),
        _over_ranks([step.exchange_seconds for step in steps], run, statistics.mean),
        next((step.loss for step in steps if step.loss is not None), None),
        _over_ranks([step.across_bytes for step in steps], run, sum),
        peak_memory_bytes=max(peaks, default=None),
        **measured,
    )


def _over_ranks(values: Sequence[Any], run: Run, combine: Callable[[Any], Any]) -> Any:
    """None where it is not known: of an exchange by code that is not ours."""
    if None in values:
        return 0 if run.group_sizes == (1,) else None
    return combine(values)
