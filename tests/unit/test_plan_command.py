"""`megatron-basp plan`: what it answers, says outright, draws and refuses."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_basp.candidates import USABLE_SHARE_OF_MEMORY, compare_plans
from megatron_basp.cli.main import main
from megatron_basp.cli.plan_picture import crossing_groups, draw, places
from megatron_basp.cli.plan_result import PlanResult, shares
from megatron_basp.cluster import WithinNode
from megatron_basp.plan import Limits, plan_batch
from megatron_basp.verdict import verdict
from tests.costs import CLUSTER, MODEL, training

PAPER = """
    --ranks 8 --seq-length 16384 --model llama3.2-3b --cluster a100-40gb-2x4
    --data-parallel-sharding-strategy optim_grads_params
""".split()
STAGES = [*PAPER, "--micro-batch-size=2", "--pipeline-model-parallel-size=2", "--ranks=4", "--model=llama3.1-70b"]


@pytest.fixture
def plan(capsys):
    """Runs the command; returns its exit status, stdout and stderr."""

    def run(*words):
        capsys.readouterr()
        status = main(["plan", *map(str, words)])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def document(plan):
    def run(*words):
        status, out, err = plan("--json", *words)
        assert status == 0, err
        return json.loads(out)

    return run


def test_two_sequences_stay_in_their_nodes_and_plain_flags_do_as_well(document):
    found = document(*PAPER, "--micro-batch-size", 2)
    choice = found["choice"]
    assert choice["waves"] == [{"rows": 2, "group_size": 4}]
    assert choice["across_node_bytes_per_rank_per_step"] == 0
    assert 1.1 < choice["speedup_over_ulysses"] < 1.4
    assert choice["speedup_over_plain"] == pytest.approx(1)
    assert found["equivalent_flags"].startswith("--context-parallel-size 4 --micro-batch-size 1 --cp-comm-type a2a ")
    assert found["plain"]["flags"] == found["equivalent_flags"]
    assert found["verdict"].startswith("Plain flags do as well here")
    assert "fit in a node of 4" in found["reason"]
    assert [one["group_size"] for one in found["refused"]] == [1, 2]
    ulysses = next(one for one in found["candidates"] if one["waves"] == [{"rows": 2, "group_size": 8}])
    assert ulysses["speedup_over_ulysses"] == 1
    assert ulysses["step_seconds"] / choice["step_seconds"] == pytest.approx(choice["speedup_over_ulysses"])


def test_three_sequences_have_no_equal_plain_flags_and_bytes_are_those_of_the_formula(document):
    found = document(*PAPER, "--micro-batch-size", 3)
    assert found["choice"]["waves"] == [{"rows": 2, "group_size": 4}, {"rows": 1, "group_size": 8}]
    assert found["equivalent_flags"] is None and "different numbers of ranks" in found["why_no_equivalent"]
    assert found["verdict"].startswith("BASP is faster")
    # Llama 3.2 3B: 28 layers, H=24, Hkv=8, d=128, 2 bytes. Of the row at K=8 a rank holds 2048 tokens.
    token = 2 * 128 * (24 + 8 + 8 + 24)
    assert found["choice"]["across_node_bytes_per_rank_per_step"] == 28 * 2 * 2048 * token * 4 / 8
    chosen = next(one for one in found["candidates"] if one["waves"] == found["choice"]["waves"])
    assert chosen["exchange_bytes_per_rank_per_step"] == 28 * 2 * token * (4096 * 3 / 4 + 2048 * 7 / 8)
    assert chosen["tokens_per_rank"] == 3 * 16384 // 8
    assert chosen["fits_memory"] and chosen["memory_bytes_per_rank"] < 40e9


def test_accumulation_with_plain_flags_is_called_faster_where_it_is(document, plan):
    words = [*PAPER, "--micro-batch-size", 3, "--global-batch-size", 12, "--model", "llama3.2-1b"]
    found = document(*words)
    assert found["choice"]["speedup_over_plain"] < 0.99
    assert found["plain"]["step_seconds"] < found["choice"]["step_seconds"]
    assert found["verdict"].startswith("Plain flags are faster here")
    assert found["plain"]["flags"].startswith("--context-parallel-size 2 --micro-batch-size 1 ")  # as the README says
    assert "Plain flags are faster here" in plan(*words)[1]


def test_the_table_shows_every_candidate_its_reason_the_flags_and_that_it_is_modelled(plan):
    _, out, err = plan(*PAPER, "--micro-batch-size", 3)
    assert out.startswith("modelled, not measured: llama3.2-3b on a100-40gb-2x4") and not err
    assert "2 at K=4, 1 at K=8" in out and "3 at K=8" in out and "plain: 3 at CP=8" in out
    assert "no wave at K=1" in out and "no wave at K=2" in out
    assert re.search(r"BASP: --sequence-parallel-mode basp --context-parallel-size 8 .* --bf16\n", out)
    assert "equal plain flags: none" in out and "fastest plain flags: --context-parallel-size 8" in out
    assert "straddle nodes of 4" in out and "BASP is faster" in out
    _, out, _ = plan(*PAPER, "--micro-batch-size", 2)
    assert "Plain flags do as well here" in out and "fastest plain flags" not in out


def test_the_readme_shows_what_the_command_prints(plan):
    text = (Path(__file__).parents[2] / "README.md").read_text()
    example = re.search(r"\$ megatron-basp plan (.*?)\n( .*?)```", text, re.DOTALL)
    words = re.sub(r"\\\n", " ", text[example.start(1) :]).split("\n")[0].split()
    printed = {" ".join(line.split()) for line in plan(*words)[1].splitlines()}
    shown = text[example.start(1) : example.end(2)].split("params\n")[1].splitlines()
    assert len(shown) == 5 and {" ".join(line.split()) for line in shown} <= printed


def test_ranks_alone_are_n_and_beside_context_parallel_size_all_devices(document):
    common = ["--model", "llama3.2-1b", "--cluster", "h100-8", "--seq-length", 4096, "--micro-batch-size", 2]
    alone = document("--ranks", 8, "--tensor-model-parallel-size", 2, *common)["training"]
    assert (alone["context_parallel_size"], alone["data_parallel_size"]) == (8, 1)
    sizes = ["--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2]
    found = document("--ranks", 64, "--context-parallel-size", 4, *sizes, *common)
    assert (found["training"]["context_parallel_size"], found["training"]["data_parallel_size"]) == (4, 4)
    assert found["training"]["global_batch_size"] == 8
    flags = found["choice"]["flags"]
    assert "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel" in flags
    for name in ("--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--global-batch-size 8"):
        assert name in found["equivalent_flags"]


def test_search_keeps_the_global_batch_and_shows_the_best_of_both(document, plan):
    words = [*PAPER, "--global-batch-size", 24, "--search"]
    found = document(*words)
    assert found["training"]["global_batch_size"] == 24 and found["search"]["tried"] > 20
    assert "--global-batch-size 24" in found["choice"]["flags"] and "--global-batch-size 24" in found["plain"]["flags"]
    one_by_one = [
        document(*PAPER, "--micro-batch-size", size, "--global-batch-size", 24)["choice"]["step_seconds"]
        for size in (1, 2, 3)
    ]
    assert found["choice"]["step_seconds"] <= min(one_by_one) * (1 + 1e-9)
    _, out, err = plan(*words)
    assert "the best of" in out and "plain: " in out and not err


def test_a_forced_group_size_is_the_choice_and_in_the_flags(document):
    found = document(*PAPER, "--micro-batch-size", 2, "--basp-group-size", 8)
    assert found["choice"]["waves"] == [{"rows": 2, "group_size": 8}]
    assert found["choice"]["speedup_over_ulysses"] == 1
    assert "--basp-group-size 8" in found["choice"]["flags"]


def test_where_ulysses_is_impossible_there_is_a_reason_instead_of_a_speed_up(document, plan, tmp_path):
    (tmp_path / "m.yaml").write_text("num-layers: 4\nhidden-size: 768\nnum-attention-heads: 12\nvocab-size: 1000\n")
    words = ["--ranks", 8, "--micro-batch-size", 2, "--seq-length", 4096, "--cluster", "h100-8"]
    words += ["--model", tmp_path / "m.yaml"]
    found = document(*words)
    assert found["choice"]["speedup_over_ulysses"] is None
    assert "H=12" in found["why_no_ulysses"]
    assert "no Ulysses to compare with: K=8" in plan(*words)[1]


def test_fewer_key_value_heads_than_ranks_are_said_to_be_within_reach_of_other_plain_flags(document):
    words = [*PAPER, "--micro-batch-size", 2]
    words[words.index("llama3.2-3b")] = "qwen2.5-3b"
    found = document(*words)
    assert found["choice"]["waves"] == [{"rows": 2, "group_size": 4}]
    assert found["equivalent_flags"] is None and "Hkv = 2" in found["why_no_equivalent"]
    assert "p2p" in found["verdict"] and "may do as well" in found["verdict"]


def test_a_plan_that_the_run_would_not_take_by_itself_gets_its_group_size_in_the_flags():
    """K = 4 is the fastest here, and copies the one key-value head 4 times; the memory is for 2 copies."""
    slow_pairs = WithinNode(latency_seconds={2: 1.0, 4: 1e-5}, bytes_per_second={2: 1e9, 4: 2e11})
    cluster = replace(CLUSTER, within=slow_pairs)
    run = training(cluster, replace(MODEL, kv_heads=1), micro_batch_size=4)
    every = {one.plan.group_sizes: one.cost.memory.total_bytes for one in compare_plans(run).candidates}
    middle = (every[2,] + every[4,]) / 2 / USABLE_SHARE_OF_MEMORY
    tight = replace(run, cluster=replace(cluster, memory_bytes=middle))
    for limited, sizes, flag in ((run, (4,), ""), (tight, (2,), "--basp-group-size 2")):
        result = PlanResult(limited, compare_plans(limited), "model", "round", None)
        assert result.comparison.chosen.plan.group_sizes == sizes
        assert ("--basp-group-size" in result.flags) == bool(flag) and flag in result.flags


@pytest.mark.parametrize("sizes", [{}, {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}])
def test_the_parts_of_a_step_add_up_to_it(sizes):
    run = training(global_batch_size=8, recompute="full", sharding="optim", **sizes)
    cost = compare_plans(run).chosen.cost
    parts = shares(run, cost)
    assert sum(parts.values()) == pytest.approx(1) and min(parts.values()) >= 0 and parts["recompute"] > 0


def test_the_verdict_does_not_call_a_difference_that_the_model_cannot_resolve():
    found = compare_plans(training(model=replace(MODEL, kv_heads=8), micro_batch_size=3))
    assert found.equivalent is None and found.plain is not None

    def said(share):
        cost = replace(found.plain.cost, step_seconds=found.chosen.cost.step_seconds * share)
        return verdict(replace(found, plain=replace(found.plain, cost=cost)))

    assert said(1.02).startswith("BASP is faster")
    assert said(1.005).startswith("Plain flags do as well") and said(0.995).startswith("Plain flags do as well")
    assert said(0.98).startswith("Plain flags are faster")
    assert verdict(replace(found, plain=None)).startswith("No plain flags")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--micro-batch-size", "2"], "--cluster"),
        ([*PAPER], "--micro-batch-size is missing"),
        ([*PAPER, "--micro-batch-size", "0"], "--micro-batch-size must be 1 or more, got 0"),
        ([*PAPER, "--micro-batch-size", "-3"], "got -3"),
        ([*PAPER, "--micro-batch-size", "2", "--ranks", "1"], "N = 2"),
        ([*PAPER, "--micro-batch-size", "2", "--ranks", "7"], "S % (2·N) to be 0"),
        ([*PAPER, "--micro-batch-size", "2", "--ranks", "16"], "at most the 8 GPUs"),
        ([*PAPER, "--micro-batch-size", "2", "--seq-length", "16380"], "16384"),
        ([*PAPER, "--micro-batch-size", "2", "--seq-length", "-16"], "S % (2·N) to be 0"),
        ([*PAPER, "--micro-batch-size", "2", "--global-batch-size", "3"], "use a multiple of 2"),
        ([*PAPER, "--micro-batch-size", "2", "--context-parallel-size", "3"], "TP·PP·CP"),
        ([*PAPER, "--micro-batch-size", "2", "--context-parallel-size", "0"], "N = 2 context-parallel ranks, got 0"),
        ([*PAPER, "--search", "--global-batch-size", "1", "--context-parallel-size", "4"], "use a multiple of 2"),
        ([*PAPER, "--search", "--global-batch-size", "25", "--context-parallel-size", "4"], "use a multiple of 2\n"),
        ([*PAPER, "--micro-batch-size", "2", "--tensor-model-parallel-size", "0"], "--tensor-model-parallel-size"),
        ([*PAPER, "--micro-batch-size", "2", "--basp-group-size", "3"], "N % K must be 0"),
        ([*PAPER, "--micro-batch-size", "2", "--model", "llama9"], "there is no model llama9"),
        ([*PAPER, "--micro-batch-size", "2", "--cluster", "z80"], "bench fabric"),
        ([*PAPER, "--micro-batch-size", "2", "--data-parallel-sharding-strategy", "zero9"], "optim_grads_params"),
        (STAGES, "no pipeline stages"),
        ([*STAGES, "--data-parallel-sharding-strategy=optim"], "no sharding or recompute makes it fit"),
        ([*PAPER, "--search"], "--micro-batch-size is missing"),
        ([*PAPER, "--micro-batch-size", "2", "--plot", "plan.doc"], ".svg"),
        ([*PAPER, "--micro-batch-size", "2", "--plot", "/nowhere/plan.svg"], "/nowhere/plan.svg"),
        ([*PAPER, "--micro-batch-size", "2", "--model", "llama3.1-8b"], "it would fit with --recompute-granularity"),
        ([*PAPER, "--micro-batch-size", "2", "--precision", "fp8"], "no peak for fp8"),
        ([*PAPER, "--micro-batch-size", "2", "--", "--num-layers", "2"], "give it behind --"),
    ],
)
def test_bad_input_is_one_line(plan, words, said):
    status, out, err = plan(*words)
    assert status == 2 and not out
    assert said in err and err.startswith("megatron-basp: error: ") and err.count("\n") == 1


def test_a_model_without_a_needed_key_and_a_cluster_with_a_zero_rate_are_named(plan, tmp_path):
    (tmp_path / "m.yaml").write_text("num-layers: 4\nnum-attention-heads: 8\nvocab-size: 1000\n")
    status, _, err = plan(*PAPER, "--micro-batch-size", 2, "--model", tmp_path / "m.yaml")
    assert status == 2 and "hidden-size" in err and err.count("\n") == 1
    (tmp_path / "c.yaml").write_text("gpus_per_node: 4\nmemory_gigabytes: 0\n")
    status, _, err = plan(*PAPER, "--micro-batch-size", 2, "--cluster", tmp_path / "c.yaml")
    assert status == 2 and err.count("\n") == 1 and "c" in err


def test_planning_imports_neither_torch_nor_megatron():
    words = ["plan", *PAPER, "--micro-batch-size", "3", "--search", "--json"]
    code = (
        "import sys; from megatron_basp.cli.main import main\n"
        f"assert main({words}) == 0\n"
        "loaded = [name for name in sys.modules if name.split('.')[0] in ('torch', 'megatron', 'matplotlib')]\n"
        "assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_picture_names_every_sequence_and_node(plan, tmp_path):
    status, _, err = plan(*PAPER, "--micro-batch-size", 3, "--plot", tmp_path / "plan.svg")
    assert status == 0, err
    text = (tmp_path / "plan.svg").read_text()
    assert "modelled, not measured" in text
    assert text.count("sequence 0<") == 1 and text.count("sequence 1<") == 1
    assert text.count("sequence 2<") == 2  # a part of it in each node
    assert text.count("node 0<") == 2 and text.count("node 1<") == 2
    assert "every group stays inside a node" in text and "the group straddles nodes" in text
    plan(*PAPER, "--micro-batch-size", 3, "--plot", tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == text
    plan(*PAPER, "--micro-batch-size", 3, "--plot", tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_groups_that_cross_nodes_are_found_from_the_placement_of_ranks():
    run = training(context_parallel_size=6, data_parallel_size=2, seq_length=1536)
    plan = plan_batch((1536,) * 2, 6, Limits(6, 6, group_size=3))
    wave = [plan.shares(rank)[0] for rank in range(6)]
    first, second = places(run)  # ranks 0 to 5, and 6 to 11, in nodes of 4
    assert crossing_groups(wave, first) == {1} and crossing_groups(wave, second) == {0}
    assert second == [(1, 2), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3)]
    # 2 tensor-parallel GPUs are one rank here.
    (where,) = places(training(tensor_model_parallel_size=2))
    assert where == [(node, cell) for node in range(4) for cell in range(2)]


@pytest.mark.parametrize("sizes", [{"context_parallel_size": 2}, {"tensor_model_parallel_size": 8}])
def test_ranks_fewer_or_wider_than_a_node_can_be_drawn(tmp_path, sizes):
    run = training(model=replace(MODEL, heads=64, kv_heads=64), cluster=CLUSTER, **sizes)
    draw(run, compare_plans(run).chosen.plan, "title", tmp_path / "plan.svg")
    assert "sequence" in (tmp_path / "plan.svg").read_text()


def test_letters_fit_into_the_cells_of_a_wide_node(tmp_path):
    run = training(cluster=replace(CLUSTER, gpus_per_node=72))
    draw(run, compare_plans(run).chosen.plan, "title", tmp_path / "plan.svg")
    (points,) = re.findall(r'<svg[^>]* width="([0-9.]+)pt"', (tmp_path / "plan.svg").read_text())
    assert float(points) / 72 / 72 > 0.4  # inches a cell
