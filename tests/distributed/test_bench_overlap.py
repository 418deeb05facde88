"""The benchmark of overlap: its link carries no more than it is told to, and its figures are what their names say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_basp.emulated.network import LEAST_BURST_BYTES

ROOT = Path(__file__).parents[2]
LENGTH, HEADS, HEAD_SIZE, MEGABITS = 256, 16, 32, 100


def bench(*arguments):
    command = [sys.executable, "-m", "scripts.bench.overlap", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def document():
    run = bench(
        *("--megabits-per-second", MEGABITS, "--seq-length", LENGTH, "--heads", HEADS, "--head-size", HEAD_SIZE),
        *("--repetitions", 1, "--json"),
    )
    if run.returncode == 2 and "this system refuses" in run.stderr:
        pytest.skip(run.stderr.strip())
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.slow
@pytest.mark.distributed
def test_what_crosses_takes_as_long_as_the_link_allows(document):
    # q, k, v and the output forward, their gradients backward; half of each goes to the other node, of 2 ranks.
    leaving = 2 * 4 * (LENGTH // 4) * HEADS * HEAD_SIZE * 4 / 2 * 2
    least = leaving / (MEGABITS * 1e6 / 8) * 1e3
    # Each collective may begin with a burst.
    bursts = 4 * LEAST_BURST_BYTES / (MEGABITS * 1e6 / 8) * 1e3
    assert all(row["exchange_milliseconds"] > least - bursts > 0 for row in document["rows"])


@pytest.mark.slow
@pytest.mark.distributed
def test_rows_are_of_one_and_three_sequences_in_one_two_and_four_parts(document):
    assert [(row["sequences"], row["chunks"]) for row in document["rows"]] == [
        (b, c) for b in (1, 3) for c in (1, 2, 4)
    ]
    assert document["compute"] == "sleep" and document["versions"].keys() == {"python", "torch", "linux"}


@pytest.mark.slow
@pytest.mark.distributed
def test_attention_takes_what_was_asked_for_and_the_hidden_share_follows_from_the_times(document):
    for row in document["rows"]:
        assert row["compute_milliseconds"] > 0
        exposed = row["together_milliseconds"] - row["compute_milliseconds"]
        assert row["hidden_share"] == pytest.approx(1 - exposed / row["exchange_milliseconds"])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--heads", 8), "got H=8 and Hkv=8: use --heads 16"),
        (("--heads", 48, "--kv-heads", 32), "got H=48 and Hkv=32"),
        (("--megabits-per-second", 0), "--megabits-per-second must be 1 or more, got 0"),
        (("--arithmetic", 1, -1), "--arithmetic must be above 0, got -1"),
        (("--seq-length", 30), "S % 4 must be 0"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(arguments, named):
    run = bench(*arguments)
    assert run.returncode == 2 and named in run.stderr
    assert run.stderr.count("\n") == 1 and not run.stdout
