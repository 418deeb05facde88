"""What a rank that dies leaves behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from megatron_basp.errors import RankFailed
from megatron_basp.local_ranks import run_ranks


def _hit_by_a_signal(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    signal.pause()


def test_a_rank_hit_by_a_signal_says_where_it_was(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 ended with exit code -11(.|\n)*_hit_by_a_signal") as failed:
        run_ranks(_hit_by_a_signal, 2, tmp_path)
    assert "Segmentation fault" in str(failed.value)
