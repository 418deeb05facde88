"""The same on real hardware: this process is one of torchrun's, and starts a rank of its own for each mode in turn.

Modes come one after the other, so that each has the device's memory to itself. Every one gets fresh processes, since
Megatron can be started once in a process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_basp.emulated.ensemble import ensemble, turn_of
from megatron_basp.emulated.results import Turn
from megatron_basp.emulated.runs import Conditions, Run
from megatron_basp.local_ranks import free_port
from megatron_basp.megatron.measured_run import RankStep

PATIENCE = timedelta(hours=2)


class Hardware:
    """torchrun's processes, one of which this is; they tell each other by its store what they measured."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.ranks = int(os.environ["WORLD_SIZE"])
        self.ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        self._store, _, _ = next(dist.rendezvous("env://"))
        self._store.set_timeout(PATIENCE)

    def steps(self, runs: Sequence[Run], conditions: Conditions, logs: Path) -> Iterator[tuple[str, list[Turn]]]:
        """Yields the mode of each step that was taken; with its last, on rank 0, all turns of the mode that count."""
        for run in runs:
            environment = self._environment(run)
            folder = logs / run.mode / f"process{self.rank}"
            own: list[RankStep] = []
            started = ensemble(run, 1, conditions.node_of_rank, None, lambda _, found=environment: found, folder)
            with started as one:
                for step in range(conditions.steps):
                    own += one.step(None)
                    is_last = step == conditions.steps - 1
                    yield run.mode, self._turns(run, own[conditions.warm_up :]) if is_last else []

    def _turns(self, run: Run, own: list[RankStep]) -> list[Turn]:
        of_ranks = self._gathered(run.mode, own)
        return [turn_of(run, None, of_step) for of_step in zip(*of_ranks, strict=True)]

    def _environment(self, run: Run) -> dict[str, str]:
        """torchrun's, with a store of this mode's own, which its first rank makes."""
        key = f"port of {run.mode}"
        if self.rank == 0:
            self._store.set(key, str(free_port()))
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        own = {"MASTER_PORT": self._store.get(key).decode(), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        return {name: os.environ[name] for name in names} | own

    def _gathered(self, mode: str, own: list[RankStep]) -> list[list[RankStep]]:
        """Of all ranks, on rank 0; nothing on others."""
        self._store.set(f"steps of {mode}, rank {self.rank}", json.dumps([asdict(step) for step in own]))
        if self.rank != 0:
            return []
        texts = [self._store.get(f"steps of {mode}, rank {rank}") for rank in range(self.ranks)]
        of_ranks: list[list[dict[str, Any]]] = [json.loads(text) for text in texts]
        return [[RankStep(**step) for step in steps] for steps in of_ranks]
