"""`megatron-basp bench attention`: our exchange and its peers in one run."""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron_basp.atomic_files import read_json
from megatron_basp.errors import ConfigurationError, RankFailed

ROOT = Path(__file__).parents[2]
PEERS_PYTHON = ROOT / ".venv-bench" / "bin" / "python"
# The paper's models; rows as well, since some copy only where there are several.
SHAPES = (
    "llama3.2-1b:256x2",
    "llama3.2-3b:256",
    "llama3.1-8b:512",
    "qwen1.5-1.8b:256x2",
    "qwen2.5-3b:256x2",
    "qwen3-8b:256x2",
)
RANKS, REPETITIONS = (2, 4, 8), 11
# glibc's switches. Kept: no memory from the kernel but once, and none goes back. Fresh: buffers of 128 KiB and more
# from the kernel each time; glibc's own rule is between the two, and depends on what a process has done before.
MEMORY = {
    "kept": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)},
    "fresh": {"MALLOC_MMAP_THRESHOLD_": str(1 << 17)},
}

DESCRIPTION = """
Measure one attention layer's exchange of heads for sequence, forward and backward, on this machine's CPU over gloo:
ours, that of Transformer Engine ("a2a"), DeepSpeed's DistributedAttention and yunchang's UlyssesAttention. All run in
turns in the same processes, on the same numbers, each in the layout that it is made for.

Part "exchange" has a cheap stand-in for attention between the two exchanges, q + k + v, so that the exchange is nearly
all there is; "with_attention" has torch's own. Collectives, bytes sent and bytes copied are counted from the
operations that run (forward and backward, of one rank), the attention's own left out. The error is the largest
difference of output and gradients from one process in fp64, relative to the largest entry.

Collectives that start together, with nothing copied between them, count as one, which they are over NCCL; gloo does
not coalesce, and "operations" in the document are what it was given.

"bare wire" is the time of the same collectives alone; "outside" is the rest, and what an implementation can save.
"CPU" is CPU time of the thread that calls, the mean over ranks. Threads of gloo drive the wire, so that this is spent
outside of it; on a machine that does other things as well it is the steadiest of the times.

The others are in an environment of their own, .venv-bench, which `make bench` builds; the processes are started with
its Python. Without it ours runs beside the form of Transformer Engine's exchange: its four collectives and reorderings
a direction, in code of ours. That form stands in as well where Transformer Engine itself is not in .venv-bench, which
takes its wheel from the cache of `make test-te`.
"""
EPILOG = """
examples:
  make bench                                               build .venv-bench, then this; a few minutes
  megatron-basp bench attention --shapes llama3.1-8b:2048 --ranks 4 --repetitions 30
  megatron-basp bench attention --memory fresh             with what page faults cost where memory is not kept
  megatron-basp bench attention --python .venv/bin/python  without the peers

Memory: --memory kept lets glibc keep what is freed, as the allocator of a GPU does: after the warm-up no call gets
pages from the kernel. With fresh every buffer of 128 KiB or more comes from the kernel, and its page faults cost as
much as copies. "page_faults" shows them. Either way it is the same for all.

exit status: 0 measured, 1 a rank failed, 2 bad input (one line on stderr). Ctrl-C keeps what was measured.

Document of --json, and of the file: rows, a list of {implementation, part, K, shape, collectives, operations,
bytes_sent, bytes_copied, milliseconds (the median), milliseconds_low and _high (quartiles), ratio_to_ours (its time
over ours), max_error, wire_milliseconds, outside_wire_milliseconds, outside_wire_ratio_to_ours (null where ours is
lost in the wire's), cpu_milliseconds, page_faults}; unsupported, shapes that an implementation refused, and what it
said; implementations, the version of each or what stood in for it; missing, those not installed; shapes; settings.
"""


def add_parser(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "attention",
        help="our exchange beside Transformer Engine's, DeepSpeed's and yunchang's",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=SHAPES,
        metavar="MODEL:SxB",
        help=f"a model of configs/models or a file of one, for its heads; tokens; rows (default {' '.join(SHAPES)})",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=RANKS,
        metavar="K",
        help=f"processes that share a sequence (default {' '.join(map(str, RANKS))})",
    )
    parser.add_argument(
        "--repetitions",
        type=int,
        default=REPETITIONS,
        metavar="N",
        help=f"of each measurement; the median counts (default {REPETITIONS})",
    )
    parser.add_argument(
        "--memory", choices=MEMORY, default="kept", help="whether freed memory is kept (the default), see below"
    )
    parser.add_argument(
        "--python",
        type=Path,
        metavar="FILE",
        help="the Python that the processes are started with (default: that of .venv-bench, or this one without it)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/bench/attention.json"),
        metavar="FILE",
        help="the document; a table and a plot go beside it, .csv and .svg (default runs/bench/attention.json)",
    )
    parser.add_argument("--json", action="store_true", help="print the document on stdout and nothing else there")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    _check(options)
    python = options.python or PEERS_PYTHON
    if not python.exists():
        print(f"there is no {python}, where the peers are: `make bench` builds it; going on without", file=sys.stderr)
        python = Path(sys.executable)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.unlink(missing_ok=True)  # an interrupted run must not show an earlier one's
    try:
        _run_ranks(options, python)
    except KeyboardInterrupt:
        kept = f"what was measured until now: {options.out}" if options.out.exists() else "nothing was written"
        print(kept, file=sys.stderr)
        raise
    document = read_json(options.out)
    _write_table(document["rows"], options.out.with_suffix(".csv"))

    from megatron_basp.cli import bench_attention_report as report

    report.draw(document, options.out.with_suffix(".svg"))
    if options.json:
        print(json.dumps(document))
    else:
        report.show(document, options.out)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Each shape on each K, by the rules of the plan and of zig-zag chunks."""
    if options.repetitions < 2:
        raise ConfigurationError(f"--repetitions must be 2 or more, got {options.repetitions}: one has no spread")
    if min(options.ranks) < 2:
        raise ConfigurationError(f"--ranks must be 2 or more, got {min(options.ranks)}: an exchange takes two")
    if options.out.suffix != ".json":
        raise ConfigurationError(f"--out must end in .json, got {options.out}")
    if options.python is not None and not os.access(options.python, os.X_OK):
        raise ConfigurationError(f"--python must name a Python, and {options.python} cannot be run")

    from megatron_basp.peers.shapes import shape_of
    from megatron_basp.plan import Limits, plan_batch

    for text in options.shapes:
        shape = shape_of(text)
        for group_size in options.ranks:
            plan_batch((shape.length,) * shape.rows, group_size, Limits(shape.heads, shape.kv_heads, group_size))
            if shape.length % (2 * group_size):
                raise ConfigurationError(
                    f"S % 2K must be 0, got S={shape.length} of {text} and K={group_size}: Transformer Engine divides "
                    f"a sequence into 2K chunks; use a length that is a multiple of {2 * group_size}"
                )


def _run_ranks(options: argparse.Namespace, python: Path) -> None:
    settings = {
        "shapes": options.shapes,
        "group_sizes": options.ranks,
        "repetitions": options.repetitions,
        "memory": options.memory,
        "file": str(options.out),
    }
    # NVTE_TORCH_COMPILE: Transformer Engine would have the compiler at its reorderings; a CPU gains nothing by it.
    environment = os.environ | MEMORY[options.memory] | {"PYTHONPATH": str(ROOT), "NVTE_TORCH_COMPILE": "0"}
    command = [str(python), "-m", "megatron_basp.peers.ranks", json.dumps(settings)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        # Of the terminal they have it too; of `kill` only this process has.
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    if code:
        raise RankFailed(f"a process of the benchmark ended with exit code {code} (logs: {_logs(options.out)})")


def _logs(out: Path) -> Path:
    return out.with_suffix(".logs")


def _write_table(rows: list[dict[str, Any]], file: Path) -> None:
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)
