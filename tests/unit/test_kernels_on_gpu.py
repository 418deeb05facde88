"""The benchmark of the packing kernels, as far as a machine without a GPU can hold it."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "kernels_on_gpu.py"


@pytest.fixture
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_without_cuda_it_says_so_in_one_line(script, capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script["main"](["--json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        "kernels_on_gpu: error: no CUDA device is visible, and the share of copy bandwidth is that of a GPU\n"
    )


def test_rows_have_all_operations_of_each_group_size_and_the_share_of_a_copy_of_the_same_bytes(script, capsys) -> None:
    copied = []

    def seconds(work) -> float:
        done = work()
        if done is None:  # a kernel; a copy returns its target
            return 4e-6
        copied.append(2 * done.numel())
        return 3e-6

    rows = list(script["measure"]("small", (4, 2), 16, 8, "cpu", seconds))
    assert [row["K"] for row in rows] == [2] * 5 + [4] * 5  # 4 heads are not for 8 ranks
    assert [row["moved_bytes"] for row in rows] == copied
    # K=4 has each of 2 KV heads twice: 8 tokens · 16 · 2 bytes of 4 + 2 + 2 heads read, and of 4 + 4 + 4 written.
    assert rows[5]["moved_bytes"] == 8 * 16 * 2 * (8 + 12)
    assert [row["share_of_copy"] for row in rows] == pytest.approx([0.75] * 10)
    script["show"]("a device", 8, rows)
    assert capsys.readouterr().out.count("0.75") == 10


def test_the_kernels_models_are_in_the_library(script) -> None:
    for name in script["MODELS"]:
        script["named_model"](name)
