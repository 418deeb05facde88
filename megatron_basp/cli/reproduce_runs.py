"""The runs behind `megatron-basp reproduce --measure`: `bench train` in processes of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_basp.atomic_files import read_json, write_json
from megatron_basp.errors import ConfigurationError, RankFailed
from megatron_basp.library import MODELS
from megatron_basp.reproduction.cases import Case, Table
from megatron_basp.reproduction.measure import measure, wanted_runs
from megatron_basp.reproduction.measured import PAPER_RANKS
from megatron_basp.reproduction.modelled import model_cases

BENCH = ["-m", "megatron_basp.cli.main", "bench", "train"]
ON_GPUS = """
    --bf16 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --grad-reduce-in-bf16
    --use-distributed-optimizer --ckpt-format fsdp_dtensor --no-gradient-accumulation-fusion --attention-dropout 0
    --hidden-dropout 0 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer
"""


def measure_on_namespaces(tables: Sequence[Table], file: Path, compute: str) -> None:
    """All that the emulated cluster can stand for, into `file`.

    Raises:
        ConfigurationError: namespaces are not allowed here.
        RankFailed: a run failed; what was measured before is kept.
    """
    scratch = file.with_suffix(".runs")

    def bench(micro_batch_size: int, with_few_kv_heads: bool, rates: Sequence[int]) -> dict[str, Any]:
        out = scratch / "train.json"
        flags = ["--micro-batch-size", str(micro_batch_size)]
        if with_few_kv_heads:
            flags += ["--num-query-groups", "2"]
        cluster = ["--cluster", "2x4", "--link", "measured", "--link-mbit", ",".join(map(str, rates))]
        run_python([*BENCH, *cluster, "--compute", compute, "--out", str(out), "--", *flags])
        return read_json(out)

    measure(wanted_runs(model_cases(tables)), file, {"cluster": "2x4", "compute": compute}, bench, _say)


def measure_on_gpus(tables: Sequence[Table], folder: Path) -> bool:
    """The rows' own models on this machine's GPUs, a file a run; whether there are two or more of them.

    A row that fails, for want of memory, is said and left out.
    """
    import torch

    gpus = min(torch.cuda.device_count(), PAPER_RANKS)
    if gpus < 2:
        _say(f"GPUs here: {gpus}, and an exchange takes two: their column is not measured")
        return False
    runs = gpu_runs(tables, gpus)
    folder.mkdir(parents=True, exist_ok=True)
    if all((folder / f"{name}.json").exists() for name in runs):
        shutil.rmtree(folder)  # a finished measurement is not gone on with
        folder.mkdir()
    for number, (name, flags) in enumerate(runs.items(), start=1):
        file = folder / f"{name}.json"
        if file.exists():
            continue
        _say(f"[{number}/{len(runs)}] {name} on {gpus} GPUs")
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
        out = folder / "unfinished" / "train.json"
        try:
            # Megatron-FSDP refuses the 1 that Megatron asks for otherwise.
            run_python(
                [*torchrun, *BENCH, "--warm-up", "5", "--iterations", "30", "--out", str(out), "--", *flags],
                CUDA_DEVICE_MAX_CONNECTIONS="8",
            )
        except RankFailed as error:
            _say(f"{name} is left out: {error}")
            write_json(file, {"failed": str(error)})
        else:
            write_json(file, read_json(out))
    return True


def gpu_runs(tables: Sequence[Table], gpus: int) -> dict[str, list[str]]:
    """Megatron's flags by name, of each row of the paper's size, once; those whose heads so many ranks can share."""
    found = {}
    for case, modelled in model_cases(tables).items():
        if case.ranks == PAPER_RANKS and modelled.model.heads % gpus == 0 and case.micro_batches == 1:
            name = f"{case.model}-s{case.seq_length}-b{case.micro_batch_size}"
            found[name] = [*_model_flags(case), *ON_GPUS.split()]
    return found


def _model_flags(case: Case) -> list[str]:
    content = yaml.safe_load((MODELS / f"{case.model}.yaml").read_text())
    content["max-position-embeddings"] = max(content["max-position-embeddings"], case.seq_length)
    content["vocab-size"] -= 1  # the tokenizer adds one for the end of documents
    flags = {**content, "seq-length": case.seq_length, "micro-batch-size": case.micro_batch_size}
    words = []
    for name, value in flags.items():
        if value is not False:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    # What recomputes all would repeat the exchange, which the benchmark refuses.
    return [*words, "--recompute-activations"] if case.recompute == "full" else words


def run_python(words: Sequence[str], **environment: str) -> None:
    """This Python with these words; what it says goes to the terminal, and nothing to stdout.

    Raises:
        ConfigurationError, RankFailed: by its exit code.
    """
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, env=os.environ | environment)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        # Of the terminal it has it too; of `kill` only this process has.
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    if code == 2:
        raise ConfigurationError("bench train refused to run, for the reason above")
    if code:
        raise RankFailed(f"bench train ended with exit code {code}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
