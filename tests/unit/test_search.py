"""`search`: every micro-batch and recompute, with groups and plain."""

from dataclasses import replace

import pytest

from megatron_basp.candidates import DoesNotFit, compare_plans, fits_memory, plain_runs
from megatron_basp.errors import ConfigurationError
from megatron_basp.search import search
from tests.costs import CLUSTER, MODEL, training


def one_by_one(run):
    """Every run by hand: step and sizes of the fastest."""
    found = []
    for recompute in ("none", "selective", "full"):
        for size in range(1, run.global_batch_size // run.parallelism.data_parallel_size + 1):
            try:
                changed = replace(
                    run, micro_batch_size=size, parallelism=replace(run.parallelism, recompute=recompute)
                )
                found.append((compare_plans(changed).chosen.cost.step_seconds, recompute, size))
            except ConfigurationError:
                pass
    return min(found)


@pytest.mark.parametrize("memory_bytes", [80e9, 2.23e9, 2.2e9])
@pytest.mark.parametrize("data_parallel_size", [1, 2])
def test_the_best_of_all_micro_batches_and_recomputes_is_found(memory_bytes, data_parallel_size):
    run = training(
        replace(CLUSTER, memory_bytes=memory_bytes), global_batch_size=12, data_parallel_size=data_parallel_size
    )
    result = search(run)
    step, recompute, size = one_by_one(run)
    assert result.comparison.chosen.cost.step_seconds == pytest.approx(step)
    assert (result.training.parallelism.recompute, result.training.micro_batch_size) == (recompute, size)
    assert result.training.global_batch_size == 12
    assert result.training.parallelism.devices == run.parallelism.devices
    assert fits_memory(result.training, result.comparison.chosen.cost)


def test_where_it_starts_does_not_matter():
    found = [
        search(training(global_batch_size=12, micro_batch_size=size, recompute=recompute))
        for size, recompute in ((1, "none"), (6, "full"))
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(("memory_bytes", "recompute"), [(80e9, "none"), (2.23e9, "full")])
def test_the_best_plain_run_is_that_of_all_recomputes_within_the_memory(memory_bytes, recompute):
    run = training(replace(CLUSTER, memory_bytes=memory_bytes), global_batch_size=12)
    result = search(run)
    plain = result.comparison.plain
    every = [
        one
        for recompute in ("none", "selective", "full")
        for one in plain_runs(replace(run, parallelism=replace(run.parallelism, recompute=recompute)))
        if fits_memory(one.training, one.cost)
    ]
    assert plain.cost.step_seconds == min(one.cost.step_seconds for one in every)
    assert plain.training.parallelism.recompute == recompute
    assert plain.training.global_batch_size == 12
    assert plain.training.parallelism.devices == run.parallelism.devices
    assert result.tried > len(every) > 10


def test_what_needs_too_much_memory_is_counted_and_not_chosen():
    roomy, tight = (search(training(replace(CLUSTER, memory_bytes=m), global_batch_size=12)) for m in (80e9, 2.2e9))
    assert roomy.too_large == 0 < tight.too_large
    assert roomy.tried == tight.tried


def test_a_model_that_fits_no_run_is_told_what_would_make_the_smallest_fit():
    large = replace(MODEL, layers=100, hidden=4096)
    with pytest.raises(DoesNotFit, match="it would fit with --data-parallel-sharding-strategy optim"):
        search(training(replace(CLUSTER, memory_bytes=20e9), large, global_batch_size=4))


def test_a_batch_that_no_ranks_can_share_is_refused_with_the_reason():
    with pytest.raises(ConfigurationError, match="cannot be dealt out"):
        search(training(model=replace(MODEL, heads=4, kv_heads=4), global_batch_size=1, micro_batch_size=1))


def test_micro_batches_that_training_would_refuse_are_left_out():
    """T = B·S/N must be a multiple of TP: 6 tokens a row here, and 4 tensor-parallel ranks."""
    run = training(
        model=replace(MODEL, heads=32, kv_heads=32),
        seq_length=48,
        micro_batch_size=6,
        global_batch_size=6,
        tensor_model_parallel_size=4,
        context_parallel_size=8,
    )
    result = search(run)
    assert result.training.micro_batch_size in (2, 6)
    assert result.comparison.plain is None or result.comparison.plain.training.tokens % 4 == 0
    with pytest.raises(ConfigurationError, match="T % 4 must be 0"):
        replace(run, micro_batch_size=3)


def test_progress_sees_every_run_once():
    seen = []

    def watch(runs):
        for run in runs:
            seen.append(run)
            yield run

    search(training(global_batch_size=12), watch=watch)
    assert len(seen) == len(set(seen)) == 3 * 6
