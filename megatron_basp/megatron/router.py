"""Routing to experts that is balanced over each sequence, of which a rank's stream holds parts of several."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_basp.batch import stream_rows
from megatron_basp.megatron.runtime import Runtime
from megatron_basp.megatron.seam import Function


def balancing_rows(runtime: Runtime, original: Function) -> Function:
    """`seq_aux_loss` over the rows of the micro-batch, in place of the whole stream.

    The loss is the mean over rows b of E·Σ_e f_be·P_be: f is the share of the row's tokens that went to expert e, over
    all ranks that hold the row; P is the mean of their scores, to which each rank adds its own tokens' part and its
    gradient. So counts are summed by row and over tp×cp, scores by row alone.
    """

    def _apply_seq_aux_loss(
        self: Any,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> Tensor:
        """`core/transformer/moe/router.py`: probs, scores and map are [tokens, experts] of this rank's stream.

        Raises:
            ValueError: some tokens are padding.
        """
        if not runtime.is_active:
            return original(self, probs, scores_for_aux_loss, routing_map, seq_length, bsz, with_padding_mask)
        from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func

        coefficient = self.get_aux_loss_coeff("seq_aux_loss")
        if coefficient == 0:
            return probs
        if with_padding_mask:
            raise ValueError(
                f"layer {self.layer_number}: seq_aux_loss with a padding mask is not supported, since tokens of a row "
                f"would have to be counted over ranks: leave the mask out"
            )
        plan = runtime.plan_holder.plan
        batch_size = len(plan.lengths)
        rows = stream_rows(plan, runtime.groups.cp_rank, probs.device)
        if self.config.sequence_parallel:
            # Outside of attention a tensor-parallel rank holds a slice of the stream.
            rows = rows.chunk(self.tp_group.size())[self.tp_group.rank()]
        counts = _sum_by_row(routing_map.long(), rows, batch_size)
        dist.all_reduce(counts, group=self.tp_cp_group)
        loss = switch_load_balancing_loss_func(
            probs=_sum_by_row(scores_for_aux_loss, rows, batch_size).reshape(1, -1),
            tokens_per_expert=counts.flatten(),
            total_num_tokens=plan.lengths[0],  # of each row
            topk=self.topk,
            num_experts=self.config.num_moe_experts,
            moe_aux_loss_coeff=coefficient,
            fused=self.config.moe_router_fusion,
        )
        return self.attach_and_log_load_balancing_loss(
            probs,
            coefficient,
            loss / batch_size,
            "seq_load_balancing_loss",
            self.tp_cp_group,
            valid_token_count=len(rows),
        )

    return _apply_seq_aux_loss


def _sum_by_row(x: Tensor, rows: Tensor, batch_size: int) -> Tensor:
    """[tokens, experts] -> [B, experts]."""
    return x.new_zeros(batch_size, x.shape[1]).index_add(0, rows, x)
