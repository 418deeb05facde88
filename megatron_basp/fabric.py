"""What the machine that this runs on reaches: exchanges by group size, rings, memory, products, attention.

Every rank takes part in every measurement, groups of one size side by side, as in training. A time is that of the
slowest rank, the median over repetitions.
"""

from __future__ import annotations

import os
import platform
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from megatron_basp.errors import ConfigurationError
from megatron_basp.hardware_file import Measured
from megatron_basp.placement import aligned_blocks

# Torch 2.14 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

WARM_UP_CALLS = 2
# Back to back, as a step that the GPU is behind with: what it takes to launch a call is hidden.
CALLS = 5


@dataclass(frozen=True)
class Settings:
    """sizes: of the tensors that a rank exchanges, in bytes. on_gpu: NCCL on GPUs, else gloo on the CPU."""

    sizes: tuple[int, ...]
    repetitions: int
    on_gpu: bool


class Measurement:
    """On one rank, with `torch.distributed` initialized and its device set."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigurationError, on every rank, where hosts differ in their ranks or have one each."""
        self._settings = settings
        self._device = torch.device("cuda", torch.cuda.current_device()) if settings.on_gpu else torch.device("cpu")
        self._hosts = _ranks_by_host()
        ranks = len(self._hosts[0])
        if {len(host) for host in self._hosts} != {ranks} or ranks < 2:
            raise ConfigurationError(
                f"every host needs the same number of ranks, 2 or more, got {[len(host) for host in self._hosts]}: "
                f"start torchrun with one --nproc-per-node everywhere"
            )
        self.result = Measured(
            device=torch.cuda.get_device_name() if settings.on_gpu else platform.processor() or platform.machine(),
            backend=dist.get_backend(),
            hosts=len(self._hosts),
            ranks_per_host=ranks,
            versions=_versions(settings.on_gpu),
            memory_bytes=self._memory_bytes(),
            matmul_precision="bf16" if settings.on_gpu else "fp32",
        )

    def steps(self) -> list[tuple[str, Callable[[], None]]]:
        """What there is to measure, each with a name; to be called in this order, by all ranks."""
        hosts, ranks = self.result.hosts, self.result.ranks_per_host
        within = [n for n in range(2, ranks + 1) if ranks % n == 0]
        across = [n for n in range(2, hosts + 1) if hosts % n == 0]
        return [
            *[(f"all-to-all of {n} ranks", lambda n=n: self._exchange_within(n)) for n in within],
            *[(f"all-to-all over {n} hosts", lambda n=n: self._exchange_across(n)) for n in across],
            ("rings", self._rings),
            ("memory", self._memory),
            ("products", self._products),
            ("attention", self._attention),
        ]

    def _exchange_within(self, ranks: int) -> None:
        groups = [block for host in self._hosts for block in aligned_blocks(host, ranks)]
        self.result.within[ranks] = [
            (tensor_bytes * (ranks - 1) / ranks, seconds) for tensor_bytes, seconds in self._exchange(groups)
        ]

    def _exchange_across(self, hosts: int) -> None:
        blocks = aligned_blocks(range(self.result.hosts), hosts)
        groups = [tuple(rank for host in block for rank in self._hosts[host]) for block in blocks]
        leaves = self.result.ranks_per_host * (hosts - 1) / hosts
        self.result.across[hosts] = [
            (tensor_bytes * leaves, seconds) for tensor_bytes, seconds in self._exchange(groups)
        ]

    def _exchange(self, groups: list[tuple[int, ...]]) -> Iterator[tuple[int, float]]:
        """Bytes of a rank's tensor, and seconds that its all-to-all takes."""
        with _own_group(groups) as group:
            for size in self._settings.sizes:
                # Of equal parts for all members, of 4 bytes an element.
                elements = max(1, size // 4 // group.size()) * group.size()
                sent = torch.zeros(elements, device=self._device)
                exchange = partial(dist.all_to_all_single, torch.empty_like(sent), sent, group=group)
                yield elements * 4, self._seconds(exchange)

    def _rings(self) -> None:
        self.result.ring_bytes_per_second = self._ring(self._hosts)
        if self.result.hosts > 1:
            self.result.ring_across_bytes_per_second = self._ring([tuple(range(dist.get_world_size()))])

    def _ring(self, groups: list[tuple[int, ...]]) -> float:
        """Bus bandwidth of an all-gather: unlike all-reduce, no switch does a part of it."""
        with _own_group(groups) as group:
            ranks = group.size()
            part = torch.zeros(max(1, max(self._settings.sizes) // 4 // ranks), device=self._device)
            whole = torch.empty(part.numel() * ranks, device=self._device)
            seconds = self._seconds(lambda: _all_gather(whole, part, group=group))
        return part.numel() * 4 * (ranks - 1) / seconds

    def _memory(self) -> None:
        source = torch.zeros((1 << 30 if self._settings.on_gpu else 1 << 25) // 4, device=self._device)
        target = torch.empty_like(source)
        read_and_written = 2 * 4 * source.numel()
        self.result.memory_bytes_per_second = read_and_written / self._seconds(lambda: target.copy_(source))

    def _products(self) -> None:
        width, dtype = (8192, torch.bfloat16) if self._settings.on_gpu else (512, torch.float32)
        a, b = (torch.randn(width, width, device=self._device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        self.result.matmul_flops_per_second = 2 * width**3 / self._seconds(lambda: torch.mm(a, b, out=out))

    def _attention(self) -> None:
        lengths = (1024, 4096, 16384) if self._settings.on_gpu else (128, 256)
        tokens, width, dtype = (16384, 2048, torch.bfloat16) if self._settings.on_gpu else (256, 256, torch.float32)
        for head_size in (64, 128):
            rates = self.result.attention_flops_per_second.setdefault(head_size, {})
            for length in lengths:
                shape = (tokens // length, width // head_size, length, head_size)
                rates[length] = self._attention_rate(shape, dtype)

    def _attention_rate(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> float:
        """Causal, forward and backward; of a product of scores half is masked, and is not counted."""
        q, k, v = (torch.randn(shape, device=self._device, dtype=dtype, requires_grad=True) for _ in range(3))

        def forward_and_backward() -> None:
            out = scaled_dot_product_attention(q, k, v, is_causal=True)
            # Of a sum: with a gradient given, autograd imports a computer algebra system first.
            torch.autograd.grad(out.sum(), (q, k, v))

        batch, heads, length, head_size = shape
        # Two products forward and five backward, of 2·S²·d each.
        flops = 7 * 2 * batch * heads * length * length * head_size / 2
        return flops / self._seconds(forward_and_backward)

    def _seconds(self, call: Callable[[], object]) -> float:
        for _ in range(WARM_UP_CALLS):
            call()
        times = []
        for _ in range(self._settings.repetitions):
            dist.barrier()
            times.append((self._seconds_on_gpu if self._settings.on_gpu else self._seconds_on_cpu)(call))
        slowest = torch.tensor(times, device=self._device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return statistics.median(slowest.tolist())

    @staticmethod
    def _seconds_on_cpu(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        return (time.perf_counter() - start) / CALLS

    @staticmethod
    def _seconds_on_gpu(call: Callable[[], object]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / CALLS

    def _memory_bytes(self) -> int:
        if self._settings.on_gpu:
            return torch.cuda.get_device_properties(self._device).total_memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(self._hosts[0])


def _ranks_by_host() -> list[tuple[int, ...]]:
    """The ranks of each host, hosts in the order of their first ranks."""
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    hosts: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        hosts.setdefault(name, []).append(rank)
    return [tuple(ranks) for ranks in hosts.values()]


@contextmanager
def _own_group(groups: list[tuple[int, ...]]) -> Iterator[dist.ProcessGroup]:
    """This rank's group of those given; all ranks make all of them."""
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups])
    yield group
    dist.destroy_process_group(group)


def _versions(on_gpu: bool) -> dict[str, str]:
    versions = {"torch": torch.__version__}
    if on_gpu:
        versions |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return versions
