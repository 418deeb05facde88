"""Real processes that talk over gloo."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_basp.local_ranks import run_ranks

# No pool of threads in the process that ranks are forked from: a fork of such a process may hang.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """Call a function of the rank on so many ranks; gives what each returned.

    Starting ranks takes longer than what they do here: each file starts them once, for all of its cases, and its tests
    look at what came back.
    """
    return over_gloo(tmp_path_factory)


def over_gloo(folders: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    def call(function: Callable[[int], Any], ranks: int = 4) -> list[Any]:
        def with_gloo(rank: int) -> Any:
            dist.init_process_group("gloo", timeout=timedelta(seconds=60))
            return function(rank)

        return run_ranks(with_gloo, ranks, folders.mktemp("ranks"))

    return call
