"""The micro-batch on its way from the loader to the model: every rank of a CP group has it, and takes its stream."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from megatron_basp.batch import take_stream
from megatron_basp.megatron.runtime import Runtime
from megatron_basp.megatron.seam import Function

# What a batch says of its documents; `megatron_basp/megatron/packed.py` reads it when the model is called.
DOCUMENT_KEYS = ("cu_seqlens", "cu_seqlens_padded")


def receiving_batch(runtime: Runtime, original: Function) -> Function:
    """Scripts allocate what tensor-parallel ranks receive for the micro-batch size of training, at evaluation too."""
    signature = inspect.signature(original)

    def get_batch_on_this_tp_rank(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        if runtime.is_active and runtime.plan_holder.is_set:
            arguments["micro_batch_size"] = len(runtime.plan_holder.plan.lengths)
        return original(**arguments)

    return get_batch_on_this_tp_rank


def taking_batch(runtime: Runtime, original: Function) -> Function:
    def get_batch_on_this_cp_rank(batch: Any, *args: Any, **kwargs: Any) -> Any:
        return stream_of_batch(runtime, batch) if runtime.is_active else original(batch, *args, **kwargs)

    return get_batch_on_this_cp_rank


def stream_of_batch(runtime: Runtime, batch: dict[str, Any]) -> dict[str, Any]:
    """This rank's stream of every [B, S] tensor of the batch, in place of Megatron's zig-zag slices.

    Packed rows may come strung together, as [1, B·S]. What describes their documents stays as it is: the model takes
    it from there.

    Outside of a schedule call (skipped iterations drain the loader) the plan follows from the shape alone.

    Raises:
        ValueError: the batch is not what was planned, or has something that would be ignored.
    """
    packed = runtime.settings.packed
    for key in ("attention_mask",) if packed else ("attention_mask", *DOCUMENT_KEYS):
        if batch.get(key) is not None:
            raise ValueError(f"the batch has {key}, which sequence parallelism by groups would ignore: leave it out")
    tokens = next((batch[key] for key in ("tokens", "labels") if batch.get(key) is not None), None)
    if tokens is None:
        raise ValueError("the batch has neither tokens nor labels")
    runtime.batches_taken += 1

    def rows(value: Tensor) -> Tensor:
        return value.reshape(-1, runtime.settings.seq_length) if packed else value

    plan = runtime.plan_holder.plan if runtime.plan_holder.is_set else runtime.plan(*rows(tokens).shape)
    for key, value in batch.items():
        if isinstance(value, Tensor) and value.dim() >= 2 and key not in DOCUMENT_KEYS:
            batch[key] = take_stream(plan, runtime.groups.cp_rank, rows(value))
    return batch
