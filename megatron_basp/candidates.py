"""The plans that a micro-batch could have, what each costs, and why: which K, and would plain flags do as well. Pure.

Ulysses is the plan with one wave at K = N. A plan with one wave at K does what stock Megatron does with context
parallelism of K, micro-batch B·K/N and N/K times the data parallelism: it is charged the same, whatever exchange stock
would use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import get_args

from megatron_basp.cost_model import StepCost, exchange_model, step_cost
from megatron_basp.decomposition import WaveCost, cheapest_counts
from megatron_basp.errors import ConfigurationError
from megatron_basp.exchange_cost import OURS, ExchangeMethod
from megatron_basp.memory_cost import MemoryCost, memory_of
from megatron_basp.placement import divisors
from megatron_basp.plan import BatchPlan, CostOf, fitting_sizes, heads_fit, plan_batch, plan_of_counts
from megatron_basp.training_spec import Recompute, Sharding, TrainingSpec

USABLE_SHARE_OF_MEMORY = 0.95  # the rest is what an allocator cannot hand out


class DoesNotFit(ConfigurationError):
    """No plan fits the memory."""


@dataclass(frozen=True)
class Candidate:
    """One plan of the micro-batch and its cost; reason: one sentence."""

    plan: BatchPlan
    cost: StepCost
    fits_memory: bool
    reason: str


@dataclass(frozen=True)
class PlainFlags:
    """Stock Megatron over the same devices and samples: one K for all sequences.

    training: the run with other context parallelism, data parallelism and micro-batch.
    """

    training: TrainingSpec
    cost: StepCost

    @property
    def context_parallel_size(self) -> int:
        return self.training.parallelism.context_parallel_size

    @property
    def micro_batch_size(self) -> int:
        return self.training.micro_batch_size


@dataclass(frozen=True)
class Comparison:
    """Every plan that is worth a look, the cheapest first.

    chosen: what a run takes. ulysses: one wave at K = N, or None where the heads or S forbid it.
    plain: the fastest plain flags that take the same samples on the same devices, or None.
    equivalent: plain flags that do what `chosen` does, or None.
    refused: for each K that no wave can have, the reason.
    """

    candidates: tuple[Candidate, ...]
    chosen: Candidate
    ulysses: Candidate | None
    plain: PlainFlags | None
    equivalent: PlainFlags | None
    refused: dict[int, str]


def compare_plans(training: TrainingSpec, group_size: int | None = None, method: ExchangeMethod = OURS) -> Comparison:
    """All that is worth a look for this run.

    Args:
        group_size: K, where the user fixed it (`--basp-group-size`).

    Raises:
        ConfigurationError: there is no plan.
        DoesNotFit: none fits the memory; with what would make it fit.
    """
    lengths = (training.seq_length,) * training.micro_batch_size
    ranks = training.parallelism.context_parallel_size
    cost_of = exchange_model(training, method).cost_of(training.seq_length)
    chosen_plan = plan_batch(lengths, ranks, replace(training.limits, group_size=group_size), cost_of)
    plans = {chosen_plan: None, **dict.fromkeys(_plans(training, lengths, cost_of))}
    costs = {plan: step_cost(training, plan, method) for plan in plans}
    fitting = [plan for plan in plans if fits_memory(training, costs[plan])]
    if chosen_plan not in fitting:
        # A run is told to take another plan by its K, which it has for all rows.
        uniform = [plan for plan in fitting if len(plan.waves) == 1]
        if not uniform or group_size is not None:
            raise DoesNotFit(_what_would_fit(training, chosen_plan, costs[chosen_plan].memory))
        chosen_plan = min(uniform, key=lambda plan: costs[plan].step_seconds)
    least = costs[chosen_plan].step_seconds
    found = {
        plan: Candidate(plan, cost, plan in fitting, _reason(training, plan, cost, least, plan == chosen_plan))
        for plan, cost in costs.items()
    }
    ulysses = next((one for plan, one in found.items() if plan.group_sizes == (ranks,)), None)
    return Comparison(
        candidates=tuple(sorted(found.values(), key=lambda one: one.cost.step_seconds)),
        chosen=found[chosen_plan],
        ulysses=ulysses,
        plain=fastest_plain(training, method),
        equivalent=_equivalent(training, chosen_plan, method),
        refused={size: why for size in divisors(ranks) if (why := _why_not(training, size))},
    )


def _plans(training: TrainingSpec, lengths: tuple[int, ...], cost_of: CostOf) -> list[BatchPlan]:
    """For each K the plan with nothing else, and the cheapest that has a wave at K."""
    rows, ranks = len(lengths), training.parallelism.context_parallel_size
    sizes = fitting_sizes(training.seq_length, ranks, training.limits)
    plans = []
    for size in sizes:
        groups = ranks // size
        if rows % groups == 0:
            plans.append(plan_of_counts(lengths, ranks, {size: rows}))
        if rows < groups:
            continue

        # One step at K is taken; the rest may add to its wave without setting one up again.
        def cost_with(other: int, size: int = size) -> WaveCost:
            return cost_of(other)._replace(per_wave=0) if other == size else cost_of(other)

        counts = cheapest_counts(rows - groups, ranks, sizes, cost_with)
        if counts is not None:
            plans.append(plan_of_counts(lengths, ranks, {**counts, size: counts.get(size, 0) + groups}))
    return plans


def fits_memory(training: TrainingSpec, cost: StepCost) -> bool:
    return cost.memory.total_bytes <= _room_bytes(training)


def _room_bytes(training: TrainingSpec) -> float:
    return training.cluster.memory_bytes * USABLE_SHARE_OF_MEMORY


def plain_runs(training: TrainingSpec, method: ExchangeMethod = OURS) -> Iterator[PlainFlags]:
    """All stock runs over the same devices and samples, whether they fit the memory or not."""
    ranks = training.parallelism.context_parallel_size
    for size in divisors(ranks):
        replicas = training.parallelism.data_parallel_size * ranks // size
        for batch_size in divisors(training.global_batch_size // replicas or 1):
            plain = _plain(training, size, batch_size, method)
            if plain is not None:
                yield plain


def fastest_plain(training: TrainingSpec, method: ExchangeMethod) -> PlainFlags | None:
    """The fastest run of stock Megatron over the same devices and samples that fits the memory."""
    fitting = (plain for plain in plain_runs(training, method) if fits_memory(training, plain.cost))
    return min(fitting, key=lambda plain: plain.cost.step_seconds, default=None)


def _equivalent(training: TrainingSpec, plan: BatchPlan, method: ExchangeMethod) -> PlainFlags | None:
    if len(plan.waves) > 1:
        return None
    size = plan.waves[0].group_size
    return _plain(training, size, training.micro_batch_size * size // plan.ranks, method)


def _plain(training: TrainingSpec, size: int, batch_size: int, method: ExchangeMethod) -> PlainFlags | None:
    """Stock Megatron with context parallelism `size`; None where its `a2a` or the batch forbids it."""
    parallelism, limits = training.parallelism, training.limits
    replicas = parallelism.replicas // size
    if training.global_batch_size % (batch_size * replicas) or training.seq_length % (2 * size if size > 1 else 1):
        return None
    micro_batches = training.global_batch_size // (batch_size * replicas)
    if parallelism.virtual_stages > 1 and micro_batches % parallelism.pipeline_model_parallel_size:
        return None
    if limits.heads % size or limits.kv_heads % size:
        return None
    if training.seq_length * batch_size // size % training.token_multiple:
        return None
    stock = replace(
        training,
        parallelism=replace(parallelism, context_parallel_size=size, data_parallel_size=replicas),
        micro_batch_size=batch_size,
    )
    plan = plan_of_counts((training.seq_length,) * batch_size, size, {size: batch_size})
    return PlainFlags(stock, step_cost(stock, plan, method))


def _reason(training: TrainingSpec, plan: BatchPlan, cost: StepCost, least_seconds: float, is_chosen: bool) -> str:
    """Whether groups fit in the fast domain comes first: it decides."""
    parts = [_where(training, wave.group_size, len(wave.rows)) for wave in plan.waves]
    across = cost.exchange.across_bytes / 1e6
    crossing = f"{across:.1f} MB a rank, layer and direction leave a node" if across else "nothing leaves a node"
    if plan.group_sizes == (1,):
        crossing = "nothing is sent"
    more = cost.step_seconds / least_seconds - 1
    judgement = f"the step takes {abs(more):.1%} {'more' if more > 0 else 'less'}"
    if is_chosen:
        judgement = "chosen"
    elif abs(more) < 0.0005:
        judgement = "the step takes as long"
    return f"{', '.join(parts)}: {crossing}, the exchange is {cost.exchange_share:.1%} of the step; {judgement}"


def _where(training: TrainingSpec, size: int, rows: int) -> str:
    tensor_parallel = training.parallelism.tensor_model_parallel_size
    sequences = f"{rows} sequence{'s' if rows > 1 else ''}"
    if size == 1:
        return f"{sequences} each on one rank"
    devices = f"{size}·{tensor_parallel} = {size * tensor_parallel}" if tensor_parallel > 1 else str(size)
    found = training.placement.crossing(size)
    node = training.cluster.gpus_per_node
    place = f"which fit in a node of {node}" if not found.leaving else f"which straddle nodes of {node}"
    return f"{sequences} in groups of {devices} GPUs, {place}"


def _why_not(training: TrainingSpec, size: int) -> str | None:
    limits, ranks = training.limits, training.parallelism.context_parallel_size
    if not heads_fit(size, limits):
        return (
            f"K={size}: H % K must be 0, and Hkv % K or K % Hkv, with H={limits.heads}, Hkv={limits.kv_heads} per "
            f"tensor-parallel rank"
        )
    if training.seq_length % size:
        return f"K={size}: S % K must be 0, with S={training.seq_length}"
    if training.micro_batch_size < ranks // size:
        return (
            f"K={size}: takes sequences by N/K = {ranks // size}, and the micro-batch has {training.micro_batch_size}"
        )
    return None


def _what_would_fit(training: TrainingSpec, plan: BatchPlan, memory: MemoryCost) -> str:
    """One line: the memory, and the first sharding or recompute, from the mildest, that fits."""
    room = _room_bytes(training)
    problem = (
        f"a rank needs {memory.total_bytes / 1e9:.1f} GB (parameters {memory.parameter_bytes / 1e9:.1f}, gradients "
        f"{memory.gradient_bytes / 1e9:.1f}, optimizer {memory.optimizer_bytes / 1e9:.1f}, activations "
        f"{(memory.activation_bytes + memory.logit_bytes) / 1e9:.1f}, reserved {memory.reserved_bytes / 1e9:.1f}) and "
        f"has {room / 1e9:.1f} GB on {training.cluster.name}"
    )
    now = training.parallelism
    # Megatron-FSDP, which shards gradients and parameters, has no pipeline stages.
    shardings = get_args(Sharding) if now.pipeline_model_parallel_size == 1 else ("no_shard", "optim")
    for recompute in get_args(Recompute)[get_args(Recompute).index(now.recompute) :]:
        for sharding in shardings[shardings.index(now.sharding) :]:
            changed = replace(training, parallelism=replace(now, sharding=sharding, recompute=recompute))
            if memory_of(changed, max(plan.group_sizes)).total_bytes <= room:
                flags = []
                if sharding != now.sharding:
                    of_megatron = "--use-distributed-optimizer" if sharding == "optim" else "with --use-megatron-fsdp"
                    flags.append(f"--data-parallel-sharding-strategy {sharding} (in Megatron {of_megatron})")
                if recompute != now.recompute:
                    flags.append(f"--recompute-granularity {recompute}")
                return f"{problem}: it would fit with {' '.join(flags)}"
    return (
        f"{problem}: no sharding or recompute makes it fit; use more GPUs, tensor or pipeline stages, or shorter rows"
    )
