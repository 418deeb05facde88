"""What a step costs, against figures worked out by hand. (Against Megatron's own counts: tests/end_to_end.)"""

from dataclasses import replace

import pytest

from megatron_basp.arithmetic_cost import arithmetic_of, attention_flops_per_second
from megatron_basp.cost_model import HIDING_SHARE, step_cost
from megatron_basp.errors import ConfigurationError
from megatron_basp.memory_cost import RESERVED_BYTES, memory_of
from megatron_basp.model_spec import ModelSpec
from megatron_basp.parallel_cost import (
    expert_traffic,
    parameters_of_rank,
    pipeline_traffic,
    replica_traffic,
    ring,
    tensor_traffic,
)
from megatron_basp.plan import plan_batch
from megatron_basp.training_spec import Parallelism
from tests.costs import CLUSTER, MODEL, training, with_across

EXPERTS = replace(MODEL, experts=8, experts_per_token=2, expert_ffn=128)


def step(run, group_size=None):
    lengths = (run.seq_length,) * run.micro_batch_size
    limits = replace(run.limits, group_size=group_size)
    return step_cost(run, plan_batch(lengths, run.parallelism.context_parallel_size, limits))


# Arithmetic.


def test_flops_of_a_layer_by_part():
    run = training(context_parallel_size=4, micro_batch_size=1)
    found = arithmetic_of(run)
    tokens = 1024 // 4
    assert found.layer_flops == {
        "projections": 6 * tokens * 256 * 64 * (2 * 8 + 2 * 4),
        # Scores and values, halved by causality, for a quarter of the heads' work; 3.5 times for both directions.
        "attention": 3.5 * 2 * (2 * 1024 * 1024 * 64 * 8) / 2 / 4,
        "mlp": 6 * tokens * 3 * 256 * 512,
        "recompute": 0,
    }
    assert found.output_flops == 6 * tokens * 256 * 1000
    assert found.layer_seconds["mlp"] == pytest.approx(found.layer_flops["mlp"] / 0.5e14)
    assert found.layer_seconds["attention"] == pytest.approx(found.layer_flops["attention"] / 2e13)


@pytest.mark.parametrize(("recompute", "again"), [("selective", {"attention"}), ("full", {"attention", "mlp", "all"})])
def test_recompute_is_one_more_forward_of_what_it_covers(recompute, again):
    none = arithmetic_of(training()).layer_flops
    found = arithmetic_of(training(recompute=recompute)).layer_flops["recompute"]
    matrices = (none["projections"] + none["mlp"]) / 3 if "all" in again else 0
    assert found == pytest.approx(none["attention"] / 3.5 + matrices)


def test_arithmetic_is_spread_over_ranks_and_does_not_know_the_plan():
    run = training(micro_batch_size=8)
    assert step(run, 8).arithmetic == step(run, 1).arithmetic
    alone = training(micro_batch_size=8, context_parallel_size=1)
    assert arithmetic_of(alone).stage_seconds(4) == pytest.approx(8 * arithmetic_of(run).stage_seconds(4))
    halves = training(micro_batch_size=8, context_parallel_size=8, tensor_model_parallel_size=2)
    assert arithmetic_of(run).stage_seconds(4) == pytest.approx(2 * arithmetic_of(halves).stage_seconds(4))


def test_a_token_of_a_mixture_is_computed_by_its_experts_alone():
    found = arithmetic_of(training(model=EXPERTS)).layer_flops["mlp"]
    assert found == 6 * training().tokens * (2 * 3 * 256 * 128 + 256 * 8)


@pytest.mark.parametrize(
    ("head_size", "seq_length", "expected"),
    [
        (64, 1024, 2e13),
        (64, 2048, 3e13),  # half-way by the logarithm
        (64, 512, 2e13),
        (64, 8192, 4e13),
        (80, 4096, 6e13),
        (256, 4096, 6e13),
    ],
)
def test_attention_rates_are_read_off_the_table(head_size, seq_length, expected):
    assert attention_flops_per_second(CLUSTER, head_size, seq_length) == pytest.approx(expected)


def test_in_fp32_attention_slows_down_as_the_peak_does():
    half, full = arithmetic_of(training()), arithmetic_of(training(precision="fp32"))
    assert full.layer_seconds["attention"] == pytest.approx(10 * half.layer_seconds["attention"])


# Traffic beside the exchange.


def test_a_ring_inside_a_node_has_the_nodes_bus_bandwidth():
    assert ring(CLUSTER, 1000, 4, 1).sent_bytes == 750
    assert ring(CLUSTER, 1000, 4, 1).across_bytes == 0
    assert ring(CLUSTER, 1000, 4, 1).seconds == pytest.approx(750 / 1e11)
    assert ring(CLUSTER, 1000, 1, 1).seconds == 0


def test_a_ring_over_nodes_has_the_interfaces_or_its_share_of_them():
    whole = ring(CLUSTER, 1000, 8, 1)  # both nodes' four GPUs
    assert whole.seconds == pytest.approx(875 / (2e10 * 0.9))
    assert whole.across_bytes == pytest.approx(875 / 4)  # one in four sends to the next node
    strided = ring(CLUSTER, 1000, 2, 4)  # four such rings side by side
    assert strided.seconds == pytest.approx(500 / (2e10 * 0.9 / 4))
    assert strided.across_bytes == 500


def test_replicas_send_what_their_sharding_asks_for():
    dense, _ = parameters_of_rank(training())
    assert dense == MODEL.parameters

    def sent(sharding, micro_batches=1):
        run = training(sharding=sharding, global_batch_size=2 * micro_batches)
        found = replica_traffic(run)
        return found.a_step.sent_bytes / dense * 8 / 7, found.a_micro_batch.sent_bytes / dense * 8 / 7

    assert sent("no_shard") == pytest.approx((2 * 4, 0))
    assert sent("optim") == pytest.approx((4 + 2, 0))
    assert sent("optim_grads") == pytest.approx((2, 4))
    assert sent("optim_grads_params") == pytest.approx((0, 2 * 2 + 4))


def test_experts_are_shared_by_fewer_replicas():
    run = training(model=EXPERTS, expert_model_parallel_size=4)
    dense, experts = parameters_of_rank(run)
    assert experts == EXPERTS.layers * EXPERTS.expert_parameters / 4
    assert dense + experts * 4 == EXPERTS.parameters
    # D = 8 for the dense ones, 8/4 for the experts.
    expected = 2 * 4 * (dense * 7 / 8 + experts * 1 / 2)
    assert replica_traffic(run).a_step.sent_bytes == pytest.approx(expected)


def test_experts_get_each_token_as_often_as_it_has_experts():
    found = expert_traffic(training(model=EXPERTS, expert_model_parallel_size=8))
    each = training().tokens * 2 * 256 * 2
    assert found.sent_bytes == pytest.approx(4 * each * 7 / 8)  # there and back, forward and backward
    assert found.across_bytes == pytest.approx(4 * each * 4 / 8)
    assert expert_traffic(training(model=EXPERTS)).sent_bytes == 0


@pytest.mark.parametrize(
    ("sizes", "rings"),
    [
        ({"sequence_parallel": False}, 8),  # four all-reduces
        ({}, 10),  # as gathers and scatters, and inputs gathered again for the weights' gradients
        ({"recompute": "selective"}, 10),
        ({"recompute": "full"}, 14),
        ({"model": EXPERTS}, 4 + 1 + 4 * 2),  # attention's alone, and of 2 experts a token
        ({"model": replace(EXPERTS, shared_expert_ffn=64)}, 10 + 4 * 2),
    ],
)
def test_tensor_parallel_ranks_gather_and_scatter_so_many_times_a_layer(sizes, rings):
    run = training(tensor_model_parallel_size=2, context_parallel_size=4, **sizes)
    assert tensor_traffic(run).sent_bytes == rings * (run.tokens * 256 * 2) / 2
    assert tensor_traffic(training()).sent_bytes == 0


def test_stages_send_activations_and_gradients_and_leave_the_node_where_stages_do():
    run = training(pipeline_model_parallel_size=2)
    assert pipeline_traffic(run).sent_bytes == pipeline_traffic(run).across_bytes == 2 * run.tokens * 256 * 2
    near = pipeline_traffic(training(pipeline_model_parallel_size=2, context_parallel_size=2))
    assert near.across_bytes == 0 < near.sent_bytes
    # Two stages to a node of 4: every other one sends to the next node, and two GPUs share its interfaces.
    mixed = pipeline_traffic(training(pipeline_model_parallel_size=4, context_parallel_size=2))
    assert mixed.across_bytes == mixed.sent_bytes / 2
    assert mixed.seconds == pytest.approx(mixed.sent_bytes * 2 / (2e10 * 0.9))


# A step.


def test_a_step_is_its_parts():
    run = training(sharding="no_shard")
    found = step(run)
    assert found.exchange_seconds == pytest.approx(found.exchange.seconds * 2 * 4)
    parts = found.arithmetic_seconds + found.exchange_seconds + found.exposed_replica_seconds + found.optimizer_seconds
    assert found.step_seconds == pytest.approx(parts)
    assert found.bubble_seconds == 0


def test_a_step_lies_between_its_bounds():
    for sizes in (
        {},
        {"sharding": "optim_grads_params"},
        {"sharding": "optim_grads", "cluster": with_across(bytes_per_second_per_nic=1e8)},
        {"pipeline_model_parallel_size": 2, "global_batch_size": 16},
        {"pipeline_model_parallel_size": 2, "virtual_stages": 2, "global_batch_size": 16},
        {"tensor_model_parallel_size": 2, "recompute": "full"},
        {"model": EXPERTS, "expert_model_parallel_size": 4},
    ):
        found = step(training(**sizes))
        assert found.least_seconds <= found.step_seconds <= found.most_seconds * (1 + 1e-12), sizes


def test_replicas_traffic_hides_behind_its_share_of_arithmetic_and_no_more():
    slow = with_across(bytes_per_second_per_nic=1e8)
    found = step(training(cluster=slow))
    arithmetic, traffic = found.arithmetic_seconds, found.traffic["replicas"].seconds
    assert traffic > arithmetic
    assert found.exposed_replica_seconds == pytest.approx(traffic - HIDING_SHARE * arithmetic)
    assert step(training(seq_length=65536)).exposed_replica_seconds == 0


def test_stages_idle_for_as_many_micro_batches_as_there_are_further_stages():
    run = training(pipeline_model_parallel_size=4, global_batch_size=16)
    found = step(run)
    rest = found.step_seconds - found.exposed_replica_seconds - found.optimizer_seconds
    assert run.micro_batches == 8
    assert found.bubble_seconds / rest == pytest.approx(3 / 11)
    virtual = step(replace(run, model=replace(MODEL, layers=8)))
    halved = step(replace(run, model=replace(MODEL, layers=8), parallelism=replace(run.parallelism, virtual_stages=2)))
    assert halved.bubble_seconds < virtual.bubble_seconds


@pytest.mark.parametrize(("recompute", "times"), [("none", 2), ("selective", 2), ("full", 3)])
def test_only_whole_layers_that_are_recomputed_exchange_again(recompute, times):
    run = training(recompute=recompute)
    found = step(run)
    assert found.exchange_sent_bytes == pytest.approx(found.exchange.sent_bytes * 4 * times)


# Memory.


def test_parameters_gradients_and_optimizer_are_divided_as_the_sharding_says():
    parameters = MODEL.parameters

    def memory(sharding):
        found = memory_of(training(sharding=sharding), 4)
        return [x / parameters for x in (found.parameter_bytes, found.gradient_bytes, found.optimizer_bytes)]

    assert memory("no_shard") == [2, 4, 12]
    assert memory("optim") == [2, 4, 12 / 8]
    assert memory("optim_grads") == [2, 4 / 8, 12 / 8]
    sharded, *others = memory("optim_grads_params")
    assert others == [4 / 8, 12 / 8] and 2 / 8 < sharded < 2 / 8 + 2 * 2 / MODEL.layers + 1e-9


def test_recompute_saves_activations_and_nothing_else():
    by_recompute = [memory_of(training(recompute=kind), 4) for kind in ("none", "selective", "full")]
    activations = [memory.activation_bytes for memory in by_recompute]
    assert activations == sorted(activations, reverse=True) and len(set(activations)) == 3
    assert len({replace(memory, activation_bytes=0) for memory in by_recompute}) == 1


def test_tensor_parallel_ranks_hold_the_tokens_of_their_experts_whole():
    def activations(model):
        run = training(model=model, tensor_model_parallel_size=2, context_parallel_size=4)
        return memory_of(run, 1).activation_bytes / (run.tokens * 2 * model.layers)

    without = replace(MODEL, ffn=1)
    assert activations(EXPERTS) - activations(without) + 3 / 2 == 2 * (3 * 128 / 2 + 256 + 256 / 2)


def test_interleaved_stages_hold_more_micro_batches():
    def activations(**sizes):
        run = training(model=replace(MODEL, layers=8), pipeline_model_parallel_size=4, recompute="selective", **sizes)
        return memory_of(run, 1).activation_bytes

    one = activations(global_batch_size=2 * 4) - activations(global_batch_size=2 * 3)
    more = activations(global_batch_size=32, virtual_stages=2) - activations(global_batch_size=32)
    assert more == pytest.approx(one * 3 / 2)  # (PP-1)/V
    few = {"global_batch_size": 2 * 4}  # no more than there are
    assert activations(**few, virtual_stages=2) == pytest.approx(activations(**few))


def test_of_several_stages_the_first_has_most_in_flight_and_the_last_the_logits():
    one = memory_of(training(), 4)
    first = memory_of(training(pipeline_model_parallel_size=4, global_batch_size=16), 4)
    assert first.logit_bytes == 0
    assert first.activation_bytes == pytest.approx(one.activation_bytes)  # a quarter of the layers, four in flight
    large = replace(MODEL, vocabulary=100_000)
    last = memory_of(training(model=large, pipeline_model_parallel_size=4, global_batch_size=16), 4)
    assert last.logit_bytes > 0
    assert last.activation_bytes == pytest.approx(one.activation_bytes / 4)


def test_copied_key_value_heads_take_memory():
    assert memory_of(training(), 8).activation_bytes > memory_of(training(), 4).activation_bytes


def test_something_is_reserved():
    assert memory_of(training(), 4).reserved_bytes == RESERVED_BYTES > 0


# Refusals.


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"seq_length": 1001}, "B·S % N must be 0, got B=2, S=1001 and N=8"),
        ({"micro_batch_size": 0, "global_batch_size": 2}, "--micro-batch-size must be 1 or more, got 0"),
        ({"global_batch_size": 3}, r"--global-batch-size % \(B·DP\) must be 0, got 3, B=2, DP=1: use a multiple of 2"),
        ({"tensor_model_parallel_size": 3}, "heads % TP must be 0, got 8 attention heads, 4 query groups and TP=3"),
        (
            {"pipeline_model_parallel_size": 2, "sharding": "optim_grads"},
            "Megatron-FSDP, which has no pipeline stages",
        ),
        ({"pipeline_model_parallel_size": 3}, r"layers % \(PP·virtual stages\) must be 0, got 4 layers and 3·1"),
        (
            {"pipeline_model_parallel_size": 2, "virtual_stages": 2, "global_batch_size": 6},
            "multiple of PP, got 3 and PP=2: use a --global-batch-size that is a multiple of 4",
        ),
        ({"expert_model_parallel_size": 2}, "experts % EP must be 0, got 0 experts and EP=2"),
        ({"model": EXPERTS, "expert_model_parallel_size": 8, "context_parallel_size": 4}, r"\(DP·CP\) % EP must be 0"),
        ({"precision": "fp8"}, "cluster round has no peak for fp8, only for bf16, fp32"),
        ({"cluster": replace(CLUSTER, nodes=1)}, "at most the 4 GPUs of round, got 1·1·8·1 = 8"),
        ({"context_parallel_size": -1}, "--context-parallel-size must be 1 or more, got -1"),
        ({"sharding": "zero3"}, "--data-parallel-sharding-strategy zero3 is not known: use one of no_shard, optim,"),
        ({"recompute": "some"}, "--recompute-granularity some is not known: use one of none, selective, full"),
    ],
)
def test_impossible_runs_are_refused_in_one_line(sizes, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        training(**sizes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "domain_size"),
    [
        ({"context_parallel_size": 8}, 4),
        ({"context_parallel_size": 2}, 2),  # N smaller than a node
        ({"context_parallel_size": 4, "tensor_model_parallel_size": 2}, 2),
        ({"context_parallel_size": 4, "tensor_model_parallel_size": 8, "model": replace(MODEL, kv_heads=8)}, 1),
        # Groups of 6 on nodes of 4: the second group's first block of 2 shares a node, no block of 3 does.
        ({"context_parallel_size": 6, "data_parallel_size": 2, "seq_length": 1020}, 2),
        ({"context_parallel_size": 3, "data_parallel_size": 4, "seq_length": 1020}, 1),
    ],
)
def test_the_fast_domain_follows_from_where_megatron_puts_ranks(sizes, domain_size):
    assert training(**sizes).domain_size == domain_size


def test_defaults_are_megatrons():
    assert Parallelism().sharding == "no_shard"
    assert ModelSpec(1, 64, 64, 1, 1, 64, 10).gated
