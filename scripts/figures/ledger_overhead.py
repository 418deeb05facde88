"""What `--basp-ledger` costs: real training on CPU ranks, half of its steps with the ledger.

Steps with and without it alternate inside one run (on, off, off, on, …), so that what else the machine does hits both.
Their times are compared by the clock, and by the rank's own use of a processor, which waits leave out. Beside the
ratios stands an estimate that noise reaches less: what the ledger adds to one collective, and what writing one line
takes, measured in loops, times their number in a step, over the step.

    python scripts/figures/ledger_overhead.py --ranks 2 --pairs 100
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_basp import cpu
from megatron_basp.clock import HostSpan
from megatron_basp.ledger import Amount, Collective, Ledger
from megatron_basp.ledger_file import Header, LedgerWriter, Step, file_of_rank, read_ledger
from megatron_basp.local_ranks import run_ranks
from megatron_basp.megatron.own_collectives import OwnCollectives

REPETITIONS = 2000


class Measured(NamedTuple):
    """Of rank 0: seconds of each step with the ledger and without, by the clock and of a processor; collectives of one
    step and what the ledger adds to one, lines of one step."""

    with_ledger: list[tuple[float, float]]
    without: list[tuple[float, float]]
    collectives: int
    collective_seconds: float
    lines: int
    header: Header


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="context-parallel ranks, processes on this machine")
    parser.add_argument("--pairs", type=int, default=100, help="pairs of steps, one of them with the ledger")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--seq-length", type=int, default=512)
    options = parser.parse_args()
    cpu.install()
    from megatron_basp.megatron import pretrain_gpt  # noqa: F401  (once, for all ranks)

    with tempfile.TemporaryDirectory() as scratch:
        measured = run_ranks(lambda rank: train(options, Path(scratch)), options.ranks, Path(scratch) / "logs")[0]
        line_seconds = seconds_to_write(measured.header, measured.lines, Path(scratch) / "lines.jsonl")
    step = statistics.median(seconds for seconds, _ in measured.without)
    estimated = measured.collectives * measured.collective_seconds + measured.lines * line_seconds
    print(f"step without the ledger: {step * 1e3:.1f} ms (median of {len(measured.without)}, {options.ranks} ranks)")
    for index, name in enumerate(("by the clock", "of a processor")):
        pairs = zip(measured.with_ledger, measured.without, strict=True)
        low, middle, high = statistics.quantiles((on[index] / off[index] for on, off in pairs), n=4)
        print(f"with / without, {name}, pair by pair: median {middle:.4f}, quartiles {low:.4f} to {high:.4f}")
    print(
        f"estimate: {measured.collectives} collectives · {measured.collective_seconds * 1e6:.1f} µs + "
        f"{measured.lines} lines · {line_seconds * 1e6:.1f} µs = {estimated * 1e3:.3f} ms, {estimated / step:.2%} of "
        f"the step"
    )


def train(options: argparse.Namespace, scratch: Path) -> Measured:
    """One rank's part of the run."""
    from megatron.core import parallel_state
    from megatron.training import training

    from megatron_basp.megatron import hooks, pretrain_gpt
    from megatron_basp.megatron.bookkeeping import Bookkeeper

    runtime = hooks.install()
    headers: list[Header] = []
    seconds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    train_step = training.train_step

    @functools.wraps(train_step)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if not headers and runtime.bookkeeper is not None:
            headers.append(runtime.bookkeeper.header)
        runtime.close_books()
        taken = sum(map(len, seconds.values()))
        with_ledger = taken % 4 in (0, 3)
        if with_ledger:
            runtime.bookkeeper = Bookkeeper(runtime, headers[0])
        start, processor_start = time.perf_counter(), time.process_time()
        result = train_step(*args, **kwargs)
        seconds[with_ledger].append((time.perf_counter() - start, time.process_time() - processor_start))
        return result

    training.train_step = timed
    ledger, steps = scratch / "ledger.jsonl", 2 * options.pairs
    sys.argv = ["pretrain_gpt", *flags(options, steps), "--basp-ledger", str(ledger)]
    pretrain_gpt.main()
    runtime.close_books()
    last = read_ledger(file_of_rank(ledger, headers[0].rank)).of("training")[-1]
    skipped = 4  # the first steps allocate
    collective_seconds = seconds_to_count(parallel_state.get_tensor_model_parallel_group())
    return Measured(
        seconds[True][skipped:],
        seconds[False][skipped:],
        sum(amount.count for amount in last.sent.values()),
        collective_seconds,
        len(last.sent),
        headers[0],
    )


def flags(options: argparse.Namespace, steps: int) -> list[str]:
    return f"""
        --num-layers {options.layers} --hidden-size {options.hidden_size} --ffn-hidden-size {3 * options.hidden_size}
        --num-attention-heads 8 --group-query-attention --num-query-groups 4 --swiglu --normalization RMSNorm
        --seq-length {options.seq_length} --max-position-embeddings {options.seq_length} --position-embedding-type rope
        --disable-bias-linear --transformer-impl local --attention-dropout 0 --hidden-dropout 0
        --no-gradient-accumulation-fusion --no-rope-fusion --no-persist-layer-norm --no-masked-softmax-fusion
        --mock-data --tokenizer-type NullTokenizer --vocab-size 1023 --split 90,10,0 --num-workers 0
        --train-iters {steps} --eval-iters 0 --eval-interval {steps} --lr 1e-3 --log-interval {steps}
        --context-parallel-size {options.ranks} --micro-batch-size {options.ranks + 1}
        --global-batch-size {options.ranks + 1} --sequence-parallel-mode basp
    """.split()


def seconds_to_count(group: dist.ProcessGroup) -> float:
    """What the ledger adds to one collective: of a group of one rank, which waits for nobody, with it and without."""
    ledger, number = Ledger(clock=HostSpan), torch.zeros(1)
    own = OwnCollectives(ledger)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for block in range(40):
        with_ledger = block % 4 in (0, 3)
        if with_ledger:
            own.install()
        start = time.perf_counter()
        for _ in range(REPETITIONS // 20):
            dist.all_reduce(number, group=group)
        seconds[with_ledger].append((time.perf_counter() - start) / (REPETITIONS // 20))
        if with_ledger:
            own.uninstall()
        ledger.turn()
    return statistics.median(seconds[True]) - statistics.median(seconds[False])


def seconds_to_write(header: Header, lines: int, path: Path) -> float:
    """Of one line of a step that has so many."""
    writer = LedgerWriter(path.open("w"), header)
    kinds = [Collective("exchange", "qkv", "GROUP", 4, layer, 0, "forward") for layer in range(lines)]
    step = Step("training", 1, 1.0, dict.fromkeys(kinds, Amount(4, 10**6, 10**6, 10**6, 0.123456789)))
    steps = max(1, REPETITIONS // lines)
    start = time.perf_counter()
    for _ in range(steps):
        writer.write_step(step)
    return (time.perf_counter() - start) / (steps * lines)


if __name__ == "__main__":
    main()
