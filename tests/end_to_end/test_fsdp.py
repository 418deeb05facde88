"""Megatron-FSDP, which spreads parameters, gradients and optimizer states over all dp×cp ranks (ZeRO-3)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.training import (
    GQA,
    ROPE,
    RankReport,
    Trainer,
    assert_close,
    assert_same_samples,
    assert_same_training,
    batch,
    cp,
)

FSDP = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy"
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
# What a run in bf16 differs by from the same on other ranks, whose sums are taken in another order, is 1e-4 here.
BF16_TOLERANCE = 4e-4
BF16 = f"{GQA} {ROPE} --global-batch-size 6 --bf16"
INSTANCES = "--num-distributed-optimizer-instances 2 --overlap-grad-reduce"


def shows(feature: str, held_to: str = "one process") -> pytest.MarkDecorator:
    return pytest.mark.supports("Parallelism", feature, held_to)


@pytest.mark.parametrize(
    ("world", "ranks", "flags", "mask"),
    [
        pytest.param(4, 4, batch(3), "uneven", marks=shows("Megatron-FSDP, `optim_grads_params` (ZeRO-3)")),
        (4, 4, batch(2), ""),
        pytest.param(
            4,
            2,
            f"{batch(3, data_parallel=2)} --calculate-per-token-loss {FULL_RECOMPUTE}",
            "uneven",
            marks=shows("Megatron-FSDP with data parallelism, accumulation, full recompute, loss per token"),
        ),
        pytest.param(
            2,
            2,
            f"{batch(3)} --mtp-num-layers 1 --recompute-granularity selective",
            "",
            marks=[pytest.mark.slow, shows("Megatron-FSDP with multi-token prediction, selective recompute")],
        ),
    ],
)
def test_ranks_that_hold_shards_of_the_parameters_train_as_one(
    trainer: Trainer, world: int, ranks: int, flags: str, mask: str
) -> None:
    flags = f"{GQA} {ROPE} {flags}"
    run = trainer.planned(f"{flags} {cp(ranks)} {FSDP} optim_grads_params", world, mask)
    reference = trainer.stock(flags, mask=mask)
    assert_same_training(run, reference)
    assert_same_samples(run, reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fsdp", "ranks"),
    [
        pytest.param("optim_grads", 2, marks=shows("Megatron-FSDP, `optim_grads`, `optim`, `no_shard`")),
        ("optim", 2),
        ("optim --overlap-grad-reduce --overlap-param-gather", 2),
        ("no_shard", 2),
        pytest.param(
            "optim_grads_params --fsdp-double-buffer",
            2,
            marks=shows("Megatron-FSDP, `--fsdp-double-buffer`, `--init-model-with-meta-device`"),
        ),
        ("optim_grads_params --init-model-with-meta-device", 2),
        pytest.param(
            f"optim_grads_params {INSTANCES}",
            4,
            marks=shows("Megatron-FSDP, several instances"),
        ),
    ],
)
def test_each_way_of_sharding_trains_as_one_rank(trainer: Trainer, fsdp: str, ranks: int) -> None:
    flags = f"{GQA} {ROPE} {batch(3)}"
    run = trainer.planned(f"{flags} {cp(ranks)} {FSDP} {fsdp}", ranks, mask="uneven")
    assert_same_training(run, trainer.stock(flags, mask="uneven"))


@pytest.mark.slow
@shows("Megatron-FSDP with tensor parallelism", "tensor parallelism alone")
@pytest.mark.parametrize("sequence_parallel", ["", "--sequence-parallel"])
def test_sharded_tensor_parallel_ranks_train_as_without(trainer: Trainer, sequence_parallel: str) -> None:
    flags = f"{GQA} {ROPE} {batch(3)} --tensor-model-parallel-size 2"
    run = trainer.planned(f"{flags} {cp(2)} {sequence_parallel} {FSDP} optim_grads_params", ranks=4)
    assert_same_training(run, trainer.stock(flags, ranks=2))


@pytest.mark.slow
@shows("Megatron-FSDP with expert parallelism", "stock with the same experts and DP for CP")
@pytest.mark.parametrize(("ranks", "loss"), [(4, ""), (2, "--calculate-per-token-loss")])
def test_sharded_expert_parallel_ranks_train_as_data_parallel_ones(trainer: Trainer, ranks: int, loss: str) -> None:
    """With as many ranks as expert parallelism no two hold the same expert."""
    flags = (
        f"{GQA} {ROPE} --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 "
        f"--moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 {loss}"
    )
    run = trainer.planned(f"{flags} {batch(3, ranks)} {cp(ranks)} {FSDP} optim_grads_params", ranks)
    assert_same_training(run, trainer.stock(f"{flags} {batch(3, 1, data_parallel=ranks)}", ranks))


@pytest.fixture(scope="module")
def saved(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RankReport]]:
    """A run on two ranks with three sequences a micro-batch, which saved after its fifth step."""
    folder = tmp_path_factory.mktemp("checkpoint")
    flags = f"{BF16} --micro-batch-size 3 {cp(2)} {FSDP} optim_grads_params --save {folder} --save-interval 5"
    return folder, trainer.planned(flags, ranks=2)


@pytest.mark.supports("Checkpoints", "fsdp_dtensor in bf16, resumed with the same flags", "the uninterrupted run")
def test_a_resumed_run_goes_on_as_the_uninterrupted_one(
    trainer: Trainer, saved: tuple[Path, list[RankReport]]
) -> None:
    folder, whole = saved
    flags = f"{BF16} --micro-batch-size 3 {cp(2)} {FSDP} optim_grads_params --load {folder} --ckpt-step 5"
    run = trainer.planned(flags, ranks=2)
    assert run[-1].losses == whole[-1].losses[5:]
    assert_close("parameter", run[0].parameters, whole[0].parameters)


@pytest.mark.slow
@pytest.mark.supports(
    "Checkpoints", "fsdp_dtensor in bf16, resumed with another N, B, and by stock on one rank", "rounding of bf16"
)
@pytest.mark.parametrize(
    ("flags", "ranks", "mode"),
    [("--micro-batch-size 1", 2, "basp"), ("--micro-batch-size 3", 4, "ulysses"), ("--micro-batch-size 3", 1, None)],
)
def test_a_run_resumed_with_other_flags_differs_by_rounding_only(
    trainer: Trainer, saved: tuple[Path, list[RankReport]], flags: str, ranks: int, mode: str | None
) -> None:
    folder, whole = saved
    flags = f"{BF16} {flags} {FSDP} optim_grads_params --load {folder} --ckpt-step 5"
    run = trainer.planned(f"{flags} {cp(ranks)}", ranks, mode=mode) if mode else trainer.stock(flags, ranks)
    for found, expected in zip(run[-1].losses, whole[-1].losses[5:], strict=True):
        assert abs(found - expected) <= BF16_TOLERANCE


@pytest.mark.slow
@shows("Megatron-FSDP with `--bf16`", "rounding of bf16")
def test_bf16_differs_from_one_rank_by_rounding_only(trainer: Trainer, saved: tuple[Path, list[RankReport]]) -> None:
    _, run = saved
    reference = trainer.stock(f"{BF16} --micro-batch-size 3")
    for found, expected in zip(run[-1].losses, reference[-1].losses, strict=True):
        assert abs(found - expected) <= BF16_TOLERANCE
