"""What replicas, tensor-, expert- and pipeline-parallel ranks send one another, in bytes and seconds. Pure.

Rings: in a group of n, an all-gather or reduce-scatter of x bytes sends x·(n-1)/n a rank, an all-reduce twice that. A
ring over nodes is as fast as its share of a node's interfaces, which it has to itself where all GPUs of the node are
in it and shares where they are not. Latency is left out: buckets are large.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_basp.cluster import ClusterSpec
from megatron_basp.training_spec import TrainingSpec


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends, and how long they take by themselves; across_bytes is the part that leaves the node."""

    sent_bytes: float = 0
    across_bytes: float = 0
    seconds: float = 0

    def times(self, factor: float) -> Traffic:
        return Traffic(self.sent_bytes * factor, self.across_bytes * factor, self.seconds * factor)

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.sent_bytes + other.sent_bytes,
            self.across_bytes + other.across_bytes,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True)
class ReplicaTraffic:
    """Of the D ranks that share parameters.

    a_step: once a step. a_micro_batch: with each micro-batch.
    """

    a_step: Traffic
    a_micro_batch: Traffic


def parameters_of_rank(training: TrainingSpec) -> tuple[float, float]:
    """(Those that D = DP·N ranks share, those of experts, which DP·N/EP ranks share), of the largest stage."""
    model, parallelism = training.model, training.parallelism
    tensor_parallel, stages = parallelism.tensor_model_parallel_size, parallelism.pipeline_model_parallel_size
    layers = model.layers // stages
    experts = model.expert_parameters
    tables = model.embedding_parameters * (2 if stages == 1 and not model.tied else 1)
    dense = layers * (model.attention_parameters + model.mlp_parameters - experts) + tables
    return dense / tensor_parallel, layers * experts / parallelism.expert_model_parallel_size / tensor_parallel


def replica_traffic(training: TrainingSpec) -> ReplicaTraffic:
    """By `--data-parallel-sharding-strategy`, as Megatron's distributed optimizer and Megatron-FSDP do it."""
    dense, experts = parameters_of_rank(training)
    parallelism, sharding = training.parallelism, training.parallelism.sharding
    expert_parallel = parallelism.expert_model_parallel_size
    gathers, reductions = Traffic(), Traffic()
    for parameters, ranks, stride in (
        (dense, parallelism.replicas, parallelism.tensor_model_parallel_size),
        (
            experts,
            parallelism.replicas // expert_parallel,
            parallelism.tensor_model_parallel_size * expert_parallel,
        ),
    ):
        gathers += ring(training.cluster, parameters * training.element_bytes, ranks, stride)
        reductions += ring(training.cluster, parameters * training.gradient_bytes, ranks, stride)
    if sharding == "no_shard":
        return ReplicaTraffic(reductions.times(2), Traffic())
    if sharding == "optim":
        return ReplicaTraffic(reductions + gathers, Traffic())
    if sharding == "optim_grads":
        return ReplicaTraffic(gathers, reductions)
    return ReplicaTraffic(Traffic(), gathers.times(2) + reductions)  # parameters for forward, and for backward again


def tensor_traffic(training: TrainingSpec) -> Traffic:
    """Of one layer and micro-batch, what is recomputed included: rings over its tokens, a gather and a scatter for
    each all-reduce.

    Attention and the MLP (or the shared expert) take two rings each way, and with `--sequence-parallel` one more
    backward, which gathers the input again for the weights' gradient. Experts gather each token as often as it has
    experts, and scatter it.
    """
    model, tensor_parallel = training.model, training.parallelism.tensor_model_parallel_size
    matrices = 1 if model.experts and not model.shared_expert_ffn else 2
    forward = 2 * (matrices + model.experts_per_token)
    backward = forward + (matrices if training.parallelism.sequence_parallel else 0)
    elements = training.tokens * model.hidden
    whole = ring(training.cluster, elements * training.element_bytes, tensor_parallel, 1)
    return whole.times(forward * _forwards(training) + backward)


def _forwards(training: TrainingSpec) -> int:
    """How often a micro-batch goes forward through the linear layers."""
    return 2 if training.parallelism.recompute == "full" else 1


def expert_traffic(training: TrainingSpec) -> Traffic:
    """Of one layer and micro-batch: tokens to their experts and back, evenly dealt out; forward, backward, and what is
    recomputed."""
    model, cluster, parallelism = training.model, training.cluster, training.parallelism
    ranks, tensor_parallel = parallelism.expert_model_parallel_size, parallelism.tensor_model_parallel_size
    if ranks == 1 or not model.experts:
        return Traffic()
    tokens = training.tokens * model.experts_per_token / tensor_parallel
    to_a_peer = tokens * model.hidden * training.element_bytes / ranks
    in_node = max(1, min(ranks, cluster.gpus_per_node // tensor_parallel))
    within_bytes, across_bytes = to_a_peer * (in_node - 1), to_a_peer * (ranks - in_node)
    latency = cluster.within_latency_seconds(in_node)
    seconds = within_bytes / cluster.within_bytes_per_second(in_node)
    if across_bytes:
        nodes = -(-ranks * tensor_parallel // cluster.gpus_per_node)
        latency = max(latency, cluster.across_latency_seconds())
        across_seconds = across_bytes * cluster.gpus_per_node / cluster.across_bytes_per_second(nodes)
        seconds = max(seconds, across_seconds)
    return Traffic(within_bytes + across_bytes, across_bytes, latency + seconds).times(2 * (_forwards(training) + 1))


def pipeline_traffic(training: TrainingSpec) -> Traffic:
    """Of one micro-batch: activations to the next stage and gradients back, once a virtual stage."""
    parallelism, cluster = training.parallelism, training.cluster
    if parallelism.pipeline_model_parallel_size == 1:
        return Traffic()
    spread = parallelism.tensor_model_parallel_size if parallelism.sequence_parallel else 1
    elements = training.tokens * training.model.hidden / spread
    sent_bytes = 2 * parallelism.virtual_stages * elements * training.element_bytes
    apart = parallelism.devices // parallelism.pipeline_model_parallel_size
    if parallelism.devices <= cluster.gpus_per_node:
        return Traffic(sent_bytes, 0, sent_bytes / cluster.within_bytes_per_second(2))
    # So many GPUs of a node send to the next one; the stage that they are of is the slowest.
    leaving = min(apart, cluster.gpus_per_node)
    seconds = sent_bytes * leaving / cluster.ring_across_bytes_per_second()
    return Traffic(sent_bytes, sent_bytes * leaving / cluster.gpus_per_node, seconds)


def ring(cluster: ClusterSpec, whole_bytes: float, ranks: int, stride: int) -> Traffic:
    """A gather or scatter of `whole_bytes` by ranks that are `stride` devices apart."""
    if ranks == 1 or not whole_bytes:
        return Traffic()
    sent_bytes = whole_bytes * (ranks - 1) / ranks
    in_node = max(1, min(ranks, cluster.gpus_per_node // stride))
    if in_node == ranks:
        return Traffic(sent_bytes, 0, sent_bytes / cluster.ring_bytes_per_second)
    rate = min(cluster.ring_bytes_per_second, cluster.ring_across_bytes_per_second() * in_node / cluster.gpus_per_node)
    # One rank of each node sends to the next node; so much of a mean rank's bytes.
    return Traffic(sent_bytes, sent_bytes / in_node, sent_bytes / rate)
