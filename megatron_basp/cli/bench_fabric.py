"""`megatron-basp bench fabric`: a hardware file for the machine that it runs on."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_basp import __version__
from megatron_basp.atomic_files import write_json
from megatron_basp.cli.progress import named_steps, terminal
from megatron_basp.errors import ConfigurationError
from megatron_basp.hardware_file import Fits, Known, Measured, fit_exchanges, hardware_file
from megatron_basp.library import named_cluster

if TYPE_CHECKING:
    from megatron_basp.fabric import Settings

CPU_RANKS = 4
GPU_SIZES_MB, CPU_SIZES_MB = (1, 4, 16, 64, 256), (1, 2, 4, 8, 16)
GPU_REPETITIONS, CPU_REPETITIONS = 20, 5

DESCRIPTION = """
Measure latency and rate of all-to-alls on this machine, by the number of ranks that take part, and write a hardware
file that `megatron-basp plan --cluster FILE` and --basp-cluster FILE take. Also measured: rings, memory, a large
matrix product, attention. Nothing else should run on the machine meanwhile.

Alone it measures this host: a process for each GPU over NCCL, or, with fewer than two GPUs, processes on the CPU over
gloo, in half a minute. Started with torchrun on several hosts, each of its processes is a rank; host names tell nodes
apart, and the links between them are measured with groups over 2, 4, … nodes side by side, as training has them.

What cannot be measured, peaks by the data sheet and network cards, comes from the flags below or from a file of the
library (--like). Each line of the file says which it was. Without either, the peak is what a product reaches, and a
single host makes a cluster of one node, which no plan can leave.
"""
EXAMPLES = """
examples:
  megatron-basp bench fabric                               this host; runs/bench/fabric.yaml
  megatron-basp bench fabric --like h100-8                 peaks and network as in configs/hardware/h100-8.yaml
  megatron-basp bench fabric --peak-teraflops 989 --sizes-mb 1 8 64 512 --out h100.yaml
  torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m megatron_basp.cli.main \\
      bench fabric --nics-per-node 8 --nic-gigabytes-per-second 50 --peak-teraflops 989 --out ours.yaml

exit status: 0 written, 1 a rank failed, 2 bad input (one line on stderr). Ctrl-C keeps the times that were measured.

Beside the file (fabric.json) are the times that it was made of. Document of --json: file; cluster, the file's content;
fits, {within, across}: {ranks or hosts: {latency_seconds, bytes_per_second, largest_error}}; measured, those times.
"""


def add_parser(benchmarks: Any) -> None:
    parser = benchmarks.add_parser(
        "fabric",
        help="measure links and devices, and write a hardware file",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="R",
        help=f"processes to start on this host (default: its GPUs, or {CPU_RANKS}); not under torchrun",
    )
    parser.add_argument("--like", metavar="NAME|FILE", help="take what is not measured from this hardware file")
    parser.add_argument(
        "--sizes-mb",
        type=float,
        nargs="+",
        metavar="MB",
        help=f"tensors that a rank exchanges, in 1e6 bytes (default {' '.join(map(str, GPU_SIZES_MB))}; on the CPU "
        f"{' '.join(map(str, CPU_SIZES_MB))})",
    )
    parser.add_argument(
        "--repetitions",
        type=int,
        metavar="N",
        help=f"of each measurement; the median counts (default {GPU_REPETITIONS}; on the CPU {CPU_REPETITIONS})",
    )
    parser.add_argument(
        "--peak-teraflops", type=float, metavar="X", help="dense peak of a GPU in bf16 (of a CPU rank in fp32)"
    )
    parser.add_argument("--nics-per-node", type=int, metavar="N", help="network cards of a node for this traffic")
    parser.add_argument(
        "--nic-gigabytes-per-second", type=float, metavar="X", help="of one card, one way: 50 for 400 Gb/s"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/bench/fabric.yaml"),
        metavar="FILE",
        help="the hardware file (default runs/bench/fabric.yaml)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout and nothing else there")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    known = _check(options)
    times_file = options.out.with_suffix(".json")
    try:
        # Libraries print what they like; this command's own stdout is for its result.
        with contextlib.redirect_stdout(sys.stderr):
            measured = (_measure_as_rank if _by_torchrun() else _measure_here)(options, known, times_file)
    except KeyboardInterrupt:
        kept = f"what was measured until now: {times_file}" if times_file.exists() else "nothing was written"
        print(kept, file=sys.stderr)
        raise
    if measured is None:
        return 0
    fits = fit_exchanges(measured)
    text = hardware_file(options.out.stem, _title(measured, times_file), measured, fits, known)
    options.out.write_text(text)
    _show(options, measured, fits, text)
    return 0


def _by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _check(options: argparse.Namespace) -> Known:
    if _by_torchrun() and options.ranks is not None:
        raise ConfigurationError("--ranks is for one host; under torchrun its --nproc-per-node says how many")
    if options.out.suffix not in (".yaml", ".yml"):
        raise ConfigurationError(f"--out must end in .yaml, got {options.out}")
    if options.ranks is not None and options.ranks < 2:
        raise ConfigurationError(f"--ranks must be 2 or more, got {options.ranks}: an exchange takes two")
    if options.repetitions is not None and options.repetitions < 1:
        raise ConfigurationError(f"--repetitions must be 1 or more, got {options.repetitions}")
    sizes = options.sizes_mb
    if sizes is not None and (len(set(sizes)) < 2 or not all(0.001 <= size <= 65536 for size in sizes)):
        raise ConfigurationError(
            f"--sizes-mb must be two different sizes or more, from 0.001 to 65536, got {' '.join(map(str, sizes))}: "
            f"latency and rate cannot be told apart with fewer"
        )
    for flag in ("peak_teraflops", "nics_per_node", "nic_gigabytes_per_second"):
        value = getattr(options, flag)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigurationError(f"--{flag.replace('_', '-')} must be a positive number, got {value}")
    return Known(
        like=named_cluster(options.like) if options.like else None,
        peak_flops_per_second=options.peak_teraflops and options.peak_teraflops * 1e12,
        nics_per_node=options.nics_per_node,
        bytes_per_second_per_nic=options.nic_gigabytes_per_second and options.nic_gigabytes_per_second * 1e9,
    )


def _measure_here(options: argparse.Namespace, known: Known, times_file: Path) -> Measured:
    """In forked ranks of this host."""
    known.check(hosts=1)
    import torch

    from megatron_basp.local_ranks import run_ranks

    gpus = torch.cuda.device_count()  # asks the driver without starting CUDA, which does not survive forks
    ranks = options.ranks or (gpus if gpus >= 2 else CPU_RANKS)
    if 2 <= gpus < ranks:
        raise ConfigurationError(f"this host has {gpus} GPUs, got --ranks {ranks}: one rank a GPU")
    settings = _settings(options, on_gpu=gpus >= 2)
    _prepare(times_file)
    with terminal() as stderr:
        return run_ranks(
            lambda rank: _measure(settings, known, times_file, stderr), ranks, options.out.with_suffix(".logs")
        )[0]


def _measure_as_rank(options: argparse.Namespace, known: Known, times_file: Path) -> Measured | None:
    """As one of torchrun's processes; None but on the first."""
    import torch

    settings = _settings(options, on_gpu=torch.cuda.is_available())
    rank = int(os.environ["RANK"])
    if rank == 0:
        _prepare(times_file)
    try:
        measured = _measure(settings, known, times_file, 2)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return measured if rank == 0 else None


def _settings(options: argparse.Namespace, on_gpu: bool) -> Settings:
    from megatron_basp.fabric import Settings

    sizes = options.sizes_mb or (GPU_SIZES_MB if on_gpu else CPU_SIZES_MB)
    return Settings(
        sizes=tuple(sorted({round(size * 1e6) for size in sizes})),
        repetitions=options.repetitions or (GPU_REPETITIONS if on_gpu else CPU_REPETITIONS),
        on_gpu=on_gpu,
    )


def _prepare(times_file: Path) -> None:
    times_file.parent.mkdir(parents=True, exist_ok=True)
    times_file.unlink(missing_ok=True)  # an interrupted run must not show an earlier one's


def _measure(settings: Settings, known: Known, times_file: Path, stderr: int) -> Measured:
    """On one rank; the first shows progress on that descriptor and keeps what was measured."""
    import torch
    import torch.distributed as dist

    from megatron_basp.fabric import Measurement

    if settings.on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if settings.on_gpu else "gloo")
    measurement = Measurement(settings)
    measured = measurement.result
    known.check(measured.hosts)
    steps = measurement.steps()
    with named_steps(stderr, dist.get_rank(), len(steps)) as advance:
        for name, step in steps:
            advance(name)
            step()
            if dist.get_rank() == 0:
                write_json(times_file, asdict(measured))
    return measured


def _title(measured: Measured, times_file: Path) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in measured.versions.items())
    return (
        f"Measured by `megatron-basp bench fabric` {__version__} on {date.today()}: {measured.device}, "
        f"{measured.hosts} × {measured.ranks_per_host} ranks,\n"
        f'{measured.backend}, {versions}. "Measured" below is that run; its times are in {times_file.name}.'
    )


def _show(options: argparse.Namespace, measured: Measured, fits: Fits, text: str) -> None:
    if options.json:
        import yaml

        document = {
            "file": str(options.out),
            "cluster": yaml.safe_load(text),
            "fits": asdict(fits),
            "measured": asdict(measured),
        }
        print(json.dumps(document))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title="all-to-all", title_justify="left", box=box.SIMPLE, pad_edge=False)
    for name in ("group", "latency", "rate", "largest error of the fit"):
        table.add_column(name, justify="left" if name == "group" else "right")
    rows = [(f"{ranks} ranks of a host", found) for ranks, found in fits.within.items()]
    rows += [(f"{hosts} hosts", found) for hosts, found in fits.across.items()]
    for group, found in rows:
        latency, rate = f"{found.latency_seconds * 1e6:.1f} µs", f"{found.bytes_per_second / 1e9:.4g} GB/s"
        table.add_row(group, latency, rate, f"{found.largest_error:.0%}")
    console = Console()
    console.print(table)
    console.print(
        "rate: what a rank sends to its peers; of hosts, what leaves one of them. Time = latency + bytes / rate. "
        f"Written: {options.out}, for --cluster {options.out}; its times: {options.out.with_suffix('.json')}",
        highlight=False,
        soft_wrap=True,
    )
