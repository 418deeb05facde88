"""A cluster in a box: all modes alive at once on this machine, a step of each in turn, at each rate of the link."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from megatron_basp.emulated.ensemble import Ensemble, ensemble, turn_of
from megatron_basp.emulated.network import DEVICE, Network
from megatron_basp.emulated.processor_time import ProcessorTime
from megatron_basp.emulated.results import Turn
from megatron_basp.emulated.runs import Conditions, Run
from megatron_basp.megatron.stand_ins import ModelledLink

# What a message takes between two hosts over TCP, apart from its bytes: assumed.
MODELLED_LATENCY_SECONDS = 2e-4
FIRST_PORT = 29500


class Box:
    """A context: the ranks live as long as it does.

    Args:
        network: what joins nodes; None for a modelled link.
    """

    def __init__(self, conditions: Conditions, network: Network | None, runs: Sequence[Run], logs: Path) -> None:
        self._conditions, self._network, self._runs, self._logs = conditions, network, runs, logs
        self._stack = ExitStack()
        self._ensembles: list[Ensemble] = []

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def start(self) -> Iterator[str]:
        """Start the modes, one after the other, since the first prepares what all read; yields the name of the one
        that comes next."""
        conditions = self._conditions
        for number, run in enumerate(self._runs):
            yield run.mode
            link = None
            if self._network is None:
                link = ModelledLink(conditions.node_of_rank, MODELLED_LATENCY_SECONDS)
            place = partial(self._place, FIRST_PORT + number)
            started = ensemble(run, conditions.ranks, conditions.node_of_rank, link, place, self._logs / run.mode)
            self._ensembles.append(self._stack.enter_context(started))

    def steps(self, rates: Sequence[int]) -> Iterator[tuple[str, int, Turn | None]]:
        """Each mode takes one, then each the next: whatever else the machine does meets all of them.

        Yields:
            mode, rate, and what was measured: None in the warm-up, with which each rate begins.
        """
        warm_up = self._conditions.warm_up
        for mbit in rates:
            if self._network is not None:
                self._network.limit(mbit)
            for step in range(warm_up + self._conditions.measured):
                for one in self._ensembles:
                    turn = self._turn(one, mbit)
                    yield one.run.mode, mbit, turn if step >= warm_up else None

    def _place(self, port: int, rank: int) -> dict[str, str]:
        """In a rank: it goes to its node."""
        node, local_rank = divmod(rank, self._conditions.ranks_per_node)
        found = {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(self._conditions.ranks_per_node)}
        if self._network is None:
            return found
        self._network.enter(node)
        address = {"MASTER_ADDR": self._network.address(0), "MASTER_PORT": str(port)}
        return found | address | {"GLOO_SOCKET_IFNAME": DEVICE}

    def _turn(self, one: Ensemble, mbit: int) -> Turn:
        processes = [os.getpid(), *one.pids]
        time_before = ProcessorTime.now(processes)
        bytes_before = 0 if self._network is None else self._network.sent_bytes()
        steps = one.step(mbit)
        measured = ProcessorTime.now(processes).since(time_before)
        crossed = None if self._network is None else self._network.sent_bytes() - bytes_before
        return turn_of(one.run, mbit, steps, across_node_bytes=crossed, **measured)
