"""Real `pretrain()` with this Megatron: the plan of two waves trains as one stock rank of the same Megatron does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.training import (
    GQA,
    MODEL,
    ROPE,
    TRAINING,
    Trainer,
    assert_same_samples,
    assert_same_training,
    batch,
    cp,
)

FLAGS = f"{GQA} {ROPE} {batch(3)}"


@pytest.mark.parametrize("ranks", [2, 4])
def test_three_sequences_train_as_on_one_stock_rank(trainer: Trainer, ranks: int) -> None:
    run, reference = trainer.planned(f"{FLAGS} {cp(ranks)}", ranks), trainer.stock(FLAGS)
    plan = run[0].plan
    assert plan is not None and len(plan.waves) == 2
    assert_same_samples(run, reference)
    assert_same_training(run, reference)


def test_experts_train_as_on_one_stock_rank(trainer: Trainer) -> None:
    flags = (
        f"{FLAGS} --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall"
    )
    assert_same_training(trainer.planned(f"{flags} {cp(4)}", 4), trainer.stock(flags))


def logged_losses(script: Path, folder: Path, ranks: int, flags: list[str]) -> list[float]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launch, "-m", "megatron_basp.launch", "--cpu", str(script), *flags]
    done = subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(loss) for loss in re.findall(r" lm loss: (\S+)", done.stdout)]


def test_the_unmodified_script_of_a_checkout_trains_the_same(
    trainer: Trainer, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    script = Path(pytestconfig.getoption("megatron"), "pretrain_gpt.py").absolute()
    if not script.exists():
        pytest.skip("a wheel brings no script")
    flags = [*MODEL.split(), *TRAINING.split(), *trainer.data_flags, *FLAGS.split()]
    run = logged_losses(script, tmp_path, 2, [*flags, *cp(2).split(), "--sequence-parallel-mode", "basp"])
    reference = logged_losses(script, tmp_path, 1, flags)
    assert len(run) == len(reference) == 10
    # Seven digits are logged.
    assert max(abs(a - b) for a, b in zip(run, reference, strict=True)) <= 2e-6
