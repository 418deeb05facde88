"""Exact figures of a training run: losses, gradient norms, times, and the loss on held-out text before and after.

Megatron's log averages the loss over an interval and rounds it. The recorder wraps `train_step` and `evaluate`
instead. It knows nothing of sequence-parallel modes, so that stock runs can be recorded with it too.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_basp.megatron.seam import replace


@dataclass
class Record:
    """One entry a step, on the ranks of the last pipeline stage for losses, on all ranks for the rest.

    held_out_losses: one entry an evaluation, the first of them before training.
    mtp_losses, mtp_tokens: of multi-token prediction, for each step and by depth: the loss that Megatron logs, and the
        number of tokens in it.
    expert_losses: what Megatron logs of its experts, by name: auxiliary losses, z-loss.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    held_out_losses: list[float] = field(default_factory=list)
    mtp_losses: list[list[float]] = field(default_factory=list)
    mtp_tokens: list[list[float]] = field(default_factory=list)
    expert_losses: list[dict[str, float]] = field(default_factory=list)


def record_training(after_step: Callable[[Record, Any], None] = lambda record, model: None) -> Record:
    """Record what Megatron's `pretrain` does from now on in this process.

    Args:
        after_step: called with the record and Megatron's list of model chunks when a step was recorded.
    """
    record = Record()
    held_out = _HeldOutBatches()

    def step(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train_step(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = original(*args, **kwargs)
            record.step_seconds.append(time.perf_counter() - start)
            if "lm loss" in result[0]:
                record.losses.append(result[0]["lm loss"].item())
            record.grad_norms.append(float(result[5]))
            after_step(record, args[2])
            return result

        return train_step

    def evaluation(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def evaluate(forward_step_func: Any, data_iterator: Any, *args: Any, **kwargs: Any) -> Any:
            from megatron.training import get_args

            consumed = get_args().consumed_valid_samples
            result = original(forward_step_func, held_out.replayed(data_iterator), *args, **kwargs)
            # So that a run that goes on from a checkpoint takes the same batches, too.
            get_args().consumed_valid_samples = consumed
            if "lm loss" in result[0]:
                record.held_out_losses.append(result[0]["lm loss"].item())
            return result

        return evaluate

    def training(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train(forward_step_func: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            from megatron.training import get_args
            from megatron.training.training import evaluate

            valid_data_iterator, config = args[3], args[5]
            if get_args().do_valid:
                evaluate(forward_step_func, valid_data_iterator, model, None, config)
            if get_args().fine_grained_activation_offloading:
                # The first call of the schedule tells it what there will be to offload: that was an evaluation.
                from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

                PipelineOffloadManager.reset_instance()
            return original(forward_step_func, model, *args, **kwargs)

        return train

    def multi_token_log(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def reduce_metrics_in_tracker() -> None:
            from megatron.core.num_microbatches_calculator import get_num_microbatches
            from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

            original()
            tracker = MTPLossLoggingHelper.tracker
            if "loss_values" in tracker:
                record.mtp_losses.append((tracker["loss_values"] / get_num_microbatches()).tolist())
                record.mtp_tokens.append(tracker["total_values"].tolist())

        return reduce_metrics_in_tracker

    replace(
        "megatron.core.transformer.multi_token_prediction:MTPLossLoggingHelper.reduce_metrics_in_tracker",
        [],
        multi_token_log,
        versions=("0.19", "0.20"),
    )

    def expert_log(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def aggregate(*args: Any, **kwargs: Any) -> Any:
            scalars = original(*args, **kwargs)
            record.expert_losses.append({name: float(value) for name, value in scalars.items()})
            return scalars

        return aggregate

    replace(
        "megatron.core.transformer.moe.moe_logging:MoEMetricsTracker._aggregate",
        ["loss_scale", "metric_names"],
        expert_log,
    )
    replace("megatron.training.training:train_step", ["forward_step_func", "data_iterator", "model"], step)
    replace(
        "megatron.training.training:evaluate", ["forward_step_func", "data_iterator", "model", "config"], evaluation
    )
    replace("megatron.training.training:train", ["valid_data_iterator", "config"], training)
    return record


class _HeldOutBatches:
    """The batches of the first evaluation, for every later one: before and after are the same text."""

    def __init__(self) -> None:
        self._batches: dict[int, list[Any]] = {}  # by virtual pipeline stage

    def replayed(self, data_iterator: Any) -> Any:
        """What stands for Megatron's iterator: one, one for each virtual pipeline stage, or None where none is."""
        if isinstance(data_iterator, list):
            return [self._replayed(stage, iterator) for stage, iterator in enumerate(data_iterator)]
        return self._replayed(0, data_iterator)

    def _replayed(self, stage: int, data_iterator: Any) -> Iterator[Any] | None:
        if data_iterator is None:
            return None
        if stage in self._batches:
            return iter([dict(batch) for batch in self._batches[stage]])
        return self._recording(data_iterator, self._batches.setdefault(stage, []))

    @staticmethod
    def _recording(data_iterator: Any, batches: list[Any]) -> Iterator[Any]:
        while True:
            batch = next(data_iterator)
            batches.append(dict(batch))
            yield batch
