"""`scripts/simulate`: requests against what is worked out by hand, the verdict, the simulator on small cases."""

import functools
import json
import math
from dataclasses import replace

import pytest

from megatron_basp.exchange_cost import AttentionShape
from megatron_basp.training_spec import Parallelism
from scripts.simulate import __main__ as simulate
from scripts.simulate.cases import (
    SWEEP_RANKS,
    all_cases,
    bytes_to_a_peer,
    case,
    groups_of_gpus,
    many_heads,
    request_of,
    sweep_cases,
)
from scripts.simulate.report import as_json, write_report
from scripts.simulate.result import compare, difference
from tests.costs import CLUSTER, MODEL

PYTHON = "/usr/bin/python3"


@functools.cache
def has_simgrid():
    try:
        simulate.check_simgrid(PYTHON)
    except simulate.ConfigurationError:
        return False
    return True


@pytest.fixture
def simgrid():
    if not has_simgrid():
        pytest.skip("needs SimGrid for the system's Python: apt-get install python3-simgrid")


def small(**changes):
    """8 ranks on 2 nodes of 4, 3 sequences: 2 at K=4, then 1 at K=8."""
    return case("small", **{"on": CLUSTER, "model": MODEL, "ranks": 8, "rows": 3, "seq_length": 65536} | changes)


def answer(seconds=1.0, node_bytes=(0, 0)):
    return {"simgrid": "3.32.0", "waves": [{"seconds": seconds, "node_sent_bytes": list(node_bytes), "flows": 1}]}


def test_neighbours_are_tensor_parallel_ranks_then_context_parallel_ones_then_replicas():
    parallelism = Parallelism(tensor_model_parallel_size=2, context_parallel_size=4, data_parallel_size=2)
    assert groups_of_gpus(parallelism, 2) == [
        [0, 2], [4, 6], [1, 3], [5, 7],
        [8, 10], [12, 14], [9, 11], [13, 15],
    ]  # fmt: skip


def test_a_peer_gets_whole_heads_of_q_k_and_v_and_as_many_of_the_output():
    shape = AttentionShape(heads=8, kv_heads=4, query_head_size=6, value_head_size=5, element_bytes=2)
    assert bytes_to_a_peer(shape, 2, tokens=10) == [10 * 2 * (4 * 6 + 2 * 6 + 2 * 5), 10 * 2 * 4 * 5]
    # 8 ranks want a key-value head each, of 4.
    assert bytes_to_a_peer(shape, 8, tokens=10) == [10 * 2 * (6 + 6 + 5), 10 * 2 * 5]


def test_the_request_has_a_wave_for_each_k_with_the_rates_of_those_that_take_part():
    request = request_of(small())
    assert (request["nodes"], request["gpus_per_node"], request["flows"]) == (2, 4, "peer")
    inside, across = request["waves"]
    assert inside["groups"] == [[0, 1, 2, 3], [4, 5, 6, 7]] and across["groups"] == [list(range(8))]
    assert inside["within_bytes_per_second"] == across["within_bytes_per_second"] == [2e11] * 8
    assert across["across_bytes_per_second"] == 2 * 1e10 * 0.8
    assert across["across_latency_seconds"] == 5e-5
    assert inside["bytes_to_a_peer"] == [16384 * 2 * (2 + 1 + 1) * 64, 16384 * 2 * 2 * 64]


def test_a_gpus_rate_follows_from_how_many_of_its_group_share_its_node():
    """12 ranks, K=6, nodes of 4: ranks 0-3 and 4-5 of the first group, 6-7 and 8-11 of the other."""
    of_12 = replace(MODEL, heads=12, kv_heads=12)
    (wave,) = request_of(small(model=of_12, ranks=12, rows=2, seq_length=12288, group_size=6))["waves"]
    assert wave["within_bytes_per_second"] == [2e11] * 4 + [1e11] * 4 + [2e11] * 4
    assert wave["within_latency_seconds"] == [2e-5] * 4 + [1e-5] * 4 + [2e-5] * 4


def test_sequences_that_a_rank_has_alone_are_not_simulated():
    assert request_of(small(rows=8, seq_length=1024))["waves"] == []


def test_cases_go_from_16_to_512_ranks_and_have_distinct_names():
    cases = all_cases()
    assert len({one.name for one in cases}) == len(cases)
    for mode in ("Ulysses", "BASP"):
        assert (
            [one.plan.ranks for one in cases if one.sweep == mode] == list(SWEEP_RANKS) == [16, 32, 64, 128, 256, 512]
        )


def test_figures_more_than_5_percent_apart_do_not_agree():
    one = small(group_size=8)
    modelled = compare(one, answer())
    seconds, sent = modelled.modelled_seconds, modelled.modelled_node_bytes
    assert compare(one, answer(seconds / 1.04, [0, sent])).agrees
    assert not compare(one, answer(seconds / 1.06, [0, sent])).agrees
    assert not compare(one, answer(seconds / 0.94, [0, sent])).agrees
    assert not compare(one, answer(seconds, [0, sent * 1.06])).agrees
    assert not compare(one, answer(seconds, [0, 0])).agrees
    assert difference(1.0, 0.0) == math.inf and difference(0.0, 0.0) == 0.0


def test_the_step_takes_the_simulated_exchange_in_place_of_the_modelled_one():
    one = compare(small(group_size=8), answer(seconds=1.0))
    exchanges = 4 * 2  # layers, forward and backward
    assert one.simulated_step_seconds - one.step.step_seconds == pytest.approx(exchanges * (1 - one.modelled_seconds))


def test_a_report_keeps_modelled_and_simulated_apart(tmp_path):
    cases = sweep_cases(CLUSTER, many_heads(MODEL))
    comparisons = [compare(one, answer(0.5, [7e6, 8e6])) for one in cases]
    write_report(comparisons, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"table.md", "result.json", "step_time.png"}
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["cases"] == list(map(as_json, comparisons))
    assert result["cases"][0]["simulated"]["node_bytes"] == 8e6 and not result["cases"][0]["agrees"]
    assert "SimGrid 3.32.0" in result["versions"]
    header, _, first = (tmp_path / "table.md").read_text().splitlines()[2:5]
    assert [cell.strip() for cell in header.split("|")][5:7] == ["modelled ms", "simulated ms"]
    assert first.split("|")[6].strip() == "500.000"


def test_without_simgrid_the_command_names_the_package_and_exits_with_2(capsys, tmp_path):
    assert simulate.main(["--python", str(tmp_path / "python3"), "--output", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "apt-get install python3-simgrid" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("agrees", [True, False])
def test_a_case_that_is_apart_is_named_and_exits_with_1(agrees, capsys, tmp_path, monkeypatch):
    one = small(group_size=8, sweep="Ulysses")
    modelled = compare(one, answer())
    found = compare(one, answer(modelled.modelled_seconds, [modelled.modelled_node_bytes * (1 if agrees else 2)]))
    monkeypatch.setattr(simulate, "check_simgrid", lambda python: None)
    monkeypatch.setattr(simulate, "run", lambda python, cases: [found])
    assert simulate.main(["--output", str(tmp_path)]) == (0 if agrees else 1)
    assert ("small: modelled" in capsys.readouterr().err) is not agrees


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"group_size": 8},
        {"ranks": 4, "tensor_parallel": 2, "rows": 1},
        {"model": replace(MODEL, heads=12, kv_heads=12), "ranks": 6, "rows": 2, "replicas": 2, "seq_length": 12288},
    ],
    ids=["two waves", "Ulysses", "TP=2", "groups that straddle"],
)
def test_model_and_simulation_agree_on_small_cases(changes, simgrid):
    one = small(**changes)
    (found,) = simulate.run(PYTHON, [one])
    assert found.agrees, found.disagreement
    assert found.time_difference == pytest.approx(0, abs=0.001)
    assert found.simulated_node_bytes > 0


def test_gpus_of_a_node_share_its_link_and_replicas_on_it_too(simgrid):
    """4 GPUs send 3 MB each to every one of 4 others over 1 GB/s, in each direction."""
    wave = {
        "groups": [list(range(8))],
        "bytes_to_a_peer": [3_000_000],
        "within_bytes_per_second": [1e12] * 8,
        "within_latency_seconds": [1e-6] * 8,
        "across_bytes_per_second": 1e9,
        "across_latency_seconds": 1e-3,
    }
    pairs = {**wave, "groups": [[0, 4], [1, 5], [2, 6], [3, 7]]}
    request = {"nodes": 2, "gpus_per_node": 4, "flows": "peer", "waves": [wave, pairs]}
    all_of_them, one_peer_each = simulate.simulate(PYTHON, request)["waves"]
    assert all_of_them["seconds"] == pytest.approx(1e-3 + 16 * 3e-3)
    assert all_of_them["node_sent_bytes"] == [48_000_000, 48_000_000] and all_of_them["flows"] == 56
    assert one_peer_each["seconds"] == pytest.approx(1e-3 + 4 * 3e-3)


def test_a_flow_for_each_node_takes_as_long_as_one_for_each_peer(simgrid):
    request = request_of(small(group_size=8))
    by_peer = simulate.simulate(PYTHON, request)["waves"][0]
    by_node = simulate.simulate(PYTHON, {**request, "flows": "node"})["waves"][0]
    assert by_node["seconds"] == pytest.approx(by_peer["seconds"], rel=1e-6)
    assert by_node["node_sent_bytes"] == by_peer["node_sent_bytes"]
    assert by_node["flows"] < by_peer["flows"]
