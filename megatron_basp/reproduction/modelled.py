"""What the cost model says of a row. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_basp.candidates import PlainFlags, fastest_plain, fits_memory
from megatron_basp.cluster import ClusterSpec
from megatron_basp.exchange_cost import OURS, ExchangeMethod
from megatron_basp.library import named_cluster, named_model
from megatron_basp.model_spec import ModelSpec
from megatron_basp.paper_model import DEEPSPEED, Modes, model_modes
from megatron_basp.plan import BatchPlan
from megatron_basp.reproduction.cases import Case, Table
from megatron_basp.training_spec import Parallelism, TrainingSpec
from megatron_basp.verdict import RESOLVED_SHARE

METHODS: dict[str, ExchangeMethod] = {"paper": DEEPSPEED, "plugin": OURS}


@dataclass(frozen=True)
class ModelledCase:
    """A row's run on its cluster, sharded over all ranks as ZeRO-3 does, by Ulysses and by BASP."""

    case: Case
    model: ModelSpec
    cluster: ClusterSpec

    @cached_property
    def training(self) -> TrainingSpec:
        case = self.case
        parallelism = Parallelism(
            context_parallel_size=case.ranks, sharding="optim_grads_params", recompute=case.recompute
        )
        return TrainingSpec(
            self.model,
            self.cluster,
            parallelism,
            case.seq_length,
            case.micro_batch_size,
            case.micro_batch_size * case.micro_batches,
            gradient_bytes=case.gradient_bytes,
        )

    @cached_property
    def modes(self) -> Modes:
        return model_modes(self.training, METHODS[self.case.exchange])

    @cached_property
    def plain(self) -> PlainFlags | None:
        return fastest_plain(self.training, METHODS[self.case.exchange])

    @property
    def copies_kv_heads(self) -> bool:
        """Whether groups are larger than there are key-value heads."""
        return self.model.kv_heads < max(self.plan.group_sizes)

    @property
    def plan(self) -> BatchPlan:
        """BASP's."""
        return self.modes.plan

    @property
    def value(self) -> float | None:
        """The row's figure; None where there is none, such as the ratio to an exchange that sends nothing."""
        ulysses, basp = self.modes.ulysses, self.modes.basp
        match self.case.quantity:
            case "speedup":
                return self.modes.speedup
            case "step_time_cut":
                return 1 - 1 / self.modes.speedup
            case "exchange_share":
                return {"ulysses": ulysses, "basp": basp}[self.case.of].exchange_share
            case "exchange_ratio":
                return ulysses.exchange_seconds / basp.exchange_seconds if basp.exchange_seconds else None
            case "memory_ratio":
                return basp.memory.total_bytes / ulysses.memory.total_bytes
            case "over_plain":
                return self._over(self.plain) if self.plain else None

    @property
    def notes(self) -> list[str]:
        """What is to be known of the figure."""
        notes, training = [], self.training
        basp, room = self.modes.basp, training.cluster.memory_bytes / 1e9
        memory = basp.memory.total_bytes / 1e9
        if self.case.quantity == "memory_ratio":
            notes.append(f"modelled: {memory:.1f} GB of {room:.0f} a rank")
        elif not fits_memory(training, basp):
            notes.append(f"modelled: {memory:.1f} GB a rank, hardly what fits {room:.0f}")
        if self.case.quantity == "exchange_ratio" and self.value is None:
            notes.append("modelled: nothing to compare, BASP sends nothing")
        if self.case.exchange == "plugin":
            notes += self._against_plain()
        return notes

    def _against_plain(self) -> list[str]:
        """Where BASP is not faster than plain flags."""
        plain = self.plain
        if plain is None:
            return ["no plain flags by a2a; stock's p2p is not modelled"]
        if self._over(plain) > 1 + RESOLVED_SHARE:
            return []
        what = "do as well" if self._over(plain) >= 1 - RESOLVED_SHARE else "are faster"
        sizes = f"--context-parallel-size {plain.context_parallel_size} --micro-batch-size {plain.micro_batch_size}"
        return [f"plain flags {what}: {sizes}"]

    def _over(self, plain: PlainFlags) -> float:
        return plain.cost.step_seconds / self.modes.basp.step_seconds


def model_cases(tables: Sequence[Table]) -> dict[Case, ModelledCase]:
    """Every row, in order.

    Raises:
        ConfigurationError: a model or cluster is not known.
    """
    cases = [case for table in tables for case in table.cases]
    models = {name: named_model(name) for name in dict.fromkeys(case.model for case in cases)}
    clusters = {name: named_cluster(name) for name in dict.fromkeys(case.cluster for case in cases)}
    return {case: ModelledCase(case, models[case.model], clusters[case.cluster]) for case in cases}


def target_shares(modelled: Mapping[Case, ModelledCase]) -> dict[Case, float]:
    """Of each row, what of Ulysses' step the exchange takes on its cluster: the paper's figure, else the modelled."""
    published = {
        _run_of(case): case.paper
        for case in modelled
        if case.quantity == "exchange_share" and case.of == "ulysses" and isinstance(case.paper, float)
    }
    return {case: published.get(_run_of(case)) or one.modes.ulysses.exchange_share for case, one in modelled.items()}


def _run_of(case: Case) -> tuple[object, ...]:
    return (case.model, case.cluster, case.ranks, case.seq_length, case.micro_batch_size, case.exchange)
