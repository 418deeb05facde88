"""A checkpoint holds nothing of the plan: any run can go on from any other's, as if it had never stopped."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch.distributed.checkpoint import FileSystemReader

from megatron_basp.comparison import RankReport, rows_by_step
from tests.end_to_end.training import (
    GQA,
    ITERATIONS,
    LOSS_TOLERANCE,
    ROPE,
    TOLERANCE,
    Trainer,
    assert_close,
    cp,
)

FLAGS = f"{GQA} {ROPE} --global-batch-size 6 --ckpt-format torch_dist"
B3 = "--micro-batch-size 3"
SAVED_STEP = 5


class Saved(NamedTuple):
    """A run that saved after its fifth step and went on to its tenth."""

    folder: Path
    run: list[RankReport]

    @property
    def resuming(self) -> str:
        return f"{FLAGS} --load {self.folder} --ckpt-step {SAVED_STEP}"


def saving(folder: Path) -> str:
    return f"{FLAGS} --save {folder} --save-interval {SAVED_STEP}"


@pytest.fixture(scope="module")
def saved(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """By four ranks with three sequences a micro-batch."""
    folder = tmp_path_factory.mktemp("checkpoint")
    return Saved(folder, trainer.planned(f"{saving(folder)} {B3} {cp(4)}", ranks=4))


@pytest.fixture(scope="module")
def saved_by_one_rank(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """By stock Megatron."""
    folder = tmp_path_factory.mktemp("checkpoint")
    return Saved(folder, trainer.stock(f"{saving(folder)} {B3}"))


def assert_goes_on(run: list[RankReport], whole: list[RankReport], steps: int = ITERATIONS - SAVED_STEP) -> None:
    """A resumed run takes the samples that come next, and ends where the uninterrupted one does."""
    assert len(run[-1].losses) == steps
    differences = [abs(a - b) for a, b in zip(run[-1].losses, whole[-1].losses[-steps:], strict=True)]
    assert max(differences) <= LOSS_TOLERANCE, "losses differ"
    for found, expected in zip(run[-1].grad_norms, whole[-1].grad_norms[-steps:], strict=True):
        assert abs(found - expected) <= TOLERANCE * expected, "gradient norms differ"
    assert rows_by_step(run) == rows_by_step(whole)[-steps:]
    peers = {report.place: report for report in whole}
    for rank, report in enumerate(run):
        assert_close(f"parameter, rank {rank}", report.parameters, peers[report.place].parameters)


@pytest.mark.supports("Checkpoints", "torch_dist, resumed with another N, B, K, mode, and by stock", "one process")
@pytest.mark.parametrize(
    ("flags", "ranks", "mode"),
    [
        pytest.param(f"--micro-batch-size 1 {cp(2)}", 2, "basp", id="another N and B"),
        pytest.param(f"--micro-batch-size 2 {cp(4)} --basp-group-size 4", 4, "basp", id="another K"),
        pytest.param(f"{B3} {cp(4)}", 4, "ulysses", id="another mode"),
        pytest.param(B3, 1, None, id="stock on one rank"),
        pytest.param(f"{B3} {cp(4)}", 4, "basp", id="the same", marks=pytest.mark.slow),
        pytest.param(f"{B3} {cp(2)}", 4, "basp", id="another DP", marks=pytest.mark.slow),
        # Stock context parallelism needs Transformer Engine, and that a GPU.
        pytest.param("--micro-batch-size 1", 2, None, id="stock, data-parallel", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_goes_on_as_the_uninterrupted_one(
    trainer: Trainer, saved: Saved, flags: str, ranks: int, mode: str | None
) -> None:
    flags = f"{saved.resuming} {flags}"
    run = trainer.planned(flags, ranks, mode=mode) if mode else trainer.stock(flags, ranks)
    assert_goes_on(run, saved.run)


@pytest.mark.supports("Checkpoints", "torch_dist, saved by stock on one rank and resumed")
def test_a_run_of_stock_on_one_rank_is_gone_on_with(trainer: Trainer, saved_by_one_rank: Saved) -> None:
    run = trainer.planned(f"{saved_by_one_rank.resuming} {B3} {cp(4)}", ranks=4)
    assert_goes_on(run, saved_by_one_rank.run)


def test_a_checkpoint_has_what_stock_saves_and_nothing_else(saved: Saved, saved_by_one_rank: Saved) -> None:
    found, stock = (_saved_shapes(folder) for folder in (saved.folder, saved_by_one_rank.folder))
    assert found == stock


def _saved_shapes(folder: Path) -> dict[str, Any]:
    """Shapes of tensors by name, None for other objects; the state of the rerun machine is saved by each rank."""
    metadata = FileSystemReader(folder / f"iter_{SAVED_STEP:07}").read_metadata().state_dict_metadata
    return {
        "rerun" if name.startswith("rerun_state_machine_state/shard_") else name: getattr(entry, "size", None)
        for name, entry in metadata.items()
    }


@pytest.mark.parametrize(
    ("flags", "resumed_with", "ranks"),
    [
        pytest.param(
            f"{B3} {cp(4)} --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable",
            f"--micro-batch-size 1 {cp(2)} --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable",
            2,
            id="distributed optimizer, fully reshardable",
            marks=[
                pytest.mark.slow,
                pytest.mark.supports("Checkpoints", "distributed optimizer, resumed with another N and B"),
            ],
        ),
        pytest.param(
            f"{B3} {cp(4)} --use-distributed-optimizer",
            f"{B3} {cp(4)} --use-distributed-optimizer",
            4,
            id="distributed optimizer",
            marks=pytest.mark.slow,
        ),
        *(
            pytest.param(flags, flags, 4, id=name, marks=[pytest.mark.slow, pytest.mark.supports("Checkpoints", name)])
            for name, flags in {
                "tensor parallelism": f"{B3} {cp(2)} --tensor-model-parallel-size 2",
                "pipeline parallelism": f"{B3} {cp(2)} --pipeline-model-parallel-size 2",
            }.items()
        ),
    ],
)
def test_however_it_is_saved_a_resumed_run_goes_on(
    trainer: Trainer, tmp_path: Path, flags: str, resumed_with: str, ranks: int
) -> None:
    saved = Saved(tmp_path, trainer.planned(f"{saving(tmp_path)} {flags}", ranks=4))
    assert_goes_on(trainer.planned(f"{saved.resuming} {resumed_with}", ranks), saved.run)


def write_slowly() -> None:
    """The writing process is still at it when the next steps are taken."""
    from megatron_basp.megatron.seam import replace

    def slow(original: Callable[..., Any]) -> Any:
        def write_preloaded_data(*args: Any, **kwargs: Any) -> Any:
            time.sleep(3)
            return original(*args, **kwargs)

        return staticmethod(write_preloaded_data)

    writer = "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync"
    replace(f"{writer}.write_preloaded_data", ["write_bucket"], slow)


@pytest.mark.slow
@pytest.mark.supports("Checkpoints", "`--async-save`, by Megatron's own worker")
def test_training_does_not_change_what_is_still_being_written(trainer: Trainer, saved: Saved, tmp_path: Path) -> None:
    flags = f"{saving(tmp_path)} {B3} {cp(4)} --async-save --use-persistent-ckpt-worker --async-strategy mcore"
    trainer.planned(flags, ranks=4, sabotage=write_slowly)
    run = trainer.planned(f"{Saved(tmp_path, []).resuming} {B3} {cp(4)}", ranks=4)
    assert_goes_on(run, saved.run)


def interrupt_after_three_steps() -> None:
    """One rank gets SIGTERM; all of them save and exit."""
    from megatron_basp.megatron import pretrain_gpt
    from megatron_basp.megatron.seam import replace

    steps = itertools.count(1)

    def step(original: Callable[..., Any]) -> Callable[..., Any]:
        def train_step(forward_step_func: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(forward_step_func, data_iterator, model, *args, **kwargs)
            if next(steps) == 3 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGTERM)
            return result

        return train_step

    def train(config: Any) -> None:
        with contextlib.suppress(SystemExit):
            plain_train(config)

    plain_train, pretrain_gpt.train = pretrain_gpt.train, train
    replace("megatron.training.training:train_step", ["forward_step_func", "data_iterator", "model"], step)


@pytest.mark.slow
@pytest.mark.supports("Checkpoints", "`--exit-signal-handler`", "the uninterrupted run")
def test_an_interrupted_run_goes_on_as_the_uninterrupted_one(trainer: Trainer, saved: Saved, tmp_path: Path) -> None:
    interrupted = trainer.planned(
        f"{saving(tmp_path)} {B3} {cp(4)} --exit-signal-handler", ranks=4, sabotage=interrupt_after_three_steps
    )
    assert len(interrupted[-1].losses) == 3
    run = trainer.planned(f"{FLAGS} --load {tmp_path} {B3} {cp(4)}", ranks=4)
    assert_goes_on(run, saved.run, steps=ITERATIONS - 3)
