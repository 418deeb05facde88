"""One attention layer on ranks of two nodes, forward and backward: its exchange, its arithmetic, and both together."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_basp.arithmetic_cost import ATTENTION_BACKWARD
from megatron_basp.attention import BaspAttention
from megatron_basp.emulated.network import DEVICE, Network
from megatron_basp.ledger import Ledger
from megatron_basp.plan import BatchPlan, Limits, PlanHolder, plan_batch
from megatron_basp.process_groups import SequenceGroups, create_sequence_groups
from scripts.bench.two_nodes import RANKS, RANKS_PER_NODE

WARM_UP_CALLS = 2


@dataclass(frozen=True)
class Layer:
    """S, H, Hkv and d, in fp32."""

    seq_length: int
    heads: int
    kv_heads: int
    head_size: int

    def plan(self, rows: int) -> BatchPlan:
        limits = Limits(self.heads, self.kv_heads, domain_size=RANKS_PER_NODE)
        return plan_batch((self.seq_length,) * rows, RANKS, limits)


@dataclass(frozen=True)
class Case:
    """rows: B. arithmetic: seconds of attention over those of the exchange, each alone."""

    rows: int
    arithmetic: float


@dataclass(frozen=True)
class Measured:
    """Milliseconds, one for each repetition.

    together: by number of chunks. in_turn: each wave by itself, in one part.
    """

    exchange: list[float]
    compute: list[float]
    in_turn: list[float]
    together: dict[int, list[float]]


class Pause:
    """Stands for a kernel: takes time in proportion to what it would have to compute, and leaves the cores alone."""

    def __init__(self) -> None:
        self.seconds_per_pair = 0.0

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[S, rows, h, d] -> [S, rows, h·d]."""
        return _Paused.apply(query, key, value, self.seconds_per_pair * self.pairs(query)).flatten(2)

    @staticmethod
    def pairs(query: Tensor) -> int:
        """Of a query and a key."""
        length, rows, heads, _ = query.shape
        return length * length * rows * heads


class _Paused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds, ctx.kv_heads = seconds, key.shape[2]
        time.sleep(seconds)
        return query.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(ctx.seconds * ATTENTION_BACKWARD)
        of_keys = grad[:, :, : ctx.kv_heads]
        return grad, of_keys, of_keys, None


class Bench:
    """On one rank, with `torch.distributed` initialized."""

    def __init__(self, layer: Layer, chunks: Sequence[int], repetitions: int) -> None:
        self._layer, self._chunks, self._repetitions = layer, chunks, repetitions
        self._groups = _groups()
        self._kernel = Pause()

    def measure(self, case: Case) -> Measured:
        layer, kernel = self._layer, self._kernel
        plan = layer.plan(case.rows)
        waves = [layer.plan(len(wave.rows)) for wave in plan.waves]
        assert [wave.group_sizes for wave in waves] == [(wave.group_size,) for wave in plan.waves]
        whole = {count: self._pass(plan, count) for count in self._chunks}
        each_wave = [self._pass(wave, 1) for wave in waves]

        def in_turn() -> None:
            for one in each_wave:
                one()

        def without_arithmetic() -> None:
            kernel.seconds_per_pair, kept = 0.0, kernel.seconds_per_pair
            whole[1]()
            kernel.seconds_per_pair = kept

        kernel.seconds_per_pair = 0.0
        exchange = statistics.median([self._seconds(whole[1]) for _ in range(WARM_UP_CALLS + 3)][WARM_UP_CALLS:])
        pairs = sum(len(w.rows) * w.group_size // RANKS * layer.heads // w.group_size for w in plan.waves)
        pairs *= layer.seq_length**2
        kernel.seconds_per_pair = case.arithmetic * exchange / (pairs * (1 + ATTENTION_BACKWARD))

        def compute() -> None:
            time.sleep(kernel.seconds_per_pair * pairs)
            time.sleep(kernel.seconds_per_pair * pairs * ATTENTION_BACKWARD)

        calls = {"exchange": without_arithmetic, "compute": compute, "in_turn": in_turn, **whole}
        times: dict[Any, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            self._seconds(call)
        for _ in range(self._repetitions):
            for name, call in calls.items():
                times[name].append(self._seconds(call) * 1e3)
        together = {count: times[count] for count in self._chunks}
        return Measured(times["exchange"], times["compute"], times["in_turn"], together)

    def _pass(self, plan: BatchPlan, chunks: int) -> Callable[[], None]:
        """Forward and backward of the layer."""
        layer, holder = self._layer, PlanHolder()
        holder.set(plan)
        kernels = dict.fromkeys(plan.group_sizes, self._kernel)
        by_size = {size: 1 if size == 1 else chunks for size in plan.group_sizes}
        attention = BaspAttention(self._groups, holder, kernels, Ledger(), layer=1, chunks=by_size)
        heads = (layer.heads, layer.kv_heads, layer.kv_heads)
        inputs = [torch.randn(plan.tokens, 1, count, layer.head_size, requires_grad=True) for count in heads]
        gradient = torch.randn(plan.tokens, 1, layer.heads * layer.head_size)

        def forward_and_backward() -> None:
            for x in inputs:
                x.grad = None
            attention(*inputs, None).backward(gradient)

        return forward_and_backward

    @staticmethod
    def _seconds(call: Callable[[], None]) -> float:
        """Of the slowest rank."""
        dist.barrier()
        start = time.perf_counter()
        call()
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()


def _groups() -> SequenceGroups:
    """One CP group, of the whole world."""
    return create_sequence_groups(
        [range(RANKS)], (1, 2, 4), dist.group.WORLD, lambda ranks, name: dist.new_group(ranks, group_desc=name)
    )


def on_node(network: Network, rank: int) -> None:
    """Join the rank's node, and the other ranks over gloo."""
    network.enter(rank // RANKS_PER_NODE)
    os.environ.update(MASTER_ADDR=network.address(0), GLOO_SOCKET_IFNAME=DEVICE)
    dist.init_process_group("gloo")


def measure_all(
    network: Network, layer: Layer, cases: Sequence[Case], chunks: Sequence[int], repetitions: int, rank: int
) -> Mapping[Case, Measured]:
    on_node(network, rank)
    bench = Bench(layer, chunks, repetitions)
    return {case: bench.measure(case) for case in cases}
