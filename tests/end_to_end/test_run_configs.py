"""configs/train: each file at its full size and number of ranks, through Megatron's own validation and its model."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_basp.candidates import compare_plans
from megatron_basp.library import CONFIGS, MODELS, named_cluster, named_model, names
from megatron_basp.local_ranks import run_ranks
from megatron_basp.run_config import RunConfig, load_config
from tests.end_to_end.training import Trainer

FOLDER = CONFIGS / "train"
MOCK_DATA = FOLDER / "layers" / "mock-data.yaml"
PAPER = FOLDER / "layers" / "paper.yaml"
PAPERS_MODELS = "llama3.2-1b llama3.2-3b llama3.1-8b qwen1.5-1.8b qwen2.5-3b qwen3-8b".split()
LENGTHS = {"16k": 16384, "32k": 32768, "128k": 131072}
RUNS = {file.stem: [file, MOCK_DATA] for file in sorted(FOLDER.glob("*.yaml"))}
RUNS |= {f"{model}-16k, as in the paper": [FOLDER / f"{model}-16k.yaml", PAPER] for model in PAPERS_MODELS}

# The largest, the experts, and what the paper ran; the others take a minute together.
QUICK = ["qwen3-8b-128k", "llama3.1-8b-128k", "qwen3-30b-a3b-128k", "llama3.1-8b-16k, as in the paper"]


@dataclass(frozen=True)
class Built:
    """What became of a run: sizes after validation, K of the plan, parameters of the built model."""

    context_parallel: int
    data_parallel: int
    seq_length: int
    micro_batch: int
    group_sizes: tuple[int, ...]
    parameters: int


def test_every_model_has_a_run_of_every_length() -> None:
    expected = {f"{model}-{length}" for model in names(MODELS) for length in LENGTHS}
    assert {file.stem for file in FOLDER.glob("*.yaml")} == expected


CASES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]


@pytest.mark.parametrize("name", CASES)
def test_a_run_fits_its_cluster_and_is_the_model_of_its_name(trainer: Trainer, tmp_path: Path, name: str) -> None:
    config = load_config(RUNS[name])
    [run] = run_ranks(lambda rank: build(config), 1, tmp_path)
    model, _, length = name.partition(",")[0].rpartition("-")
    assert run.seq_length == LENGTHS[length]
    cluster = cluster_of(config)
    assert run.context_parallel * run.data_parallel == config.nodes * cluster.gpus_per_node
    # No group of a run leaves its node: that is what it is for.
    assert max(run.group_sizes) <= cluster.gpus_per_node
    if "paper" in name:
        assert (run.context_parallel, run.micro_batch, run.group_sizes) == (8, 2, (4,))
    # Biases, norms and the padded vocabulary are what the specification leaves out.
    assert run.parameters == pytest.approx(named_model(model).parameters, rel=2e-3)


def cluster_of(config: RunConfig) -> Any:
    return named_cluster({setting.key: setting.value for setting in config.settings}["basp-cluster"])


def build(config: RunConfig) -> Built:
    """On one rank of a group that is not there, with the hooks as the launcher puts them in."""
    from megatron.training import arguments

    from megatron_basp.megatron import hooks, start_up
    from megatron_basp.megatron.command_line import CommandLine, flag_parser
    from megatron_basp.megatron.config_flags import config_words
    from megatron_basp.megatron.planned_flags import training_of_flags
    from megatron_basp.megatron.scaled_flags import Scaling, run_on_cpu

    hooks.install()
    # Transformer Engine is for the GPUs that these runs are for.
    start_up.check_environment = lambda args: None
    words = config_words(config.settings, flag_parser(), ())
    cluster = cluster_of(config)
    ranks = config.nodes * cluster.gpus_per_node
    training, args = training_of_flags(words, ranks, None, None)
    chosen = compare_plans(training).chosen  # raises where it does not fit the memory
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"  # Megatron-FSDP wants anything but 1
    args.rank = 0
    arguments.validate_args(args)
    line = CommandLine(words)
    run_on_cpu(Scaling(line))
    line.set("--no-initialization")
    with group_of(ranks, cluster.gpus_per_node, line.args):
        parameters = parameters_of(line.args)
    return Built(
        context_parallel=args.context_parallel_size,
        data_parallel=args.data_parallel_size,
        seq_length=args.seq_length,
        micro_batch=args.micro_batch_size,
        group_sizes=chosen.plan.group_sizes,
        parameters=parameters,
    )


@contextlib.contextmanager
def group_of(ranks: int, gpus_per_node: int, args: Any) -> Any:
    """Rank 0 of so many, over torch's fake process group: arguments validated, Megatron's groups and ours made."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.training import arguments
    from torch.testing._internal.distributed.fake_pg import FakeStore

    args.rank, args.world_size = 0, ranks
    arguments.validate_args(args)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    gather = dist.all_gather_object

    def what_ranks_would_have_said(into: list[Any], own: Any, **kwargs: Any) -> None:
        size = args.context_parallel_size
        for rank in range(len(into)):
            first = rank // size * size
            into[rank] = (tuple(range(first, first + size)), f"node {rank // gpus_per_node}")

    dist.all_gather_object = what_ranks_would_have_said
    try:
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            create_gloo_process_groups=False,
        )
        yield
    finally:
        dist.all_gather_object = gather
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def parameters_of(args: Any) -> int:
    """Of the whole model, as Megatron builds it for rank 0, BASP attention in every layer; matrices take no memory."""
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    from megatron_basp import cpu
    from megatron_basp.attention import BaspAttention

    model_parallel_cuda_manual_seed(1)
    config = gpt_config_from_args(args)
    # Megatron names the GPU for most parameters, which the CPU backend answers with this.
    cpu._CPU = torch.device("meta")
    with torch.device("meta"):
        model = GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    cpu._CPU = torch.device("cpu")
    assert sum(isinstance(module, BaspAttention) for module in model.modules()) == args.num_layers
    experts = sum(p.numel() for name, p in model.named_parameters() if ".local_experts." in name)
    return sum(p.numel() for p in model.parameters()) + experts * (args.expert_model_parallel_size - 1)
