"""The cost model's figures of a case beside those of the simulation. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_basp.cost_model import StepCost, exchanges_per_layer, step_cost
from scripts.simulate.cases import Case

BOUND = 0.05


@dataclass(frozen=True)
class Comparison:
    """Of one layer and direction; copies before and after, which no link carries, are left out of both.

    simulated_seconds: of all waves.
    simulated_node_bytes: what leaves the node that sends most.
    flows: how many were simulated. simgrid: its version.
    """

    case: Case
    simulated_seconds: float
    simulated_node_bytes: float
    flows: int
    simgrid: str

    @cached_property
    def step(self) -> StepCost:
        return step_cost(self.case.training, self.case.plan)

    @property
    def modelled_seconds(self) -> float:
        return self.step.exchange.seconds - self.step.exchange.copy_seconds

    @property
    def modelled_node_bytes(self) -> float:
        return self.step.exchange.leaving_bytes

    @property
    def simulated_step_seconds(self) -> float:
        """The modelled step with the simulated exchange in place of the modelled one."""
        training = self.case.training
        layers = training.model.layers // training.parallelism.pipeline_model_parallel_size
        exchanges = layers * exchanges_per_layer(training) * training.micro_batches
        return self.step.step_seconds + exchanges * (self.simulated_seconds - self.modelled_seconds)

    @property
    def time_difference(self) -> float:
        return difference(self.modelled_seconds, self.simulated_seconds)

    @property
    def bytes_difference(self) -> float:
        return difference(self.modelled_node_bytes, self.simulated_node_bytes)

    @property
    def agrees(self) -> bool:
        return max(abs(self.time_difference), abs(self.bytes_difference)) <= BOUND

    @property
    def disagreement(self) -> str:
        return (
            f"modelled {self.modelled_seconds * 1e3:.3f} ms and {self.modelled_node_bytes / 1e6:.1f} MB out of a "
            f"node, simulated {self.simulated_seconds * 1e3:.3f} ms and {self.simulated_node_bytes / 1e6:.1f} MB: "
            f"more than {BOUND:.0%} apart"
        )


def difference(modelled: float, simulated: float) -> float:
    """By which part of the simulated figure the modelled one is above it."""
    if simulated == 0:
        return 0.0 if modelled == 0 else float("inf")
    return modelled / simulated - 1


def compare(case: Case, answer: Mapping[str, Any]) -> Comparison:
    waves = answer["waves"]
    return Comparison(
        case,
        simulated_seconds=sum(wave["seconds"] for wave in waves),
        simulated_node_bytes=sum(max(wave["node_sent_bytes"]) for wave in waves),
        flows=sum(wave["flows"] for wave in waves),
        simgrid=answer["simgrid"],
    )
