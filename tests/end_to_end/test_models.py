"""Each variant of the model trains on four ranks as on one."""

from __future__ import annotations

import pytest

from megatron_basp.errors import RankFailed
from tests.end_to_end.training import GQA, ROPE, Trainer, assert_same_training, batch, cp


@pytest.mark.supports("Models", "fewer KV heads than K, multi-query attention")
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_fewer_kv_heads_than_ranks_of_a_group_train_as_one(trainer: Trainer, kv_heads: int) -> None:
    flags = f"--group-query-attention --num-query-groups {kv_heads} {ROPE} {batch(3)}"
    run, reference = trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags)
    assert max(run[0].plan.group_sizes) > kv_heads
    assert_same_training(run, reference)


@pytest.mark.supports("Models", "learned positions")
def test_learned_positions_train_as_one_rank(trainer: Trainer) -> None:
    flags = f"{GQA} --position-embedding-type learned_absolute {batch(3)}"
    run, reference = trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags)
    assert_same_training(run, reference)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(
            f"{ROPE} --untie-embeddings-and-output-weights --add-qkv-bias",
            marks=pytest.mark.supports("Models", "untied embeddings, QKV bias (Qwen1.5, Qwen2.5)"),
        ),
        pytest.param(
            f"{ROPE} --qk-layernorm --kv-channels 16",
            marks=pytest.mark.supports("Models", "QK layer norm (Qwen3), a head size of its own"),
        ),
        pytest.param(
            f"{ROPE} --use-rope-scaling --no-rope-freq 2",
            marks=pytest.mark.supports("Models", "scaled RoPE (Llama 3.1), layers without RoPE"),
        ),
        pytest.param(
            f"{ROPE} --rotary-percent 0.5 --rotary-interleaved",
            marks=pytest.mark.supports("Models", "partial and interleaved RoPE"),
        ),
        pytest.param(
            f"{ROPE} --attention-output-gate",
            marks=pytest.mark.supports("Models", "attention output gate"),
        ),
        pytest.param(
            "--position-embedding-type none",
            marks=pytest.mark.supports("Models", "no positions"),
        ),
        pytest.param(
            "--position-embedding-type yarn --rotary-scaling-factor 4.0 --yarn-original-max-position-embeddings 32",
            marks=pytest.mark.supports("Models", "YaRN"),
        ),
        pytest.param(
            f"{ROPE} --window-size 7,0 --window-attn-skip-freq 2",
            marks=pytest.mark.supports("Models", "sliding windows, in all layers or some"),
        ),
        pytest.param(
            f"{ROPE} --normalization LayerNorm --cross-entropy-loss-fusion",
            marks=pytest.mark.supports("Models", "LayerNorm, fused cross-entropy"),
        ),
    ],
)
def test_variants_of_the_model_train_as_one_rank(trainer: Trainer, flags: str) -> None:
    flags = f"{GQA} {batch(3)} {flags}"
    assert_same_training(trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags))


def _megatron_does_not_rotate() -> None:
    from megatron.core.transformer import attention

    def apply_rotary_pos_emb(*args: object, **kwargs: object) -> None:
        raise RuntimeError("Megatron rotates")

    attention.apply_rotary_pos_emb = apply_rotary_pos_emb


def test_q_and_k_are_rotated_while_they_are_packed_and_not_by_megatron(trainer: Trainer) -> None:
    flags = f"{GQA} {ROPE} {batch(3)}"
    run = trainer.planned(f"{flags} {cp(2)}", ranks=2, sabotage=_megatron_does_not_rotate)
    assert_same_training(run, trainer.stock(flags))


def test_where_nothing_is_packed_megatron_rotates(trainer: Trainer) -> None:
    with pytest.raises(RankFailed, match="Megatron rotates"):
        trainer.planned(f"{GQA} {ROPE} {batch(2)} {cp(2)}", ranks=2, sabotage=_megatron_does_not_rotate)
