"""`megatron-basp verify`: what it proves, and that it fails where it should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_basp import all_to_all
from megatron_basp.cli.main import main
from megatron_basp.cli.verify_runs import DEFAULT_FLAGS, plan_runs
from megatron_basp.errors import ConfigurationError
from megatron_basp.transport import AllToAll
from tests.end_to_end.faults import gradient_of_one_kv_copy
from tests.end_to_end.training import Trainer

LLAMA = """
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
    --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope --swiglu
    --normalization RMSNorm --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --bf16
    --use-distributed-optimizer --save /nowhere --train-samples 1000000 --lr 3e-4 --lr-warmup-samples 1000
    --data-path /nowhere/data --tokenizer-type HuggingFaceTokenizer --tokenizer-model /nowhere
"""


@pytest.fixture
def verify(trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command in this process, where Megatron is loaded; returns its exit status and what it wrote."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(["verify", "--out", str(tmp_path / "out"), *arguments])
        return status, *capsys.readouterr()

    return run


def test_the_default_model_is_proved_equal(verify: Any, tmp_path: Path) -> None:
    status, out, _ = verify("--ranks", "2", "--json")
    document = json.loads(out)
    assert status == 0 and document["verdict"] == "equal"
    assert [(case["name"], case["group_sizes"]) for case in document["cases"]] == [("ulysses", [2]), ("basp", [1, 2])]
    for case in document["cases"]:
        assert case["samples_equal"] and case["beyond_rounding"] == []
        for kind, bound in document["bounds"].items():
            assert 0 <= case[kind] <= bound
    assert document["left_out"][0]["name"] == "re-flagged"
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == document


@pytest.mark.slow
def test_tensor_parallel_and_plain_flags_are_held_to_the_same_without_context_parallelism(verify: Any) -> None:
    flags = "--micro-batch-size 2 --context-parallel-size 2 --tensor-model-parallel-size 2 --use-distributed-optimizer"
    status, out, err = verify("--", *DEFAULT_FLAGS.split(), *flags.split())
    assert status == 0
    assert "verdict: equal" in out and "re-flagged" in out and "4 ranks on cpu" in out
    assert "--global-batch-size: 4 = B 2 · DP 1 · 2 micro-batches" in err


def test_a_broken_exchange_is_called_different(verify: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_to_all, "unpack_heads", all_to_all.unpack_heads)  # put back afterwards
    gradient_of_one_kv_copy()
    status, out, _ = verify("--ranks", "2", "--json", "--", *DEFAULT_FLAGS.split(), "--num-query-groups", "1")
    document = json.loads(out)
    assert status == 1 and document["verdict"] == "different"
    assert all("gradients differ" in " ".join(case["beyond_rounding"]) for case in document["cases"])


def test_a_run_that_fails_is_called_different(verify: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("no route to host")

    monkeypatch.setattr(AllToAll, "start", broken)
    status, out, _ = verify("--ranks", "2", "--json")
    document = json.loads(out)
    assert status == 1 and document["verdict"] == "different"
    assert all("no route to host" in case["beyond_rounding"][0] for case in document["cases"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--reset-attention-mask", "--reset-attention-mask (got True) is not supported"),
        ("--micro-batch-siz 2", "--micro-batch-siz is none of them"),
        ("--micro-batch-size two", "argument --micro-batch-size: invalid int value: 'two'"),
        ("--tensor-model-parallel-size 8 --micro-batch-size 4", "TP·PP·N must fit into 8 ranks"),
        ("--recompute-granularity full", "Megatron refuses the flags:"),
    ],
)
def test_flags_that_training_would_refuse_are_refused_in_one_line(verify: Any, flags: str, message: str) -> None:
    status, out, err = verify("--", *DEFAULT_FLAGS.split(), *flags.split())
    said = [line for line in err.splitlines() if line.startswith("megatron-basp: error:")]
    assert status == 2 and out == "" and len(said) == 1 and message in said[0]
    assert "Traceback" not in err


class Options:
    full_size = False

    def __init__(self, out: Path, flags: str, ranks: int | None = None) -> None:
        self.out, self.flags, self.ranks = out, flags.split(), ranks


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verify")


def test_what_decides_exactness_is_kept_and_every_change_is_said(trainer: Trainer, out: Path) -> None:
    flags = f"""
        {LLAMA} --micro-batch-size 8 --context-parallel-size 16 --num-experts 128 --moe-router-topk 8
        --moe-layer-freq ([0]*3+[1]*29) --qk-layernorm --kv-channels 128
    """
    runs = plan_runs(Options(out, flags), gpus=0)
    line = " ".join(runs.result.flags)
    for kept in ("--num-attention-heads 32", "--num-query-groups 8", "--moe-router-topk 8", "--qk-layernorm"):
        assert kept in line
    for gone in ("--bf16", "--save", "--train-samples", "/nowhere"):
        assert gone not in line
    assert {
        "--context-parallel-size: 16 → 8, to fit this machine",
        "--micro-batch-size: 8 → 4, in proportion to N",
        "--bf16: left out, numbers are compared in fp32",
        "--num-layers: 32 → 2",
        "--moe-layer-freq: [0, 1], a layer of each kind",
        "--num-experts: 128 → 16",
        "--kv-channels: 128 → 8",
    } <= set(runs.result.changes)
    assert (runs.reference.ranks, runs.result.ranks) == (1, 8)
    assert not {"--context-parallel-size", "--sequence-parallel-mode"} & set(runs.reference.flags)


def test_n_that_cannot_shrink_with_the_micro_batch_shrinks_alone(trainer: Trainer, out: Path) -> None:
    runs = plan_runs(Options(out, f"{LLAMA} --micro-batch-size 3 --context-parallel-size 16", ranks=4), gpus=0)
    assert "--micro-batch-size: stays 3, not in proportion to N" in runs.result.changes
    assert runs.result.ranks == 4


def test_the_reference_of_experts_has_their_parallelism(trainer: Trainer, out: Path) -> None:
    flags = f"{DEFAULT_FLAGS} --context-parallel-size 4 --num-experts 8 --expert-model-parallel-size 2"
    runs = plan_runs(Options(out, f"{flags} --moe-aux-loss-coeff 1e-2"), gpus=0)
    assert runs.reference.ranks == 2
    with pytest.raises(ConfigurationError, match="DP % EP must be 0"):
        plan_runs(Options(out, f"{flags} --moe-router-load-balancing-type global_aux_loss"), gpus=0)


def test_on_gpus_precision_stays_and_rounding_is_measured(trainer: Trainer, out: Path) -> None:
    runs = plan_runs(Options(out, f"{LLAMA} --micro-batch-size 4 --context-parallel-size 8"), gpus=8)
    assert "--bf16" in runs.result.flags and "local" not in runs.result.flags
    assert runs.yardstick is not None and runs.yardstick.flags[-2:] == ["--micro-batch-size", "1"]
    reflagged = runs.compared[-1]
    assert reflagged.name == "re-flagged" and reflagged.ranks == 8
    assert reflagged.flags[-6:] == "--context-parallel-size 2 --micro-batch-size 1 --cp-comm-type a2a".split()
