"""The objective, in training and at evaluation, is what one process computes, whatever the masks."""

from __future__ import annotations

import pytest

from tests.end_to_end.training import GQA, ROPE, Trainer, assert_same_samples, assert_same_training, batch, cp


@pytest.mark.supports(
    "Data and loss",
    "uneven loss masks, one valid token in a micro-batch; with and without `--calculate-per-token-loss`",
)
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


@pytest.mark.supports("Data and loss", "`--eod-mask-loss`, `--reset-position-ids`")
def test_documents_ends_masked_out_keep_the_objective(trainer: Trainer) -> None:
    flags = f"{GQA} {ROPE} {batch(3)} --eod-mask-loss --reset-position-ids"
    assert_same_training(trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags))


@pytest.mark.supports("Data and loss", "evaluation at another B")
@pytest.mark.parametrize(("rows", "evaluated"), [(2, 3), (3, 1), (4, 6)])
def test_evaluation_at_another_micro_batch_size_gives_the_same_loss(
    trainer: Trainer, rows: int, evaluated: int
) -> None:
    flags = f"{GQA} {ROPE} {batch(rows)} --eval-micro-batch-size {evaluated} --eval-global-batch-size {evaluated}"
    run, reference = trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags)
    assert_same_training(run, reference)


@pytest.mark.supports(
    "Data and loss",
    "evaluation at another B under tensor parallelism",
    "stock at training's B, where it does not crash",
)
def test_evaluation_at_another_micro_batch_size_under_tensor_parallelism(trainer: Trainer) -> None:
    """Stock Megatron fails here, so its own evaluation takes the same samples in micro-batches of training's size."""
    flags = f"{GQA} {ROPE} {batch(2)} --tensor-model-parallel-size 2 --eval-global-batch-size 6"
    run = trainer.planned(f"{flags} {cp(2)} --eval-micro-batch-size 3", ranks=4)
    assert_same_training(run, trainer.stock(flags, ranks=2))
