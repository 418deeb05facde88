"""Training under a plan is training on one rank: real `pretrain()`, fp32, ten steps.

With tensor or pipeline parallelism the reference has the same, since Megatron's initial weights depend on it.
"""

from __future__ import annotations

import pytest

from tests.end_to_end.training import GQA, ROPE, SEQ_LENGTH, Trainer, assert_same_samples, assert_same_training


def batch(micro: int, micro_batches: int = 2, data_parallel: int = 1) -> str:
    """Flags for micro-batches of B sequences, so many of them to a step."""
    return f"--micro-batch-size {micro} --global-batch-size {micro * micro_batches * data_parallel}"


def cp(ranks: int) -> str:
    return f"--context-parallel-size {ranks}"


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6])
def test_four_ranks_train_as_one_for_any_micro_batch_size(trainer: Trainer, rows: int) -> None:
    flags = f"{GQA} {ROPE} {batch(rows)}"
    run, reference = trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags)
    assert_same_training(run, reference)
    assert_same_samples(run, reference)


@pytest.mark.parametrize(("rows", "group_sizes"), [(3, [4, 8]), (8, [1])])
def test_eight_ranks_train_as_one(trainer: Trainer, rows: int, group_sizes: list[int]) -> None:
    flags = f"{ROPE} {batch(rows, micro_batches=1)}"
    run, reference = trainer.planned(f"{flags} {cp(8)}", ranks=8), trainer.stock(flags)
    assert [wave.group_size for wave in run[0].plan.waves] == group_sizes
    assert_same_training(run, reference)
    assert_same_samples(run, reference)


def test_ulysses_mode_trains_as_one_rank(trainer: Trainer) -> None:
    flags = f"{GQA} {ROPE} {batch(3)}"
    run, reference = trainer.planned(f"{flags} {cp(4)}", ranks=4, mode="ulysses"), trainer.stock(flags)
    assert [wave.group_size for wave in run[0].plan.waves] == [4]
    assert_same_training(run, reference)
    assert_same_samples(run, reference)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_fewer_kv_heads_than_ranks_of_a_group_train_as_one(trainer: Trainer, kv_heads: int) -> None:
    flags = f"--group-query-attention --num-query-groups {kv_heads} {ROPE} {batch(3)}"
    run, reference = trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags)
    assert max(run[0].plan.group_sizes) > kv_heads
    assert_same_training(run, reference)


def test_learned_positions_train_as_one_rank(trainer: Trainer) -> None:
    flags = f"{GQA} --position-embedding-type learned_absolute {batch(3)}"
    run, reference = trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags)
    assert_same_training(run, reference)


@pytest.mark.parametrize(
    "flags",
    [
        f"{ROPE} --untie-embeddings-and-output-weights --add-qkv-bias",
        f"{ROPE} --qk-layernorm --kv-channels 16",
        f"{ROPE} --use-rope-scaling --no-rope-freq 2",
        f"{ROPE} --rotary-percent 0.5 --rotary-interleaved",
        f"{ROPE} --attention-output-gate",
        "--position-embedding-type none",
        "--position-embedding-type yarn --rotary-scaling-factor 4.0 --yarn-original-max-position-embeddings 32",
        f"{ROPE} --window-size 7,0 --window-attn-skip-freq 2",
        f"{ROPE} --normalization LayerNorm --cross-entropy-loss-fusion",
    ],
)
def test_variants_of_the_model_train_as_one_rank(trainer: Trainer, flags: str) -> None:
    flags = f"{GQA} {batch(3)} {flags}"
    assert_same_training(trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags))


@pytest.mark.parametrize(
    "flags",
    [
        "--rerun-mode validate_results --check-for-spiky-loss --log-throughput --log-num-zeros-in-grad",
        "--dataloader-type cyclic --data-parallel-random-init",
        "--use-cpu-initialization --deterministic-mode --no-create-attention-mask-in-dataloader",
    ],
)
def test_ways_of_running_do_not_change_the_training(trainer: Trainer, flags: str) -> None:
    flags = f"{GQA} {ROPE} {batch(3)} {flags}"
    run, reference = trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags)
    assert_same_training(run, reference)
    assert_same_samples(run, reference)


def test_a_batch_size_schedule_trains_as_on_one_rank(trainer: Trainer) -> None:
    flags = f"{GQA} {ROPE} --micro-batch-size 3 --step-batch-size-schedule 0:3,{12 * SEQ_LENGTH}:6"
    run, reference = trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags)
    assert [len(rows) for rows in reference[0].samples] == [3] * 4 + [6] * 6
    assert_same_training(run, reference)
    assert_same_samples(run, reference)


def test_skipped_iterations_take_their_samples_and_change_nothing_else(trainer: Trainer) -> None:
    flags = f"{GQA} {ROPE} {batch(3)} --iterations-to-skip 3 4"
    run, reference = trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags)
    assert_same_training(run, reference, gradients=False, steps=8)


def test_a_forced_group_size_trains_as_one_rank(trainer: Trainer) -> None:
    flags = f"{GQA} {ROPE} {batch(4)}"
    run = trainer.planned(f"{flags} {cp(4)} --basp-group-size 2", ranks=4)
    assert [(len(wave.rows), wave.group_size) for wave in run[0].plan.waves] == [(4, 2)]
    assert_same_training(run, trainer.stock(flags))


def test_data_parallel_ranks_with_accumulation_train_as_one(trainer: Trainer) -> None:
    flags = f"{GQA} {ROPE} {batch(3, micro_batches=2, data_parallel=2)}"
    run, reference = trainer.planned(f"{flags} {cp(2)}", ranks=4), trainer.stock(flags)
    assert_same_training(run, reference)
    assert_same_samples(run, reference)


@pytest.mark.parametrize("rows", [2, 3])
def test_pipeline_stages_train_as_without_context_parallelism(trainer: Trainer, rows: int) -> None:
    flags = f"{GQA} {ROPE} {batch(rows)} --pipeline-model-parallel-size 2"
    run, reference = trainer.planned(f"{flags} {cp(2)}", ranks=4), trainer.stock(flags, ranks=2)
    assert_same_training(run, reference)
    assert_same_samples(run, reference)


def test_virtual_pipeline_stages_train_as_without_context_parallelism(trainer: Trainer) -> None:
    flags = f"{GQA} {ROPE} {batch(3, micro_batches=4)} --num-layers 4 --pipeline-model-parallel-size 2"
    flags = f"{flags} --num-virtual-stages-per-pipeline-rank 2"
    run, reference = trainer.planned(f"{flags} {cp(2)}", ranks=4), trainer.stock(flags, ranks=2)
    assert_same_training(run, reference)
    assert_same_samples(run, reference)


@pytest.mark.parametrize("rows", [2, 3])
def test_tensor_parallel_ranks_train_as_without_context_parallelism(trainer: Trainer, rows: int) -> None:
    flags = f"{GQA} {ROPE} {batch(rows)} --tensor-model-parallel-size 2"
    run, reference = trainer.planned(f"{flags} {cp(2)}", ranks=4), trainer.stock(flags, ranks=2)
    assert_same_training(run, reference)
    assert_same_samples(run, reference)


@pytest.mark.parametrize(("rows", "evaluated"), [(2, 3), (3, 1), (4, 6)])
def test_evaluation_at_another_micro_batch_size_gives_the_same_loss(
    trainer: Trainer, rows: int, evaluated: int
) -> None:
    flags = f"{GQA} {ROPE} {batch(rows)} --eval-micro-batch-size {evaluated} --eval-global-batch-size {evaluated}"
    run, reference = trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags)
    assert_same_training(run, reference)


def test_evaluation_at_another_micro_batch_size_under_tensor_parallelism(trainer: Trainer) -> None:
    """Stock Megatron fails here, so its own evaluation takes the same samples in micro-batches of training's size."""
    flags = f"{GQA} {ROPE} {batch(2)} --tensor-model-parallel-size 2 --eval-global-batch-size 6"
    run = trainer.planned(f"{flags} {cp(2)} --eval-micro-batch-size 3", ranks=4)
    assert_same_training(run, trainer.stock(flags, ranks=2))


@pytest.mark.parametrize("per_token", ["", "--calculate-per-token-loss"])
@pytest.mark.parametrize("mask", ["uneven", "one token"])
@pytest.mark.parametrize("rows", [2, 3])
def test_loss_masks_that_differ_between_sequences_keep_the_objective(
    trainer: Trainer, rows: int, mask: str, per_token: str
) -> None:
    flags = f"{GQA} {ROPE} {batch(rows)} {per_token}"
    run = trainer.planned(f"{flags} {cp(4)}", ranks=4, mask=mask)
    reference = trainer.stock(flags, mask=mask)
    assert_same_training(run, reference)
    assert_same_samples(run, reference)


def test_documents_ends_masked_out_keep_the_objective(trainer: Trainer) -> None:
    flags = f"{GQA} {ROPE} {batch(3)} --eod-mask-loss --reset-position-ids"
    assert_same_training(trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags))


def test_one_wave_trains_as_stock_megatron_with_other_flags(trainer: Trainer) -> None:
    """For B = N every rank has a sequence of its own: CP=1, DP=N, micro-batch 1."""
    run = trainer.planned(f"{GQA} {ROPE} {batch(4)} {cp(4)}", ranks=4)
    reflagged = trainer.stock(f"{GQA} {ROPE} {batch(1, micro_batches=2, data_parallel=4)}", ranks=4)
    assert_same_training(run, reflagged)
    assert_same_samples(run, reflagged)


@pytest.mark.parametrize(
    "recompute",
    [
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--recompute-granularity selective",
    ],
)
def test_recomputed_activations_train_as_one_rank(trainer: Trainer, recompute: str) -> None:
    flags = f"{GQA} {ROPE} {batch(3)}"
    run = trainer.planned(f"{flags} {cp(4)} {recompute}", ranks=4)
    assert_same_training(run, trainer.stock(flags))


def test_the_distributed_optimizer_with_overlap_trains_as_one_rank(trainer: Trainer) -> None:
    flags = f"{GQA} {ROPE} {batch(3)}"
    run = trainer.planned(
        f"{flags} {cp(4)} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", ranks=4
    )
    assert_same_training(run, trainer.stock(flags), gradients=False)


def test_experts_with_global_auxiliary_loss_train_as_without_context_parallelism(trainer: Trainer) -> None:
    """The loss is taken over all data-parallel ranks, so that the reference has as many."""
    flags = (
        f"{GQA} {ROPE} {batch(3, data_parallel=2)} --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 "
        "--moe-router-load-balancing-type global_aux_loss"
    )
    assert_same_training(trainer.planned(f"{flags} {cp(2)}", ranks=4), trainer.stock(flags, ranks=2))


def test_experts_with_auxiliary_and_z_loss_train_as_one_rank(trainer: Trainer) -> None:
    flags = (
        f"{GQA} {ROPE} {batch(3)} --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
        "--moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3"
    )
    assert_same_training(trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags))


def test_experts_balanced_by_a_bias_train_as_one_rank(trainer: Trainer) -> None:
    flags = (
        f"{GQA} {ROPE} {batch(3)} --num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-load-balancing-type none"
    )
    assert_same_training(trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags))


def test_bf16_differs_from_one_rank_by_its_rounding_only(trainer: Trainer) -> None:
    """Stock Megatron with other flags differs from one rank by as much: sums are taken in another order."""
    run = trainer.planned(f"{GQA} {ROPE} {batch(4)} {cp(4)} --bf16", ranks=4)
    reference = trainer.stock(f"{GQA} {ROPE} {batch(4)} --bf16")
    reflagged = trainer.stock(f"{GQA} {ROPE} {batch(1, micro_batches=2, data_parallel=4)} --bf16", ranks=4)
    found, rounding = (
        [a - b for a, b in zip(x[-1].losses, reference[-1].losses, strict=True)] for x in (run, reflagged)
    )
    assert max(map(abs, rounding)) > 0
    assert max(map(abs, found)) <= 4 * max(map(abs, rounding))


@pytest.mark.parametrize(
    ("dispatcher", "ranks", "expert_parallel", "rows", "mask"),
    [("allgather", 2, 2, 3, ""), ("alltoall", 4, 2, 3, "uneven"), ("alltoall", 4, 4, 6, "")],
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
