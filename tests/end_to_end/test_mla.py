"""Multi-latent attention (DeepSeek): heads of q and k wider than those of v, and a rotary part of its own."""

from __future__ import annotations

import pytest

from tests.end_to_end.training import ROPE, Trainer, assert_same_training, batch, cp

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
def test_multi_latent_attention_under_tensor_parallelism_trains_as_without_context_parallelism(
    trainer: Trainer,
) -> None:
    flags = f"{MLA} {YARN} --q-lora-rank 24 --qk-layernorm {batch(3)} --tensor-model-parallel-size 2"
    assert_same_training(trainer.planned(f"{flags} {cp(2)}", ranks=4), trainer.stock(flags, ranks=2))


@pytest.mark.supports("Training", "selective recompute of multi-latent attention's up-projections")
def test_recomputed_up_projections_train_as_kept_ones(trainer: Trainer) -> None:
    flags = f"{MLA} {PLAIN} {batch(3)}"
    recompute = "--recompute-granularity selective --recompute-modules core_attn mla_up_proj"
    assert_same_training(trainer.planned(f"{flags} {recompute} {cp(4)}", ranks=4), trainer.stock(flags))
