"""`--basp-ledger FILE`: what a rank sends is written as the run goes, and summed up at its end."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_basp.clock import clock
from megatron_basp.ledger import Page, Phase
from megatron_basp.ledger_file import Exchanged, Header, LedgerWriter, PlannedWave, Step, file_of_rank
from megatron_basp.ledger_summary import print_summary
from megatron_basp.megatron.own_collectives import OwnCollectives
from megatron_basp.megatron.runtime import Runtime
from megatron_basp.megatron.settings import Settings
from megatron_basp.megatron.versions import megatron_version
from megatron_basp.version import __version__

# What decides the shapes of a model and what a step sends, by Megatron's flags.
FLAGS = """
    num-layers hidden-size ffn-hidden-size num-attention-heads group-query-attention num-query-groups kv-channels
    swiglu untie-embeddings-and-output-weights multi-latent-attention mtp-num-layers num-experts moe-router-topk
    moe-ffn-hidden-size moe-shared-expert-intermediate-size moe-layer-freq seq-length micro-batch-size
    eval-micro-batch-size global-batch-size context-parallel-size tensor-model-parallel-size
    pipeline-model-parallel-size virtual-pipeline-model-parallel-size expert-model-parallel-size
    expert-tensor-parallel-size data-parallel-size sequence-parallel use-distributed-optimizer use-megatron-fsdp
    data-parallel-sharding-strategy overlap-grad-reduce overlap-param-gather accumulate-allreduce-grads-in-fp32
    bf16 fp8 recompute-granularity recompute-method recompute-num-layers recompute-modules calculate-per-token-loss
""".split()


def set_aside(path: Path) -> None:
    """What an earlier run wrote, one that this one goes on from perhaps, stays: `x.jsonl` -> `x.jsonl.1`, `.2`, …"""
    if path.exists():
        taken = itertools.takewhile(Path.exists, (Path(f"{path}.{number}") for number in itertools.count(1)))
        path.rename(f"{path}.{len(list(taken)) + 1}")


class Bookkeeper:
    """Writes the file of this rank, from the creation of groups until `close`."""

    def __init__(self, runtime: Runtime, header: Header) -> None:
        assert runtime.settings.ledger is not None
        path = file_of_rank(runtime.settings.ledger, header.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        set_aside(path)
        self._writer = LedgerWriter(path.open("w"), header)
        self._runtime = runtime
        self._unwritten: deque[tuple[Phase, int, float, Page]] = deque()
        self._own = OwnCollectives(runtime.ledger)
        self._own.install()
        runtime.ledger.clock = clock()
        runtime.steps.readers.append(self.read)

    @property
    def header(self) -> Header:
        return self._writer.header

    def read(self, phase: Phase, iteration: int, seconds: float, page: Page) -> None:
        """Take a page. On a GPU it is written once its events have come, which nobody waits for."""
        self._unwritten.append((phase, iteration, seconds, page))
        while self._unwritten and all(span.is_over() for span in self._unwritten[0][3].spans):
            self._write(*self._unwritten.popleft())

    def close(self) -> None:
        """Write what is left, and the totals; rank 0 prints them."""
        runtime = self._runtime
        self._own.uninstall()
        runtime.steps.turn("outside")
        runtime.steps.readers.remove(self.read)
        if runtime.monitor is None:
            runtime.ledger.clock = None
        while self._unwritten:
            self._write(*self._unwritten.popleft())
        self._writer.close()
        steps, totals = self._writer.totals("training")
        if self.header.rank == 0 and steps:
            print_summary(self.header, steps, totals)

    def _write(self, phase: Phase, iteration: int, seconds: float, page: Page) -> None:
        header = self._writer.header
        self._writer.write_step(Step(phase, iteration, seconds, page.amounts(header.rank, header.nodes)))


def header_of_run(settings: Settings, cp_ranks: Sequence[int], nodes: Sequence[str]) -> Header:
    """Of this rank, once Megatron has validated its arguments and made its groups."""
    from megatron.training import get_args

    args = get_args()
    flags = {name: getattr(args, name.replace("-", "_"), None) for name in FLAGS}
    flags["vocab-size"] = args.padded_vocab_size
    return Header(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        versions={
            "megatron_basp": __version__,
            "megatron-core": megatron_version(),
            "torch": version("torch"),
        },
        backend=dist.get_backend(),
        clock="device" if torch.cuda.is_available() else "host",
        mode=settings.mode,
        flags={name: value for name, value in flags.items() if value is not None},
        exchanged=Exchanged(
            settings.limits.heads, settings.limits.kv_heads, *_head_sizes(args), args.params_dtype.itemsize
        ),
        training_waves=_waves(settings, settings.micro_batch_size),
        evaluation_waves=_waves(settings, settings.eval_micro_batch_size),
        cp_ranks=tuple(cp_ranks),
        domain_size=settings.limits.domain_size or 1,
        nodes=tuple(nodes),
    )


def _head_sizes(args: Any) -> tuple[int, int]:
    """Of queries and keys, and of values."""
    if args.multi_latent_attention:
        return args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
    return args.kv_channels, args.kv_channels


def _waves(settings: Settings, micro_batch_size: int) -> tuple[PlannedWave, ...]:
    plan = settings.plan(micro_batch_size, settings.seq_length)
    return tuple(PlannedWave(len(wave.rows), wave.group_size, settings.chunks[wave.group_size]) for wave in plan.waves)
