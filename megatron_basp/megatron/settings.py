"""What a run asked for, taken from Megatron's arguments once they are known to be sound. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from megatron_basp.errors import ConfigurationError
from megatron_basp.exchange_cost import AttentionShape, ExchangeModel
from megatron_basp.overlap_cost import best_chunks
from megatron_basp.placement import aligned_domain_size, placement
from megatron_basp.plan import BatchPlan, Limits, plan_batch


@dataclass(frozen=True)
class Settings:
    """One run's sequence parallelism.

    mode: `ulysses` (one wave at K = N) or `basp`.
    ranks: N.
    limits: heads per tensor-parallel rank, the K that was fixed, the fast domain in CP ranks.
    seq_length: S.
    micro_batch_size, eval_micro_batch_size: B in training and at evaluation.
    global_batch_size, data_parallel_size: Megatron's.
    tensor_model_parallel_size: Megatron's; a group of K ranks spans K times as many devices.
    domain_devices: `--basp-domain-size`, or None for the host's.
    attention: heads and their sizes, per tensor-parallel rank.
    exchange: what an exchange costs on `--basp-cluster`, or None.
    per_token_loss: `--calculate-per-token-loss`.
    packed: rows hold several documents (`--sft`, `--dataloader-inter-document-masking`).
    sft: `--sft`.
    ledger: `--basp-ledger`, where it is written what is sent, or None.
    check: `--basp-check`, compare plans between ranks in every step.
    overlap_chunks: `--basp-overlap-chunks`: in how many parts a rank's heads are exchanged, or None to choose.
    transport: `--basp-transport`.
    """

    mode: str
    ranks: int
    limits: Limits
    seq_length: int
    micro_batch_size: int
    eval_micro_batch_size: int
    global_batch_size: int
    data_parallel_size: int
    tensor_model_parallel_size: int
    domain_devices: int | None
    attention: AttentionShape
    exchange: ExchangeModel | None
    per_token_loss: bool
    packed: bool
    sft: bool
    ledger: Path | None
    check: bool
    overlap_chunks: int | None
    transport: str

    def plan(self, micro_batch_size: int, seq_length: int) -> BatchPlan:
        cost_of = None if self.exchange is None else self.exchange.cost_of(seq_length)
        return plan_batch((seq_length,) * micro_batch_size, self.ranks, self.limits, cost_of)

    @cached_property
    def chunks(self) -> Mapping[int, int]:
        """C by K: the parts in which a rank's heads are exchanged, 1 where it is alone. What `--basp-overlap-chunks`
        says; else the least seconds on `--basp-cluster`, of the first plan with that K; without either 1."""
        chosen = dict.fromkeys(self.group_sizes(), 1)
        for plan in reversed(self.plans()):
            if self.overlap_chunks is not None:
                chosen |= {size: self.overlap_chunks for size in plan.group_sizes if size > 1}
            elif self.exchange is not None:
                chosen |= best_chunks(self.exchange, plan, self.limits)
        return chosen

    def batch_sizes(self) -> tuple[int, ...]:
        """The micro-batch sizes that the run uses, training's first."""
        return tuple(dict.fromkeys((self.micro_batch_size, self.eval_micro_batch_size)))

    def plans(self) -> list[BatchPlan]:
        """The plans that the run uses, training's first."""
        return [self.plan(batch_size, self.seq_length) for batch_size in self.batch_sizes()]

    def group_sizes(self) -> tuple[int, ...]:
        """The K that the run's plans choose; groups are made for these and no others."""
        return tuple(sorted({group_size for plan in self.plans() for group_size in plan.group_sizes}))

    def in_flight_bytes(self, group_size: int) -> int:
        """The most that a rank has sent to its group of K and not received yet: in one layer q, k, v and the output,
        or their gradients."""
        tokens = max(
            sum(share.tokens for share in plan.shares(0) if share.group_size == group_size) for plan in self.plans()
        )
        shape = self.attention
        return int(shape.query_key_value_bytes(tokens, group_size) + shape.output_bytes(tokens))

    def part_bytes(self, group_size: int) -> frozenset[int]:
        """What a rank sends to another of its group of K at once: of q, k, v and the output each, in any plan."""
        shape, parts = self.attention, group_size * self.chunks[group_size]
        widths = {
            shape.heads // parts * shape.query_head_size,
            shape.heads // parts * shape.value_head_size,
            max(shape.kv_heads, group_size) // parts * shape.query_head_size,
            max(shape.kv_heads, group_size) // parts * shape.value_head_size,
        }
        tokens = {share.tokens for plan in self.plans() for share in plan.shares(0) if share.group_size == group_size}
        return frozenset(t * width * shape.element_bytes for t in tokens for width in widths)

    def with_placement(self, cp_groups: Sequence[Sequence[int]], domain_of_rank: Mapping[int, Hashable]) -> Settings:
        """The same with what was learnt of where ranks sit."""
        domain_size = aligned_domain_size(cp_groups, domain_of_rank)
        exchange = self.exchange and replace(self.exchange, placement=placement(cp_groups, domain_of_rank))
        return replace(self, limits=replace(self.limits, domain_size=domain_size), exchange=exchange)

    def check_cluster(self, domain_of_rank: Mapping[int, Hashable]) -> None:
        """Raise `ConfigurationError` where the ranks sit as they cannot on `--basp-cluster`."""
        if self.exchange is None:
            return
        cluster = self.exchange.cluster
        fullest, ranks = Counter(domain_of_rank.values()).most_common(1)[0]
        if ranks > cluster.gpus_per_node:
            raise ConfigurationError(
                f"{cluster.name} has {cluster.gpus_per_node} GPUs a node, and {ranks} ranks run on {fullest}: name "
                f"another --basp-cluster, or give --basp-domain-size {cluster.gpus_per_node} to count consecutive "
                f"ranks as nodes"
            )
        nodes = len(set(domain_of_rank.values()))
        if cluster.nodes is not None and nodes > cluster.nodes:
            raise ConfigurationError(
                f"{cluster.name} has {cluster.nodes} nodes, and the ranks run on {nodes}: name another --basp-cluster"
            )
