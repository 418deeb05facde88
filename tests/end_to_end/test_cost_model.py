"""The cost model's counts against those that Megatron makes for its own log, for every model of the library."""

import argparse
from pathlib import Path

import pytest
import yaml

from megatron_basp.arithmetic_cost import ATTENTION_BACKWARD, arithmetic_of
from megatron_basp.memory_cost import memory_of
from megatron_basp.model_spec import load_model
from megatron_basp.parallel_cost import parameters_of_rank
from tests.costs import training

MODELS = Path(__file__).parents[2] / "configs" / "models"
NAMES = sorted(file.stem for file in MODELS.glob("*.yaml"))
pytestmark = pytest.mark.end_to_end


def megatron_arguments(name, run):
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags = yaml.safe_load((MODELS / f"{name}.yaml").read_text())
    parallelism = run.parallelism
    sizes = {
        "padded_vocab_size": run.model.vocabulary,
        "kv_channels": run.model.head_size,
        "seq_length": run.seq_length,
        "micro_batch_size": run.micro_batch_size,
        "tensor_model_parallel_size": parallelism.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallelism.pipeline_model_parallel_size,
        "expert_model_parallel_size": parallelism.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallelism.tensor_model_parallel_size,
        "use_distributed_optimizer": parallelism.sharding == "optim",
        "data_parallel_size": parallelism.replicas,
        "world_size": parallelism.devices,
    }
    given = {key.replace("-", "_"): value for key, value in flags.items()}
    return argparse.Namespace(**{**vars(parser.parse_args([])), **given, **sizes})


def run_of(name, **sizes):
    return training(model=load_model(name, MODELS), seq_length=8192, micro_batch_size=8, **sizes)


@pytest.mark.parametrize("name", NAMES)
def test_flops_are_those_that_megatron_counts(trainer, name):
    from megatron.training.training import num_floating_point_operations

    run = run_of(name)
    found, model = arithmetic_of(run), run.model
    # Megatron counts backward of attention as twice its forward, and leaves the router out.
    attention = found.layer_flops["attention"] / (1 + ATTENTION_BACKWARD) * 3
    router = 6 * run.tokens * model.hidden * model.experts
    mine = model.layers * (found.layer_flops["projections"] + attention + found.layer_flops["mlp"] - router)
    theirs = num_floating_point_operations(megatron_arguments(name, run), run.micro_batch_size)
    assert (mine + found.output_flops) * 8 == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sharding", ["no_shard", "optim"])
def test_memory_of_weights_gradients_and_optimizer_is_what_megatron_reports(trainer, name, sharding):
    from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

    for sizes in ({}, {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2, "global_batch_size": 16}):
        run = run_of(name, sharding=sharding, **sizes)
        mine = memory_of(run, 1)
        theirs = compute_weight_and_optimizer_memory(megatron_arguments(name, run))
        # Norms and biases are left out, and the router is divided.
        mine = mine.parameter_bytes + mine.gradient_bytes + mine.optimizer_bytes
        assert mine == pytest.approx(theirs, rel=1e-3), sizes


def test_expert_parallel_ranks_hold_what_megatron_says(trainer):
    from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

    run = run_of("qwen3-30b-a3b", expert_model_parallel_size=8)
    theirs = compute_weight_and_optimizer_memory(megatron_arguments("qwen3-30b-a3b", run))
    assert sum(parameters_of_rank(run)) * 18 == pytest.approx(theirs, rel=1e-3)
