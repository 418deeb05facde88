"""Seconds of a layer's attention when exchanges travel behind arithmetic, and in how many parts that is least. Pure.

What `overlap.py` does is played through: one device, which packs, attends and unpacks in the order in which it is told
to, and two links, inside a domain and across, each of which carries what is posted in the order of the posts. A
collective that uses both has arrived when both are done with it, and keeps each busy for its latency too: so much does
another part cost.

Not modelled: what is recomputed, documents shorter than their row, and kernels and collectives that slow each other
down.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_basp.arithmetic_cost import ATTENTION_BACKWARD, attention_flops_per_second
from megatron_basp.exchange_cost import ExchangeModel, Transfer
from megatron_basp.placement import divisors
from megatron_basp.plan import BatchPlan, Limits, Wave

# Of a layer's seconds. A gain below that is less than the model can tell, and parts that it does not see are not free:
# launches, and kernels of fewer heads.
TELLS_APART = 0.01


@dataclass(frozen=True)
class Work:
    """What one piece, some heads of a wave, asks for.

    group_size: K.
    to_heads, to_sequence: on the links; None at K = 1.
    pack_seconds, attend_seconds, unpack_seconds: on the device.
    """

    group_size: int
    attend_seconds: float
    to_heads: Transfer | None = None
    to_sequence: Transfer | None = None
    pack_seconds: float = 0.0
    unpack_seconds: float = 0.0


class _Links:
    """Both are free from some time on."""

    def __init__(self) -> None:
        self._within = self._across = 0.0

    def arrival(self, transfer: Transfer, posted: float) -> float:
        """When it has arrived; it waits for what was posted before it."""
        arrival = posted
        if transfer.within_seconds:
            self._within = max(self._within, posted) + transfer.latency_seconds + transfer.within_seconds
            arrival = self._within
        if transfer.across_seconds:
            self._across = max(self._across, posted) + transfer.latency_seconds + transfer.across_seconds
            arrival = max(arrival, self._across)
        return arrival


def seconds_of(pieces: Sequence[Work]) -> float:
    """Until the last piece is unpacked. Pieces are attended to in this order, and sent with the largest K first."""
    links, now = _Links(), 0.0
    arrivals: dict[int, float] = {}
    for index in sorted(range(len(pieces)), key=lambda index: -pieces[index].group_size):
        to_heads = pieces[index].to_heads
        if to_heads is not None:
            now += pieces[index].pack_seconds
            arrivals[index] = links.arrival(to_heads, now)
    returns: list[tuple[float, Work]] = []
    for index, piece in enumerate(pieces):
        now = max(now, arrivals.get(index, 0.0)) + piece.attend_seconds
        if piece.to_sequence is not None:
            returns.append((links.arrival(piece.to_sequence, now), piece))
    for arrival, piece in returns:
        now = max(now, arrival) + piece.unpack_seconds
    return now


def layer_seconds(exchange: ExchangeModel, plan: BatchPlan, chunks: Mapping[int, int]) -> float:
    """Of one layer, forward and backward, of one micro-batch. chunks: C, by K."""
    forward = [_forward(exchange, plan, wave, chunks[wave.group_size]) for wave in plan.waves]
    backward = [_backward(work) for work in reversed(forward)]
    return sum(
        seconds_of([work for work in works for _ in range(chunks[work.group_size])]) for works in (forward, backward)
    )


def _forward(exchange: ExchangeModel, plan: BatchPlan, wave: Wave, chunks: int) -> Work:
    """Of one of so many parts."""
    shape, cluster, length = exchange.shape, exchange.cluster, wave.lengths[0]
    tokens = sum(wave.lengths) / plan.ranks
    precision = "fp32" if shape.element_bytes == 4 else "bf16"
    rate = attention_flops_per_second(cluster, shape.query_head_size, length, precision)
    # Causal: a token sees S/2 others on average, once for the scores and once for the values.
    attend_seconds = tokens * length * shape.heads * (shape.query_head_size + shape.value_head_size) / rate / chunks
    if wave.group_size == 1:
        return Work(1, attend_seconds)
    query_key_value = shape.query_key_value_bytes(tokens, wave.group_size) / chunks
    output = shape.output_bytes(tokens) / chunks
    return Work(
        wave.group_size,
        attend_seconds,
        exchange.transfer(wave.group_size, query_key_value),
        exchange.transfer(wave.group_size, output),
        exchange.copy_seconds(query_key_value),
        exchange.copy_seconds(output),
    )


def _backward(work: Work) -> Work:
    """The gradient of the output goes to heads, those of q, k and v come back."""
    return Work(
        work.group_size,
        work.attend_seconds * ATTENTION_BACKWARD,
        work.to_sequence,
        work.to_heads,
        work.unpack_seconds,
        work.pack_seconds,
    )


def possible_chunks(limits: Limits, group_size: int) -> list[int]:
    """C that divide the query heads and the key-value heads of a rank in its group: each part is an exchange by
    itself, without more copies of key-value heads than the whole has."""
    if group_size == 1:
        return [1]
    return divisors(math.gcd(limits.heads // group_size, max(limits.kv_heads // group_size, 1)))


def best_chunks(exchange: ExchangeModel, plan: BatchPlan, limits: Limits) -> dict[int, int]:
    """C for each K of the plan: the fewest parts that come as near to the least seconds as `TELLS_APART`.

    One K after the other, the largest first, which has the longest way, and with those that are not chosen yet in one
    part: all choices together are far too many where a plan has many waves.
    """
    chosen = dict.fromkeys(plan.group_sizes, 1)
    for size in reversed(plan.group_sizes):
        seconds = {
            chunks: layer_seconds(exchange, plan, chosen | {size: chunks}) for chunks in possible_chunks(limits, size)
        }
        near = min(seconds.values()) * (1 + TELLS_APART)
        chosen[size] = min(chunks for chunks, of_chunks in seconds.items() if of_chunks <= near)
    return chosen
