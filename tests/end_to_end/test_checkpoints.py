"""A checkpoint holds nothing of the plan: any run can go on from any other's."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_basp.comparison import BOUNDS, RankReport
from tests.end_to_end.training import GQA, ROPE, Trainer

FLAGS = f"{GQA} {ROPE} --global-batch-size 6"


@pytest.fixture(scope="module")
def saved(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RankReport]]:
    """A run on four ranks with three sequences a micro-batch, which saved after its fifth step."""
    folder = tmp_path_factory.mktemp("checkpoint")
    flags = f"{FLAGS} --micro-batch-size 3 --context-parallel-size 4"
    return folder, trainer.planned(f"{flags} --save {folder} --save-interval 5 --ckpt-format torch_dist", ranks=4)


@pytest.mark.supports("Checkpoints", "torch_dist, resumed with another N, B, mode, and by stock on one rank")
@pytest.mark.parametrize(
    ("flags", "ranks", "mode"),
    [
        ("--micro-batch-size 3 --context-parallel-size 4", 4, "basp"),
        ("--micro-batch-size 1 --context-parallel-size 2", 2, "basp"),
        ("--micro-batch-size 2 --context-parallel-size 4", 4, "ulysses"),
        ("--micro-batch-size 3", 1, None),
    ],
)
def test_a_resumed_run_goes_on_as_the_uninterrupted_one(
    trainer: Trainer, saved: tuple[Path, list[RankReport]], flags: str, ranks: int, mode: str | None
) -> None:
    folder, whole = saved
    flags = f"{FLAGS} {flags} --load {folder} --ckpt-step 5 --ckpt-format torch_dist"
    run = trainer.planned(flags, ranks, mode=mode) if mode else trainer.stock(flags, ranks)
    assert len(run[-1].losses) == 5
    for found, expected in zip(run[-1].losses, whole[-1].losses[5:], strict=True):
        assert abs(found - expected) <= BOUNDS.loss
    assert [sorted(rows) for rows in run[0].samples] == [sorted(rows) for rows in whole[0].samples[5:]]
