"""`megatron-basp demo`: the same small Llama, trained on real text three ways on this machine's CPU.

One rank without parallelism is the reference; Ulysses and BASP must give its losses. What differs is what they send.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_basp.cli.demo_kept import Kept, Step, StepLog
from megatron_basp.cli.demo_result import DemoResult, ModeResult
from megatron_basp.cli.loading import load_megatron
from megatron_basp.cli.progress import step_progress, terminal
from megatron_basp.errors import ConfigurationError
from megatron_basp.ledger import Page, Phase
from megatron_basp.plan import BatchPlan, Limits, plan_batch

if TYPE_CHECKING:
    from megatron_basp.megatron.recorder import Record
    from megatron_basp.megatron.text_dataset import TextDataset

MODES = ("reference", "ulysses", "basp")
HEADS, KV_HEADS, SEQ_LENGTH = 8, 4, 256
LEARNING_RATE, MICRO_BATCHES, HELD_OUT_BATCHES = 3e-3, 2, 8

DESCRIPTION = """
Train a small Llama-style GPT on real text through Megatron's pretrain(), three ways: on 1 rank without parallelism,
with Ulysses and with BASP on N ranks. Shows that the losses are the same and how many bytes each sent. Runs on the
CPU, in about two minutes on 2 cores. Results: a table, OUT/result.json, OUT/losses.csv and OUT/losses.png.

With --save-interval each run keeps Megatron's checkpoints in OUT/checkpoints; after Ctrl-C, or worse, the same command
goes on from the last one, and runs that have ended are not run again.
"""
EPILOG = """
examples:
  megatron-basp demo
  megatron-basp demo --iterations 800 --save-interval 400 --out runs/loss-800    losses as in docs/results.md
  megatron-basp demo --micro-batch-size 3 --text book.txt

exit status: 0; 1 a mode's losses are not the reference's, or a rank failed; 2 bad input (one line on stderr).
"""


def add_parser(subcommands: Any) -> None:
    parser = subcommands.add_parser(
        "demo",
        help="train the same small model three ways on the CPU and compare",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--iterations", type=int, default=100, metavar="N", help="training steps of each run (default 100)"
    )
    parser.add_argument(
        "--micro-batch-size", type=int, default=2, metavar="B", help="sequences in a micro-batch (default 2; try 3)"
    )
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="context-parallel ranks (default 4)")
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="plain text or .jsonl (default: Python's standard library)",
    )
    parser.add_argument(
        "--save-interval", type=int, metavar="N", help="keep a checkpoint every N steps to go on from (default: none)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="results (default runs/demo)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout and nothing else there")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Exit status 0, or 1 where a mode's losses are not the reference's."""
    plan = _check(options)
    result = DemoResult(
        settings={
            "iterations": options.iterations,
            "micro_batch_size": options.micro_batch_size,
            "ranks": options.ranks,
            "text": f"text of {len(options.text)} files" if options.text else "text of Python's standard library",
        },
        plan=[{"rows": len(wave.rows), "group_size": wave.group_size} for wave in plan.waves],
    )
    try:
        # Libraries print what they like; this command's own stdout is for its result.
        with contextlib.redirect_stdout(sys.stderr):
            _train_all(result, options, plan)
    finally:
        _show(result, options)
    return 0 if _losses_agree(result) else 1


def _train_all(result: DemoResult, options: argparse.Namespace, plan: BatchPlan) -> None:
    """Prepare the text and run every mode; a finished one is kept whatever happens to the next."""
    # What is compared here is computed on the CPU, also where there is a GPU.
    load_megatron()
    dataset = _prepare_text(options)
    kept = Kept(options.out / "checkpoints", options.save_interval) if options.save_interval else None
    if kept:
        training = {"flags": _megatron_flags(options, dataset), "ranks": options.ranks, "tokens": dataset.tokens}
        kept.begin(training)
    for mode in MODES:
        earlier = kept.result(mode) if kept else None
        result.modes[mode] = ModeResult(**earlier) if earlier else _train(mode, options, dataset, plan, kept)
        if kept and not earlier:
            kept.keep_result(mode, result.modes[mode])
        _write(result, options.out)


def _check(options: argparse.Namespace) -> BatchPlan:
    if options.iterations < 2:
        raise ConfigurationError(f"--iterations must be 2 or more, got {options.iterations}")
    if options.ranks < 2 or HEADS % options.ranks:
        usable = [ranks for ranks in range(2, HEADS + 1) if HEADS % ranks == 0]
        raise ConfigurationError(
            f"H % N must be 0 for Ulysses, and N above 1, got H={HEADS} heads and --ranks {options.ranks}: use one of "
            f"{usable}"
        )
    if options.save_interval is not None and options.save_interval < 1:
        raise ConfigurationError(f"--save-interval must be 1 or more, got {options.save_interval}")
    if options.micro_batch_size < 1:
        raise ConfigurationError(f"--micro-batch-size must be 1 or more, got {options.micro_batch_size}")
    for file in options.text or ():
        if not file.is_file():
            raise ConfigurationError(f"--text {file}: there is no such file, or it is no regular one")
    return plan_batch((SEQ_LENGTH,) * options.micro_batch_size, options.ranks, Limits(HEADS, KV_HEADS))


def _prepare_text(options: argparse.Namespace) -> TextDataset:
    from megatron_basp.megatron.text_dataset import prepare_text_dataset
    from megatron_basp.text_files import sample_texts, standard_library_files
    from megatron_basp.tokenizer import train_tokenizer

    files = options.text or standard_library_files()
    _say(f"preparing text: {len(files)} files")
    tokenizer = train_tokenizer(sample_texts(files), options.out / "data" / "tokenizer")
    # Text is held out by whole documents, and a book is one: cut into a hundred there is something to hold out.
    document_bytes = max(1, sum(file.stat().st_size for file in files) // 100) if options.text else None
    dataset = prepare_text_dataset(files, options.out / "data" / "text", tokenizer, document_bytes=document_bytes)
    if dataset.documents < 20:
        raise ConfigurationError(
            f"the text makes {dataset.documents} documents, which leaves none to hold out of training: give more "
            f"text, in lines"
        )
    return dataset


def _train(
    mode: str, options: argparse.Namespace, dataset: TextDataset, plan: BatchPlan, kept: Kept | None
) -> ModeResult:
    from megatron_basp.local_ranks import run_ranks
    from megatron_basp.megatron import pretrain_gpt  # noqa: F401  (imported once, before the ranks are forked)

    ranks = 1 if mode == "reference" else options.ranks
    flags = _megatron_flags(options, dataset)
    if mode != "reference":
        flags += f"--sequence-parallel-mode {mode} --context-parallel-size {ranks}".split()
    if kept:
        flags += kept.flags(mode)
        if kept.saved_step(mode):
            _say(f"{mode}: going on from step {kept.saved_step(mode)}")
    # Before the ranks are forked: where one is missing, it is said here.
    logs = [kept.steps(mode, rank) if kept else None for rank in range(ranks)]
    with terminal() as stderr:
        reports = run_ranks(
            lambda rank: _train_on_rank(rank, mode, flags, options.iterations, stderr, logs[rank]),
            ranks,
            options.out / "logs" / mode,
        )
    steps, held_out_loss_after = reports[-1]
    return ModeResult(
        losses=[step.loss for step in steps],
        grad_norms=[step.grad_norm for step in steps],
        step_seconds=statistics.median(step.seconds for step in steps[1:]),
        bytes_sent_per_rank_per_step=max(of_rank[-1].sent_bytes for of_rank, _ in reports),
        group_sizes={
            "reference": [1],
            "ulysses": [ranks],
            "basp": [wave.group_size for wave in plan.waves],
        }[mode],
        held_out_loss_before=steps[0].held_out_loss,
        held_out_loss_after=held_out_loss_after,
    )


def _train_on_rank(
    rank: int, mode: str, flags: list[str], iterations: int, stderr: int, log: StepLog | None
) -> tuple[list[Step], float]:
    """In a forked rank: all steps, those before a restart too, and the held-out loss after them."""
    from megatron_basp.megatron import pretrain_gpt
    from megatron_basp.megatron.recorder import record_training

    sent_bytes = [0]
    if mode != "reference":
        from megatron_basp.megatron import hooks

        def read(phase: Phase, iteration: int, seconds: float, page: Page) -> None:
            if phase == "training":
                sent_bytes.append(page.sent_bytes_to_peer.total())

        hooks.install().steps.readers.append(read)
    steps = list(log.earlier) if log else []
    with step_progress(stderr, rank, f"{mode:>9}", iterations, len(steps)) as advance:

        def after_step(record: Record, model: Any) -> None:
            before = steps[0].held_out_loss if steps else record.held_out_losses[0]
            step = Step(record.losses[-1], record.grad_norms[-1], record.step_seconds[-1], sent_bytes[-1], before)
            steps.append(step)
            if log:
                log.append(step)
            advance(record)

        record = record_training(after_step)
        sys.argv = ["pretrain_gpt", *flags]
        pretrain_gpt.main()
    return steps, record.held_out_losses[-1]


def _megatron_flags(options: argparse.Namespace, dataset: TextDataset) -> list[str]:
    batch_size = options.micro_batch_size
    flags = f"""
        --num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads {HEADS}
        --group-query-attention --num-query-groups {KV_HEADS} --seq-length {SEQ_LENGTH}
        --max-position-embeddings {SEQ_LENGTH} --position-embedding-type rope --swiglu --normalization RMSNorm
        --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
        --transformer-impl local --no-gradient-accumulation-fusion --no-rope-fusion --no-persist-layer-norm
        --no-masked-softmax-fusion --micro-batch-size {batch_size} --global-batch-size {MICRO_BATCHES * batch_size}
        --train-iters {options.iterations} --lr {LEARNING_RATE} --min-lr {LEARNING_RATE / 10} --lr-decay-style cosine
        --lr-warmup-iters {options.iterations // 10} --weight-decay 0.01 --split 95,5,0 --num-workers 0
        --eval-iters {HELD_OUT_BATCHES} --eval-interval {options.iterations + 1} --log-interval 10
    """
    return [*flags.split(), *dataset.megatron_flags()]


def _losses_agree(result: DemoResult) -> bool:
    """Over the first ten steps to 2e-6; later ones drift apart by rounding, as two orders of one sum do."""
    reference = result.modes["reference"].losses[:10]
    others = [result.modes[mode].losses[:10] for mode in result.modes if mode != "reference"]
    return all(abs(a - b) <= 2e-6 for losses in others for a, b in zip(losses, reference, strict=True))


def _write(result: DemoResult, out: Path) -> None:
    """After each run, and in one go, so that an interrupted demo keeps whole results."""
    part = out / "result.json.part"
    part.write_text(json.dumps(result.as_document(), indent=2) + "\n")
    part.replace(out / "result.json")


def _show(result: DemoResult, options: argparse.Namespace) -> None:
    if not result.modes:
        return
    from megatron_basp.cli.demo_report import curves, draw_losses, print_table
    from megatron_basp.reproduction.loss import write_losses

    write_losses(curves(result), options.out / "losses.csv")
    draw_losses(result, options.out / "losses.png")
    if options.json:
        print(json.dumps(result.as_document()))
    else:
        print_table(result, options.out)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
