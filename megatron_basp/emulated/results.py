"""What `megatron-basp bench train` measured, and the document that it writes. Pure.

The document (`runs/bench/train.json`, and that of --json):

    command             as it was typed
    date                of the run, ISO 8601
    is_finished         false where the run was interrupted: rows are of the steps until then
    versions            {megatron_basp, megatron-core, torch, python, linux}
    machine             {device, cores}: what it ran on
    cluster             {nodes, ranks_per_node}
    backend             gloo or nccl
    link                "measured": packets crossed a link of that rate; "modelled": the exchange ran in this machine's
                        memory, and each rank then slept for as long as the link would have taken
    compute             "real", or "sleep": attention is a pause of `pause_milliseconds` a step
    pause_milliseconds  null where compute is real
    shape               {layers, heads, kv_heads, head_size, element_bytes, seq_length, micro_batch_size,
                        micro_batches, ranks}: what the formula takes
    flags               Megatron's, those that all modes share
    modes               {mode: {what, group_sizes}}: how each was run, and K of each of its waves
    left_out            {mode: why it was not run}
    warm_up, steps      steps of each mode at each rate before, and in the figures
    rows                a list, one for each rate of the link and mode:

    mode                                 "ulysses", "basp", "reflagged" or "no_exchange"
    link_mbit                            of each node, each way; null on real hardware
    link, compute                        as above, in each row
    steps                                how many were measured
    step_milliseconds                    median; the slowest rank counts
    step_milliseconds_low, _high         quartiles
    exchange_milliseconds                median of the mean over ranks: what a rank stood still for in exchanges; null
                                         where Transformer Engine's code exchanges
    exchange_share                       of the step, of its median
    across_node_bytes_per_step           that left all nodes together, by the counters of their network devices, less
                                         frame headers: gradients and all; null where there are no such counters
    across_node_exchange_bytes_per_step  the exchange's own: these less those of no_exchange; where there are no
                                         counters, what the ledger counted
    bytes_by                             "counters" or "ledger": which of the two
    ledger_bytes_per_step                what the exchange sent across nodes, counted where it is sent
    formula_bytes_per_step               what it has to send, by plan and shape
    speedup_over_ulysses                 time of its step over this mode's
    share_of_bound                       time of the step without any exchange over this mode's: 1 is the bound
    max_loss_difference                  from ulysses, over all steps at this rate; null for no_exchange, whose losses
                                         mean nothing
    cpu_seconds                          of all ranks in a step, median; null where modes do not take turns
    others_cpu_seconds                   of everybody else on the machine meanwhile
    peak_memory_bytes                    of the rank that took most, on a GPU; null on a CPU

A ratio is of medians, and both are of the same run. `no_exchange` is the bound: every rank attends with its own share
of heads to data of the same shapes, and sends none of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_basp.exchange_cost import AttentionShape
from megatron_basp.placement import pairs_across
from megatron_basp.plan import BatchPlan

MODES = ("ulysses", "basp", "reflagged", "no_exchange")
ULYSSES, BOUND = "ulysses", "no_exchange"


@dataclass(frozen=True)
class Turn:
    """One step of one mode, all ranks together; fields as in the document, None where something was not measured."""

    mode: str
    link_mbit: int | None
    seconds: float
    exchange_seconds: float | None
    loss: float | None
    ledger_bytes: int | None
    across_node_bytes: int | None = None
    cpu_seconds: float | None = None
    others_cpu_seconds: float | None = None
    peak_memory_bytes: int | None = None


def exchanged_across_nodes(plan: BatchPlan, ranks_per_node: int, shape: AttentionShape) -> int:
    """Bytes that one layer's exchanges send across nodes for one micro-batch, forward and backward, by all ranks.

    Each of the `pairs_across` hands the other a K-th of its tokens' heads. Backward moves what forward moves.
    """
    n_bytes = 0.0
    for wave in plan.waves:
        tokens = sum(wave.lengths) / plan.ranks
        size = wave.group_size
        to_a_peer = (shape.query_key_value_bytes(tokens, size) + shape.output_bytes(tokens)) / size
        n_bytes += 2 * to_a_peer * pairs_across(size, plan.ranks, ranks_per_node)
    return round(n_bytes)


def rows(turns: Sequence[Turn], formula_bytes: dict[str, int], common: dict[str, Any]) -> list[dict[str, Any]]:
    """One for each rate and mode, in the order of `MODES`.

    Args:
        turns: those that count, without the warm-up.
        formula_bytes: of a step, by mode.
        common: columns that are the same in all rows.
    """
    found = []
    for link_mbit in dict.fromkeys(turn.link_mbit for turn in turns):
        at_rate = {
            mode: own
            for mode in MODES
            if (own := [turn for turn in turns if (turn.mode, turn.link_mbit) == (mode, link_mbit)])
        }
        found += [
            {"mode": mode, "link_mbit": link_mbit, **common, **_row(mode, at_rate, formula_bytes[mode])}
            for mode in at_rate
        ]
    return found


def _row(mode: str, at_rate: dict[str, list[Turn]], formula_bytes: int) -> dict[str, Any]:
    own = at_rate[mode]
    seconds = [turn.seconds for turn in own]
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(own) > 1 else seconds * 3
    crossed, ledger = _bytes(own, "across_node_bytes"), _bytes(own, "ledger_bytes")
    exchange = _median(own, "exchange_seconds")
    without = _bytes(at_rate.get(BOUND, []), "across_node_bytes")
    exchanged = None if crossed is None or without is None else crossed - without
    peaks = [turn.peak_memory_bytes for turn in own if turn.peak_memory_bytes is not None]
    return {
        "steps": len(own),
        "step_milliseconds": middle * 1e3,
        "step_milliseconds_low": low * 1e3,
        "step_milliseconds_high": high * 1e3,
        "exchange_milliseconds": None if exchange is None else exchange * 1e3,
        "exchange_share": None if exchange is None else exchange / middle,
        "across_node_bytes_per_step": crossed,
        "across_node_exchange_bytes_per_step": ledger if exchanged is None else exchanged,
        "bytes_by": "ledger" if exchanged is None else "counters",
        "ledger_bytes_per_step": ledger,
        "formula_bytes_per_step": formula_bytes,
        "speedup_over_ulysses": _over(at_rate.get(ULYSSES, []), middle),
        "share_of_bound": _over(at_rate.get(BOUND, []), middle),
        "max_loss_difference": None if mode == BOUND else _loss_difference(own, at_rate.get(ULYSSES, [])),
        "cpu_seconds": _median(own, "cpu_seconds"),
        "others_cpu_seconds": _median(own, "others_cpu_seconds"),
        "peak_memory_bytes": max(peaks, default=None),
    }


def _median(turns: Sequence[Turn], name: str) -> Any:
    """None where it was not measured."""
    values = [getattr(turn, name) for turn in turns]
    return None if not values or None in values else statistics.median(values)


def _bytes(turns: Sequence[Turn], name: str) -> int | None:
    found = _median(turns, name)
    return None if found is None else round(found)


def _over(turns: Sequence[Turn], seconds: float) -> float | None:
    return statistics.median(turn.seconds for turn in turns) / seconds if turns else None


def _loss_difference(own: Sequence[Turn], reference: Sequence[Turn]) -> float | None:
    """Step by step; an interrupted run may have taken one more in one of them."""
    pairs = zip(own, reference, strict=False)
    return max((abs(a.loss - b.loss) for a, b in pairs if a.loss is not None and b.loss is not None), default=None)
