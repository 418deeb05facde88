"""The run that `megatron-basp plan` is asked about: from its own options, or from a command line of Megatron's."""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import dataclass

from megatron_basp.errors import ConfigurationError
from megatron_basp.library import MODELS, named_cluster, named_model, names, no_cluster
from megatron_basp.training_spec import Parallelism, TrainingSpec

# Options that Megatron has too, and that a command line of Megatron's says by itself.
SIZES = """
    context_parallel_size micro_batch_size seq_length global_batch_size tensor_model_parallel_size
    pipeline_model_parallel_size expert_model_parallel_size data_parallel_sharding_strategy recompute_granularity
    precision basp_group_size
""".split()


@dataclass(frozen=True)
class Question:
    """training: the run. group_size: K, where it is fixed. model, cluster: what they are called."""

    training: TrainingSpec
    group_size: int | None
    model: str
    cluster: str


def question(options: argparse.Namespace) -> Question:
    """Raises ConfigurationError: something is missing, impossible, or would be refused in training."""
    return _from_megatron(options) if options.flags else _from_options(options)


def _from_options(options: argparse.Namespace) -> Question:
    if options.cluster is None:
        raise ConfigurationError(no_cluster())
    parallelism = _parallelism(options)
    batch_size = options.micro_batch_size
    if options.search and options.global_batch_size is not None and batch_size is None:
        batch_size = options.global_batch_size // parallelism.data_parallel_size
        if batch_size < 1 or options.global_batch_size % parallelism.data_parallel_size:
            raise ConfigurationError(
                f"--global-batch-size % DP must be 0, got {options.global_batch_size} and "
                f"DP={parallelism.data_parallel_size}: use a multiple of {parallelism.data_parallel_size}"
            )
    for flag, value in {
        "--model": options.model,
        "--seq-length": options.seq_length,
        "--micro-batch-size": batch_size,
    }.items():
        if value is None:
            known = f" with a file, or one of {', '.join(names(MODELS))}" if flag == "--model" else ""
            raise ConfigurationError(f"{flag} is missing: give it{known}, or a command line of Megatron's behind --")
    if batch_size < 1:
        raise ConfigurationError(f"--micro-batch-size must be 1 or more, got {batch_size}")
    _check_length(options.seq_length, parallelism.context_parallel_size)
    samples = batch_size * parallelism.data_parallel_size
    training = TrainingSpec(
        model=named_model(options.model),
        cluster=named_cluster(options.cluster),
        parallelism=parallelism,
        seq_length=options.seq_length,
        micro_batch_size=batch_size,
        global_batch_size=samples if options.global_batch_size is None else options.global_batch_size,
        precision=options.precision or "bf16",
    )
    return Question(training, options.basp_group_size, options.model, options.cluster)


def _parallelism(options: argparse.Namespace) -> Parallelism:
    """`--ranks` alone is N; beside `--context-parallel-size` it is all devices."""
    tensor_parallel = _given(options, "tensor_model_parallel_size")
    stages = _given(options, "pipeline_model_parallel_size")
    ranks = options.ranks if options.context_parallel_size is None else options.context_parallel_size
    if ranks is None:
        raise ConfigurationError("--ranks is missing: give the number of context-parallel ranks N")
    if ranks < 2:
        raise ConfigurationError(
            f"there is nothing to plan below N = 2 context-parallel ranks, got {ranks}: use 2 or more"
        )
    model_ranks = tensor_parallel * stages * ranks
    data_parallel = 1
    if options.context_parallel_size is not None and options.ranks is not None:
        if options.ranks < 1 or options.ranks % model_ranks:
            raise ConfigurationError(
                f"ranks % (TP·PP·CP) must be 0, got --ranks {options.ranks} and {tensor_parallel}·{stages}·{ranks}: "
                f"use a multiple of {model_ranks}"
            )
        data_parallel = options.ranks // model_ranks
    return Parallelism(
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=stages,
        context_parallel_size=ranks,
        data_parallel_size=data_parallel,
        expert_model_parallel_size=_given(options, "expert_model_parallel_size"),
        sharding=options.data_parallel_sharding_strategy or "no_shard",
        recompute=options.recompute_granularity or "none",
    )


def _given(options: argparse.Namespace, name: str) -> int:
    value = getattr(options, name)
    if value is not None and value < 1:
        raise ConfigurationError(f"--{name.replace('_', '-')} must be 1 or more, got {value}")
    return 1 if value is None else int(value)


def _check_length(length: int, ranks: int) -> None:
    """Megatron's own condition for context parallelism."""
    unit = 2 * ranks
    if length < 1 or length % unit:
        raise ConfigurationError(
            f"Megatron wants S % (2·N) to be 0 for N context-parallel ranks, got S={length}, N={ranks}: the next "
            f"--seq-length that works is {max(1, -(-length // unit)) * unit}"
        )


def _from_megatron(options: argparse.Namespace) -> Question:
    for name in SIZES:
        if getattr(options, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise ConfigurationError(f"{flag} stands before --: with a command line of Megatron's, give it behind --")
    if options.ranks is not None and options.ranks < 1:
        raise ConfigurationError(f"--ranks must be 1 or more, got {options.ranks}")
    model = named_model(options.model) if options.model is not None else None
    # What Megatron prints is not this command's result.
    with contextlib.redirect_stdout(sys.stderr):
        from megatron_basp.cli.loading import load_megatron

        load_megatron()
        from megatron_basp.megatron.planned_flags import training_of_flags

        training, args = training_of_flags(options.flags, options.ranks, model, options.cluster)
    return Question(training, args.basp_group_size, options.model or "the model of these flags", args.basp_cluster)
