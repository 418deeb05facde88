"""One rank's part in a run of Megatron's `pretrain()`, with everything written down that two runs can differ in.

With or without a sequence-parallel mode: a stock run is observed by the same code, and no hook is imported for it.
"""

from __future__ import annotations

import sys
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from megatron_basp.comparison import RankReport
from megatron_basp.errors import ConfigurationError
from megatron_basp.megatron.recorder import Record, record_training
from megatron_basp.megatron.whole_parameters import named_gradients, named_parameters

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
            gradients.append(dict(named_gradients(model)))
        chunks[:] = model
        after_step(record)

    forward_step = pretrain_gpt.forward_step

    def observed_step(data_iterator: Any, model: Any) -> Any:
        rows = data_iterator and _observed(data_iterator, samples if model.training else None, make_mask)
        return forward_step(rows, model)

    pretrain_gpt.forward_step = observed_step
    record = record_training(keep)
    pretrain_gpt.train(validated_configuration(flags))
    if runtime is not None:
        runtime.close_books()  # a forked process has no exit of its own
    # Not in the last step: with overlap a rank gets the others' shards of the new parameters later.
    parameters = dict(named_parameters(chunks))
    return RankReport(
        (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
        ),
        record.losses,
        record.grad_norms,
        record.held_out_losses,
        record.mtp_losses,
        record.mtp_tokens,
        record.expert_losses,
        samples[:-1],
        gradients,
        parameters,
        runtime and runtime.plan(runtime.settings.micro_batch_size, runtime.settings.seq_length),
    )


def validated_configuration(flags: Sequence[str]) -> Any:
    """What the flags say, as `pretrain_gpt.train` takes it.

    Raises:
        ConfigurationError: in one line, by Megatron or by the mode.
    """
    from megatron_basp.megatron import pretrain_gpt

    sys.argv = ["pretrain_gpt", *flags]
    try:
        return pretrain_gpt.configuration()
    except ConfigurationError:
        raise
    except (AssertionError, ValueError) as error:
        said = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        raise ConfigurationError(f"Megatron refuses the flags: {' '.join(str(said).split())}") from error


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
