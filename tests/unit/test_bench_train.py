"""`megatron-basp bench train`: what it refuses, the formula it holds bytes to, and what its rows are made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_basp.all_to_all import ExchangeGroup
from megatron_basp.cli import bench_train_report
from megatron_basp.cli.bench_train import cluster_of, rates_of
from megatron_basp.emulated.results import Turn, exchanged_across_nodes, rows
from megatron_basp.exchange_cost import AttentionShape
from megatron_basp.ledger import Ledger
from megatron_basp.megatron.stand_ins import Pause, as_whole_sequences, attend_without_exchange
from megatron_basp.overlap import Piece
from megatron_basp.placement import aligned_blocks
from megatron_basp.plan import Limits, plan_batch
from megatron_basp.sdpa import CausalSDPA
from tests.commands import assert_refused

SOUND = ["--cluster", "2x4", "--link-mbit", "500"]
SHAPE = AttentionShape(heads=16, kv_heads=4, query_head_size=8, value_head_size=8, element_bytes=4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--link-mbit", "500"], "--cluster is missing: for example --cluster 2x4"),
        (["--cluster", "2x4"], "--link-mbit is missing"),
        (["--cluster", "8", "--link-mbit", "500"], "--cluster must be NxR, .*got 8"),
        (["--cluster", "1x4", "--link-mbit", "500"], "N nodes from 2 to 250 .*got 1x4"),
        (["--cluster", "2x0", "--link-mbit", "500"], "got 2x0"),
        (["--cluster", "2x4", "--link-mbit", "0"], "--link-mbit must be whole numbers from 1 to 999999, .*got 0"),
        (["--cluster", "2x4", "--link-mbit", "100,fast"], "got 100,fast"),
        ([*SOUND, "--iterations", "0"], "--iterations must be 1 or more, got 0"),
        ([*SOUND, "--warm-up", "-1"], "--warm-up must be 0 or more, got -1"),
        ([*SOUND, "--out", "train.csv"], "--out must end in .json, got train.csv"),
        ([*SOUND, "--pause-ms", "100"], "--pause-ms is the pause of --compute sleep"),
        ([*SOUND, "--compute", "sleep", "--pause-ms", "0"], "--pause-ms must be a positive number, got 0"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    flags: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert_refused(["bench", "train", *flags], message, tmp_path, monkeypatch, capsys)


def test_a_box_is_refused_under_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert_refused(["bench", "train", *SOUND], "--cluster is of a cluster in a box", tmp_path, monkeypatch, capsys)
    sleep = ["bench", "train", "--compute", "sleep"]
    assert_refused(sleep, "--compute sleep is for a cluster in a box", tmp_path, monkeypatch, capsys)


def test_clusters_and_rates_are_read() -> None:
    assert cluster_of("2x4") == (2, 4)
    assert rates_of("100,200,100") == [100, 200]


@pytest.mark.parametrize(("sequences", "ranks", "per_node"), [(1, 8, 4), (2, 8, 4), (2, 8, 2), (3, 8, 4), (4, 16, 4)])
def test_the_formula_is_what_pairs_of_ranks_in_different_nodes_send_each_other(
    sequences: int, ranks: int, per_node: int
) -> None:
    length = 64
    plan = plan_batch((length,) * sequences, ranks, Limits(SHAPE.heads, SHAPE.kv_heads, domain_size=per_node))
    expected = 0
    for wave in plan.waves:
        size = wave.group_size
        for block in aligned_blocks(range(ranks), size):
            for sender in block:
                for receiver in block:
                    if sender // per_node != receiver // per_node:
                        tokens = len(wave.rows) * length // ranks
                        kv_heads = max(SHAPE.kv_heads, size)
                        heads = SHAPE.heads // size * 2 + kv_heads // size * 2
                        expected += 2 * tokens * heads * 8 * 4  # forward and backward, d = 8, 4 bytes
    assert exchanged_across_nodes(plan, per_node, SHAPE) == expected
    assert (expected == 0) == all(per_node % wave.group_size == 0 for wave in plan.waves)


def turns() -> list[Turn]:
    """Three steps of each mode at one rate."""
    found = []
    for step, late in enumerate([0.0, 0.5, 0.1]):
        ulysses = Turn("ulysses", 500, 3.0 + late, 1.0, 7.0 - step, 80, 100, 0.5, 0.1)
        basp = replace(ulysses, mode="basp", seconds=2.1 + late, exchange_seconds=0.1, ledger_bytes=0)
        basp = replace(basp, loss=7.0 - step + step * 1e-6, across_node_bytes=20)
        bound = replace(basp, mode="no_exchange", seconds=2.0 + late, exchange_seconds=0.0, loss=1.0)
        found += [ulysses, basp, bound]
    return found


def test_rows_are_of_medians_and_the_exchange_is_what_the_bound_does_not_send() -> None:
    formula = {"ulysses": 80, "basp": 0, "no_exchange": 0}
    ulysses, basp, bound = rows(turns(), formula, {"link": "measured", "compute": "real"})
    assert [row["mode"] for row in (ulysses, basp, bound)] == ["ulysses", "basp", "no_exchange"]
    assert ulysses["step_milliseconds"] == pytest.approx(3100)
    assert (ulysses["step_milliseconds_low"], ulysses["step_milliseconds_high"]) == pytest.approx((3050, 3300))
    assert ulysses["exchange_share"] == pytest.approx(1 / 3.1)
    assert ulysses["across_node_exchange_bytes_per_step"] == 80 and ulysses["bytes_by"] == "counters"
    assert basp["across_node_exchange_bytes_per_step"] == 0 and basp["across_node_bytes_per_step"] == 20
    assert basp["speedup_over_ulysses"] == pytest.approx(3.1 / 2.2)
    assert basp["share_of_bound"] == pytest.approx(2.1 / 2.2)
    assert basp["max_loss_difference"] == pytest.approx(2e-6)
    assert ulysses["max_loss_difference"] == 0 and bound["max_loss_difference"] is None
    assert bound["share_of_bound"] == 1 and bound["speedup_over_ulysses"] == pytest.approx(3.1 / 2.1)
    assert basp["others_cpu_seconds"] == 0.1 and basp["peak_memory_bytes"] is None
    assert all(row["link"] == "measured" and row["steps"] == 3 for row in (ulysses, basp, bound))


def test_without_counters_bytes_are_the_ledgers_and_what_nobody_measured_is_null() -> None:
    modelled = [replace(turn, across_node_bytes=None) for turn in turns()]
    modelled += [replace(modelled[0], mode="reflagged", exchange_seconds=None, ledger_bytes=None)]
    found = rows(modelled, dict.fromkeys(("ulysses", "basp", "reflagged", "no_exchange"), 80), {"link": "modelled"})
    by_mode = {row["mode"]: row for row in found}
    assert by_mode["ulysses"]["across_node_exchange_bytes_per_step"] == 80
    assert {row["bytes_by"] for row in found} == {"ledger"} and {row["link"] for row in found} == {"modelled"}
    assert by_mode["reflagged"]["exchange_share"] is None
    assert by_mode["reflagged"]["across_node_exchange_bytes_per_step"] is None


def test_rates_are_compared_each_with_its_own_baseline() -> None:
    slow = [replace(turn, link_mbit=100, seconds=turn.seconds * 2) for turn in turns() if turn.mode == "ulysses"]
    found = rows([*turns(), *slow], dict.fromkeys(("ulysses", "basp", "no_exchange"), 0), {})
    assert [(row["link_mbit"], row["mode"]) for row in found][-1] == (100, "ulysses") and len(found) == 4
    assert found[-1]["speedup_over_ulysses"] == 1 and found[-1]["share_of_bound"] is None


def document(link: str) -> dict:
    formula = {"ulysses": 80, "basp": 0, "no_exchange": 0}
    return {
        "cluster": {"nodes": 2, "ranks_per_node": 4},
        "link": link,
        "compute": "sleep",
        "pause_milliseconds": 2000.0,
        "modes": {mode: {"what": f"how {mode} ran", "group_sizes": [4]} for mode in formula},
        "left_out": {"reflagged": "no plain flags do the same"},
        "steps": 3,
        "rows": rows(turns(), formula, {"link": link, "compute": "sleep"}),
    }


def test_the_terminal_says_what_was_modelled_and_the_plot_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench_train_report.show(document("modelled"), tmp_path / "train.json")
    said = capsys.readouterr().out
    assert "link modelled; attention is a pause of 2000 ms a step" in said
    assert "32.3%" in said and "1.409" in said and "reflagged is left out: no plain flags do the same" in said
    bench_train_report.draw(document("modelled"), tmp_path / "train.png")
    assert (tmp_path / "train.png").read_bytes().startswith(b"\x89PNG")


def test_without_exchange_a_rank_attends_with_its_share_of_heads_to_whole_sequences() -> None:
    """N = 4, B = 3: two rows at K = 2, then one at K = 4; fewer key-value heads than ranks."""
    length, heads, kv_heads, size = 16, 8, 2, 4
    plan = plan_batch((length,) * 3, 4, Limits(heads, kv_heads))
    assert plan.group_sizes == (2, 4)
    seen, pieces, start = [], [], 0
    for index, share in enumerate(plan.shares(1)):
        where = ExchangeGroup(None, None, share.tokens_per_rank, Ledger(), 1, index)  # type: ignore[arg-type]
        pieces.append(Piece(share, slice(start, start + share.tokens), where, 0, 1))
        start += share.tokens

    class Watched(CausalSDPA):
        def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen.append((tuple(query.shape), tuple(key.shape)))
            return super().forward(query, key, value)

    kernel = Watched(0.5)
    tensors = [torch.randn(plan.tokens, n, size, requires_grad=True) for n in (heads, kv_heads, kv_heads)]
    output = attend_without_exchange(pieces, [kernel] * 2, *tensors, None)
    assert output.shape == (plan.tokens, heads, size)
    assert seen == [((length, 1, 4, size), (length, 1, 1, size)), ((length, 1, 2, size), (length, 1, 1, size))]
    output.sum().backward()
    assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in tensors)


def test_reading_a_stream_as_whole_sequences_moves_nothing() -> None:
    x = torch.randn(6, 8, 4)
    read = as_whole_sequences(x, 4)
    assert read.shape == (24, 2, 4) and read.data_ptr() == x.data_ptr()
    assert as_whole_sequences(x[:, :2], 4).shape == (24, 1, 4)


def test_a_pause_is_in_proportion_to_its_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    query, key = torch.randn(4, 3, 2, 8, requires_grad=True), torch.randn(4, 3, 1, 8, requires_grad=True)
    output = Pause(1e-3)(query, key, key)
    assert output.shape == (4, 3, 16)
    output.sum().backward()
    assert len(slept) == 2 and sum(slept) == pytest.approx(1e-3 * 4 * 4 * 3 * 2)
    assert query.grad is not None and torch.equal(key.grad, torch.full_like(key, 4))
