"""Packed rows: several documents in a row of S tokens (`--sft`, `--dataloader-inter-document-masking`).

Megatron describes them by cumulative lengths over the rows of a micro-batch strung together, in a `PackedSeqParams`
with the layout `thd`, which the training script hands to the model on every pipeline stage. Layers would apply these
to the T tokens of a rank's stream, which lie in another order. So the model gets `PackedRows` in its place: a stream
is `sbhd` to it as ever, its rotary positions restart in each document, and core attention knows the documents of the
whole rows that it sees after its exchange.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_basp.batch import take_stream
from megatron_basp.documents import Documents, documents_of_rows
from megatron_basp.megatron.runtime import Runtime
from megatron_basp.megatron.seam import Function

CUMULATIVE_LENGTHS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


@dataclass(frozen=True)
class PackedRows:
    """What rides with a micro-batch through the model, also where layers are recomputed.

    documents: of the rows of the micro-batch.
    positions: of each token of this rank's stream within its document, [T] int64.

    The rest is what Megatron's layers read of a `PackedSeqParams` (`core/packed_seq_params.py`) where the layout is
    not `thd`. It is no subclass: what else they would read belongs to `thd`, and is missing here instead of wrong.
    """

    documents: Documents
    positions: Tensor
    qkv_format: str = "sbhd"
    cp_group: None = None
    tokens_per_sample: None = None


def reading_documents(runtime: Runtime, original: Function) -> Function:
    """The model's forward pass, on every pipeline stage: stages in the middle take no batch."""
    signature = inspect.signature(original)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not runtime.is_active:
            return original(self, *args, **kwargs)
        arguments = signature.bind(self, *args, **kwargs).arguments
        packed = arguments.get("packed_seq_params")
        if (packed is not None) != runtime.settings.packed:
            raise ValueError(
                "the model was given packed_seq_params, and the data is not packed"
                if packed is not None
                else "the data is packed, and the model was given no packed_seq_params: attention would mix documents"
            )
        if packed is not None:
            arguments["packed_seq_params"] = packed_rows(runtime, packed)
        return original(**arguments)

    return forward


def packed_rows(runtime: Runtime, packed_seq_params: Any) -> PackedRows:
    """The documents of the micro-batch on its way, and the positions of this rank's stream in them.

    Reads the cumulative lengths on the host, once for each micro-batch and chunk of the model.

    Raises:
        ValueError: they do not describe whole rows of the planned micro-batch, or leave gaps between documents.
    """
    plan = runtime.plan_holder.plan
    cumulative = packed_seq_params.cu_seqlens_q
    for name in CUMULATIVE_LENGTHS:
        other = getattr(packed_seq_params, name)
        if other is not None and other is not cumulative and not torch.equal(other, cumulative):
            raise ValueError(f"packed sequences with {name} other than cu_seqlens_q are not supported: leave it out")
    documents = documents_of_rows(cumulative.tolist(), plan.lengths)
    positions = positions_in_documents(cumulative, plan.lengths)
    return PackedRows(documents, take_stream(plan, runtime.groups.cp_rank, positions)[0])


def positions_in_documents(cumulative: Tensor, lengths: Sequence[int]) -> Tensor:
    """The position of each token of the micro-batch within its document, [B, S] int64, on the device of
    `cumulative`."""
    total = sum(lengths)
    starts = torch.repeat_interleave(cumulative[:-1].long(), cumulative.diff().long(), output_size=total)
    return (torch.arange(total, device=cumulative.device) - starts).view(len(lengths), -1)


def packing_as_one_process(runtime: Runtime, original: Function) -> Function:
    """`SFTDataset` pads every conversation to a multiple of 2·CP, for stock's zig-zag slices of each document. Groups
    share rows, not documents, so that packs can be those that one process trains on."""
    signature = inspect.signature(original)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        arguments = signature.bind(self, *args, **kwargs).arguments
        if runtime.is_active:
            arguments["config"] = copy.copy(arguments["config"])
            arguments["config"].context_parallel_size = 1
        original(**arguments)

    return __init__
