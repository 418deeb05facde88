"""What `megatron-basp plan` found, as a document and as what a table shows of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_basp.candidates import Candidate, Comparison
from megatron_basp.cost_model import StepCost, exchange_model
from megatron_basp.plan import BatchPlan, plan_batch
from megatron_basp.run_flags import basp_flags, plain_flags, stock_flags
from megatron_basp.search import SearchResult
from megatron_basp.training_spec import TrainingSpec
from megatron_basp.verdict import verdict


@dataclass(frozen=True)
class PlanResult:
    """model, cluster: what they are called; group_size: K, where the user fixed it; search: what was tried."""

    training: TrainingSpec
    comparison: Comparison
    model: str
    cluster: str
    group_size: int | None
    search: SearchResult | None = None

    @property
    def title(self) -> str:
        return f"modelled, not measured: {self.model} on {self.training.cluster.name}"

    @property
    def sizes(self) -> str:
        training, parallelism = self.training, self.training.parallelism
        sizes = {
            "N": parallelism.context_parallel_size,
            "B": training.micro_batch_size,
            "S": training.seq_length,
            "DP": parallelism.data_parallel_size,
            "TP": parallelism.tensor_model_parallel_size,
            "PP": parallelism.pipeline_model_parallel_size,
            "EP": parallelism.expert_model_parallel_size,
        }
        shown = [f"{name} = {size}" for name, size in sizes.items() if size > 1 or name in ("N", "B", "S")]
        number = training.micro_batches
        return (
            f"{', '.join(shown)}; {parallelism.devices} GPUs in nodes of {training.cluster.gpus_per_node}; "
            f"{training.global_batch_size} sequences a step in M = {number} micro-batch{'es' if number > 1 else ''}; "
            f"{training.precision}, {parallelism.sharding}, recompute {parallelism.recompute}"
        )

    @cached_property
    def flags(self) -> str:
        """For BASP; with K where the run would choose another."""
        training = self.training
        lengths = (training.seq_length,) * training.micro_batch_size
        ranks = training.parallelism.context_parallel_size
        cost_of = exchange_model(training).cost_of(training.seq_length)
        chosen = self.comparison.chosen.plan
        group_size = self.group_size
        if chosen != plan_batch(lengths, ranks, training.limits, cost_of):
            (group_size,) = chosen.group_sizes
        return basp_flags(training, self.cluster, group_size)

    @property
    def equivalent_flags(self) -> str | None:
        equivalent = self.comparison.equivalent
        return stock_flags(equivalent.training) if equivalent else None

    @property
    def why_no_equivalent(self) -> str | None:
        if self.comparison.equivalent is not None:
            return None
        alike = plain_flags(self.comparison.chosen.plan, self.training.limits)
        if alike is None:
            return "since sequences get different numbers of ranks"
        return f"though stock spreads sequences alike with {alike}"

    @property
    def plain_flags(self) -> str | None:
        plain = self.comparison.plain
        return stock_flags(plain.training) if plain else None

    @property
    def why_no_ulysses(self) -> str | None:
        if self.comparison.ulysses is not None:
            return None
        return self.comparison.refused[self.training.parallelism.context_parallel_size]

    def over_ulysses(self, cost: StepCost) -> float | None:
        ulysses = self.comparison.ulysses
        return ulysses.cost.step_seconds / cost.step_seconds if ulysses else None

    def over_plain(self, cost: StepCost) -> float | None:
        plain = self.comparison.plain
        return plain.cost.step_seconds / cost.step_seconds if plain else None

    def as_document(self) -> dict[str, Any]:
        comparison, training = self.comparison, self.training
        chosen, plain = comparison.chosen, comparison.plain
        document = {
            "choice": {
                **self._cost_document(chosen),
                "shares": shares(training, chosen.cost),
                "flags": self.flags,
            },
            "candidates": [self._candidate_document(candidate) for candidate in comparison.candidates],
            "refused": [{"group_size": size, "reason": why} for size, why in comparison.refused.items()],
            "equivalent_flags": self.equivalent_flags,
            "plain": plain and {"flags": self.plain_flags, "step_seconds": plain.cost.step_seconds},
            "reason": chosen.reason,
            "verdict": verdict(comparison),
            "why_no_equivalent": self.why_no_equivalent,
            "why_no_ulysses": self.why_no_ulysses,
            "training": {
                "model": self.model,
                "cluster": training.cluster.name,
                "seq_length": training.seq_length,
                "micro_batch_size": training.micro_batch_size,
                "global_batch_size": training.global_batch_size,
                "precision": training.precision,
                **vars(training.parallelism),
            },
        }
        if self.search is not None:
            document["search"] = {"tried": self.search.tried, "too_large": self.search.too_large}
        return document

    def _cost_document(self, candidate: Candidate) -> dict[str, Any]:
        cost = candidate.cost
        return {
            "waves": waves(candidate.plan),
            "step_seconds": cost.step_seconds,
            "least_step_seconds": cost.least_seconds,
            "most_step_seconds": cost.most_seconds,
            "speedup_over_ulysses": self.over_ulysses(cost),
            "speedup_over_plain": self.over_plain(cost),
            "across_node_bytes_per_rank_per_step": cost.exchange_across_bytes,
        }

    def _candidate_document(self, candidate: Candidate) -> dict[str, Any]:
        cost = candidate.cost
        return {
            **self._cost_document(candidate),
            "tokens_per_rank": candidate.plan.tokens,
            "memory_bytes_per_rank": cost.memory.total_bytes,
            "fits_memory": candidate.fits_memory,
            "exchange_bytes_per_rank_per_step": cost.exchange_sent_bytes,
            "exchange_seconds": cost.exchange_seconds,
            "reason": candidate.reason,
        }


def waves(plan: BatchPlan) -> list[dict[str, int]]:
    return [{"rows": len(wave.rows), "group_size": wave.group_size} for wave in plan.waves]


def shares(training: TrainingSpec, cost: StepCost) -> dict[str, float]:
    """Of the estimated step, by part; they add up to 1."""
    layers = training.model.layers // training.parallelism.pipeline_model_parallel_size
    arithmetic = cost.arithmetic
    seconds = {part: layers * of_one * training.micro_batches for part, of_one in arithmetic.layer_seconds.items()}
    seconds["output layer"] = arithmetic.output_seconds * training.micro_batches
    seconds["exchange"] = cost.exchange_seconds
    seconds |= {f"{kind} parallelism": cost.traffic[kind].seconds for kind in ("tensor", "expert", "pipeline")}
    seconds["replicas, exposed"] = cost.exposed_replica_seconds
    seconds["pipeline bubble"] = cost.bubble_seconds
    seconds["optimizer"] = cost.optimizer_seconds
    return {part: value / cost.step_seconds for part, value in seconds.items()}
