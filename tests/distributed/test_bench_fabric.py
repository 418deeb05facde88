"""The benchmark on real gloo ranks: what it measures, what it writes, how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_basp.cli.main import main
from megatron_basp.cluster import load_cluster
from megatron_basp.errors import ConfigurationError
from megatron_basp.fabric import Measurement, Settings
from megatron_basp.hardware_file import Measured
from tests.commands import assert_refused
from tests.unit.commented_yaml import without_a_comment

pytestmark = pytest.mark.distributed

NOWHERE = Path("/nonexistent")
SMALL = ["--ranks", "4", "--sizes-mb", "1", "4", "16", "--repetitions", "3"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bench") / "here.yaml"
    assert main(["bench", "fabric", *SMALL, "--out", str(out)]) == 0
    return out


def test_the_file_that_it_writes_is_a_cluster(file: Path) -> None:
    cluster = load_cluster(str(file), NOWHERE)
    assert (cluster.nodes, cluster.gpus_per_node, cluster.across) == (1, 4, None)
    assert set(cluster.within.latency_seconds) == set(cluster.within.bytes_per_second) == {2, 4}
    assert without_a_comment(file.read_text()) == []
    assert "Measured by `megatron-basp bench fabric`" in file.read_text()


def test_the_times_are_kept_beside_it(file: Path) -> None:
    measured = json.loads(file.with_suffix(".json").read_text())
    # Of a tensor of 4 MB three quarters leave a rank of four, and half leaves one of two.
    assert [sent for sent, _ in measured["within"]["4"]] == [0.75e6, 3e6, 12e6]
    assert [sent for sent, _ in measured["within"]["2"]] == [0.5e6, 2e6, 8e6]
    assert all(seconds > 0 for _, seconds in measured["within"]["2"])


def test_json_is_one_document_and_the_rest_is_taken_from_the_library(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "like.yaml"
    flags = ["--ranks", "2", "--sizes-mb", "1", "16", "--repetitions", "2", "--like", "a100-80gb-8", "--json"]
    assert main(["bench", "fabric", *flags, "--out", str(out)]) == 0
    said = capfd.readouterr()
    document = json.loads(said.out)
    assert document["file"] == str(out) and document["cluster"]["across_nodes"]["nics_per_node"] == 1
    assert document["fits"]["within"]["2"]["bytes_per_second"] > 0 and document["measured"]["hosts"] == 1
    assert "all-to-all of 2 ranks" in said.err and "done" in said.err
    assert "nics_per_node: 1  # taken from a100-80gb-8" in out.read_text()


def pretend_hosts(rank: int, sizes: tuple[int, ...], hosts: tuple[str, ...]) -> Measured | str:
    """Measure as if each rank were on that host."""
    socket.gethostname = lambda: hosts[rank]
    try:
        measurement = Measurement(Settings(sizes=sizes, repetitions=1, on_gpu=False))
    except ConfigurationError as error:
        return str(error)
    for _, step in measurement.steps():
        step()
    assert dist.get_rank() == rank
    return measurement.result


def test_several_hosts_measure_what_leaves_one(on_ranks: Any) -> None:
    # Their ranks in turns, as some launchers place them.
    results = on_ranks(lambda rank: pretend_hosts(rank, (40_000, 400_000), ("a", "b", "a", "b")), 4)
    for measured in results:
        assert (measured.hosts, measured.ranks_per_host) == (2, 2)
        assert [sent for sent, _ in measured.within[2]] == [20_000, 200_000]
        # Both ranks of a host send half of their tensors to the other host.
        assert [left for left, _ in measured.across[2]] == [40_000, 400_000]
        assert measured.ring_across_bytes_per_second > 0
    # The slowest rank's time is everyone's.
    assert len({json.dumps(measured.across) for measured in results}) == 1


def test_hosts_that_differ_are_refused_on_every_rank(on_ranks: Any) -> None:
    said = on_ranks(lambda rank: pretend_hosts(rank, (1000, 2000), ("a", "a", "a", "b")), 4)
    assert all("every host needs the same number of ranks, 2 or more, got [3, 1]" in line for line in said)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ranks", "1"], "--ranks must be 2 or more, got 1"),
        (["--sizes-mb", "4"], "--sizes-mb must be two different sizes or more, .*got 4.0"),
        (["--sizes-mb", "4", "4"], "--sizes-mb must be two different sizes or more"),
        (["--sizes-mb", "0", "4"], "from 0.001 to 65536, got 0.0 4.0"),
        (["--sizes-mb", "nan", "4"], "from 0.001 to 65536, got nan 4.0"),
        (["--repetitions", "0"], "--repetitions must be 1 or more, got 0"),
        (["--peak-teraflops", "-1"], "--peak-teraflops must be a positive number, got -1.0"),
        (["--nics-per-node", "0"], "--nics-per-node must be a positive number, got 0"),
        (["--nics-per-node", "2"], "one host cannot measure"),
        (["--like", "v100"], "there is no cluster v100: use one of a100-40gb-2x4"),
        (["--out", "fabric.txt"], "--out must end in .yaml, got fabric.txt"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    flags: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert_refused(["bench", "fabric", *flags], message, tmp_path, monkeypatch, capsys)


def test_an_interrupted_benchmark_keeps_what_it_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_basp.cli.main", "bench", "fabric", "--ranks", "2", "--sizes-mb", "0.1"]
    process = subprocess.Popen(
        [*command, "1", "--repetitions", "60", "--out", "own.yaml"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    times_file = tmp_path / "own.json"
    for _ in range(600):
        if times_file.exists() or process.poll() is not None:
            break
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.rstrip().endswith("what was measured until now: own.json\nmegatron-basp: interrupted")
    assert len(json.loads(times_file.read_text())["within"]["2"]) == 2
    assert not (tmp_path / "own.yaml").exists()


@pytest.mark.slow
def test_torchrun_s_processes_are_the_ranks(tmp_path: Path) -> None:
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "2"]
    flags = ["bench", "fabric", "--sizes-mb", "1", "16", "--repetitions", "2", "--out", "own.yaml"]
    done = subprocess.run(
        [*torchrun, "-m", "megatron_basp.cli.main", *flags], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert load_cluster(str(tmp_path / "own.yaml"), NOWHERE).gpus_per_node == 2
    assert done.stdout.count("Written: own.yaml") == 1
