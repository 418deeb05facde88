"""`megatron-basp bench train`: real `pretrain()` on nodes that a link joins, modes in turn."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_basp.emulated.network import Network, refusal
from megatron_basp.local_ranks import in_one_rank
from tests.end_to_end.training import Trainer
from tests.namespaces import namespaces, still_in_use

MODES = ["ulysses", "basp", "reflagged", "no_exchange"]
FLAGS = "--seq-length 128 --num-attention-heads 4 --num-query-groups 2 --kv-channels 16"
# What connections send beside what ranks do: acknowledgements of packets out of turn are longer than others.
NOTHING = 2000
# Gloo's own, of each message; two layers send q, k, v and the output, and the gradients of all four.
HEADERS, MESSAGES = 3 * 48, 2 * 8


def measured_in_a_box(trainer: Trainer, cluster: tuple[int, int], rows: int) -> list[dict[str, Any]]:
    """In a process of its own, in which the network stays."""
    from megatron_basp.emulated.box import Box
    from megatron_basp.emulated.document import Document
    from megatron_basp.emulated.runs import Conditions, plan_runs

    nodes, per_node = cluster
    folder = trainer.folder / f"box{nodes}x{per_node}"
    conditions = Conditions(
        nodes * per_node, per_node, rates=1, warm_up=1, measured=2, on_gpu=False, pause_seconds=None
    )

    def measure() -> list[dict[str, Any]]:
        network = None if refusal(nodes) else Network(nodes)
        words = [*FLAGS.split(), "--micro-batch-size", str(rows)]
        runs = plan_runs(words, conditions, lambda: trainer.data_flags)
        document = Document(folder / "train.json", runs, conditions, "measured" if network else "modelled", "cpu")
        with Box(conditions, network, runs.runs, folder) as box:
            assert list(box.start()) == [run.mode for run in runs.runs]
            for _, _, turn in box.steps([200]):
                document.add([turn] if turn else [])
        document.finish()
        return document.content["rows"]

    return in_one_rank(measure, folder)


@pytest.mark.end_to_end
def test_counters_ledger_and_formula_agree_and_losses_are_the_same(trainer: Trainer) -> None:
    """Two nodes of one rank: BASP gives each its own sequence, and plain flags are stock Megatron's."""
    rows = {row["mode"]: row for row in measured_in_a_box(trainer, (2, 1), rows=2)}
    assert list(rows) == MODES
    # q, k, v and output; a half of T = 128 tokens' heads, from each of two ranks, two layers, forward and backward.
    expected = 128 * (2 * 4 + 2 * 2) * 16 * 4 // 2 * 2 * 2 * 2
    assert rows["ulysses"]["formula_bytes_per_step"] == rows["ulysses"]["ledger_bytes_per_step"] == expected
    for mode in ("basp", "reflagged", "no_exchange"):
        assert rows[mode]["formula_bytes_per_step"] == rows[mode]["ledger_bytes_per_step"] == 0
    if rows["ulysses"]["bytes_by"] == "counters":
        counted = {mode: row["across_node_exchange_bytes_per_step"] for mode, row in rows.items()}
        assert abs(counted["ulysses"] - expected - HEADERS * MESSAGES * 2) <= NOTHING
        assert all(abs(counted[mode]) <= NOTHING for mode in MODES[1:])
    assert rows["basp"]["max_loss_difference"] <= 2e-6 and rows["reflagged"]["max_loss_difference"] <= 2e-6
    assert rows["ulysses"]["exchange_share"] > 0 == rows["basp"]["exchange_share"]
    assert rows["no_exchange"]["max_loss_difference"] is None


COMMAND = [sys.executable, "-m", "megatron_basp.cli.main", "bench", "train", "--json"]


def bench(folder: Path, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*COMMAND, *flags], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.end_to_end
@pytest.mark.parametrize("link", ["measured", "modelled"])
def test_three_sequences_on_two_nodes_of_two(tmp_path: Path, link: str) -> None:
    """Two stay inside of the nodes and one crosses; no plain flags do that."""
    if link == "measured" and (why := refusal(2)):
        pytest.skip(why)
    flags = ["--cluster", "2x2", "--link-mbit", "100,400", "--link", link, "--iterations", "1", "--compute", "sleep"]
    process = bench(tmp_path, *flags, "--pause-ms", "50", "--", *FLAGS.split(), "--micro-batch-size", "3")
    said, progress = process.communicate(timeout=600)
    assert process.returncode == 0, progress
    document = json.loads(said)
    rows = document["rows"]
    assert document == json.loads((tmp_path / "runs/bench/train.json").read_text()) and document["is_finished"]
    assert [(row["link_mbit"], row["mode"]) for row in rows] == [
        (mbit, mode) for mbit in (100, 400) for mode in ("ulysses", "basp", "no_exchange")
    ]
    assert list(document["left_out"]) == ["reflagged"]
    assert document["modes"]["basp"]["group_sizes"] == [2, 4]
    assert {(row["link"], row["compute"]) for row in rows} == {(link, "sleep")}
    for row in rows:
        formula = row["formula_bytes_per_step"]
        assert row["ledger_bytes_per_step"] == formula
        # Each of two ranks of a node has a message for each of the other's, if there is any.
        headers = HEADERS * MESSAGES * 8 if formula and link == "measured" else 0
        assert abs(row["across_node_exchange_bytes_per_step"] - formula - headers) <= NOTHING
        assert row["max_loss_difference"] is None or row["max_loss_difference"] <= 2e-6
    ulysses, basp = rows[0], rows[1]
    # One row of three crosses, as all of Ulysses' do.
    assert basp["formula_bytes_per_step"] * 3 == ulysses["formula_bytes_per_step"]
    with (tmp_path / "runs/bench/train.csv").open() as file:
        assert [row["mode"] for row in csv.DictReader(file)] == [row["mode"] for row in rows]
    assert (tmp_path / "runs/bench/train.png").exists()


@pytest.mark.slow
@pytest.mark.end_to_end
def test_under_torchrun_each_process_is_a_rank(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, *COMMAND[1:], "--iterations", "2", "--", *FLAGS.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["backend"], document["link"]) == ("gloo", "measured")
    assert document["cluster"] == {"nodes": 1, "ranks_per_node": 2}
    rows = {row["mode"]: row for row in document["rows"]}
    assert list(rows) == MODES and all(row["steps"] == 2 and row["link_mbit"] is None for row in rows.values())
    assert rows["ulysses"]["exchange_share"] > 0 == rows["basp"]["exchange_share"]
    assert rows["basp"]["max_loss_difference"] <= 2e-6 and rows["reflagged"]["max_loss_difference"] <= 2e-6
    assert (tmp_path / "runs/bench/train.png").exists()


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """One that has measured something and goes on."""
    flags = ["--cluster", "2x1", "--link-mbit", "200", "--iterations", "100000", "--warm-up", "0"]
    process = bench(tmp_path, *flags, "--", *FLAGS.split())
    file = tmp_path / "runs/bench/train.json"
    for _ in range(6000):
        if process.poll() is not None or file.exists():
            break
        time.sleep(0.1)
    assert process.poll() is None
    yield process
    process.kill()


@pytest.mark.slow
@pytest.mark.end_to_end
def test_an_interrupted_benchmark_keeps_what_it_measured(endless: subprocess.Popen[str], tmp_path: Path) -> None:
    endless.send_signal(signal.SIGINT)
    said, progress = endless.communicate(timeout=60)
    assert endless.returncode == 130 and said == ""
    kept = "what was measured until now: runs/bench/train.json"
    assert progress.rstrip().endswith(f"{kept}\nmegatron-basp: interrupted")
    document = json.loads((tmp_path / "runs/bench/train.json").read_text())
    assert [row["mode"] for row in document["rows"]] == MODES and not document["is_finished"]


@pytest.mark.slow
@pytest.mark.end_to_end
def test_namespaces_and_ranks_are_gone_when_the_command_is_killed(endless: subprocess.Popen[str]) -> None:
    if why := refusal(2):
        pytest.skip(why)
    children = Path(f"/proc/{endless.pid}/task/{endless.pid}/children").read_text().split()
    theirs = namespaces([endless.pid, *children])
    assert len(children) == 8 and len(theirs) == 3 and not theirs & namespaces(["self"])
    endless.kill()
    endless.wait()
    assert still_in_use(theirs) == set()
