"""The benchmark of the exchange: its document, what it counts, that all implementations compute the same."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_basp.cli.main import main
from megatron_basp.copy_counter import CopyCounter
from megatron_basp.peers.implementations import installed
from megatron_basp.peers.kernels import PARTS
from megatron_basp.peers.measurement import Case
from megatron_basp.peers.shapes import Shape, shape_of
from tests.commands import assert_refused

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-5
SMALL = "llama3.2-1b:16x2"
KEYS = (
    *("implementation", "part", "K", "shape", "collectives", "bytes_sent", "bytes_copied", "milliseconds"),
    *("ratio_to_ours", "max_error"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run without peers: ours and the four collectives."""
    folder = tmp_path_factory.mktemp("bench")
    flags = ["--shapes", SMALL, "--ranks", "2", "--repetitions", "2", "--python", sys.executable]
    assert main(["bench", "attention", *flags, "--out", str(folder / "attention.json")]) == 0
    return folder


@pytest.fixture(scope="module")
def rows(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """By part and implementation."""
    document = json.loads((folder / "attention.json").read_text())
    return {(row["part"], row["implementation"]): row for row in document["rows"]}


def test_there_is_a_row_for_each_part_and_implementation(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    for part in ("exchange", "with_attention"):
        ours, theirs = rows[part, "megatron_basp"], rows[part, "transformer_engine"]
        assert set(KEYS) <= set(ours) and (ours["K"], ours["shape"]) == (2, SMALL)
        assert ours["ratio_to_ours"] == 1
        assert theirs["ratio_to_ours"] == theirs["milliseconds"] / ours["milliseconds"] > 0
        assert ours["milliseconds_low"] <= ours["milliseconds"] <= ours["milliseconds_high"]


def test_half_the_collectives_send_the_same_bytes(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    shape = shape_of(SMALL)
    tokens, away = shape.length * shape.rows // 2, 1 / 2
    # q and the output have H heads, k and v Hkv; all of them forward and backward; e = 4.
    sent = 2 * tokens * away * 4 * shape.head_size * (2 * shape.heads + 2 * shape.kv_heads)
    for (_, implementation), row in rows.items():
        assert row["collectives"] == (4 if implementation == "megatron_basp" else 8)
        assert row["operations"] == 8, "gloo does not coalesce"
        assert row["bytes_sent"] == sent


def test_four_collectives_copy_everything_twice_each_way(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    for part in ("exchange", "with_attention"):
        row = rows[part, "transformer_engine"]
        assert row["bytes_copied"] == 2 * row["bytes_sent"] * 2  # half of what is copied leaves the rank
        assert rows[part, "megatron_basp"]["bytes_copied"] == rows["exchange", "megatron_basp"]["bytes_copied"]


def test_all_agree_with_one_process(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    assert all(0 < row["max_error"] <= TOLERANCE for row in rows.values())


def test_a_table_and_a_plot_are_beside_the_document(folder: Path, rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    with (folder / "attention.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["bytes_copied"] for row in table] == [str(row["bytes_copied"]) for row in rows.values()]
    assert "<svg" in (folder / "attention.svg").read_text()


def measure(shape: Shape, names: tuple[str, ...]) -> tuple[list[dict[str, Any]], list[str]]:
    """On a rank: the rows, and which implementations refused the shape."""
    implementations = [one for one in installed() if one.name in names]
    cases = [Case(shape, part, implementations, repetitions=2) for part in PARTS]
    rows = [asdict(row) for case in cases for row in case.rows()]
    return rows, [one.implementation for case in cases for one in case.unsupported]


@pytest.mark.parametrize("name", ["transformer_engine", "deepspeed", "yunchang"])
def test_a_peer_computes_the_same_with_eight_collectives(on_ranks: Any, name: str) -> None:
    if name != "transformer_engine" and importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: make bench")
    shape = Shape("small", heads=8, kv_heads=4, head_size=4, length=16, rows=2)
    rows, refused = on_ranks(lambda rank: measure(shape, ("megatron_basp", name)), 4)[0]
    assert refused == [] and len(rows) == 4
    ours, theirs = rows[0], rows[1]
    assert (theirs["implementation"], theirs["collectives"]) == (name, 8)
    assert theirs["bytes_sent"] == ours["bytes_sent"]
    assert all(row["max_error"] <= TOLERANCE for row in rows)


def test_fewer_key_value_heads_than_ranks_are_for_ours_alone(on_ranks: Any) -> None:
    shape = Shape("small", heads=8, kv_heads=2, head_size=4, length=16, rows=2)
    rows, refused = on_ranks(lambda rank: measure(shape, ("megatron_basp", "transformer_engine")), 4)[0]
    assert [row["implementation"] for row in rows] == ["megatron_basp"] * 2
    assert refused == ["transformer_engine"] * 2
    assert all(row["max_error"] <= TOLERANCE for row in rows)


def test_unknown_collectives_are_not_overlooked(on_ranks: Any) -> None:
    import torch

    def gather(rank: int) -> str:
        with CopyCounter(), pytest.raises(NotImplementedError) as error:
            dist.all_reduce(torch.zeros(2))
        return str(error.value)

    assert on_ranks(gather, 2)[0].startswith("c10d::allreduce_")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shapes", "llama3.1-8b"], "a shape is MODEL:S or MODEL:SxB, .*got llama3.1-8b"),
        (["--shapes", "llama9:512"], "llama9"),
        (["--shapes", "llama3.1-8b:500", "--ranks", "8"], "S % K must be 0, got S=500 and K=8"),
        (["--shapes", "llama3.1-8b:504", "--ranks", "8"], "S % 2K must be 0, got S=504 of llama3.1-8b:504 and K=8"),
        (["--ranks", "3"], "H % K must be 0"),
        (["--ranks", "1"], "--ranks must be 2 or more, got 1"),
        (["--repetitions", "1"], "--repetitions must be 2 or more, got 1"),
        (["--python", "nowhere/python"], "nowhere/python cannot be run"),
        (["--out", "attention.csv"], "--out must end in .json, got attention.csv"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    flags: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert_refused(["bench", "attention", *flags], message, tmp_path, monkeypatch, capsys)


@pytest.mark.slow
def test_an_interrupted_benchmark_keeps_what_it_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_basp.cli.main", "bench", "attention"]
    shapes = [f"llama3.2-1b:{length}" for length in range(16, 800, 4)]  # more than it gets to
    flags = ["--shapes", *shapes, "--ranks", "2", "--repetitions", "9", "--python", sys.executable, "--json"]
    process = subprocess.Popen(
        [*command, *flags, "--out", "own.json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    file = tmp_path / "own.json"
    for _ in range(900):
        if process.poll() is not None or (file.exists() and json.loads(file.read_text())["rows"]):
            break
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    said, progress = process.communicate(timeout=60)
    assert process.returncode == 130 and said == ""
    assert progress.rstrip().endswith("what was measured until now: own.json\nmegatron-basp: interrupted")
    assert json.loads(file.read_text())["rows"]
