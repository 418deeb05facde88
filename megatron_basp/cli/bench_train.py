"""`megatron-basp bench train`: what batch-aware groups save of a training step, measured."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_basp.cli.loading import load_megatron
from megatron_basp.emulated.network import MOST_NODES, Network, refusal
from megatron_basp.errors import ConfigurationError

if TYPE_CHECKING:
    from megatron_basp.emulated.document import Document
    from megatron_basp.emulated.runs import Conditions, Runs

PAUSE_MILLISECONDS = 2000.0

DESCRIPTION = """
Train a small Llama by Megatron's pretrain() on a cluster in a box, and measure a step of each mode: Ulysses, BASP, the
plain flags that are equal to BASP, and the bound, in which nothing is exchanged at all. Nodes are network namespaces
on this machine, joined by links of the given rate; inside of a node ranks talk over loopback. All modes are alive at
once and take their steps in turn, on the same data. Namespaces have no name, and are gone with the command however it
ends; nothing outside of them is touched. It takes Linux with `ip` and `tc` (iproute2), as root or where user
namespaces are allowed.

Where they are not, the link is modelled: the exchange runs in this machine's memory, and a rank then sleeps for as
long as the link would have taken. Each row says which it was.
"""
EXAMPLES = """
examples:
  megatron-basp bench train --cluster 2x4 --link-mbit 500
  megatron-basp bench train --cluster 2x4 --link-mbit 30,50,100 --compute sleep    few cores: attention is a pause
  megatron-basp bench train --cluster 2x2 --link-mbit 200 -- --seq-length 2048 --micro-batch-size 4
  torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m megatron_basp.cli.main \\
      bench train --warm-up 5 --iterations 30 -- [Megatron's flags of your model]

With few cores, ranks wait for each other's arithmetic, and what is saved of the exchange is lost in that. --compute
sleep replaces attention, which is nearly all of the arithmetic here, by a pause of the same length in every mode; the
exchange stays real. Each row says so.

Flags after -- are Megatron's. On a CPU they change those of the small Llama (few parameters, long rows, so that
gradients are little beside the exchange); on GPUs they are the whole model. Under torchrun, which then says how many
ranks there are, each process is a rank, over NCCL on GPUs. Modes then run one after the other.

exit status: 0 measured, 1 a rank failed, 2 bad input (one line on stderr). Ctrl-C keeps what was measured.

Document of --json, and of the file: see megatron_basp/emulated/results.py. Beside it are the rows as .csv and a plot,
.png: speed-up over the share that the exchange has of Ulysses' step, with the paper's points.
"""


def add_parser(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "train",
        help="a training step of Ulysses, BASP and plain flags, on a cluster in a box or by torchrun on a real one",
        usage="megatron-basp bench train --cluster NxR --link-mbit M[,M…] [options] [-- Megatron's flags]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--cluster", metavar="NxR", help="N nodes of R ranks each; not under torchrun")
    parser.add_argument(
        "--link-mbit", metavar="M[,M…]", help="of each node's link, each way, in Mbit/s; several are a sweep"
    )
    parser.add_argument(
        "--link",
        choices=("auto", "measured", "modelled"),
        default="auto",
        help="auto (the default): measured where namespaces are allowed, else modelled",
    )
    parser.add_argument(
        "--compute", choices=("real", "sleep"), default="real", help="sleep: attention is a pause (default real)"
    )
    parser.add_argument(
        "--pause-ms",
        type=float,
        metavar="X",
        help=f"of --compute sleep, in a step, forward and backward (default {PAUSE_MILLISECONDS:g})",
    )
    parser.add_argument(
        "--iterations", type=int, default=5, metavar="N", help="measured steps of each mode at each rate (default 5)"
    )
    parser.add_argument(
        "--warm-up", type=int, default=1, metavar="N", help="steps before these, of each mode at each rate (default 1)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/bench/train.json"),
        metavar="FILE",
        help="the document; a table and a plot go beside it, .csv and .png (default runs/bench/train.json)",
    )
    parser.add_argument("--json", action="store_true", help="print the document on stdout and nothing else there")
    parser.add_argument("flags", nargs="*", metavar="Megatron's flags", help="after --")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    _check(options, by_torchrun)
    # Libraries print what they like; this command's own stdout is for its result.
    with contextlib.redirect_stdout(sys.stderr):
        document = _on_hardware(options) if by_torchrun else _in_a_box(options)
    if document is None:
        return 0

    from megatron_basp.cli import bench_train_report as report

    report.draw(document.content, options.out.with_suffix(".png"))
    if options.json:
        print(json.dumps(document.content))
    else:
        report.show(document.content, options.out)
    return 0


def _in_a_box(options: argparse.Namespace) -> Document:
    nodes, ranks_per_node = cluster_of(options.cluster)
    rates = rates_of(options.link_mbit)
    # Before anything starts a thread: only a process of one may have users of its own.
    network = _network(options.link, nodes)
    load_megatron()
    from megatron_basp.emulated.box import Box
    from megatron_basp.emulated.document import Document
    from megatron_basp.emulated.runs import plan_runs
    from megatron_basp.megatron import pretrain_gpt  # noqa: F401  (once, before the ranks are forked)
    from megatron_basp.megatron.text_dataset import prepare_sample_dataset

    conditions = _conditions(options, nodes * ranks_per_node, ranks_per_node, len(rates), on_gpu=False)
    data = options.out.with_suffix(".data")
    runs = plan_runs(options.flags, conditions, lambda: prepare_sample_dataset(data).megatron_flags())
    _prepare(options.out, runs)
    link = "modelled" if network is None else "measured"
    document = Document(options.out, runs, conditions, link, platform.processor() or platform.machine())
    logs = options.out.with_suffix(".logs")
    with document.keeping_what_was_measured(), Box(conditions, network, runs.runs, logs) as box:
        for mode in box.start():
            _say(f"starting {conditions.ranks} ranks of {mode} …")
        with _progress(conditions.steps * document.modes) as advance:
            for mode, mbit, turn in box.steps(rates):
                document.add([turn] if turn else [])
                advance(f"{mode} at {mbit} Mbit/s")
    document.finish()
    return document


def _on_hardware(options: argparse.Namespace) -> Document | None:
    """As one of torchrun's processes; None but on the first."""
    import torch

    from megatron_basp.emulated.document import Document
    from megatron_basp.emulated.hardware import Hardware
    from megatron_basp.emulated.runs import MOCK_DATA, plan_runs
    from megatron_basp.local_ranks import in_one_rank

    gpus = torch.cuda.device_count()  # asks the driver without starting CUDA, as is_available() would
    hardware = Hardware()
    conditions = _conditions(options, hardware.ranks, hardware.ranks_per_node, 1, on_gpu=gpus > 0)
    if gpus:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron asks for it
    else:
        load_megatron()
    logs = options.out.with_suffix(".logs")
    # Where there are GPUs this process must not touch CUDA, which does not survive the forks to come.
    runs = in_one_rank(lambda: plan_runs(options.flags, conditions, lambda: MOCK_DATA), logs / f"flags{hardware.rank}")
    device = torch.cuda.get_device_name if gpus else lambda: platform.processor() or platform.machine()
    name = in_one_rank(device, logs / f"device{hardware.rank}")
    is_first = hardware.rank == 0
    if is_first:
        _prepare(options.out, runs)
    document = Document(options.out, runs, conditions, "measured", name)
    with document.keeping_what_was_measured(), _progress(conditions.steps * document.modes, is_first) as advance:
        for mode, turns in hardware.steps(runs.runs, conditions, logs):
            document.add(turns)
            advance(mode)
    if not is_first:
        return None
    document.finish()
    return document


def _check(options: argparse.Namespace, by_torchrun: bool) -> None:
    for flag in ("cluster", "link_mbit"):
        name = f"--{flag.replace('_', '-')}"
        if by_torchrun and getattr(options, flag) is not None:
            raise ConfigurationError(f"{name} is of a cluster in a box, and torchrun is on a real one: leave it out")
        if not by_torchrun and getattr(options, flag) is None:
            raise ConfigurationError(f"{name} is missing: for example --cluster 2x4 --link-mbit 500")
    if by_torchrun and options.compute == "sleep":
        raise ConfigurationError("--compute sleep is for a cluster in a box: leave it out under torchrun")
    if options.iterations < 1:
        raise ConfigurationError(f"--iterations must be 1 or more, got {options.iterations}")
    if options.warm_up < 0:
        raise ConfigurationError(f"--warm-up must be 0 or more, got {options.warm_up}")
    if options.out.suffix != ".json":
        raise ConfigurationError(f"--out must end in .json, got {options.out}")
    if options.pause_ms is not None and options.compute != "sleep":
        raise ConfigurationError("--pause-ms is the pause of --compute sleep: add it, or drop --pause-ms")
    if options.pause_ms is not None and not 0 < options.pause_ms < math.inf:
        raise ConfigurationError(f"--pause-ms must be a positive number, got {options.pause_ms:g}")
    if not by_torchrun:
        cluster_of(options.cluster)
        rates_of(options.link_mbit)


def cluster_of(text: str) -> tuple[int, int]:
    """Nodes, and ranks of each."""
    found = re.fullmatch(r"([0-9]+)x([0-9]+)", text)
    nodes, ranks_per_node = map(int, found.groups()) if found else (0, 0)
    if not 2 <= nodes <= MOST_NODES or ranks_per_node < 1:
        raise ConfigurationError(
            f"--cluster must be NxR, N nodes from 2 to {MOST_NODES} of R ranks each, such as 2x4, got {text}"
        )
    return nodes, ranks_per_node


def rates_of(text: str) -> list[int]:
    """In Mbit/s, each once."""
    words = text.split(",")
    if not all(re.fullmatch(r"[0-9]{1,6}", word) and int(word) > 0 for word in words):
        raise ConfigurationError(f"--link-mbit must be whole numbers from 1 to 999999, with commas, got {text}")
    return list(dict.fromkeys(map(int, words)))


def _conditions(options: argparse.Namespace, ranks: int, ranks_per_node: int, rates: int, on_gpu: bool) -> Conditions:
    from megatron_basp.emulated.runs import Conditions

    pause = (options.pause_ms or PAUSE_MILLISECONDS) / 1e3 if options.compute == "sleep" else None
    return Conditions(ranks, ranks_per_node, rates, options.warm_up, options.iterations, on_gpu, pause)


def _network(link: str, nodes: int) -> Network | None:
    """None for a modelled link."""
    if link == "modelled":
        return None
    why = refusal(nodes)
    if why is None:
        return Network(nodes)
    if link == "measured":
        raise ConfigurationError(f"{why}; or use --link modelled")
    _say(f"{why}\nThe link is modelled instead (--link modelled), and each row says so.")
    return None


def _prepare(out: Path, runs: Runs) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)  # an interrupted run must not show an earlier one's
    for mode, why in runs.left_out.items():
        _say(f"{mode} is left out: {why}")


@contextlib.contextmanager
def _progress(steps: int, is_shown: bool = True) -> Iterator[Callable[[str], None]]:
    """A bar with the time that is left; yields what is called after each step with what it was."""
    from tqdm import tqdm

    with tqdm(total=steps, unit="step", file=sys.stderr, disable=not is_shown) as bar:

        def advance(what: str) -> None:
            bar.set_postfix_str(what, refresh=False)
            bar.update()

        yield advance


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
