"""Which runs `megatron-basp verify` holds to each other: the user's flags made to fit this machine, with and without
the modes."""

from __future__ import annotations

import argparse
import platform
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_basp import __version__
from megatron_basp.cli.verify_result import VerifyResult
from megatron_basp.errors import ConfigurationError
from megatron_basp.run_flags import plain_flags

if TYPE_CHECKING:
    from megatron_basp.megatron.command_line import CommandLine
    from megatron_basp.megatron.settings import Settings

CPU_RANKS = 8  # half a gigabyte each
DEFAULT_FLAGS = """
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 8 --group-query-attention
    --num-query-groups 4 --seq-length 64 --max-position-embeddings 64 --position-embedding-type rope --swiglu
    --normalization RMSNorm --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 3
"""


@dataclass
class Run:
    """One training run: its flags, processes and whether it has a mode."""

    name: str
    flags: list[str]
    ranks: int
    is_planned: bool = False


@dataclass
class Runs:
    """What is going to be run. yardstick: stock once more in another order of sums, which measures rounding."""

    result: VerifyResult
    reference: Run
    yardstick: Run | None
    compared: list[Run]


def plan_runs(options: argparse.Namespace, gpus: int) -> Runs:
    """Read the flags, make them fit this machine, and derive from them what is compared.

    Raises:
        ConfigurationError: the flags are refused, as they would be in training; or nothing fits.
    """
    from megatron_basp.megatron import scaled_flags
    from megatron_basp.megatron.arguments import settings_from_arguments
    from megatron_basp.megatron.command_line import CommandLine
    from megatron_basp.megatron.text_dataset import prepare_sample_dataset
    from megatron_basp.megatron.versions import megatron_version

    if options.ranks is not None and options.ranks < 2:
        raise ConfigurationError(f"--ranks must be 2 or more, got {options.ranks}")
    line = CommandLine(options.flags or DEFAULT_FLAGS.split())
    args, available = line.args, gpus or CPU_RANKS
    model_ranks = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    if args.context_parallel_size == 1:
        size = (options.ranks or min(4 * model_ranks, available)) // model_ranks
        line.set("--context-parallel-size", max(2, size))
    line.set("--sequence-parallel-mode", "basp")
    line.args.world_size = model_ranks * line.args.context_parallel_size
    settings_from_arguments(line.args)  # what training would refuse is refused, whatever is scaled away

    scaling = scaled_flags.Scaling(line)
    ranks = scaled_flags.fit_ranks(scaling, available, options.ranks)
    scaled_flags.shorten(scaling)
    data_parallel = ranks // (model_ranks * line.args.context_parallel_size)
    if not options.full_size:
        scaled_flags.shrink_model(scaling)
        scaled_flags.shrink_batches(scaling, data_parallel)
    if not gpus:
        scaled_flags.run_on_cpu(scaling)
    if not (options.full_size and (args.data_path or args.mock_data or args.train_data_path)):
        scaled_flags.use_data(scaling, lambda: prepare_sample_dataset(options.out / "data").megatron_flags())
    line.args.world_size = ranks
    settings = settings_from_arguments(line.args)
    assert settings is not None
    result = VerifyResult(
        flags=line.words,
        ranks=ranks,
        device=f"{ranks} of {gpus} GPUs" if gpus else "cpu",
        changes=scaling.changes,
        versions={
            "megatron_basp": __version__,
            "megatron-core": megatron_version(),
            "torch": version("torch"),
            "python": platform.python_version(),
        },
    )
    reference = reference_run(line, settings)
    compared = [_ulysses(line, ranks, result), Run("basp", line.words, ranks, is_planned=True)]
    compared.append(_reflagged(line, reference, settings, result, with_gpus=bool(gpus)))
    yardstick = None
    if gpus and not _objective_of_micro_batches(line.args):
        yardstick = Run("rounding", [*reference.flags, "--micro-batch-size", "1"], reference.ranks)
    return Runs(result, reference, yardstick, [run for run in compared if run is not None])


def reference_run(line: CommandLine, settings: Settings) -> Run:
    """Stock Megatron without context parallelism, with the same tensor, pipeline and expert parallelism, on which
    initial weights depend."""
    args = line.args
    data_parallel = args.expert_model_parallel_size
    if args.num_experts and "global_aux_loss" in args.moe_router_load_balancing_type:
        # Taken over all data-parallel ranks.
        data_parallel = settings.data_parallel_size
        if data_parallel % args.expert_model_parallel_size:
            raise ConfigurationError(
                f"DP % EP must be 0 to hold global_aux_loss to a run without context parallelism, got "
                f"DP={data_parallel}, EP={args.expert_model_parallel_size}: give --ranks a multiple of "
                f"{args.tensor_model_parallel_size * args.pipeline_model_parallel_size * settings.ranks} by more, or "
                f"--expert-model-parallel-size 1"
            )
    if settings.global_batch_size % (settings.micro_batch_size * data_parallel):
        raise ConfigurationError(
            f"the reference has DP={data_parallel}, and --global-batch-size % (B·DP) must be 0, got "
            f"{settings.global_batch_size} and B={settings.micro_batch_size}: use a multiple of "
            f"{settings.micro_batch_size * data_parallel}"
        )
    ranks = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * data_parallel
    return Run("reference", _without_mode(line).words, ranks)


def _without_mode(line: CommandLine) -> CommandLine:
    line = line.copy()
    for flag in line.flags:
        if flag in ("--context-parallel-size", "--sequence-parallel-mode") or flag.startswith("--basp-"):
            line.drop(flag)
    return line


def _ulysses(line: CommandLine, ranks: int, result: VerifyResult) -> Run | None:
    from megatron_basp.megatron.arguments import settings_from_arguments

    line = line.copy()
    line.drop("--basp-group-size")
    line.set("--sequence-parallel-mode", "ulysses")
    line.args.world_size = ranks
    try:
        settings_from_arguments(line.args)
    except ConfigurationError as error:
        result.left_out["ulysses"] = str(error)
        return None
    return Run("ulysses", line.words, ranks, is_planned=True)


def _objective_of_micro_batches(args: Any) -> str:
    """Why stock with other micro-batches has another objective, or nothing."""
    if args.num_experts and any(np.atleast_1d(args.moe_aux_loss_coeff)):
        return "stock takes the auxiliary loss of experts over each micro-batch, and its micro-batches are others"
    if args.eod_mask_loss and not args.calculate_per_token_loss:
        return "with masks, stock weighs tokens by micro-batch, and its micro-batches are others"
    return ""


def _reflagged(
    line: CommandLine, reference: Run, settings: Settings, result: VerifyResult, with_gpus: bool
) -> Run | None:
    """Stock Megatron with the flags that deal the same sequences out to the same ranks."""
    plan = settings.plan(settings.micro_batch_size, settings.seq_length)
    flags = plain_flags(plan, settings.limits)
    why = _objective_of_micro_batches(line.args)
    if flags is None:
        why = "no plain flags do the same: sequences get different numbers of ranks"
    elif ", but" in flags:
        why = flags
    elif plan.waves[0].group_size > 1 and not with_gpus:
        why = f"stock's own context parallelism ({flags}) needs Transformer Engine, and a GPU"
    elif plan.ranks // plan.waves[0].group_size * settings.data_parallel_size % line.args.expert_model_parallel_size:
        why = "its data-parallel ranks are no multiple of --expert-model-parallel-size"
    if why or flags is None:
        result.left_out["re-flagged"] = why
        return None
    return Run("re-flagged", [*reference.flags, *flags.split()], result.ranks)
