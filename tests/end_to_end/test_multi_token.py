"""Multi-token prediction trains on groups of ranks as on one, in what Megatron logs of it too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.end_to_end.training import (
    GQA,
    LOSS_TOLERANCE,
    ROPE,
    Trainer,
    assert_same_samples,
    assert_same_training,
    batch,
    cp,
)

MTP = f"{GQA} {ROPE} --mtp-num-layers 2"


@pytest.mark.supports("Models", "multi-token prediction, depth 1 and 2")
@pytest.mark.parametrize(
    ("depth", "rows"),
    [(1, 2), (2, 3), pytest.param(1, 3, marks=pytest.mark.slow), pytest.param(2, 2, marks=pytest.mark.slow)],
)
def test_four_ranks_predict_several_tokens_as_one_does(trainer: Trainer, depth: int, rows: int) -> None:
    flags = f"{GQA} {ROPE} {batch(rows)} --mtp-num-layers {depth}"
    run, reference = trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags)
    assert len(reference[0].mtp_losses) == 10 and len(reference[0].mtp_losses[0]) == depth
    assert_same_training(run, reference)
    assert_same_samples(run, reference)


@pytest.mark.supports(
    "Models", "multi-token prediction with uneven loss masks; with and without `--calculate-per-token-loss`"
)
@pytest.mark.parametrize("per_token", ["", pytest.param("--calculate-per-token-loss", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mask", ["uneven", pytest.param("one token", marks=pytest.mark.slow)])
def test_loss_masks_that_differ_between_sequences_keep_the_objective_of_each_depth(
    trainer: Trainer, mask: str, per_token: str
) -> None:
    flags = f"{MTP} {batch(3)} {per_token}"
    run, reference = trainer.planned(f"{flags} {cp(4)}", ranks=4, mask=mask), trainer.stock(flags, mask=mask)
    assert_same_training(run, reference)


@pytest.mark.supports(
    "Models", "multi-token prediction under pipeline and tensor parallelism", "the same without context parallelism"
)
@pytest.mark.parametrize(
    ("stages", "reference_ranks"),
    [
        ("--pipeline-model-parallel-size 2", 2),
        pytest.param(
            "--num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
            2,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "--num-layers 3 --pipeline-model-parallel-size 3 --pipeline-model-parallel-layout Ettt|mm|L",
            3,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_pipeline_stages_predict_several_tokens_as_without_context_parallelism(
    trainer: Trainer, stages: str, reference_ranks: int
) -> None:
    """The last stage needs ids as well as labels; with a layout a stage in the middle may predict."""
    flags = f"{MTP} {batch(3, micro_batches=4)} {stages}"
    run = trainer.planned(f"{flags} {cp(2)}", ranks=2 * reference_ranks)
    reference = trainer.stock(flags, ranks=reference_ranks)
    assert_same_training(run, reference)
    assert_same_samples(run, reference)


@pytest.mark.supports(
    "Models", "multi-token prediction under pipeline and tensor parallelism", "the same without context parallelism"
)
@pytest.mark.parametrize("norms", ["", pytest.param("--sequence-parallel", marks=pytest.mark.slow)])
def test_tensor_parallel_ranks_predict_several_tokens_also_at_evaluation_with_another_micro_batch_size(
    trainer: Trainer, norms: str
) -> None:
    """Stock Megatron cannot evaluate so, and takes the same samples in micro-batches of training's size."""
    flags = f"{MTP} {batch(2)} --tensor-model-parallel-size 2 --eval-global-batch-size 6"
    run = trainer.planned(f"{flags} {cp(2)} --eval-micro-batch-size 3 {norms}", ranks=4)
    assert_same_training(run, trainer.stock(flags, ranks=2))


@pytest.mark.slow
@pytest.mark.supports("Models", "multi-token prediction with experts and `aux_loss`")
def test_experts_of_the_predicting_layers_are_balanced_over_the_same_tokens(trainer: Trainer) -> None:
    flags = (
        f"{MTP} {batch(3)} --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
        "--moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3"
    )
    assert_same_training(trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(
            f"{ROPE} --mtp-use-repeated-layer --mtp-loss-scaling-factor 0.3 --recompute-granularity full "
            "--recompute-method uniform --recompute-num-layers 1",
            marks=pytest.mark.supports(
                "Models", "`--mtp-use-repeated-layer`, `--mtp-loss-scaling-factor`; with full recompute"
            ),
        ),
        pytest.param(
            f"{ROPE} --mtp-detach-heads --untie-embeddings-and-output-weights",
            marks=pytest.mark.supports("Models", "`--mtp-detach-heads`, untied embeddings"),
        ),
        pytest.param(
            "--position-embedding-type none --reset-position-ids --eod-mask-loss --cross-entropy-loss-fusion",
            marks=pytest.mark.supports("Models", "multi-token prediction without positions, `--eod-mask-loss`"),
        ),
        pytest.param(
            f"{ROPE} --eval-micro-batch-size 2 --eval-global-batch-size 4 --iterations-to-skip 3",
            marks=pytest.mark.supports("Models", "multi-token prediction, evaluation at another B"),
        ),
    ],
)
def test_variants_of_the_prediction_train_as_one_rank(trainer: Trainer, flags: str) -> None:
    flags = f"{GQA} --mtp-num-layers 2 {batch(3)} {flags}"
    steps = 9 if "--iterations-to-skip" in flags else 10
    run, reference = trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags)
    assert_same_training(run, reference, gradients=steps == 10, steps=steps)


@pytest.mark.slow
@pytest.mark.supports("Models", "multi-token prediction, data parallelism with accumulation", "one process")
def test_data_parallel_ranks_with_accumulation_predict_several_tokens_as_one(trainer: Trainer) -> None:
    flags = f"{MTP} {batch(3, micro_batches=2, data_parallel=2)}"
    run, reference = trainer.planned(f"{flags} {cp(2)}", ranks=4), trainer.stock(flags)
    assert_same_training(run, reference)


@pytest.mark.slow
@pytest.mark.supports("Checkpoints", "multi-token prediction, torch_dist, resumed by stock on one rank")
def test_a_checkpoint_with_predicting_layers_is_resumed_by_stock_megatron(trainer: Trainer, tmp_path: Path) -> None:
    flags = f"{MTP} {batch(3)} --ckpt-format torch_dist"
    whole = trainer.planned(f"{flags} {cp(2)} --save {tmp_path} --save-interval 5", ranks=2)
    resumed = trainer.stock(f"{flags} --load {tmp_path} --ckpt-step 5")
    for name in ("losses", "mtp_losses"):
        found, expected = getattr(resumed[-1], name), getattr(whole[-1], name)[5:]
        assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=0, atol=LOSS_TOLERANCE), name
