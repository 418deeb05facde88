"""One call of Megatron's forward-backward schedule under a plan: shapes, loss, and the check that it happened.

The schedule call says which micro-batch size and length are coming, so the plan is set there, for the length of the
call; the batch's own shape is held against it. Training, evaluation, recompute and every pipeline stage see the same
one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_basp.ledger import Collective
from megatron_basp.megatron.model import check_model
from megatron_basp.megatron.multi_token import attentions_in_a_pass
from megatron_basp.megatron.random_streams import streams_of_rank
from megatron_basp.megatron.runtime import Runtime
from megatron_basp.megatron.seam import Function
from megatron_basp.plan import BatchPlan
from megatron_basp.plan_agreement import check_agreement


def choosing_schedule(runtime: Runtime, original: Function) -> Function:
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        forward_backward_func = original(*args, **kwargs)
        return PlannedSchedule(runtime, forward_backward_func) if runtime.is_active else forward_backward_func

    return get_forward_backward_func


class PlannedSchedule:
    """A forward-backward function of Megatron's that runs under the plan of its micro-batches.

    A rank's share of B rows of S tokens is one row of T = B·S/N, so Megatron is told of one row of B·S tokens: it
    divides by N and allocates its pipeline buffers for T.
    """

    def __init__(self, runtime: Runtime, forward_backward_func: Callable[..., Any]) -> None:
        self.runtime = runtime
        self.forward_backward_func = forward_backward_func

    def __call__(
        self, *, forward_step_func: Callable[..., Any], micro_batch_size: int, seq_length: int, **arguments: Any
    ) -> Any:
        runtime = self.runtime
        plan = runtime.plan(micro_batch_size, seq_length)
        chunks = [_unwrapped(chunk) for chunk in _as_list(arguments["model"])]
        unchecked = plan not in runtime.checked_plans
        if unchecked or runtime.settings.check:
            check_agreement([plan], runtime.settings.mode, runtime.groups.cp_group)
        if unchecked:
            for chunk in chunks:
                check_model(chunk)
        before, batches_before = runtime.ledger.page.collectives if unchecked else None, runtime.batches_taken
        # Evaluation draws nothing, and must not change what training draws after it.
        is_training = not arguments.get("forward_only", False)
        runtime.plan_holder.set(plan)
        try:
            with streams_of_rank(runtime.groups.cp_rank) if is_training else nullcontext():
                result = self.forward_backward_func(
                    forward_step_func=with_rescaled_loss(forward_step_func, runtime),
                    micro_batch_size=1,
                    seq_length=seq_length * micro_batch_size,
                    **arguments,
                )
        finally:
            runtime.plan_holder.set(None)
        if unchecked:
            microbatches = arguments["num_microbatches"]
            check_batches(chunks, microbatches, runtime.batches_taken - batches_before)
            counted = runtime.ledger.page.collectives
            counted.subtract(before)
            attentions = sum((attentions_in_a_pass(chunk) for chunk in chunks), Counter())
            parts = {size: microbatches * chunks for size, chunks in runtime.settings.chunks.items()}
            check_exchanges(plan, attentions, parts, counted, dist.get_rank())
            runtime.checked_plans.add(plan)
        return result


def _as_list(model: Any) -> list[Any]:
    return model if isinstance(model, list) else [model]


def _unwrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    """The model inside of data-parallel and mixed-precision wrappers."""
    while isinstance(getattr(chunk, "module", None), torch.nn.Module):
        chunk = chunk.module
    return chunk


def check_batches(chunks: Iterable[torch.nn.Module], microbatches: int, taken: int) -> None:
    """Each chunk that reads data must have taken its stream of every micro-batch.

    Raises:
        RuntimeError: it did not; the script slices its batches by itself, or holds Megatron's own function, which
        does.
    """
    expected = microbatches * sum(chunk.pre_process or chunk.post_process or chunk.mtp_process for chunk in chunks)
    if taken != expected:
        raise RuntimeError(
            f"rank {dist.get_rank()}: {taken} micro-batches were taken by the plan in the first step under it, and "
            f"should have been {expected}: the script must call megatron.core.utils.get_batch_on_this_cp_rank, "
            f"imported after the hooks were installed"
        )


def check_exchanges(
    plan: BatchPlan, attentions: Counter[int], parts: Mapping[int, int], counted: Counter[Collective], rank: int
) -> None:
    """Each layer must have exchanged every part of every micro-batch in each wave with K > 1, up to twice where it is
    recomputed.

    Args:
        attentions: how often each layer attends in one forward pass.
        parts: micro-batches, times the parts in which each is exchanged, by K.
        counted: the rank's collectives of this step.

    Raises:
        RuntimeError: a layer did not; its attention saw a part of each sequence only.
    """
    exchanged = Counter[tuple[int | None, int | None]]()
    for collective, number in counted.items():
        if (collective.operation, collective.direction) == ("qkv", "forward"):
            exchanged[collective.layer, collective.wave] += number
    for layer, times in attentions.items():
        for index, wave in enumerate(plan.waves):
            expected, found = parts[wave.group_size] * times, exchanged[layer, index]
            if wave.group_size > 1 and not expected <= found <= 2 * expected:
                raise RuntimeError(
                    f"rank {rank}: layer {layer} exchanged {found} times in groups of {wave.group_size} in its "
                    f"first step, and should have {expected} times, or up to twice that with recompute: attention did "
                    f"not see whole sequences"
                )


def with_rescaled_loss(forward_step_func: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    """The forward step, with a loss function that keeps the objective what one process computes.

    Without `--calculate-per-token-loss` Megatron divides a rank's summed loss by that rank's own count n of tokens and
    averages over the N ranks (`forward_step_calc_loss` in `core/pipeline_parallel/schedules.py`). Where masks differ
    between ranks that is not the mean over the micro-batch. Scaled by n·N/Σn beforehand it is: the mean over ranks of
    (loss·n·N/Σn)/n is Σloss/Σn. With the flag Megatron divides by the global count already.
    """

    def forward_step(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        output, loss_func = forward_step_func(*args, **kwargs)
        return output, loss_func and _rescaled(loss_func, runtime)

    return forward_step


def _rescaled(loss_func: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    def rescaled_loss_func(output_tensor: Tensor, **kwargs: Any) -> Any:
        result = loss_func(output_tensor, **kwargs)
        if kwargs.get("non_loss_data"):
            return result
        if len(result) != 3:
            raise ValueError(
                f"the loss function returned {len(result)} values; with two, Megatron averages over ranks whatever "
                f"their token counts are, which is another objective: return (summed loss, number of tokens, report)"
            )
        loss, num_tokens, report = result
        if runtime.settings.sft:
            report = {name: _over_groups(sums, runtime) for name, sums in report.items()}
        if not runtime.settings.per_token_loss:
            total = num_tokens.detach().to(torch.int64).clone()
            dist.all_reduce(total, group=runtime.groups.cp_group)
            share = num_tokens.double() * runtime.settings.ranks / total.clamp(min=1)
            loss = loss * share.to(loss.dtype)
        return loss, num_tokens, report

    return rescaled_loss_func


def _over_groups(sums: Tensor, runtime: Runtime) -> Tensor:
    """A reported pair (summed loss, number of tokens) of the micro-batch instead of a rank's part of it.

    With `--sft` evaluation averages the quotients of ranks, whatever their token counts are (`evaluate` in
    `training/training.py`); elsewhere Megatron sums both over the ranks first, and the quotient stays the same.
    """
    if sums.numel() != 2:
        raise ValueError(
            f"the loss function reports {sums.numel()} numbers, and with --sft it must be (summed loss, tokens)"
        )
    sums = sums.clone()
    dist.all_reduce(sums, group=runtime.groups.cp_group)
    return sums
