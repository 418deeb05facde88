"""Attention sinks: one more logit for each head, which belongs to the head and so to the rank that attends with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.training import GQA, LOSS_TOLERANCE, ROPE, Trainer, assert_same_training, batch, cp

LEARNABLE = "--softmax-type learnable"


@pytest.mark.supports("Models", "attention sinks: softmax off by one, learnable (gpt-oss), with sliding windows too")
@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        (f"{GQA} --softmax-type off-by-one", 3),
        (f"{GQA} {LEARNABLE}", 3),
        (f"--group-query-attention --num-query-groups 2 {LEARNABLE} --window-size 16,0 --window-attn-skip-freq 2", 2),
    ],
)
def test_attention_sinks_train_as_one_rank(trainer: Trainer, flags: str, rows: int) -> None:
    flags = f"{ROPE} {flags} {batch(rows)}"
    run, reference = trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags)
    assert any("softmax_offset" in name for name in run[0].gradients[0]) == ("learnable" in flags)
    assert_same_training(run, reference)


@pytest.mark.supports("Models", "learnable sinks under tensor parallelism", "the same without context parallelism")
def test_sinks_of_tensor_parallel_ranks_train_as_without_context_parallelism(trainer: Trainer) -> None:
    flags = f"{ROPE} {GQA} {LEARNABLE} {batch(3)} --tensor-model-parallel-size 2"
    assert_same_training(trainer.planned(f"{flags} {cp(2)}", ranks=4), trainer.stock(flags, ranks=2))


@pytest.mark.slow
@pytest.mark.supports("Checkpoints", "learnable sinks of tensor-parallel ranks, resumed by stock on one rank")
def test_saved_sinks_are_where_stock_looks_for_them(trainer: Trainer, tmp_path: Path) -> None:
    flags = f"{ROPE} {GQA} {LEARNABLE} {batch(3)} --ckpt-format torch_dist"
    split = f"{flags} --tensor-model-parallel-size 2 {cp(2)} --save {tmp_path} --save-interval 5"
    whole = trainer.planned(split, ranks=4)
    resumed = trainer.stock(f"{flags} --load {tmp_path} --ckpt-step 5")
    assert len(resumed[-1].losses) == 5
    for found, expected in zip(resumed[-1].losses, whole[-1].losses[5:], strict=True):
        assert abs(found - expected) <= LOSS_TOLERANCE
