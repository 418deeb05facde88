"""A small cluster with round figures, and training runs on it, for tests of the cost model."""

from dataclasses import replace

from megatron_basp.cluster import AcrossNodes, ClusterSpec, WithinNode
from megatron_basp.model_spec import ModelSpec
from megatron_basp.training_spec import Parallelism, TrainingSpec

CLUSTER = ClusterSpec(
    name="round",
    nodes=None,
    gpus_per_node=4,
    memory_bytes=80e9,
    memory_bytes_per_second=2e12,
    peak_flops_per_second={"bf16": 1e14, "fp32": 1e13},
    matmul_share_of_peak=0.5,
    attention_flops_per_second={64: {1024: 2e13, 4096: 4e13}, 128: {1024: 3e13, 4096: 6e13}},
    ring_bytes_per_second=1e11,
    within=WithinNode(latency_seconds={2: 1e-5, 4: 2e-5}, bytes_per_second={2: 1e11, 4: 2e11}),
    across=AcrossNodes(
        latency_seconds=5e-5,
        bytes_per_second_per_nic=1e10,
        nics_per_node=2,
        all_to_all_uses_all_nics=True,
        share_of_rate={2: 0.8, 4: 0.5},
        ring_share_of_rate=0.9,
    ),
)
MODEL = ModelSpec(layers=4, hidden=256, ffn=512, heads=8, kv_heads=4, head_size=64, vocabulary=1000)


def training(cluster=CLUSTER, model=MODEL, seq_length=1024, micro_batch_size=2, global_batch_size=None, **sizes):
    """A run at N = 8 unless `sizes` say otherwise; other keywords are those of `Parallelism` or `TrainingSpec`."""
    of_run = {key: sizes.pop(key) for key in ("precision", "gradient_bytes") if key in sizes}
    parallelism = Parallelism(**{"context_parallel_size": 8, **sizes})
    samples = global_batch_size or micro_batch_size * parallelism.data_parallel_size
    return TrainingSpec(model, cluster, parallelism, seq_length, micro_batch_size, samples, **of_run)


def with_across(**changes):
    return replace(CLUSTER, across=replace(CLUSTER.across, **changes))
