"""The plans that are compared, the choice among them, and what is said of each."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_basp.candidates import compare_plans, plain_runs
from megatron_basp.cost_model import step_cost
from megatron_basp.errors import ConfigurationError
from megatron_basp.placement import divisors
from megatron_basp.plan import fitting_sizes, plan_of_counts
from tests.costs import CLUSTER, MODEL, training
from tests.decompositions import all_decompositions


def waves(plan):
    return [(len(wave.rows), wave.group_size) for wave in plan.waves]


def step_of(run, plan):
    return step_cost(run, plan).step_seconds


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([2, 4, 8]), st.integers(1, 9), st.sampled_from([64, 4096, 65536]), st.sampled_from([1, 2, 4]))
def test_no_decomposition_is_faster_than_the_choice(ranks, rows, seq_length, gpus_per_node):
    cluster = replace(CLUSTER, gpus_per_node=gpus_per_node, memory_bytes=1e15)
    run = training(cluster, context_parallel_size=ranks, micro_batch_size=rows, seq_length=seq_length)
    found = compare_plans(run)
    lengths = (seq_length,) * rows
    every = [
        plan_of_counts(lengths, ranks, counts)
        for counts in all_decompositions(rows, ranks, fitting_sizes(seq_length, ranks, run.limits))
    ]
    assert {one.plan for one in found.candidates} <= set(every)
    least = min(step_of(run, plan) for plan in every)
    assert found.chosen.cost.step_seconds == pytest.approx(least, rel=1e-12)
    assert found.chosen in found.candidates and found.chosen.reason.endswith("chosen")
    # For each K the plan with nothing else, and one that has it.
    for size in fitting_sizes(seq_length, ranks, run.limits):
        if rows % (ranks // size) == 0:
            assert [(rows, size)] in [waves(one.plan) for one in found.candidates]
        if rows >= ranks // size:
            assert any(size in one.plan.group_sizes for one in found.candidates)


def test_candidates_come_with_the_fastest_first():
    steps = [one.cost.step_seconds for one in compare_plans(training(micro_batch_size=6)).candidates]
    assert steps == sorted(steps) and len(steps) > 3


def test_plain_flags_of_virtual_stages_have_as_many_micro_batches_as_megatron_wants():
    run = training(pipeline_model_parallel_size=2, virtual_stages=2, micro_batch_size=6, global_batch_size=12)
    found = {one.training.micro_batches for one in plain_runs(run)}
    assert found == {2, 6}
    in_turn = replace(run, parallelism=replace(run.parallelism, virtual_stages=1))
    assert {one.training.micro_batches for one in plain_runs(in_turn)} == found | {1, 3}


def test_ulysses_is_one_wave_over_all_ranks():
    assert waves(compare_plans(training()).ulysses.plan) == [(2, 8)]
    # 4 heads cannot be spread over 8 ranks.
    few = replace(MODEL, heads=4, kv_heads=4)
    assert compare_plans(training(model=few)).ulysses is None


def test_the_reason_says_first_whether_groups_fit_in_a_node():
    inside, across = (one.reason for one in compare_plans(training()).candidates)
    assert inside.startswith("2 sequences in groups of 4 GPUs, which fit in a node of 4: nothing leaves a node")
    assert across.startswith("2 sequences in groups of 8 GPUs, which straddle nodes of 4: ")
    assert "MB a rank, layer and direction leave a node" in across
    with_tensor_ranks = compare_plans(training(tensor_model_parallel_size=2))
    assert "in groups of 4·2 = 8 GPUs, which straddle nodes of 4" in with_tensor_ranks.chosen.reason
    alone = compare_plans(training(micro_batch_size=8)).chosen.reason
    assert alone.startswith("8 sequences each on one rank: nothing is sent")


def test_each_group_size_that_no_wave_can_have_gets_its_reason():
    run = training(model=replace(MODEL, heads=12, kv_heads=12), micro_batch_size=2, seq_length=1024)
    refused = compare_plans(run).refused
    assert refused[8] == "K=8: H % K must be 0, and Hkv % K or K % Hkv, with H=12, Hkv=12 per tensor-parallel rank"
    assert refused[2] == "K=2: takes sequences by N/K = 4, and the micro-batch has 2"
    assert set(refused) == {1, 2, 8}
    assert compare_plans(training(seq_length=1028)).refused[8] == "K=8: S % K must be 0, with S=1028"


# Plain flags.


def test_one_wave_is_what_plain_flags_do_at_the_same_cost():
    run = training(micro_batch_size=4)
    found = compare_plans(run)
    assert waves(found.chosen.plan) == [(4, 2)]
    equal = found.equivalent
    assert (equal.context_parallel_size, equal.micro_batch_size) == (2, 1)
    assert equal.cost.step_seconds == pytest.approx(found.chosen.cost.step_seconds)
    assert equal.cost.exchange == found.chosen.cost.exchange
    assert found.plain.cost.step_seconds <= equal.cost.step_seconds


def test_several_waves_are_not_what_plain_flags_do():
    found = compare_plans(training(micro_batch_size=3, seq_length=65536, model=replace(MODEL, kv_heads=8)))
    assert len(found.chosen.plan.waves) == 2
    assert found.equivalent is None
    # 3 sequences on 8 ranks: all that plain flags can do is all ranks for each.
    assert (found.plain.context_parallel_size, found.plain.micro_batch_size) in [(8, 1), (8, 3)]
    assert found.plain.cost.step_seconds > found.chosen.cost.step_seconds


def test_with_accumulation_plain_flags_may_be_faster_and_that_is_not_hidden():
    found = compare_plans(training(micro_batch_size=3, seq_length=65536, global_batch_size=24))
    assert found.plain.context_parallel_size < 8
    assert found.plain.cost.step_seconds < found.chosen.cost.step_seconds


def test_plain_flags_take_no_more_ranks_than_key_value_heads_divide_into():
    """Stock's `a2a` asserts Hkv % K = 0; ours copies the heads."""
    found = compare_plans(training(model=replace(MODEL, kv_heads=2), micro_batch_size=2))
    assert waves(found.chosen.plan) == [(2, 4)]
    assert found.equivalent is None and found.plain is None


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([2, 4, 8]), st.integers(1, 6), st.integers(1, 4), st.integers(1, 3))
def test_plain_flags_take_the_same_samples_on_the_same_devices(ranks, rows, micro_batches, replicas):
    samples = rows * micro_batches * replicas
    run = training(
        context_parallel_size=ranks,
        micro_batch_size=rows,
        data_parallel_size=replicas,
        global_batch_size=samples,
    )
    plain = compare_plans(run).plain
    if plain is None:
        return
    stock_replicas = ranks * replicas // plain.context_parallel_size
    assert ranks % plain.context_parallel_size == 0
    assert samples % (plain.micro_batch_size * stock_replicas) == 0


# What is fixed, and what does not fit.


def test_a_fixed_group_size_is_the_choice_whatever_it_costs():
    found = compare_plans(training(micro_batch_size=8), group_size=4)
    assert waves(found.chosen.plan) == [(8, 4)]
    assert found.candidates[0] is not found.chosen
    assert "less" in found.candidates[0].reason


def test_a_fixed_group_size_that_cannot_be_is_refused():
    with pytest.raises(ConfigurationError, match="B % \\(N/K\\) must be 0 when K is fixed, got B=3"):
        compare_plans(training(micro_batch_size=3), group_size=4)


@pytest.mark.parametrize(
    ("memory_bytes", "remedy"),
    [
        (2.9e9, "would fit with --data-parallel-sharding-strategy optim .in Megatron --use-distributed-optimizer.$"),
        (
            2.68e9,
            "would fit with --data-parallel-sharding-strategy optim_grads_params .in .* --use-megatron-fsdp.$",
        ),
        (
            2.655e9,
            "would fit with --data-parallel-.* optim_grads_params .* --recompute-gran.* selective$",
        ),
        (2.55e9, "would fit with --data-parallel-sharding-strategy optim_grads .* --recompute-granularity full$"),
        (2.4e9, "no sharding or recompute makes it fit"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(memory_bytes, remedy):
    model = replace(MODEL, hidden=1024, ffn=2048, vocabulary=8000, heads=16)
    run = training(replace(CLUSTER, memory_bytes=memory_bytes), model=model, seq_length=8192)
    with pytest.raises(ConfigurationError, match=remedy) as caught:
        compare_plans(run)
    assert "\n" not in str(caught.value) and "a rank needs" in str(caught.value)


def test_divisors_are_all_that_divide():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
