"""Multi-token prediction: the next token may lie on the next rank, and a rank's part of the loss is not its own mean.

Its layers see the rolled ids and positions, its losses the rolled labels and masks (`roll_tensor` and
`process_mtp_loss` in `core/transformer/multi_token_prediction.py`). Megatron rolls as if the stream were one sequence,
and divides by the tokens that a rank holds.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_basp.all_to_all import ExchangeGroup
from megatron_basp.attention import BaspAttention
from megatron_basp.batch import roll_stream
from megatron_basp.ledger import Ledger
from megatron_basp.megatron.runtime import Runtime
from megatron_basp.megatron.seam import Function
from megatron_basp.next_rank import from_next_rank
from megatron_basp.plan import BatchPlan, Share
from megatron_basp.process_groups import SequenceGroups
from megatron_basp.transport import AllToAll


def rolling(runtime: Runtime, original: Function) -> Function:
    signature = inspect.signature(original)

    def roll_tensor(*args: Any, **kwargs: Any) -> tuple[Tensor | None, Tensor | None]:
        """The rolled stream and its sum over `cp_group`: of one rank where a layer rolls, of all where a loss does."""
        if not runtime.is_active:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        stream, group = bound.arguments["tensor"], bound.arguments["cp_group"]
        if stream is None:
            return None, None
        shifts, dims, packed = (bound.arguments[name] for name in ("shifts", "dims", "packed_seq_params"))
        if (shifts, dims % stream.dim(), packed) != (-1, 1, None):
            raise ValueError(
                f"multi-token prediction rolls streams [1, T] by one token to the left, got {list(stream.shape)} to "
                f"be rolled by {shifts} along {dims}{' with packed sequences' if packed is not None else ''}"
            )
        rolled = roll_over_ranks(runtime.plan_holder.plan, runtime.groups, runtime.ledger, stream)
        total = rolled.sum()
        if group is not None and group.size() > 1:
            dist.all_reduce(total, group=group)
        return rolled, total

    return roll_tensor


def roll_over_ranks(plan: BatchPlan, groups: SequenceGroups, ledger: Ledger, stream: Tensor) -> Tensor:
    """`roll_stream` with the edges sent inside the groups: one collective for each wave with K > 1.

    Raises:
        ValueError: it is not the stream that was planned.
    """
    if tuple(stream.shape) != (1, plan.tokens):
        raise ValueError(f"a rank's stream is [1, T] with T = B·S/N = {plan.tokens}, got {list(stream.shape)}")

    def edge_of_next(wave: int, share: Share, edge: Tensor) -> Tensor:
        if share.group_size == 1:
            return torch.zeros_like(edge)
        group = groups.by_size[share.group_size]
        where = ExchangeGroup(group, AllToAll(group), share.tokens_per_rank, ledger, None, wave)
        return from_next_rank(edge[0], where)[None]

    return roll_stream(plan, groups.cp_rank, stream, edge_of_next)


def weighing_losses(runtime: Runtime, original: Function) -> Function:
    """The loss of a depth is Σloss/Σn over the micro-batch, where n counts the rolled mask.

    Megatron takes a rank's Σloss/n and averages over the N ranks, for gradients and for the log. With Σn over the CP
    group in place of n, which `roll_tensor` gives, and N times the loss, that is the mean over the micro-batch. With
    `--calculate-per-token-loss` gradients are summed over ranks and divided by the tokens of the main loss, so
    Megatron scales by these: by m·Σloss/n, with m of the mask before it was rolled. Here that is (Σm/N)·(N·Σloss)/Σn.
    """
    signature = inspect.signature(original)

    def process_mtp_loss(*args: Any, **kwargs: Any) -> Tensor:
        if not runtime.is_active:
            return original(*args, **kwargs)
        arguments = signature.bind(*args, **kwargs).arguments
        labels, config = arguments["labels"], arguments["config"]
        if labels is None:
            raise ValueError("multi-token prediction without labels is not supported: its mask would be another one")
        ranks, cp_group = runtime.settings.ranks, runtime.groups.cp_group
        compute_loss = arguments["compute_language_model_loss"]
        arguments["compute_language_model_loss"] = lambda labels, logits: compute_loss(labels, logits) * ranks
        arguments["cp_group"] = cp_group
        if config.calculate_per_token_loss:
            mask = arguments["loss_mask"]
            tokens = (torch.ones_like(labels) if mask is None else mask).sum()
            dist.all_reduce(tokens, group=cp_group)
            arguments["config"] = config = copy.copy(config)
            config.calculate_per_token_loss = False
            config.mtp_loss_scaling_factor = config.mtp_loss_scaling_factor * tokens / ranks
        return original(**arguments)

    return process_mtp_loss


def number_behind_decoder(model: torch.nn.Module) -> None:
    """Megatron counts layers of multi-token prediction from 1 again. For the ledger they follow those of the decoder,
    as they do for Megatron's own log of auxiliary losses (`core/transformer/moe/router.py`)."""
    for module in _multi_token_attention(model):
        module.layer += model.config.num_layers


def attentions_in_a_pass(model: torch.nn.Module) -> Counter[int]:
    """How often each layer of a model chunk attends in one forward pass."""
    times = Counter(module.layer for module in model.modules() if isinstance(module, BaspAttention))
    if model.config.mtp_use_repeated_layer:
        for module in _multi_token_attention(model):
            times[module.layer] *= model.config.mtp_num_layers
    return times


def _multi_token_attention(model: torch.nn.Module) -> list[BaspAttention]:
    block = getattr(model, "mtp", None)
    return [] if block is None else [module for module in block.modules() if isinstance(module, BaspAttention)]
