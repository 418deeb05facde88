"""What Megatron logs of a run: figures of the exchange beside its own, and a check of its throughput.

Written where Megatron writes its own, TensorBoard and Weights & Biases, by the last rank and of that rank:
    basp/exchange-bytes-per-step           sent in the exchanges of attention, by the ledger
    basp/exchange-milliseconds-per-step    spent in them (`megatron_basp.clock`)
    basp/group-size-wave-0, -1, …          K of each wave of training's micro-batches
With `--timing-log-level 2` the milliseconds are among Megatron's timers too, as `basp-exchange`, of all ranks. Nothing
is measured where nobody asked for either.
"""

from __future__ import annotations

import inspect
from collections import deque
from typing import Any, NamedTuple

import torch

from megatron_basp.clock import clock
from megatron_basp.ledger import Page, Phase, Span
from megatron_basp.megatron.runtime import Runtime
from megatron_basp.megatron.seam import Function

# Dense bf16 TFLOP/s by NVIDIA's data sheets, by a part of the device's name; the first that fits counts.
PEAK_TFLOPS = (
    *(("GB300", 2500.0), ("GB200", 2500.0), ("B300", 2250.0), ("B200", 2250.0)),
    *(("H200 NVL", 835.0), ("H200", 989.0), ("H100 NVL", 835.0), ("H100 PCIe", 756.0), ("H100", 989.0)),
    *(("H800", 989.0), ("H20", 148.0), ("A100", 312.0), ("A800", 312.0)),
)


def peak_tflops(device_name: str) -> float | None:
    """Of a device's dense bf16 arithmetic; None for one that is not in the table."""
    return next((peak for name, peak in PEAK_TFLOPS if name in device_name), None)


def check_throughput(tflops: float, device_name: str, rank: int) -> None:
    """Model FLOP/s, as Megatron counts them for its log, cannot exceed what the device computes.

    Raises:
        RuntimeError: they do, so that something is left out of the computation, or of the time.
    """
    peak = peak_tflops(device_name)
    if peak is not None and tflops > peak:
        raise RuntimeError(
            f"rank {rank}: Megatron measured {tflops:.1f} TFLOP/s a GPU, and {device_name} computes at most "
            f"{peak:.0f} (dense bf16): attention is skipped somewhere, or time is not measured right"
        )


def checking_throughput(runtime: Runtime, original: Function) -> Function:
    """`training_log` hands its throughput to this function, the only place where it leaves it as a number."""

    def track_e2e_metrics(log_throughput: bool = False, throughput: float | None = None) -> Any:
        if runtime.is_active and throughput is not None:
            from megatron.training import get_args

            args = get_args()
            # Megatron counts a sliding window as full attention, the documents of an evaluation in the step after it,
            # and a whole interval as if it were of its last batch size; lower precisions have higher peaks.
            counted = (
                args.window_size is None and not runtime.settings.packed and args.step_batch_size_schedule is None
            )
            if counted and not args.fp8 and not args.fp4:
                check_throughput(throughput, torch.cuda.get_device_name(), torch.distributed.get_rank())
        return original(log_throughput, throughput)

    return track_e2e_metrics


class Totals(NamedTuple):
    """Of training steps, without evaluations."""

    steps: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0

    def __sub__(self, other: Totals) -> Totals:
        return Totals(*(a - b for a, b in zip(self, other, strict=True)))


class ExchangeMonitor:
    """Adds up what training steps exchange."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.written = self.logged = self._totals = Totals()
        self._spans: deque[Span] = deque()
        runtime.ledger.clock = clock()
        runtime.steps.readers.append(self.read)

    def read(self, phase: Phase, iteration: int, seconds: float, page: Page) -> None:
        if phase == "training":
            exchange = page.exchange
            self._spans.extend(exchange.spans)
            steps, sent_bytes, measured = self._totals
            # Those of earlier steps are over as a rule: kept until somebody asks, they would pile up.
            while self._spans and self._spans[0].is_over():
                measured += self._spans.popleft().seconds()
            self._totals = Totals(steps + 1, sent_bytes + sum(exchange.sent_bytes.values()), measured)

    def totals(self) -> Totals:
        """On a GPU this waits for the last exchange."""
        steps, sent_bytes, measured = self._totals
        self._totals = Totals(steps, sent_bytes, measured + sum(span.seconds() for span in self._spans))
        self._spans.clear()
        return self._totals


def monitoring_step(runtime: Runtime, original: Function) -> Function:
    def train_step(*args: Any, **kwargs: Any) -> Any:
        if runtime.is_active and runtime.monitor is None and _somebody_asked():
            runtime.monitor = ExchangeMonitor(runtime)
        return original(*args, **kwargs)

    return train_step


def _somebody_asked() -> bool:
    from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer

    return bool(get_tensorboard_writer() or get_wandb_writer() or get_args().timing_log_level >= 2)


def logging_exchanges(runtime: Runtime, original: Function) -> Function:
    signature = inspect.signature(original)

    def training_log(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        monitor = runtime.monitor
        if runtime.is_active and monitor is not None:
            arguments = signature.bind(*args, **kwargs).arguments
            write_figures(monitor, arguments["iteration"])
            log_timer(monitor, arguments["iteration"])
        return result

    return training_log


def write_figures(monitor: ExchangeMonitor, iteration: int) -> None:
    """To the writers, on the rank that has them, at Megatron's interval for TensorBoard."""
    from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer

    writer, wandb = get_tensorboard_writer(), get_wandb_writer()
    if not (writer or wandb) or iteration % get_args().tensorboard_log_interval:
        return
    totals = monitor.totals()
    since, monitor.written = totals - monitor.written, totals
    if not since.steps:  # the first iteration is logged twice
        return
    settings = monitor.runtime.settings
    figures = {
        "basp/exchange-bytes-per-step": since.sent_bytes / since.steps,
        "basp/exchange-milliseconds-per-step": since.seconds * 1e3 / since.steps,
    }
    for index, wave in enumerate(settings.plan(settings.micro_batch_size, settings.seq_length).waves):
        figures[f"basp/group-size-wave-{index}"] = wave.group_size
    for name, value in figures.items():
        if writer:
            writer.add_scalar(name, value, iteration)
    if wandb:
        wandb.log(figures, iteration)


def log_timer(monitor: ExchangeMonitor, iteration: int) -> None:
    """With Megatron's timers of level 2, at the interval of its log; all ranks come here together."""
    from megatron.training import get_args, get_timers

    args = get_args()
    if args.timing_log_level < 2 or iteration % args.log_interval:
        return
    totals = monitor.totals()
    since, monitor.logged = totals - monitor.logged, totals
    timers = get_timers()
    timers("basp-exchange", log_level=2).set_elapsed(since.seconds)
    timers.log(["basp-exchange"], normalizer=max(1, since.steps))
