"""`megatron-basp verify`: the proof that nothing changed, for the user's own flags.

The same training, by stock Megatron without context parallelism and by each mode, held to each other: losses,
gradients, parameters and samples.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from megatron_basp.atomic_files import write_json
from megatron_basp.cli.loading import load_megatron
from megatron_basp.cli.progress import step_progress, terminal
from megatron_basp.cli.verify_result import ROUNDING, Case, VerifyResult, print_verdict
from megatron_basp.cli.verify_runs import Run, Runs, plan_runs
from megatron_basp.comparison import Bounds, RankReport, compare
from megatron_basp.errors import ConfigurationError, RankFailed
from megatron_basp.local_ranks import in_one_rank, run_ranks

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
        runs = in_one_rank(lambda: plan_runs(options, gpus), logs / "flags") if gpus else plan_runs(options, gpus)
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
    load_megatron()
    from megatron_basp.megatron import pretrain_gpt  # noqa: F401

    return 0


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


def _write(result: VerifyResult, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "result.json", result.as_document())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
