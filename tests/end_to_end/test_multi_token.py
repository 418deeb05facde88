"""Multi-token prediction trains on four ranks as on one, in what Megatron logs of it too."""

from __future__ import annotations

import pytest

from tests.end_to_end.training import GQA, ROPE, Trainer, assert_same_training, batch, cp


@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("depth", [1, 2])
def test_depth(trainer: Trainer, rows: int, depth: int) -> None:
    flags = f"{GQA} {ROPE} {batch(rows)} --mtp-num-layers {depth}"
    run, reference = trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags)
    print(run[0].mtp_losses[0], reference[0].mtp_losses[0])
    print([max(abs(a-b) for a,b in zip(x.losses, reference[0].losses)) for x in run])
    print([max(abs(a-b) for m,n in zip(x.mtp_losses, reference[0].mtp_losses) for a,b in zip(m,n)) for x in run])
    assert_same_training(run, reference)
