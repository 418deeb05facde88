"""Megatron's fine-grained activation offloading, its own code: the same training, with tensors of attention gone.

On a CPU it copies them from memory to memory (`megatron_basp/megatron/offloading_on_cpu.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_basp.plan import BatchPlan
from tests.end_to_end.training import GQA, ITERATIONS, ROPE, Trainer, assert_same_training, batch, cp

HEADS, KV_HEADS, HEAD_SIZE = 8, 4, 8
MODULES = "attn_norm qkv_linear core_attn attn_proj mlp_norm"
FLAGS = f"{GQA} {ROPE} {batch(3)}"


def offloading(modules: str, smallest: int = 0) -> str:
    """smallest: elements of a tensor below which it stays."""
    return f"--fine-grained-activation-offloading --offload-modules {modules} --min-offloaded-tensor-size {smallest}"


class Group(NamedTuple):
    """What one module of one layer gave to the offloader in one micro-batch.

    alive: tensors whose memory was still in use when they were to come back.
    """

    name: str
    tensors: int
    bytes: int
    alive: int


def watching(folder: Path) -> Callable[[], None]:
    """To be called on each rank: from then on every group that was offloaded is written down when it comes back."""

    def start() -> None:
        from megatron.core.pipeline_parallel.fine_grained_activation_offload import ChunkOffloadHandler

        offload, reload = ChunkOffloadHandler.bulk_offload_group, ChunkOffloadHandler.bulk_reload_group
        taken: dict[Any, tuple[list[int], list[StorageWeakRef]]] = {}
        file = folder / os.environ["RANK"]

        def bulk_offload_group(self: Any, group: Any) -> None:
            tensors = [x for x in group._tensors.values() if self.tensor_need_offloading_checker(x)]
            storages = [StorageWeakRef(x.untyped_storage()) for x in tensors]
            taken[group] = [x.numel() * x.element_size() for x in tensors], storages
            del tensors
            offload(self, group)

        def bulk_reload_group(self: Any) -> None:
            group = self._groups_to_reload[-1]
            sizes, storages = taken.pop(group)
            alive = sum(not storage.expired() for storage in storages)
            with file.open("a") as stream:
                print(json.dumps(Group(group._name, len(sizes), sum(sizes), alive)), file=stream)
            reload(self)

        ChunkOffloadHandler.bulk_offload_group = bulk_offload_group
        ChunkOffloadHandler.bulk_reload_group = bulk_reload_group

    return start


def offloaded(folder: Path, rank: int) -> list[Group]:
    return [Group(*json.loads(line)) for line in (folder / str(rank)).read_text().splitlines()]


def kept_by_attention(plan: BatchPlan, rank: int) -> int:
    """Bytes of a layer: queries, keys, values and output of whole sequences, and a number for each query and head."""
    total = 0
    for share in plan.shares(rank):
        copied = max(KV_HEADS, share.group_size)
        total += 4 * share.tokens * (2 * HEADS * HEAD_SIZE + 2 * copied * HEAD_SIZE + HEADS)
    return total


@pytest.mark.supports("Training", "fine-grained activation offloading of dense layers (copied within a CPU's memory)")
def test_what_attention_keeps_is_offloaded_and_nowhere_else_and_training_is_that_of_one_process(
    trainer: Trainer, tmp_path: Path
) -> None:
    run = trainer.planned(f"{FLAGS} {cp(4)} {offloading(MODULES)}", ranks=4, sabotage=watching(tmp_path))
    assert_same_training(run, trainer.stock(FLAGS))
    plan = run[0].plan
    assert plan.group_sizes == (2, 4)
    for rank in range(4):
        groups = offloaded(tmp_path, rank)
        assert {group.name for group in groups} == set(MODULES.split())
        attention = [group for group in groups if group.name == "core_attn"]
        # Two micro-batches of two layers; after the first step the last layer, which comes back at once, stays.
        assert len(attention) == 4 + 2 * (ITERATIONS - 1)
        for group in attention:
            assert (group.tensors, group.alive) == (5 * len(plan.waves), 0)
            assert group.bytes == kept_by_attention(plan, rank)


@pytest.mark.slow
def test_a_wave_of_whole_sequences_keeps_what_megatron_would_empty(trainer: Trainer, tmp_path: Path) -> None:
    """Megatron empties the storage of q, k and v once they are offloaded. At K = 1 attention keeps views of parts of
    them, which may be too small to be offloaded where the whole is not."""
    flags = f"{FLAGS} {cp(2)} {offloading('core_attn', smallest=5000)}"
    run = trainer.planned(flags, ranks=2, sabotage=watching(tmp_path))
    plan = run[0].plan
    assert plan.group_sizes == (1, 2)
    width = HEADS * HEAD_SIZE
    assert plan.shares(0)[0].tokens * width < 5000 <= plan.tokens * width
    assert_same_training(run, trainer.stock(FLAGS))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(
            "--recompute-granularity selective",
            marks=pytest.mark.supports("Training", "offloading with selective recompute"),
        ),
        "--basp-overlap-chunks 2",
    ],
)
def test_offloading_goes_with_recompute_and_heads_in_parts(trainer: Trainer, tmp_path: Path, flags: str) -> None:
    flags = f"{FLAGS} {cp(2)} {offloading('core_attn')} {flags}"
    run = trainer.planned(flags, ranks=2, sabotage=watching(tmp_path))
    assert_same_training(run, trainer.stock(FLAGS))
    for rank in range(2):
        groups = offloaded(tmp_path, rank)
        assert groups and all(group.bytes and not group.alive for group in groups)


@pytest.mark.slow
@pytest.mark.supports(
    "Training",
    "offloading with tensor parallelism, and of core attention with pipeline stages",
    "the same without context parallelism",
)
@pytest.mark.parametrize(
    ("flags", "modules"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel", MODULES),
        # Of more modules stock Megatron 0.19 itself fails with stages: "Chunk mismatch".
        ("--pipeline-model-parallel-size 2", "core_attn"),
    ],
)
def test_offloading_goes_with_model_parallelism(trainer: Trainer, tmp_path: Path, flags: str, modules: str) -> None:
    flags = f"{FLAGS} {flags}"
    run = trainer.planned(f"{flags} {cp(2)} {offloading(modules)}", ranks=4, sabotage=watching(tmp_path))
    assert_same_training(run, trainer.stock(flags, ranks=2))
    for rank in range(4):
        attention = [group for group in offloaded(tmp_path, rank) if group.name == "core_attn"]
        assert attention and not any(group.alive for group in attention)
