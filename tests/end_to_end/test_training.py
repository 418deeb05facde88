"""Ways of training that must not change its result: schedules, recompute, precision, checks at run time."""

from __future__ import annotations

import pytest

from tests.end_to_end.training import (
    GQA,
    ROPE,
    SEQ_LENGTH,
    Trainer,
    assert_same_samples,
    assert_same_training,
    batch,
    cp,
)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(
            "--rerun-mode validate_results --check-for-spiky-loss --log-throughput --log-num-zeros-in-grad",
            marks=pytest.mark.supports("Training", "`--rerun-mode`, `--check-for-spiky-loss`"),
        ),
        pytest.param(
            "--dataloader-type cyclic --data-parallel-random-init",
            marks=pytest.mark.supports("Training", "`--dataloader-type cyclic`"),
        ),
        pytest.param(
            "--use-cpu-initialization --deterministic-mode --no-create-attention-mask-in-dataloader",
            marks=pytest.mark.supports("Training", "`--no-create-attention-mask-in-dataloader`"),
        ),
    ],
)
def test_ways_of_running_do_not_change_the_training(trainer: Trainer, flags: str) -> None:
    flags = f"{GQA} {ROPE} {batch(3)} {flags}"
    run, reference = trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags)
    assert_same_training(run, reference)
    assert_same_samples(run, reference)


@pytest.mark.supports("Training", "`--step-batch-size-schedule`")
def test_a_batch_size_schedule_trains_as_on_one_rank(trainer: Trainer) -> None:
    flags = f"{GQA} {ROPE} --micro-batch-size 3 --step-batch-size-schedule 0:3,{12 * SEQ_LENGTH}:6"
    run, reference = trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags)
    assert [len(rows) for rows in reference[0].samples] == [3] * 4 + [6] * 6
    assert_same_training(run, reference)
    assert_same_samples(run, reference)


@pytest.mark.supports("Training", "`--iterations-to-skip`")
def test_skipped_iterations_take_their_samples_and_change_nothing_else(trainer: Trainer) -> None:
    flags = f"{GQA} {ROPE} {batch(3)} --iterations-to-skip 3 4"
    run, reference = trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags)
    assert_same_training(run, reference, gradients=False, steps=8)


@pytest.mark.parametrize(
    "recompute",
    [
        pytest.param(
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            marks=pytest.mark.supports("Training", "full recompute, uniform"),
        ),
        pytest.param(
            "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
            marks=pytest.mark.supports("Training", "full recompute, block"),
        ),
        pytest.param(
            "--recompute-granularity selective",
            marks=pytest.mark.supports("Training", "selective recompute"),
        ),
    ],
)
def test_recomputed_activations_train_as_one_rank(trainer: Trainer, recompute: str) -> None:
    flags = f"{GQA} {ROPE} {batch(3)}"
    run = trainer.planned(f"{flags} {cp(4)} {recompute}", ranks=4)
    assert_same_training(run, trainer.stock(flags))


@pytest.mark.supports("Training", "`--bf16`", "four times what stock with plain flags differs by")
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
