"""What is simulated: runs on clusters, their plans, and the request to `all_to_all.py` that follows from them.

The request says which GPUs share what and who sends how much to whom, from ranks and heads, with none of the cost
model's formulas. Taken from the cluster's file as it takes them: rates by the number of GPUs or nodes that take part,
and latencies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_basp.cluster import ClusterSpec, load_cluster
from megatron_basp.cost_model import exchange_model
from megatron_basp.exchange_cost import AttentionShape
from megatron_basp.model_spec import ModelSpec, load_model
from megatron_basp.plan import BatchPlan, Wave, plan_batch
from megatron_basp.training_spec import Parallelism, TrainingSpec

CONFIGS = Path(__file__).parents[2] / "configs"
SWEEP_RANKS = (16, 32, 64, 128, 256, 512)
# Up to here each pair of GPUs has a flow; SimGrid's time grows with more than the square of their number.
MOST_RANKS_WITH_A_FLOW_A_PEER = 64


@dataclass(frozen=True)
class Case:
    """One plan on one cluster; sweep: which curve of the plot it is a point of, or none."""

    name: str
    training: TrainingSpec
    plan: BatchPlan
    sweep: str | None = None

    @property
    def waves(self) -> str:
        return ", then ".join(f"{len(wave.rows)} at K={wave.group_size}" for wave in self.plan.waves)

    @property
    def flows(self) -> str:
        return "peer" if self.plan.ranks <= MOST_RANKS_WITH_A_FLOW_A_PEER else "node"


def all_cases() -> list[Case]:
    a100, h100 = cluster("a100-80gb-8"), cluster("h100-8")
    llama, paper = load_model("llama3.1-70b", CONFIGS / "models"), load_model("llama3.1-8b", CONFIGS / "models")
    # No GPU without NVLink is in the library; here what stays inside a node is slower than what leaves it.
    slow_inside = replace(h100, name="h100-8, slow inside", within=replace(h100.within, bytes_per_second={8: 12e9}))
    # Heads that 3, 6 and 12 ranks can share, and 144.
    of_48, of_144 = replace(llama, heads=48, kv_heads=48), replace(llama, heads=144, kv_heads=144)
    return [
        *sweep_cases(h100, many_heads(paper)),
        case("the paper's: BASP", cluster("a100-40gb-2x4"), paper, ranks=8, rows=2),
        case("the paper's: Ulysses", cluster("a100-40gb-2x4"), paper, ranks=8, rows=2, group_size=8),
        case("3 sequences on 16 ranks", a100, llama, ranks=16, rows=3),
        case("3 sequences on 64 ranks", a100, llama, ranks=64, rows=3),
        case("12 sequences on 64 ranks", a100, llama, ranks=64, rows=12),
        case("7 sequences, 8 cards a node", cluster("a100-80gb-8-8nic"), llama, ranks=64, rows=7),
        case("groups span 2 nodes", a100, llama, ranks=32, rows=2, group_size=16),
        case("the same, 1,024 tokens", a100, llama, ranks=32, rows=2, seq_length=1024, group_size=16),
        case("two racks of 72", cluster("gb200-72"), of_144, ranks=144, rows=16, seq_length=27648, group_size=144),
        case("two replicas share a node", a100, llama, ranks=4, rows=2, replicas=4, group_size=4),
        case("TP=2: 4·2 GPUs fit a node", a100, llama, ranks=16, rows=4, tensor_parallel=2),
        case("TP=2: 8·2 GPUs span 2", a100, llama, ranks=16, rows=2, tensor_parallel=2),
        case("links inside are slower", slow_inside, llama, ranks=32, rows=2),
        case("2 replicas of 12, K=12", a100, of_48, ranks=12, rows=1, replicas=2),
        case("2 replicas of 12, K=6 straddles", a100, of_48, ranks=12, rows=2, replicas=2, group_size=6),
        case("the same, slower inside", slow_inside, of_48, ranks=12, rows=2, replicas=2, group_size=6),
        case("4 replicas of 6, K=3 straddles", a100, of_48, ranks=6, rows=2, replicas=4, group_size=3),
        case("12 ranks alone, K=12", a100, of_48, ranks=12, rows=1),
        case("12 ranks alone, K=6 straddles", a100, of_48, ranks=12, rows=2, group_size=6),
    ]


def sweep_cases(on: ClusterSpec, model: ModelSpec) -> list[Case]:
    """Each rank has as many tokens and each sequence is as long, whatever N; a group of 8 takes one sequence."""
    return [
        case(f"{mode}, N={ranks}", on, model, ranks=ranks, rows=ranks // 8, group_size=size, sweep=mode)
        for ranks in SWEEP_RANKS
        for mode, size in (("Ulysses", ranks), ("BASP", None))
    ]


def many_heads(model: ModelSpec) -> ModelSpec:
    """With 512 heads, so that 512 ranks can share them; no model in the library has more than 64."""
    return replace(model, heads=512, kv_heads=64, head_size=64)


def case(
    name: str,
    on: ClusterSpec,
    model: ModelSpec,
    *,
    ranks: int,
    rows: int,
    seq_length: int = 24576,
    tensor_parallel: int = 1,
    replicas: int = 1,
    group_size: int | None = None,
    sweep: str | None = None,
) -> Case:
    """Args: group_size: K, or None for the planner's choice on this cluster. replicas: DP."""
    parallelism = Parallelism(
        tensor_model_parallel_size=tensor_parallel, context_parallel_size=ranks, data_parallel_size=replicas
    )
    training = TrainingSpec(model, on, parallelism, seq_length, rows, global_batch_size=rows * replicas)
    limits = replace(training.limits, group_size=group_size)
    cost_of = exchange_model(training).cost_of(seq_length)
    return Case(name, training, plan_batch((seq_length,) * rows, ranks, limits, cost_of), sweep)


def cluster(name: str) -> ClusterSpec:
    return load_cluster(name, CONFIGS / "hardware")


def request_of(case: Case) -> dict[str, Any]:
    """As `all_to_all.py` says; a wave at K = 1 exchanges nothing and is left out."""
    training, gpus_per_node = case.training, case.training.cluster.gpus_per_node
    nodes = -(-training.parallelism.devices // gpus_per_node)
    waves = [
        wave_request(training, wave, share.tokens, nodes * gpus_per_node)
        for wave, share in zip(case.plan.waves, case.plan.shares(0), strict=True)
        if wave.group_size > 1
    ]
    return {"nodes": nodes, "gpus_per_node": gpus_per_node, "flows": case.flows, "waves": waves}


def wave_request(training: TrainingSpec, wave: Wave, tokens: int, gpus: int) -> dict[str, Any]:
    """Args: tokens: that each rank holds of the wave. gpus: of all nodes; some may have no rank."""
    cluster, size = training.cluster, wave.group_size
    groups = groups_of_gpus(training.parallelism, size)
    together = [1] * gpus  # GPUs of its group in the node of each GPU
    nodes = 1
    for group in groups:
        of_node = Counter(gpu // cluster.gpus_per_node for gpu in group)
        nodes = max(nodes, len(of_node))
        for gpu in group:
            together[gpu] = of_node[gpu // cluster.gpus_per_node]
    return {
        "groups": groups,
        "bytes_to_a_peer": bytes_to_a_peer(training.attention_shape, size, tokens),
        "within_bytes_per_second": [cluster.within_bytes_per_second(count) for count in together],
        "within_latency_seconds": [cluster.within_latency_seconds(count) for count in together],
        "across_bytes_per_second": cluster.across_bytes_per_second(max(2, nodes)),
        "across_latency_seconds": cluster.across.latency_seconds,
    }


def groups_of_gpus(parallelism: Parallelism, group_size: int) -> list[list[int]]:
    """Megatron's order, tp, cp, dp: neighbours are tensor-parallel ranks, then context-parallel ones."""
    tensor_parallel, ranks = parallelism.tensor_model_parallel_size, parallelism.context_parallel_size
    return [
        [(replica * ranks + rank) * tensor_parallel + lane for rank in range(first, first + group_size)]
        for replica in range(parallelism.data_parallel_size)
        for lane in range(tensor_parallel)
        for first in range(0, ranks, group_size)
    ]


def bytes_to_a_peer(shape: AttentionShape, group_size: int, tokens: int) -> Sequence[int]:
    """Of q, k and v, then of the output: the peer's heads of my tokens; my heads of the peer's tokens, as many."""
    heads, kv_heads = shape.heads // group_size, max(1, shape.kv_heads // group_size)
    query_key_value = heads * shape.query_head_size + kv_heads * (shape.query_head_size + shape.value_head_size)
    output = heads * shape.value_head_size
    return [tokens * elements * shape.element_bytes for elements in (query_key_value, output)]
