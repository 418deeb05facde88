"""`megatron-basp verify`: the proof that nothing changed, for the user's own flags.

The same training, by stock Megatron without context parallelism and by each mode, held to each other: losses,
gradients, parameters and samples.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import platform
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from megatron_basp import __version__
from megatron_basp.atomic_files import write_json
from megatron_basp.cli.progress import step_progress, terminal
from megatron_basp.comparison import BOUNDS, Bounds, Comparison, Difference, RankReport, compare
from megatron_basp.errors import ConfigurationError, RankFailed
from megatron_basp.local_ranks import run_ranks

if TYPE_CHECKING:
    from megatron_basp.megatron.command_line import CommandLine
    from megatron_basp.megatron.settings import Settings

CPU_RANKS = 8  # half a gigabyte each
# Users' models have more heads and experts than the tests', so that sums are longer; mistakes begin at 1e-3.
ROUNDING = Bounds(*(5 * bound for bound in BOUNDS))
DEFAULT_FLAGS = """
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 8 --group-query-attention
    --num-query-groups 4 --seq-length 64 --max-position-embeddings 64 --position-embedding-type rope --swiglu
    --normalization RMSNorm --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 3
"""

DESCRIPTION = """
Prove on this machine that the modes change nothing. Trains ten steps by stock Megatron without context parallelism
(one process, or the same tensor, pipeline and expert parallelism), then with ulysses and with basp, and by stock
Megatron with the plain flags that spread the sequences alike, where there are such. Compares the loss of every step,
every parameter's gradient in the first and last step, every parameter at the end, and which samples each step saw.

Give your own Megatron flags after --. The model is scaled down: heads, KV heads, norms, biases, positions, experts,
parallelism and the micro-batch stay, which decide whether the modes are exact; layers, widths, S, vocabulary and
steps shrink. Each change is said in one line. --full-size keeps model, S and data as given. On a machine without GPUs
it runs on CPU processes in fp32, in about a minute; else on one process a GPU. Flags that the modes do not support
are refused with their reason, as in training.
"""
EXAMPLES = """
examples:
  megatron-basp verify                                  a small Llama on 4 CPU ranks, 3 sequences a micro-batch
  megatron-basp verify -- --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \\
      --group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --swiglu \\
      --position-embedding-type rope --normalization RMSNorm --disable-bias-linear --attention-dropout 0 \\
      --hidden-dropout 0 --micro-batch-size 4 --context-parallel-size 8 --bf16
  megatron-basp verify --ranks 4 -- [flags]             N and B get smaller in proportion until 4 ranks suffice
  megatron-basp verify --json > proof.json              for scripts; see "document" below

exit status: 0 equal, 1 something differs beyond rounding, 2 bad input (one line on stderr).

document of --json (and OUT/result.json):
  verdict            "equal" or "different"
  cases              one each for ulysses, basp, re-flagged: name; max_loss_difference (absolute, over all steps);
                     max_gradient_relative_difference and max_parameter_difference (of each tensor, relative in the
                     Frobenius norm); samples_equal; beyond_rounding (what and where, empty if equal); group_sizes
  left_out           cases that were not run: name and why
  bounds             what counts as rounding, in the same units
  changes            how the flags were changed, one line each
  flags, ranks, device, versions
"""


@dataclass
class Case:
    """One run that is held to the reference.

    comparison: None where the run failed, as `failure` says.
    """

    name: str
    group_sizes: list[int]
    comparison: Comparison | None
    failure: str = ""


@dataclass
class VerifyResult:
    """All of it; cases that did not run yet are missing."""

    flags: list[str]
    ranks: int
    device: str
    changes: list[str]
    versions: dict[str, str]
    bounds: Bounds = ROUNDING
    cases: list[Case] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    is_finished: bool = False

    def beyond_rounding(self, case: Case) -> list[str]:
        if case.comparison is None:
            return [f"the run failed: {case.failure}"]
        found = case.comparison.beyond(self.bounds)
        return found if case.comparison.samples_equal else [*found, "steps were trained on other samples"]

    @property
    def is_equal(self) -> bool:
        return self.is_finished and not any(map(self.beyond_rounding, self.cases))

    def as_document(self) -> dict[str, Any]:
        verdict = "equal" if self.is_equal else "different" if self.is_finished else "unfinished"
        return {
            "verdict": verdict,
            "cases": [self._case_document(case) for case in self.cases],
            "left_out": [{"name": name, "why": why} for name, why in self.left_out.items()],
            "bounds": {
                "max_loss_difference": self.bounds.loss,
                "max_gradient_relative_difference": self.bounds.gradient,
                "max_parameter_difference": self.bounds.parameter,
            },
            "changes": self.changes,
            "flags": self.flags,
            "ranks": self.ranks,
            "device": self.device,
            "versions": self.versions,
        }

    def _case_document(self, case: Case) -> dict[str, Any]:
        found = case.comparison
        return {
            "name": case.name,
            "max_loss_difference": found and _for_json(found.losses),
            "max_gradient_relative_difference": found and _for_json(found.gradients),
            "max_parameter_difference": found and _for_json(found.parameters),
            "samples_equal": found is not None and found.samples_equal,
            "beyond_rounding": self.beyond_rounding(case),
            "group_sizes": case.group_sizes,
        }


def _for_json(difference: Difference | None) -> float | None:
    """JSON has no infinity."""
    return difference.value if difference is not None and math.isfinite(difference.value) else None


def add_parser(subcommands: Any) -> None:
    parser = subcommands.add_parser(
        "verify",
        help="prove on this machine that the modes train as one process does, with your own flags",
        usage="megatron-basp verify [-h] [--ranks R] [--full-size] [--out DIR] [--json] [-- Megatron's flags]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="R",
        help="processes to start (default: TP·PP·N of the flags, made to fit the machine)",
    )
    parser.add_argument(
        "--full-size", action="store_true", help="model, S and data as the flags say, instead of scaled down"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/verify"), metavar="DIR", help="results (default runs/verify)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout and nothing else there")
    parser.add_argument("flags", nargs="*", metavar="Megatron's flags", help="after --")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Exit status 0, or 1 where something differs by more than rounding."""
    # Libraries print what they like; this command's own stdout is for its result.
    with contextlib.redirect_stdout(sys.stderr):
        gpus = _load()
        logs = options.out / "logs"
        # Where there are GPUs this process must not touch CUDA, which does not survive the forks to come.
        runs = _in_one_rank(lambda: plan_runs(options, gpus), logs / "flags") if gpus else plan_runs(options, gpus)
        for change in runs.result.changes:
            _say(change)
        try:
            _compare_all(runs, logs, options.out)
        except KeyboardInterrupt:
            _say(f"what was compared until now: {options.out / 'result.json'}")
            raise
    if options.json:
        print(json.dumps(runs.result.as_document()))
    else:
        print_verdict(runs.result, options.out)
    return 0 if runs.result.is_equal else 1


def _load() -> int:
    """The number of GPUs to run on. Without, Megatron is loaded here, once for all ranks."""
    import torch

    gpus = torch.cuda.device_count()  # asks the driver without starting CUDA, as is_available() would
    if gpus >= 2:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron asks for it
        return gpus
    # One GPU is one process, which can't be held to several.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    _say("loading Megatron …")
    # What it warns of, missing GPU libraries, is what this does without.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    if "megatron.core" not in sys.modules:
        from megatron_basp import cpu

        cpu.install()
    from megatron_basp.megatron import pretrain_gpt  # noqa: F401

    logging.getLogger("megatron").setLevel(logging.WARNING)
    return 0


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
    from megatron_basp.megatron.seam import megatron_version
    from megatron_basp.megatron.text_dataset import prepare_sample_dataset

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
    from megatron_basp.megatron.report import plain_flags

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


def _compare_all(runs: Runs, logs: Path, out: Path) -> None:
    """Run everything; a finished comparison is kept whatever happens to the next."""
    result = runs.result
    _write(result, out)
    reference = _train(runs.reference, logs)
    if runs.yardstick is not None:
        rounding = compare(_train(runs.yardstick, logs), reference)
        assert rounding.gradients is not None
        found = (rounding.losses.value, rounding.gradients.value, rounding.parameters.value)
        result.bounds = Bounds(*(max(bound, 4 * value) for bound, value in zip(ROUNDING, found, strict=True)))
    for run in runs.compared:
        try:
            reports = _train(run, logs)
        except RankFailed as error:
            result.cases.append(Case(run.name, [], None, str(error)))
        else:
            plan = reports[-1].plan
            group_sizes = [wave.group_size for wave in plan.waves] if plan else []
            result.cases.append(Case(run.name, group_sizes, compare(reports, reference)))
        _write(result, out)
    result.is_finished = True
    _write(result, out)


def _train(run: Run, logs: Path) -> list[RankReport]:
    from megatron_basp.megatron.scaled_flags import ITERATIONS

    with terminal() as stderr:

        def train_on_rank(rank: int) -> RankReport | str:
            from megatron_basp.megatron.observed_run import observe_training

            with step_progress(stderr, rank, f"{run.name:>10}", ITERATIONS) as advance:
                try:
                    return observe_training(run.flags, ITERATIONS, run.is_planned, after_step=advance)
                except ConfigurationError as error:
                    return str(error)

        reports = run_ranks(train_on_rank, run.ranks, logs / run.name)
    for report in reports:
        if isinstance(report, str):
            raise ConfigurationError(report)
    return reports


def _in_one_rank(function: Callable[[], Any], logs: Path) -> Any:
    """The function's result, from a process of its own; bad input is bad input here too."""

    def in_rank(rank: int) -> Any:
        try:
            return function()
        except ConfigurationError as error:
            return error

    result = run_ranks(in_rank, 1, logs)[0]
    if isinstance(result, ConfigurationError):
        raise result
    return result


def _write(result: VerifyResult, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "result.json", result.as_document())


def print_verdict(result: VerifyResult, out: Path) -> None:
    """The table, what differs, and the verdict."""
    table = Table(
        title="largest differences from stock without context parallelism",
        title_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
    )
    for name in ("", "loss", "gradient", "parameter", "samples", "K", ""):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for case in result.cases:
        found = case.comparison
        figures = (
            [f"{d.value:.1e}" for d in (found.losses, found.gradients, found.parameters) if d] if found else ["-"] * 3
        )
        table.add_row(
            case.name,
            *figures,
            "-" if found is None else "equal" if found.samples_equal else "DIFFERENT",
            ", ".join(map(str, case.group_sizes)),
            "different" if result.beyond_rounding(case) else "equal",
        )
    table.add_section()
    table.add_row("bound", *(f"{bound:.1e}" for bound in result.bounds))
    console = Console()
    console.print(table)
    for case in result.cases:
        for line in result.beyond_rounding(case):
            console.print(f"{case.name}: {line}", highlight=False)
    for name, why in result.left_out.items():
        console.print(f"{name}: not run, {why}", highlight=False)
    console.print(
        f"\nverdict: [bold]{'equal' if result.is_equal else 'different'}[/bold]. loss: absolute, over all steps. "
        f"gradient, parameter: of each tensor, relative in the Frobenius norm. {result.ranks} ranks on {result.device}"
        f"; {out / 'result.json'}, {out / 'logs'}",
        highlight=False,
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
