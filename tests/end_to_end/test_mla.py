"""Multi-latent attention (DeepSeek): heads of q and k wider than those of v, and a rotary part of its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_basp.batch import stream_positions
from megatron_basp.plan import Limits, PlanHolder, plan_batch
from tests.end_to_end.training import ROPE, SEQ_LENGTH, Trainer, assert_same_training, batch, cp

MLA = f"""
    {ROPE} --multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 12
"""
PLAIN = "--rope-type rope"
YARN = "--rope-type yarn --rotary-scaling-factor 4 --mscale 0.707 --mscale-all-dim 0.5"


@pytest.mark.supports("Models", "multi-latent attention, with and without query compression, plain RoPE and YaRN")
@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        (PLAIN, 3),
        (f"{PLAIN} --q-lora-rank 24 --qk-layernorm", 2),
        (f"{YARN} --q-lora-rank 24 --qk-layernorm", 3),
    ],
)
def test_multi_latent_attention_trains_as_one_rank(trainer: Trainer, flags: str, rows: int) -> None:
    flags = f"{MLA} {flags} {batch(rows)}"
    assert_same_training(trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags))


@pytest.mark.supports(
    "Models", "multi-latent attention under tensor parallelism", "the same without context parallelism"
)
@pytest.mark.parametrize("norms", ["", pytest.param("--sequence-parallel", marks=pytest.mark.slow)])
def test_multi_latent_attention_under_tensor_parallelism_trains_as_without_context_parallelism(
    trainer: Trainer, norms: str
) -> None:
    flags = f"{MLA} {YARN} --q-lora-rank 24 --qk-layernorm {batch(3)} --tensor-model-parallel-size 2"
    flags = f"{flags} {norms}"
    assert_same_training(trainer.planned(f"{flags} {cp(2)}", ranks=4), trainer.stock(flags, ranks=2))


@pytest.mark.slow
@pytest.mark.supports("Training", "selective recompute of multi-latent attention's up-projections")
def test_recomputed_up_projections_train_as_kept_ones(trainer: Trainer) -> None:
    flags = f"{MLA} {PLAIN} {batch(3)}"
    recompute = "--recompute-granularity selective --recompute-modules core_attn mla_up_proj"
    assert_same_training(trainer.planned(f"{flags} {recompute} {cp(4)}", ranks=4), trainer.stock(flags))


@pytest.mark.parametrize("rank", range(4))
def test_fused_yarn_reads_the_row_of_each_tokens_position(trainer: Trainer, rank: int) -> None:
    """The fused kernel runs on a GPU only; it takes row t of these tables for token t (`rotary_fwd_q_kernel`)."""
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    from megatron_basp.megatron.model import StreamRotaryEmbedding

    def yarn() -> YarnRotaryEmbedding:
        return YarnRotaryEmbedding(8, scaling_factor=4.0, original_max_position_embeddings=16, mscale=0.7)

    plan, plan_holder = plan_batch((SEQ_LENGTH,) * 3, 4, Limits(8, 8)), PlanHolder()
    plan_holder.set(plan)
    runtime = SimpleNamespace(plan_holder=plan_holder, groups=SimpleNamespace(cp_rank=rank, alone=None))
    of_stream = StreamRotaryEmbedding(yarn(), runtime).get_cached_cos_sin(plan.tokens, dtype=torch.float32)
    positions = stream_positions(plan, rank, torch.device("cpu"))
    for found, whole in zip(of_stream, yarn().get_cached_cos_sin(SEQ_LENGTH, dtype=torch.float32), strict=True):
        assert found.is_contiguous()
        torch.testing.assert_close(found, whole[positions], rtol=0, atol=0)
