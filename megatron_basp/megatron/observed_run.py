"""One rank's part in a run of Megatron's `pretrain()`, with everything written down that two runs can differ in.

With or without a sequence-parallel mode: a stock run is observed by the same code, and no hook is imported for it.
"""

from __future__ import annotations

import itertools
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_basp.comparison import RankReport
from megatron_basp.errors import ConfigurationError
from megatron_basp.megatron.recorder import Record, record_training

# Gets the checksums of a batch's rows, returns a mask [B, S] for its loss.
MakeMask = Callable[[list[int]], Tensor]


def observe_training(
    flags: Sequence[str],
    iterations: int,
    planned: bool,
    before: Callable[[], None] = lambda: None,
    make_mask: MakeMask | None = None,
    after_step: Callable[[Record], None] = lambda record: None,
) -> RankReport:
    """Train as the flags say and report what this rank saw. Once in a process, with torchrun's environment.

    Args:
        flags: Megatron's, with those of the mode.
        iterations: steps that are taken; the gradients of the first and the last are kept.
        planned: install the hooks; without them this is Megatron alone.
        before: called when the hooks are in.
        make_mask: narrows the loss masks of the data.
        after_step: called after each step.

    Raises:
        ConfigurationError: the arguments were refused, by Megatron or by the mode.
    """
    runtime = None
    if planned:
        from megatron_basp.megatron import hooks

        runtime = hooks.install()
    from megatron.core import parallel_state

    from megatron_basp.megatron import pretrain_gpt

    before()
    samples: list[list[int]] = [[]]
    gradients: list[dict[str, Tensor]] = []
    chunks: list[Any] = []

    def keep(record: Record, model: list[Any]) -> None:
        samples.append([])
        if len(record.grad_norms) in (1, iterations):
            gradients.append({name: _kept(gradient) for name, gradient in _gradients(model)})
        chunks[:] = model
        after_step(record)

    forward_step = pretrain_gpt.forward_step

    def observed_step(data_iterator: Any, model: Any) -> Any:
        rows = data_iterator and _observed(data_iterator, samples if model.training else None, make_mask)
        return forward_step(rows, model)

    pretrain_gpt.forward_step = observed_step
    record = record_training(keep)
    sys.argv = ["pretrain_gpt", *flags]
    try:
        config = pretrain_gpt.configuration()
    except ConfigurationError:
        raise
    except (AssertionError, ValueError) as error:
        said = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        raise ConfigurationError(f"Megatron refuses the flags: {' '.join(str(said).split())}") from error
    pretrain_gpt.train(config)
    # Not in the last step: with overlap a rank gets the others' shards of the new parameters later.
    parameters = {name: _kept(parameter) for name, parameter in _named_parameters(chunks)}
    return RankReport(
        (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
        ),
        record.losses,
        record.grad_norms,
        record.held_out_losses,
        samples[:-1],
        gradients,
        parameters,
        runtime and runtime.plan(runtime.settings.micro_batch_size, runtime.settings.seq_length),
    )


def _kept(x: Tensor) -> Tensor:
    return x.detach().to("cpu", copy=True)


def _named_parameters(model: list[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for index, chunk in enumerate(model):
        yield from ((f"{index}.{name}", parameter) for name, parameter in chunk.named_parameters())


def _gradients(model: list[Any]) -> Iterator[tuple[str, Tensor]]:
    _gather_gradients(model)
    return ((name, parameter.main_grad) for name, parameter in _named_parameters(model))


def _gather_gradients(model: list[Any]) -> None:
    """With the distributed optimizer a rank has the sum over all ranks for its own shard of each bucket only. After a
    step the buffers are free, so that the shards of the others go where they belong."""
    for chunk in model:
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for buffers in itertools.chain(chunk.bucket_groups, chunk.expert_parallel_bucket_groups):
            group = buffers.intra_distributed_optimizer_instance_group
            for bucket in buffers.buckets:
                shards = bucket.grad_data.chunk(group.size())
                dist.all_gather_into_tensor(bucket.grad_data, shards[group.rank()].clone(), group=group)


def _observed(data_iterator: Any, samples: list[list[int]] | None, make_mask: MakeMask | None) -> Iterator[Any]:
    """The batches, written down where there is a list for it, with narrowed loss masks."""
    while True:
        batch = dict(next(data_iterator))
        checksums = [zlib.crc32(row.numpy().tobytes()) for row in batch["tokens"]]
        if samples is not None:
            samples[-1] += checksums
        if make_mask is not None:
            batch["loss_mask"] = batch["loss_mask"] * make_mask(checksums)
        yield batch
