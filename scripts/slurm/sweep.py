"""Submit the rows of the paper's tables to SLURM, a job each, as `megatron-basp reproduce --collect DIR` reads them.

    python scripts/slurm/sweep.py --out runs/sweep --nodes 2 --gpus-per-node 4 [--dry-run]
    megatron-basp reproduce --collect runs/sweep

A job runs `megatron-basp bench train` of a row's model on the whole allocation: Ulysses, BASP and plain flags in one.
Rows whose file is in DIR already are left out, so that the same command again submits what is missing.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from megatron_basp.cli.reproduce_runs import gpu_runs
from megatron_basp.reproduction.cases import load_tables

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="of the results and the jobs' logs")
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="of each job (default 2, the paper's)")
    parser.add_argument("--gpus-per-node", type=int, default=4, metavar="G", help="default 4, the paper's")
    parser.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help="such as --sbatch=--qos=high")
    parser.add_argument("--job", action="append", default=[], metavar="OPTION", help="of pretrain.sbatch, a word each")
    parser.add_argument("--dry-run", action="store_true", help="print the commands; needs no SLURM")
    options = parser.parse_args()
    ranks = options.nodes * options.gpus_per_node
    if ranks < 2 or options.gpus_per_node < 1:
        parser.error(f"--nodes · --gpus-per-node must be 2 or more: an exchange takes two, got {ranks}")
    runs = gpu_runs(load_tables(), ranks)
    if not runs:
        parser.error(f"no row of the tables runs on {ranks} GPUs: the paper's take 2 nodes of 4")
    commands = [_command(name, flags, options) for name, flags in runs.items() if not _file(options, name).exists()]
    if options.dry_run:
        print("\n".join(map(shlex.join, commands)))
        return 0
    if shutil.which("sbatch") is None:
        parser.error("there is no sbatch on this machine: --dry-run shows what it would be given")
    options.out.mkdir(parents=True, exist_ok=True)
    for command in commands:
        if code := subprocess.run(command).returncode:
            return code
    print(f"{len(commands)} of {len(runs)} rows submitted; then: megatron-basp reproduce --collect {options.out}")
    return 0


def _file(options: argparse.Namespace, name: str) -> Path:
    return Path(options.out.resolve(), f"{name}.json")


def _command(name: str, flags: list[str], options: argparse.Namespace) -> list[str]:
    size = ["--nodes", str(options.nodes), "--gpus-per-node", str(options.gpus_per_node)]
    log = str(options.out.resolve() / f"{name}.%j.log")
    bench = "-m megatron_basp.cli.main bench train --warm-up 5 --iterations 30".split()
    return [
        *("sbatch", "--job-name", name, *size, "--output", log, *options.sbatch),
        *(str(ROOT / "scripts" / "slurm" / "pretrain.sbatch"), "--root", str(ROOT), "--python", sys.executable),
        *(*options.job, "--", *bench, "--out", str(_file(options, name)), "--", *flags),
    ]


if __name__ == "__main__":
    sys.exit(main())
