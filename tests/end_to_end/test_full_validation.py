"""The whole validation set, of which Megatron reads one sequence at a time."""

from __future__ import annotations

import pytest

from tests.end_to_end.training import GQA, ROPE, Trainer, assert_same_training, batch, cp


@pytest.mark.slow
@pytest.mark.supports("Data and loss", "`--full-validation` with `--eval-micro-batch-size 1`")
def test_the_whole_validation_set_has_the_loss_that_one_rank_finds(trainer: Trainer) -> None:
    flags = f"{GQA} {ROPE} {batch(3)} --full-validation --eval-micro-batch-size 1 --eval-global-batch-size 1"
    flags = f"{flags} --split 97,3,0"
    run, reference = trainer.planned(f"{flags} {cp(2)}", ranks=2), trainer.stock(flags)
    assert_same_training(run, reference)
