"""One rank's part in a run of Megatron's `pretrain()` whose steps are timed, each when somebody says so."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_basp.clock import clock
from megatron_basp.ledger import Page, Phase
from megatron_basp.megatron import stand_ins
from megatron_basp.megatron.observed_run import validated_configuration
from megatron_basp.megatron.seam import replace


@dataclass(frozen=True)
class TimedRun:
    """What is trained, and what of it is replaced.

    flags: Megatron's, with those of the mode.
    planned: with a sequence-parallel mode; else this is Megatron alone.
    with_exchange: False to leave it out.
    seconds_per_pair: of attention that is a pause, or None where it computes.
    our_kernel: Megatron alone attends with the kernel that the modes have on a CPU.
    """

    flags: tuple[str, ...]
    planned: bool
    with_exchange: bool = True
    seconds_per_pair: float | None = None
    our_kernel: bool = False


@dataclass(frozen=True)
class RankStep:
    """What one rank saw of a step; the exchange's figures are None where somebody else's code exchanges.

    exchange_seconds: that it stood still in exchanges.
    across_bytes: sent in them to other nodes.
    loss: None on ranks that have none.
    """

    seconds: float
    exchange_seconds: float | None
    across_bytes: int | None
    loss: float | None
    peak_memory_bytes: int | None


def time_training(
    run: TimedRun,
    nodes: Sequence[int],
    link: stand_ins.ModelledLink | None,
    wait_for_turn: Callable[[], int | None],
    report: Callable[[RankStep], None],
) -> None:
    """Train as the run says. Once in a process, with torchrun's environment.

    Args:
        nodes: of each global rank.
        link: in place of a real one.
        wait_for_turn: returns when the next step may begin, with the link's rate.
        report: gets each step.

    Raises:
        ConfigurationError: the flags were refused, by Megatron or by the mode.
    """
    pages: list[Page] = []
    if run.planned:
        from megatron_basp.megatron import hooks

        def read(phase: Phase, iteration: int, seconds: float, page: Page) -> None:
            if phase == "training":
                pages.append(page)

        runtime = hooks.install()
        runtime.ledger.clock = clock()
        runtime.steps.readers.append(read)
        if not run.with_exchange:
            # The first step under a plan must have exchanged; here it must not.
            replace("megatron_basp.megatron.schedule:check_exchanges", [], lambda original: lambda *args: None)
            stand_ins.leave_out_exchange()
    if run.seconds_per_pair is not None:
        stand_ins.pause_for_attention(run.seconds_per_pair)
    if run.our_kernel:
        stand_ins.attend_as_ours_does()
    if link is not None:
        link.install()
    from megatron_basp.megatron import pretrain_gpt

    def timing(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train_step(*args: Any, **kwargs: Any) -> Any:
            mbit = wait_for_turn()
            if link is not None:
                link.mbit = mbit
            on_gpu = torch.cuda.is_available()
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            dist.barrier()
            span = clock()()
            result = original(*args, **kwargs)
            span.stop()
            exchange = pages.pop().exchange if pages else None
            report(
                RankStep(
                    span.seconds(),
                    None if exchange is None else sum(one.seconds() for one in exchange.spans),
                    None if exchange is None else _across(exchange, nodes),
                    result[0]["lm loss"].item() if "lm loss" in result[0] else None,
                    torch.cuda.max_memory_allocated() if on_gpu else None,
                )
            )
            return result

        return train_step

    replace("megatron.training.training:train_step", ["forward_step_func", "data_iterator", "model"], timing)
    pretrain_gpt.train(validated_configuration(run.flags))


def _across(page: Page, nodes: Sequence[int]) -> int:
    here = nodes[dist.get_rank()]
    return sum(n_bytes for peer, n_bytes in page.sent_bytes_to_peer.items() if nodes[peer] != here)
