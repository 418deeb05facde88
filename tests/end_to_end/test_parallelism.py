"""Each way of spreading a run over ranks trains as one process does: real `pretrain()`, fp32, ten steps.

With tensor or pipeline parallelism the reference has the same, since Megatron's initial weights depend on it.
"""

from __future__ import annotations

import pytest

from tests.end_to_end.training import GQA, ROPE, Trainer, assert_same_samples, assert_same_training, batch, cp


@pytest.mark.supports("Parallelism", "N = 4, B = 1 to 6")
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6])
def test_four_ranks_train_as_one_for_any_micro_batch_size(trainer: Trainer, rows: int) -> None:
    flags = f"{GQA} {ROPE} {batch(rows)}"
    run, reference = trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags)
    assert_same_training(run, reference)
    assert_same_samples(run, reference)


@pytest.mark.supports("Parallelism", "N = 8, B = 3 and 8")
@pytest.mark.parametrize(("rows", "group_sizes"), [(3, [4, 8]), (8, [1])])
def test_eight_ranks_train_as_one(trainer: Trainer, rows: int, group_sizes: list[int]) -> None:
    flags = f"{ROPE} {batch(rows, micro_batches=1)}"
    run, reference = trainer.planned(f"{flags} {cp(8)}", ranks=8), trainer.stock(flags)
    assert [wave.group_size for wave in run[0].plan.waves] == group_sizes
    assert_same_training(run, reference)
    assert_same_samples(run, reference)


@pytest.mark.supports("Parallelism", "`--sequence-parallel-mode ulysses`")
def test_ulysses_mode_trains_as_one_rank(trainer: Trainer) -> None:
    flags = f"{GQA} {ROPE} {batch(3)}"
    run, reference = trainer.planned(f"{flags} {cp(4)}", ranks=4, mode="ulysses"), trainer.stock(flags)
    assert [wave.group_size for wave in run[0].plan.waves] == [4]
    assert_same_training(run, reference)
    assert_same_samples(run, reference)


@pytest.mark.supports("Parallelism", "`--basp-group-size`")
def test_a_forced_group_size_trains_as_one_rank(trainer: Trainer) -> None:
    flags = f"{GQA} {ROPE} {batch(4)}"
    run = trainer.planned(f"{flags} {cp(4)} --basp-group-size 2", ranks=4)
    assert [(len(wave.rows), wave.group_size) for wave in run[0].plan.waves] == [(4, 2)]
    assert_same_training(run, trainer.stock(flags))


@pytest.mark.supports("Parallelism", "`--basp-cluster`")
def test_a_plan_made_by_seconds_trains_as_one_rank(trainer: Trainer) -> None:
    """Rows this short are not worth the latency of a second wave, which by bytes they would get."""
    flags = f"{GQA} {ROPE} {batch(3)}"
    run = trainer.planned(f"{flags} {cp(4)} --basp-cluster a100-80gb-8", ranks=4)
    assert [wave.group_size for wave in run[0].plan.waves] == [4]
    assert_same_training(run, trainer.stock(flags))


@pytest.mark.supports("Parallelism", "`--basp-overlap-chunks`")
def test_heads_exchanged_in_parts_train_as_one_rank(trainer: Trainer) -> None:
    """Two rows at K = 2 and one at K = 4, each in two parts of the heads."""
    flags = f"{GQA} {ROPE} {batch(3)} --num-attention-heads 16 --num-query-groups 8"
    run = trainer.planned(f"{flags} {cp(4)} --basp-overlap-chunks 2", ranks=4)
    assert [wave.group_size for wave in run[0].plan.waves] == [2, 4]
    assert_same_training(run, trainer.stock(flags))


@pytest.mark.supports("Parallelism", "B = N", "stock with plain flags")
def test_one_wave_trains_as_stock_megatron_with_other_flags(trainer: Trainer) -> None:
    """For B = N every rank has a sequence of its own: CP=1, DP=N, micro-batch 1."""
    run = trainer.planned(f"{GQA} {ROPE} {batch(4)} {cp(4)}", ranks=4)
    reflagged = trainer.stock(f"{GQA} {ROPE} {batch(1, micro_batches=2, data_parallel=4)}", ranks=4)
    assert_same_training(run, reflagged)
    assert_same_samples(run, reflagged)


@pytest.mark.supports("Parallelism", "data parallelism with accumulation")
def test_data_parallel_ranks_with_accumulation_train_as_one(trainer: Trainer) -> None:
    flags = f"{GQA} {ROPE} {batch(3, micro_batches=2, data_parallel=2)}"
    run, reference = trainer.planned(f"{flags} {cp(2)}", ranks=4), trainer.stock(flags)
    assert_same_training(run, reference)
    assert_same_samples(run, reference)


@pytest.mark.supports("Parallelism", "pipeline parallelism", "the same without context parallelism")
@pytest.mark.parametrize("rows", [2, 3])
def test_pipeline_stages_train_as_without_context_parallelism(trainer: Trainer, rows: int) -> None:
    flags = f"{GQA} {ROPE} {batch(rows)} --pipeline-model-parallel-size 2"
    run, reference = trainer.planned(f"{flags} {cp(2)}", ranks=4), trainer.stock(flags, ranks=2)
    assert_same_training(run, reference)
    assert_same_samples(run, reference)


@pytest.mark.supports("Parallelism", "interleaved (virtual) pipeline stages", "the same without context parallelism")
def test_virtual_pipeline_stages_train_as_without_context_parallelism(trainer: Trainer) -> None:
    flags = f"{GQA} {ROPE} {batch(3, micro_batches=4)} --num-layers 4 --pipeline-model-parallel-size 2"
    flags = f"{flags} --num-virtual-stages-per-pipeline-rank 2"
    run, reference = trainer.planned(f"{flags} {cp(2)}", ranks=4), trainer.stock(flags, ranks=2)
    assert_same_training(run, reference)
    assert_same_samples(run, reference)


@pytest.mark.supports("Parallelism", "tensor parallelism", "the same without context parallelism")
@pytest.mark.parametrize(("rows", "mask"), [(2, ""), (3, "--no-create-attention-mask-in-dataloader")])
def test_tensor_parallel_ranks_train_as_without_context_parallelism(trainer: Trainer, rows: int, mask: str) -> None:
    flags = f"{GQA} {ROPE} {batch(rows)} --tensor-model-parallel-size 2"
    run, reference = trainer.planned(f"{flags} {cp(2)} {mask}", ranks=4), trainer.stock(flags, ranks=2)
    assert_same_training(run, reference)
    assert_same_samples(run, reference)


@pytest.mark.supports("Parallelism", "distributed optimizer with overlap of gradients and parameters")
def test_the_distributed_optimizer_with_overlap_trains_as_one_rank(trainer: Trainer) -> None:
    flags = f"{GQA} {ROPE} {batch(3)}"
    run = trainer.planned(
        f"{flags} {cp(4)} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", ranks=4
    )
    assert_same_training(run, trainer.stock(flags))


@pytest.mark.supports("Parallelism", "tensor parallelism with `--sequence-parallel`", "tensor parallelism without it")
@pytest.mark.parametrize(
    "flags", [f"{ROPE} --qk-layernorm", "--position-embedding-type learned_absolute --normalization LayerNorm"]
)
def test_sequence_parallel_norms_train_as_plain_tensor_parallelism(trainer: Trainer, flags: str) -> None:
    flags = f"{GQA} {flags} {batch(3)} --tensor-model-parallel-size 2"
    run = trainer.planned(f"{flags} {cp(2)} --sequence-parallel", ranks=4)
    assert_same_training(run, trainer.stock(flags, ranks=2))


@pytest.mark.supports("Parallelism", "`--use-tp-pp-dp-mapping`", "stock in the usual order, with DP in place of CP")
def test_stages_before_replicas_train_as_without_context_parallelism(trainer: Trainer) -> None:
    """Megatron wants as many replicas of experts as of attention for it; the reference, which has not, has ranks in
    the usual order. The auxiliary loss is taken over micro-batches: the reference has one for each replica."""
    flags = (
        f"{GQA} {ROPE} --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --num-experts 4 "
        "--moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2"
    )
    run = trainer.planned(f"{flags} {batch(3, micro_batches=2)} {cp(2)} --use-tp-pp-dp-mapping", ranks=4)
    assert_same_training(run, trainer.stock(f"{flags} {batch(3, 1, data_parallel=2)}", ranks=4))


@pytest.mark.supports("Parallelism", "several distributed-optimizer instances")
def test_several_instances_of_the_distributed_optimizer_train_as_one_rank(trainer: Trainer) -> None:
    flags = f"{GQA} {ROPE} {batch(3, data_parallel=2)}"
    run = trainer.planned(
        f"{flags} {cp(2)} --use-distributed-optimizer --num-distributed-optimizer-instances 2", ranks=4
    )
    assert_same_training(run, trainer.stock(flags))
