"""Megatron's NVTX ranges, which its profiling switches on, with ours inside of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.end_to_end.training import GQA, ROPE, Trainer, batch, cp

OURS = "megatron_basp."


def writing_ranges(folder: Path) -> Callable[[], None]:
    """To be called on each rank: from then on every range, with those it is in, goes to a file. The driver, which
    Megatron tells when profiling begins, is not there."""

    def start() -> None:
        opened: list[str] = []
        file = folder / os.environ["RANK"]

        def range_push(name: str) -> None:
            opened.append(name)
            with file.open("a") as stream:
                print(json.dumps(opened), file=stream)

        torch.cuda.nvtx = SimpleNamespace(range_push=range_push, range_pop=lambda: opened.pop())
        torch.cuda.cudart = lambda: SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0)
        torch.cuda.check_error = lambda code: None
        torch.autograd.profiler.emit_nvtx = lambda **options: nullcontext()

    return start


def test_in_the_steps_that_are_profiled_and_in_no_other_our_ranges_are_inside_of_megatrons(
    trainer: Trainer, tmp_path: Path
) -> None:
    profile = "--profile --nvtx-ranges --profile-step-start 4 --profile-step-end 5 --profile-ranks 0 1"
    trainer.planned(f"{GQA} {ROPE} {batch(3)} {cp(2)} {profile}", ranks=2, sabotage=writing_ranges(tmp_path))
    for rank in range(2):
        ranges: list[list[Any]] = [json.loads(line) for line in (tmp_path / str(rank)).read_text().splitlines()]
        ours = [names for names in ranges if names[-1].startswith(OURS)]
        found = [names[-1].removeprefix(OURS) for names in ours]
        # One step of two micro-batches and two layers; the plan is two rows at K = 1, then one at K = 2.
        assert sorted(found) == sorted(
            4
            * [
                "pack_heads qkv forward K=2",
                "all_to_all qkv forward K=2",
                "attend forward K=1 part 1 of 1",
                "attend forward K=2 part 1 of 1",
                "all_to_all output forward K=2",
                "unpack forward K=2 part 1 of 1",
                "pack_heads output backward K=2",
                "all_to_all output backward K=2",
                "attend backward K=2 part 1 of 1",
                "attend backward K=1 part 1 of 1",
                "all_to_all qkv backward K=2",
                "unpack backward K=2 part 1 of 1",
            ]
        )
        for names, name in zip(ours, found, strict=True):
            around = names[-2] if len(names) > 1 else ""
            assert around.endswith("core_attention") if " forward " in name else not around.startswith(OURS)
