"""What the paper ran, modelled: the same training by Ulysses and by BASP, with the exchange that it used. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_basp.cost_model import StepCost, exchange_model, step_cost
from megatron_basp.exchange_cost import ExchangeMethod
from megatron_basp.plan import BatchPlan, plan_batch, plan_of_counts
from megatron_basp.training_spec import TrainingSpec

# q, k, v and the output, each exchanged by itself, packed before and unpacked after: DeepSpeed's `single_all_to_all`
# (deepspeed/sequence/layer.py) where the batch comes first, and much the same in Transformer Engine.
SEPARATE = ExchangeMethod(collectives=4, query_key_value_passes=2, output_passes=2)
# In the paper's training run ranks also wait for one another: fitted to its ratio of 3.10 alone.
DEEPSPEED = replace(SEPARATE, wait_seconds=140e-6)


@dataclass(frozen=True)
class Modes:
    """A step of the same run by both; plan: BASP's."""

    plan: BatchPlan
    ulysses: StepCost
    basp: StepCost

    @property
    def speedup(self) -> float:
        return self.ulysses.step_seconds / self.basp.step_seconds


def model_modes(training: TrainingSpec, method: ExchangeMethod) -> Modes:
    """Ulysses, and the plan whose exchange takes the least modelled time.

    Raises:
        ConfigurationError: there is no plan.
    """
    lengths = (training.seq_length,) * training.micro_batch_size
    ranks = training.parallelism.context_parallel_size
    plan = plan_batch(lengths, ranks, training.limits, exchange_model(training, method).cost_of(training.seq_length))
    return Modes(plan, step_cost(training, ulysses_plan(training), method), step_cost(training, plan, method))


def ulysses_plan(training: TrainingSpec) -> BatchPlan:
    """One wave at K = N; whether the heads allow it is not looked at."""
    rows, ranks = training.micro_batch_size, training.parallelism.context_parallel_size
    return plan_of_counts((training.seq_length,) * rows, ranks, {ranks: rows})
