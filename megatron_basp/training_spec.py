"""One training run, as far as it decides what a step costs: model, parallelism, batch, precision. Pure.

Names are Megatron's flags. N is the context-parallel size, B the micro-batch size of N ranks together, S the sequence
length, D = DP·N the ranks that share one set of parameters and sum their gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from megatron_basp.cluster import ClusterSpec
from megatron_basp.errors import ConfigurationError
from megatron_basp.exchange_cost import AttentionShape
from megatron_basp.model_spec import ModelSpec
from megatron_basp.placement import Placement, aligned_domain_size, placement
from megatron_basp.plan import Limits

Sharding = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
Recompute = Literal["none", "selective", "full"]
Precision = Literal["bf16", "fp16", "fp8", "fp32"]
FP8_TOKENS = 16  # at a time, in delayed scaling (`megatron/fp8.py`)
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp8": 2, "fp32": 4}  # of activations; fp8 is for linear layers alone


@dataclass(frozen=True)
class Parallelism:
    """Sizes by Megatron's flags; the defaults are Megatron's.

    sequence_parallel: `--sequence-parallel`, which spreads norms over tensor-parallel ranks.
    virtual_stages: `--num-virtual-stages-per-pipeline-rank`.
    sharding: `--data-parallel-sharding-strategy`; `optim` is the distributed optimizer as well.
    recompute: `--recompute-granularity`.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    sequence_parallel: bool = True
    virtual_stages: int = 1
    sharding: Sharding = "no_shard"
    recompute: Recompute = "none"

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise ConfigurationError(f"--{name.replace('_', '-')} must be 1 or more, got {value}")
        for name, value, known in (
            ("--data-parallel-sharding-strategy", self.sharding, get_args(Sharding)),
            ("--recompute-granularity", self.recompute, get_args(Recompute)),
        ):
            if value not in known:
                raise ConfigurationError(f"{name} {value} is not known: use one of {', '.join(known)}")
        if self.pipeline_model_parallel_size > 1 and self.sharding in ("optim_grads", "optim_grads_params"):
            raise ConfigurationError(
                f"--data-parallel-sharding-strategy {self.sharding} is Megatron-FSDP, which has no pipeline stages: "
                f"use --pipeline-model-parallel-size 1, or optim"
            )

    @property
    def devices(self) -> int:
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
            * self.data_parallel_size
        )

    @property
    def replicas(self) -> int:
        """D, the ranks that sum their gradients."""
        return self.data_parallel_size * self.context_parallel_size


@dataclass(frozen=True)
class TrainingSpec:
    """A model on a cluster.

    global_batch_size: sequences a step of all replicas.
    gradient_bytes: an element of gradients as they are reduced: 4, or 2 with `--grad-reduce-in-bf16`.
    """

    model: ModelSpec
    cluster: ClusterSpec
    parallelism: Parallelism
    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    precision: Precision = "bf16"
    gradient_bytes: int = 4
    placement: Placement = field(init=False)
    domain_size: int = field(init=False)

    def __post_init__(self) -> None:
        _check(self)
        cp_groups, node_of_device = _nodes(self.parallelism, self.cluster.gpus_per_node)
        object.__setattr__(self, "placement", placement(cp_groups, node_of_device))
        object.__setattr__(self, "domain_size", aligned_domain_size(cp_groups, node_of_device))

    @property
    def tokens(self) -> int:
        """T, of a micro-batch on a rank."""
        return self.seq_length * self.micro_batch_size // self.parallelism.context_parallel_size

    @property
    def token_multiple(self) -> int:
        """What T is a multiple of: the ranks that `--sequence-parallel` spreads it over, each with whole FP8 tiles."""
        parallelism = self.parallelism
        spread = parallelism.tensor_model_parallel_size if parallelism.sequence_parallel else 1
        return spread * (FP8_TOKENS if self.precision == "fp8" else 1)

    @property
    def micro_batches(self) -> int:
        """M, that a replica takes in a step."""
        return self.global_batch_size // (self.micro_batch_size * self.parallelism.data_parallel_size)

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.precision]

    @property
    def limits(self) -> Limits:
        """For `plan_batch`."""
        shape = self.attention_shape
        return Limits(shape.heads, shape.kv_heads, domain_size=self.domain_size)

    @property
    def attention_shape(self) -> AttentionShape:
        """Of a tensor-parallel rank; fewer key-value heads than TP are copied, as Megatron does."""
        model, tensor_parallel = self.model, self.parallelism.tensor_model_parallel_size
        return AttentionShape(
            heads=model.heads // tensor_parallel,
            kv_heads=max(1, model.kv_heads // tensor_parallel),
            query_head_size=model.head_size,
            value_head_size=model.head_size,
            element_bytes=self.element_bytes,
        )


def _check(training: TrainingSpec) -> None:
    model, cluster, parallelism = training.model, training.cluster, training.parallelism
    tensor_parallel, stages = parallelism.tensor_model_parallel_size, parallelism.pipeline_model_parallel_size
    for name in ("seq_length", "micro_batch_size", "global_batch_size"):
        if getattr(training, name) < 1:
            raise ConfigurationError(f"--{name.replace('_', '-')} must be 1 or more, got {getattr(training, name)}")
    if training.precision not in cluster.peak_flops_per_second:
        known = ", ".join(cluster.peak_flops_per_second)
        raise ConfigurationError(f"cluster {cluster.name} has no peak for {training.precision}, only for {known}")
    if model.heads % tensor_parallel or (model.kv_heads % tensor_parallel and tensor_parallel % model.kv_heads):
        raise ConfigurationError(
            f"heads % TP must be 0, got {model.heads} attention heads, {model.kv_heads} query groups and "
            f"TP={tensor_parallel}: use a --tensor-model-parallel-size that divides both"
        )
    if model.layers % (stages * parallelism.virtual_stages):
        raise ConfigurationError(
            f"layers % (PP·virtual stages) must be 0, got {model.layers} layers and "
            f"{stages}·{parallelism.virtual_stages}: use a --pipeline-model-parallel-size that divides {model.layers}"
        )
    experts, expert_parallel = model.experts, parallelism.expert_model_parallel_size
    if expert_parallel > 1 and (not experts or experts % expert_parallel):
        raise ConfigurationError(
            f"experts % EP must be 0, got {experts} experts and EP={expert_parallel}: use an "
            f"--expert-model-parallel-size that divides them"
        )
    if parallelism.replicas % expert_parallel:
        raise ConfigurationError(
            f"(DP·CP) % EP must be 0, got DP={parallelism.data_parallel_size}, CP={parallelism.context_parallel_size} "
            f"and EP={expert_parallel}"
        )
    ranks, tokens = parallelism.context_parallel_size, training.seq_length * training.micro_batch_size
    if tokens % ranks:
        raise ConfigurationError(
            f"B·S % N must be 0, got B={training.micro_batch_size}, S={training.seq_length} and N={ranks}: use a "
            f"--seq-length that is a multiple of {ranks}"
        )
    if training.tokens % training.token_multiple:
        raise ConfigurationError(
            f"T % {training.token_multiple} must be 0 for the T = B·S/N tokens of a rank with "
            f"TP={tensor_parallel} and {training.precision}, got T={training.tokens} from "
            f"B={training.micro_batch_size}, S={training.seq_length} and N={ranks}: use a --seq-length that is a "
            f"multiple of {training.token_multiple * ranks}"
        )
    samples = training.micro_batch_size * parallelism.data_parallel_size
    if training.global_batch_size % samples:
        raise ConfigurationError(
            f"--global-batch-size % (B·DP) must be 0, got {training.global_batch_size}, "
            f"B={training.micro_batch_size}, DP={parallelism.data_parallel_size}: use a multiple of {samples}"
        )
    if parallelism.virtual_stages > 1 and training.micro_batches % stages:
        raise ConfigurationError(
            f"virtual pipeline stages want M = samples/(B·DP) micro-batches to be a multiple of PP, got "
            f"{training.micro_batches} and PP={stages}: use a --global-batch-size that is a multiple of "
            f"{samples * stages}"
        )
    gpus = None if cluster.nodes is None else cluster.nodes * cluster.gpus_per_node
    if gpus is not None and parallelism.devices > gpus:
        raise ConfigurationError(
            f"TP·PP·CP·DP must be at most the {gpus} GPUs of {cluster.name}, got "
            f"{tensor_parallel}·{stages}·{ranks}·{parallelism.data_parallel_size} = {parallelism.devices}"
        )


def _nodes(parallelism: Parallelism, gpus_per_node: int) -> tuple[list[range], dict[int, int]]:
    """The devices of each CP group, and their nodes, one after the other in Megatron's usual order of tp, cp, dp."""
    tensor_parallel = parallelism.tensor_model_parallel_size
    devices_of_replica = tensor_parallel * parallelism.context_parallel_size
    # Where a replica begins with a node, all that is before it is found there again.
    replicas = min(
        parallelism.devices // devices_of_replica, math.lcm(devices_of_replica, gpus_per_node) // devices_of_replica
    )
    devices = range(replicas * devices_of_replica)
    cp_groups = [
        devices[first + lane : first + devices_of_replica : tensor_parallel]
        for first in devices[::devices_of_replica]
        for lane in range(tensor_parallel)
    ]
    return cp_groups, {device: device // gpus_per_node for device in devices}
