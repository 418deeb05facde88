"""Seconds, bytes and memory of a training step under a plan, on a cluster. Pure; everything here is modelled.

A step is M micro-batches through PP stages, then the optimizer:

    step = (M + (PP-1)/virtual stages)·stage + what is left of the replicas' traffic + optimizer
    stage = arithmetic + exchange + tensor- and expert-parallel traffic + pipeline sends

Replicas' traffic hides behind a part of the arithmetic (`HIDING_SHARE`); nothing else does. Beside the estimate stand
bounds: all communication hidden behind arithmetic, and none of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_basp.arithmetic_cost import Arithmetic, arithmetic_of
from megatron_basp.exchange_cost import OURS, ExchangeCost, ExchangeMethod, ExchangeModel
from megatron_basp.memory_cost import MemoryCost, memory_of
from megatron_basp.parallel_cost import (
    Traffic,
    expert_traffic,
    parameters_of_rank,
    pipeline_traffic,
    replica_traffic,
    tensor_traffic,
)
from megatron_basp.plan import BatchPlan
from megatron_basp.training_spec import TrainingSpec

# The optimizer reads gradient, weight and two moments in fp32 and writes three of them and the parameter.
OPTIMIZER_BYTES = 30
# Of a micro-batch's arithmetic, behind how much replicas' traffic hides: the first layer's parameters and the last
# gradients have nothing to hide behind, and a layer's traffic hides behind its neighbour's arithmetic alone. Fitted to
# one published share of time under ZeRO-3, held against published speed-ups (`docs/cost-model.md`).
HIDING_SHARE = 0.6


@dataclass(frozen=True)
class StepCost:
    """Of one step of one rank.

    arithmetic: of one micro-batch, by part.
    exchange: of one micro-batch, layer and direction.
    exchange_seconds, exchange_sent_bytes, exchange_across_bytes: of the whole step, what is recomputed included.
    traffic: of the whole step by kind (tensor, expert, pipeline, replicas), by itself.
    exposed_replica_seconds: what of the replicas' traffic the step waits for.
    bubble_seconds: idle time of pipeline stages.
    step_seconds: the estimate; least_seconds and most_seconds bound it.
    """

    arithmetic: Arithmetic
    exchange: ExchangeCost
    exchange_seconds: float
    exchange_sent_bytes: float
    exchange_across_bytes: float
    traffic: dict[str, Traffic]
    arithmetic_seconds: float
    exposed_replica_seconds: float
    optimizer_seconds: float
    bubble_seconds: float
    step_seconds: float
    least_seconds: float
    most_seconds: float
    memory: MemoryCost

    @property
    def exchange_share(self) -> float:
        return self.exchange_seconds / self.step_seconds

    @property
    def across_bytes(self) -> float:
        """That leave the node in a step, of all kinds."""
        return self.exchange_across_bytes + sum(traffic.across_bytes for traffic in self.traffic.values())


def exchange_model(training: TrainingSpec, method: ExchangeMethod = OURS) -> ExchangeModel:
    return ExchangeModel(training.cluster, training.attention_shape, training.placement, method)


def exchanges_per_layer(training: TrainingSpec) -> int:
    """Of a micro-batch: forward, backward, and forward again where whole layers are recomputed. Attention that is
    recomputed by itself keeps what arrived."""
    return 3 if training.parallelism.recompute == "full" else 2


def step_cost(training: TrainingSpec, plan: BatchPlan, method: ExchangeMethod = OURS) -> StepCost:
    parallelism, micro_batches = training.parallelism, training.micro_batches
    layers = training.model.layers // parallelism.pipeline_model_parallel_size
    arithmetic = arithmetic_of(training)
    exchange = exchange_model(training, method).of_plan(plan)
    exchanges = layers * exchanges_per_layer(training)
    of_stage = {
        "tensor": tensor_traffic(training).times(layers),
        "expert": expert_traffic(training).times(layers),
        "pipeline": pipeline_traffic(training),
    }
    arithmetic_seconds = arithmetic.stage_seconds(layers)
    stage_seconds = (
        arithmetic_seconds + exchange.seconds * exchanges + sum(traffic.seconds for traffic in of_stage.values())
    )
    idle_stages = (parallelism.pipeline_model_parallel_size - 1) / parallelism.virtual_stages
    replicas = replica_traffic(training)
    # Traffic of a step goes with one of its micro-batches, behind the same arithmetic.
    exposed = _exposed_seconds(replicas.a_step + replicas.a_micro_batch, arithmetic_seconds)
    exposed += (micro_batches - 1) * _exposed_seconds(replicas.a_micro_batch, arithmetic_seconds)
    optimizer = _optimizer_seconds(training)
    traffic = {kind: of_one.times(micro_batches) for kind, of_one in of_stage.items()}
    traffic["replicas"] = replicas.a_step + replicas.a_micro_batch.times(micro_batches)
    exchange_seconds = exchange.seconds * exchanges * micro_batches
    communication = exchange_seconds + sum(kind.seconds for kind in traffic.values())
    computing = arithmetic_seconds * (micro_batches + idle_stages) + optimizer
    waiting = idle_stages * (stage_seconds - arithmetic_seconds)
    return StepCost(
        arithmetic=arithmetic,
        exchange=exchange,
        exchange_seconds=exchange_seconds,
        exchange_sent_bytes=exchange.sent_bytes * exchanges * micro_batches,
        exchange_across_bytes=exchange.across_bytes * exchanges * micro_batches,
        traffic=traffic,
        arithmetic_seconds=arithmetic_seconds * micro_batches,
        exposed_replica_seconds=exposed,
        optimizer_seconds=optimizer,
        bubble_seconds=idle_stages * stage_seconds,
        step_seconds=(micro_batches + idle_stages) * stage_seconds + exposed + optimizer,
        least_seconds=max(computing, communication),
        most_seconds=computing + communication + waiting,
        memory=memory_of(training, max(plan.group_sizes)),
    )


def _exposed_seconds(traffic: Traffic, arithmetic_seconds: float) -> float:
    """Of what is sent while one micro-batch is computed."""
    return max(0.0, traffic.seconds - HIDING_SHARE * arithmetic_seconds)


def _optimizer_seconds(training: TrainingSpec) -> float:
    dense, experts = parameters_of_rank(training)
    parallelism = training.parallelism
    if parallelism.sharding != "no_shard":
        dense /= parallelism.replicas
        experts /= parallelism.replicas // parallelism.expert_model_parallel_size
    return (dense + experts) * OPTIMIZER_BYTES / training.cluster.memory_bytes_per_second
