"""`megatron-basp plan`: which K, what it costs, and when plain flags would do. Modelled, without a GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_basp.candidates import compare_plans
from megatron_basp.cli.plan_inputs import question
from megatron_basp.cli.plan_result import PlanResult
from megatron_basp.errors import ConfigurationError
from megatron_basp.search import Sizes, search

DESCRIPTION = """
Will groups of ranks be faster for your model, your lengths, your cluster; by how much; what leaves a node; is it worth
it over changing two flags? Models a training step under each plan that the micro-batch allows, and under stock
Megatron's plain flags over the same devices and samples. Nothing is run or measured.

--ranks alone is N, the context-parallel ranks, without data parallelism: TP·PP·N devices. Beside
--context-parallel-size N it is all devices, and DP = R/(TP·PP·N). With a command line of Megatron's behind -- it is
the world size (default TP·PP·N), --model supplies what the flags do not say of the model, and --cluster stands in
place of --basp-cluster. Tensor parallelism is modelled with --sequence-parallel unless Megatron's flags say otherwise.
"""
EPILOG = """
examples:
  megatron-basp plan --ranks 8 --micro-batch-size 3 --seq-length 16384 --model llama3.2-3b \\
      --cluster a100-40gb-2x4 --data-parallel-sharding-strategy optim_grads_params
  megatron-basp plan --search --ranks 8 --global-batch-size 24 --seq-length 16384 \\
      --model qwen2.5-3b --cluster a100-40gb-2x4 --data-parallel-sharding-strategy optim_grads_params
  megatron-basp plan --cluster a100-40gb-2x4 --model llama3.1-8b --ranks 8 -- --context-parallel-size 8 \\
      --micro-batch-size 2 --seq-length 8192 --bf16 --use-megatron-fsdp --recompute-activations
  megatron-basp plan --check runs/ledger.jsonl --cluster h100-8

exit status: 0; 2 bad input, or no plan fits the memory (one line on stderr, with what would make it fit); 1 --check
found other bytes than predicted.

--check predicts what attention's exchanges send in a training step from the run that the ledger's header describes,
and holds it to the count of every step, by wave, operation and direction, split into bytes inside nodes and across.
With --cluster the modelled seconds stand beside those measured; they are not judged. Its document of --json: verdict
(equal, different), complete (whether the run came to its end), exchanges (rank, kind, predicted, counted, steps,
differs_in_step), cluster, seconds.

document of --json; everything is modelled, seconds and bytes are of one step and one rank:
  choice             waves [{rows (their number), group_size}], step_seconds, speedup_over_ulysses (null: see
                     why_no_ulysses), across_node_bytes_per_rank_per_step (sent to other nodes by the exchanges of
                     attention: all layers and micro-batches, forward and backward), least_step_seconds (all
                     communication hidden), most_step_seconds (none), shares (of the step, by part; they add up to 1),
                     flags (for BASP)
  candidates         waves, tokens_per_rank (of a micro-batch), memory_bytes_per_rank, fits_memory,
                     exchange_bytes_per_rank_per_step, exchange_seconds, across_node_bytes_per_rank_per_step,
                     step_seconds, least_step_seconds, most_step_seconds, speedup_over_ulysses, speedup_over_plain,
                     reason
  refused            group_size and reason, for each K that divides N and that no wave can have
  equivalent_flags   plain flags that do the same as the choice, or null
  plain              the fastest plain flags over the same devices and samples: flags, step_seconds; or null
  reason             of the choice
  verdict            whether plain flags do as well
  why_no_equivalent, why_no_ulysses    null where there are such
  training           the run: model, cluster and sizes
  search             with --search: tried, too_large (runs that were modelled, and those that fit no memory)
"""


def add_parser(subcommands: Any) -> None:
    parser = subcommands.add_parser(
        "plan",
        help="model which K to take, what it costs, and whether plain flags do as well",
        usage="megatron-basp plan [options] [-- Megatron's flags]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    number: dict[str, Any] = {"type": int}
    parser.add_argument("--ranks", **number, metavar="R", help="N, or all devices (above)")
    parser.add_argument("--micro-batch-size", **number, metavar="B", help="sequences that N ranks take at a time")
    parser.add_argument("--seq-length", **number, metavar="S", help="tokens in each")
    parser.add_argument("--model", metavar="NAME|FILE", help="of configs/models, or a .yaml file or config.json")
    parser.add_argument("--cluster", metavar="NAME|FILE", help="of configs/hardware, or a .yaml file")
    parser.add_argument("--global-batch-size", **number, metavar="G", help="sequences a step (default B·DP)")
    parser.add_argument("--context-parallel-size", **number, metavar="N")
    parser.add_argument("--tensor-model-parallel-size", **number, metavar="TP")
    parser.add_argument("--pipeline-model-parallel-size", **number, metavar="PP")
    parser.add_argument("--expert-model-parallel-size", **number, metavar="EP")
    parser.add_argument(
        "--data-parallel-sharding-strategy",
        metavar="STRATEGY",
        help="no_shard (the default), optim (the distributed optimizer), optim_grads or optim_grads_params "
        "(Megatron-FSDP)",
    )
    parser.add_argument("--recompute-granularity", choices=("selective", "full"), help="default: none")
    parser.add_argument("--precision", choices=("bf16", "fp8", "fp32"), help="default bf16; fp8: of linear layers")
    parser.add_argument("--basp-group-size", **number, metavar="K", help="ranks for every sequence; default: the best")
    parser.add_argument(
        "--search",
        action="store_true",
        help="with the same global batch, try every micro-batch, K and recompute, and plain flags with every "
        "context parallelism too; B (then optional) and --recompute-granularity do not matter",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw ranks, nodes and groups, wave by wave: .png, .svg or .pdf"
    )
    parser.add_argument(
        "--check",
        type=Path,
        metavar="LEDGER",
        help="hold the model to what a run counted: a file of --basp-ledger, or FILE as it was given, for all ranks",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout and nothing else there")
    parser.add_argument("flags", nargs="*", metavar="Megatron's flags", help="behind --")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.check is not None:
        from megatron_basp.cli.plan_check import run_check

        return run_check(options)
    if options.plot is not None and options.plot.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigurationError(f"--plot {options.plot}: name a file that ends with .png, .svg or .pdf")
    asked = question(options)
    training, found = asked.training, None
    if options.search:
        found = search(training, asked.group_size, _progress)
        training, comparison = found.training, found.comparison
    else:
        comparison = compare_plans(training, asked.group_size)
    result = PlanResult(training, comparison, asked.model, asked.cluster, asked.group_size, found)
    if options.plot is not None:
        from megatron_basp.cli.plan_picture import draw

        draw(result.training, result.comparison.chosen.plan, result.title, options.plot)
    if options.json:
        print(json.dumps(result.as_document()))
    else:
        from megatron_basp.cli.plan_table import print_result

        print_result(result)
    return 0


def _progress(runs: list[Sizes]) -> Iterable[Sizes]:
    """A bar, where it takes longer than a second."""
    from tqdm import tqdm

    return tqdm(runs, desc="plans", unit="run", delay=1, leave=False, disable=None)
