"""Mixtures of experts: what is balanced over tokens must be balanced over the same tokens."""

from __future__ import annotations

import pytest

from tests.end_to_end.training import GQA, ROPE, Trainer, assert_same_samples, assert_same_training, batch, cp


@pytest.mark.supports("Experts", "`aux_loss`, z-loss")
def test_experts_with_auxiliary_and_z_loss_train_as_one_rank(trainer: Trainer) -> None:
    flags = (
        f"{GQA} {ROPE} {batch(3)} --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
        "--moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3"
    )
    assert_same_training(trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags))


@pytest.mark.supports("Experts", "`global_aux_loss`", "the same without context parallelism")
def test_experts_with_global_auxiliary_loss_train_as_without_context_parallelism(trainer: Trainer) -> None:
    """The loss is taken over all data-parallel ranks, so that the reference has as many."""
    flags = (
        f"{GQA} {ROPE} {batch(3, data_parallel=2)} --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 "
        "--moe-router-load-balancing-type global_aux_loss"
    )
    assert_same_training(trainer.planned(f"{flags} {cp(2)}", ranks=4), trainer.stock(flags, ranks=2))


@pytest.mark.supports("Experts", "`seq_aux_loss`, with other auxiliary losses too")
@pytest.mark.parametrize(
    ("flags", "rows", "mask", "recompute"),
    [
        ("--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-1", 3, "", ""),
        (
            "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1e-2 1e-1",
            6,
            "uneven",
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        ),
        (
            "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-1 --calculate-per-token-loss",
            3,
            "uneven",
            "--recompute-granularity selective --recompute-modules moe",
        ),
    ],
)
def test_experts_balanced_over_each_sequence_train_as_one_rank(
    trainer: Trainer, flags: str, rows: int, mask: str, recompute: str
) -> None:
    flags = f"{GQA} {ROPE} {batch(rows)} --num-experts 4 --moe-router-topk 2 {flags}"
    run = trainer.planned(f"{flags} {cp(4)} {recompute}", ranks=4, mask=mask)
    assert all(losses["seq_load_balancing_loss"] > 0 for losses in run[-1].expert_losses)
    assert_same_training(run, trainer.stock(flags, mask=mask))


@pytest.mark.supports("Experts", "expert bias")
def test_experts_balanced_by_a_bias_train_as_one_rank(trainer: Trainer) -> None:
    flags = (
        f"{GQA} {ROPE} {batch(3)} --num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-load-balancing-type none"
    )
    assert_same_training(trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags))


@pytest.mark.supports(
    "Experts", "expert parallelism, dispatchers allgather and alltoall", "stock with the same experts and DP for CP"
)
@pytest.mark.parametrize(
    ("dispatcher", "ranks", "expert_parallel", "rows", "mask"),
    [
        ("allgather", 2, 2, 3, ""),
        ("alltoall", 4, 2, 3, "uneven"),
        pytest.param("alltoall", 4, 4, 6, "", marks=pytest.mark.slow),
    ],
)
def test_expert_parallel_ranks_train_as_data_parallel_ones(
    trainer: Trainer, dispatcher: str, ranks: int, expert_parallel: int, rows: int, mask: str
) -> None:
    """The reference has the same expert parallelism, on which initial weights depend, and the same micro-batches, over
    which the auxiliary loss is taken: one for each data-parallel rank, in place of one after the other."""
    flags = (
        f"{GQA} {ROPE} --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 "
        f"--moe-token-dispatcher-type {dispatcher} --expert-model-parallel-size {expert_parallel}"
    )
    run = trainer.planned(f"{flags} {batch(rows, micro_batches=ranks)} {cp(ranks)}", ranks=ranks, mask=mask)
    reference = trainer.stock(f"{flags} {batch(rows, 1, data_parallel=ranks)}", ranks=ranks, mask=mask)
    assert_same_training(run, reference)
    assert_same_samples(run, reference)


@pytest.mark.supports(
    "Experts",
    "tensor parallelism with `--sequence-parallel`; `--expert-tensor-parallel-size`, EP over TP ranks",
    "the same without context parallelism",
)
@pytest.mark.parametrize(
    "flags",
    [
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2",
        "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1e-2 1e-1 "
        "--moe-z-loss-coeff 1e-3 --expert-tensor-parallel-size 1 --expert-model-parallel-size 2 "
        "--moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 32 --calculate-per-token-loss",
    ],
)
def test_experts_of_tensor_parallel_ranks_train_as_without_context_parallelism(trainer: Trainer, flags: str) -> None:
    flags = (
        f"{GQA} {ROPE} {batch(3)} --num-experts 4 --moe-router-topk 2 --tensor-model-parallel-size 2 "
        f"--sequence-parallel {flags}"
    )
    run = trainer.planned(f"{flags} {cp(2)}", ranks=4, mask="uneven")
    assert_same_training(run, trainer.stock(flags, ranks=2, mask="uneven"))


@pytest.mark.supports("Experts", "capacity factor, with padding to it, where K = 1", "stock with DP for CP")
@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        ("--moe-expert-capacity-factor 0.7", 4),
        ("--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity", 8),
        ("--moe-expert-capacity-factor 0.6 --moe-token-drop-policy position --expert-model-parallel-size 2", 4),
    ],
)
def test_experts_drop_the_tokens_that_data_parallel_ranks_would_drop(trainer: Trainer, flags: str, rows: int) -> None:
    """Capacity is counted over the tokens of a rank, so the reference puts the same ones together. Its micro-batches,
    over which auxiliary losses are taken, are smaller: these are left out."""
    flags = (
        f"{GQA} {ROPE} --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none "
        f"--moe-token-dispatcher-type alltoall {flags}"
    )
    run = trainer.planned(f"{flags} {batch(rows)} {cp(4)}", ranks=4)
    reference = trainer.stock(f"{flags} {batch(rows // 4, data_parallel=4)}", ranks=4)
    assert_same_training(run, reference)
    assert_same_samples(run, reference)


@pytest.mark.supports("Experts", "gated shared experts, fine-grained experts, QK layer norm (Qwen3-MoE)")
def test_a_model_like_qwen3_moe_trains_as_one_rank(trainer: Trainer) -> None:
    flags = (
        f"{GQA} {ROPE} {batch(3)} --qk-layernorm --kv-channels 16 --untie-embeddings-and-output-weights "
        "--num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 32 --moe-router-load-balancing-type aux_loss "
        "--moe-aux-loss-coeff 1e-2 --moe-shared-expert-intermediate-size 48 --moe-shared-expert-gate"
    )
    assert_same_training(trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags))


@pytest.mark.slow
@pytest.mark.supports(
    "Experts",
    "dense layers first, shared experts, groups of experts, bias and `seq_aux_loss`, on MLA, predicting two tokens "
    "(DeepSeek-V3)",
    "stock with the same experts and DP for CP",
)
def test_a_model_like_deepseek_v3_trains_as_data_parallel_ranks(trainer: Trainer) -> None:
    """The reference is as in the test of expert parallelism."""
    flags = (
        f"{ROPE} --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
        "--v-head-dim 12 --qk-layernorm --rotary-scaling-factor 4 --moe-layer-freq ([0]*1+[1]*1) --num-experts 8 "
        "--moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32 --moe-router-topk 4 "
        "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-score-function sigmoid "
        "--moe-router-topk-scaling-factor 2.5 --moe-router-enable-expert-bias "
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 "
        "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 --mtp-num-layers 1"
    )
    run = trainer.planned(f"{flags} {batch(3, micro_batches=4)} {cp(4)}", ranks=4)
    assert_same_training(run, trainer.stock(f"{flags} {batch(3, 1, data_parallel=4)}", ranks=4))
