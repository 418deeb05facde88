"""FLOPs of one micro-batch on one rank, by part, and the seconds that they take. Pure.

A multiplication and an addition are two. Backward is twice the forward of a matrix product and 2.5 times that of
attention, which computes its scores anew (FlashAttention-2, section 4.1). What norms, rotary embedding and activations
take is in `matmul_share_of_peak`, which is fitted to whole training steps (`docs/cost-model.md`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_basp.cluster import ClusterSpec
from megatron_basp.training_spec import TrainingSpec

MATMUL_BACKWARD, ATTENTION_BACKWARD = 2.0, 2.5


@dataclass(frozen=True)
class Arithmetic:
    """Of one micro-batch on one rank, forward, backward and what is recomputed.

    layer_flops, layer_seconds: of one layer, by part: projections, attention, mlp, recompute.
    output_flops, output_seconds: of the output layer, which the last pipeline stage has.
    """

    layer_flops: Mapping[str, float]
    layer_seconds: Mapping[str, float]
    output_flops: float
    output_seconds: float

    def stage_seconds(self, layers: int) -> float:
        """Of the pipeline stage that has the output layer."""
        return layers * sum(self.layer_seconds.values()) + self.output_seconds


def arithmetic_of(training: TrainingSpec) -> Arithmetic:
    """Independent of the plan: every rank attends B·S/N tokens' worth of whole sequences with its heads."""
    model, parallelism, cluster = training.model, training.parallelism, training.cluster
    tensor_parallel, tokens = parallelism.tensor_model_parallel_size, training.tokens
    # Causal: a token sees S/2 others on average, once for the scores and once for the values.
    attention = 2 * tokens * training.seq_length * model.heads * model.head_size / tensor_parallel
    forward = {
        "projections": 2 * tokens * model.attention_parameters / tensor_parallel,
        "attention": attention,
        "mlp": 2 * tokens * model.active_mlp_parameters / tensor_parallel,
    }
    flops = {part: value * (1 + MATMUL_BACKWARD) for part, value in forward.items()}
    flops["attention"] = attention * (1 + ATTENTION_BACKWARD)
    again = {"none": [], "selective": ["attention"], "full": list(forward)}[parallelism.recompute]
    matmul_rate = cluster.peak_flops_per_second[training.precision] * cluster.matmul_share_of_peak
    attention_rate = attention_flops_per_second(cluster, model.head_size, training.seq_length, training.precision)
    rate = {part: attention_rate if part == "attention" else matmul_rate for part in forward}
    seconds = {part: value / rate[part] for part, value in flops.items()}
    flops["recompute"] = sum(forward[part] for part in again)
    seconds["recompute"] = sum(forward[part] / rate[part] for part in again)
    output = 2 * tokens * model.embedding_parameters / tensor_parallel * (1 + MATMUL_BACKWARD)
    return Arithmetic(flops, seconds, output, output / matmul_rate)


def attention_flops_per_second(
    cluster: ClusterSpec, head_size: int, seq_length: int, precision: str = "bf16"
) -> float:
    """From the cluster's table: the next head size up (or the largest), and between lengths by their logarithm.
    In fp32 it is as much slower as products are; a file with the peak of one precision has attention in that one."""
    rate = _rate_in_the_table(cluster.attention_flops_per_second, head_size, seq_length)
    peaks = cluster.peak_flops_per_second
    if precision == "fp32" and {"fp32", "bf16"} <= peaks.keys():
        rate *= peaks["fp32"] / peaks["bf16"]
    return rate


def _rate_in_the_table(sizes: Mapping[int, Mapping[int, float]], head_size: int, seq_length: int) -> float:
    table = sizes[min((size for size in sizes if size >= head_size), default=max(sizes))]
    below = max((length for length in table if length <= seq_length), default=min(table))
    above = min((length for length in table if length >= seq_length), default=max(table))
    if below == above:
        return table[below]
    part = min(1.0, max(0.0, math.log(seq_length / below) / math.log(above / below)))
    return table[below] + part * (table[above] - table[below])
