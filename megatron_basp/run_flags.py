"""Megatron's flags of a run, with groups of ranks or plain: those that decide what a step costs. Pure."""

from __future__ import annotations

import shlex

from megatron_basp.plan import BatchPlan, Limits
from megatron_basp.training_spec import TrainingSpec

# Replicas' traffic is modelled as hidden behind arithmetic, which Megatron does by these.
_SHARDING = {
    "no_shard": "--overlap-grad-reduce",
    "optim": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
}
_FSDP = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --overlap-grad-reduce --overlap-param-gather"
_RECOMPUTE = {
    "none": "",
    "selective": "--recompute-granularity selective",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}
_PRECISION = {"fp32": "", "bf16": "--bf16", "fp16": "--fp16", "fp8": "--bf16 --fp8-format hybrid"}


def basp_flags(training: TrainingSpec, cluster: str, group_size: int | None = None) -> str:
    """With groups of ranks.

    Args:
        cluster: its name or file, by which the run plans.
        group_size: K, where the run must not choose it.
    """
    flags = f"--sequence-parallel-mode basp --context-parallel-size {training.parallelism.context_parallel_size}"
    flags += f" --micro-batch-size {training.micro_batch_size} --basp-cluster {shlex.quote(cluster)}"
    if group_size is not None:
        flags += f" --basp-group-size {group_size}"
    return f"{flags} {_other_flags(training)}"


def stock_flags(training: TrainingSpec) -> str:
    """Without them."""
    sizes = _stock_sizes(training.parallelism.context_parallel_size, training.micro_batch_size)
    return f"{sizes} {_other_flags(training)}"


def plain_flags(plan: BatchPlan, limits: Limits) -> str | None:
    """The flags of stock Megatron that spread the same sequences over the same ranks, where there are such.

    One wave at K with B rows is CP = K, micro-batch B·K/N and N/K times the data parallelism.
    """
    if len(plan.waves) > 1:
        return None
    group_size = plan.waves[0].group_size
    rows = len(plan.lengths) * group_size // plan.ranks
    if group_size > 1 and limits.kv_heads % group_size:
        flags = f"--context-parallel-size {group_size} --micro-batch-size {rows}"
        return f"{flags}, but not by a2a: it wants Hkv % K to be 0, and Hkv = {limits.kv_heads}"
    return _stock_sizes(group_size, rows)


def _stock_sizes(context_parallel_size: int, micro_batch_size: int) -> str:
    flags = f"--context-parallel-size {context_parallel_size} --micro-batch-size {micro_batch_size}"
    return flags if context_parallel_size == 1 else f"{flags} --cp-comm-type a2a"


def _other_flags(training: TrainingSpec) -> str:
    """That both have."""
    parallelism = training.parallelism
    sizes = {
        "--tensor-model-parallel-size": parallelism.tensor_model_parallel_size,
        "--pipeline-model-parallel-size": parallelism.pipeline_model_parallel_size,
        "--num-virtual-stages-per-pipeline-rank": parallelism.virtual_stages,
        "--expert-model-parallel-size": parallelism.expert_model_parallel_size,
    }
    flags = [f"{flag} {size}" for flag, size in sizes.items() if size > 1]
    if training.model.experts:
        flags.append("--moe-token-dispatcher-type alltoall")  # as modelled; Megatron's default is allgather
    if parallelism.sequence_parallel and parallelism.tensor_model_parallel_size > 1:
        flags.append("--sequence-parallel")
    flags.append(f"--seq-length {training.seq_length} --global-batch-size {training.global_batch_size}")
    flags.append(_RECOMPUTE[parallelism.recompute])
    sharding = parallelism.sharding
    flags.append(_SHARDING.get(sharding) or f"{_FSDP} --data-parallel-sharding-strategy {sharding}")
    flags.append(_PRECISION[training.precision])
    if training.gradient_bytes == 2:
        flags.append("--grad-reduce-in-bf16")
    return " ".join(flag for flag in flags if flag)
