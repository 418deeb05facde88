"""What a run asked for, taken from Megatron's arguments once they are known to be sound. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

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
    per_token_loss: `--calculate-per-token-loss`.
    packed: rows hold several documents (`--sft`, `--dataloader-inter-document-masking`).
    sft: `--sft`.
    ledger: `--basp-ledger`, where it is written what is sent, or None.
    check: `--basp-check`, compare plans between ranks in every step.
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
    per_token_loss: bool
    packed: bool
    sft: bool
    ledger: Path | None
    check: bool

    def plan(self, micro_batch_size: int, seq_length: int) -> BatchPlan:
        return plan_batch((seq_length,) * micro_batch_size, self.ranks, self.limits)

    def batch_sizes(self) -> tuple[int, ...]:
        """The micro-batch sizes that the run uses, training's first."""
        return tuple(dict.fromkeys((self.micro_batch_size, self.eval_micro_batch_size)))

    def plans(self) -> list[BatchPlan]:
        """The plans that the run uses, training's first."""
        return [self.plan(batch_size, self.seq_length) for batch_size in self.batch_sizes()]

    def group_sizes(self) -> tuple[int, ...]:
        """The K that the run's plans choose; groups are made for these and no others."""
        return tuple(sorted({group_size for plan in self.plans() for group_size in plan.group_sizes}))

    def with_domain(self, domain_size: int) -> Settings:
        """The same with what was learnt of the placement of ranks."""
        return replace(self, limits=replace(self.limits, domain_size=domain_size))
