"""`megatron-basp plan` and Megatron's own parser: it reads a whole command line, and what it prints can be run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_basp.cli.main import main
from megatron_basp.errors import ConfigurationError
from megatron_basp.library import MODELS, named_model, names
from megatron_basp.model_spec import model_from_flags
from tests.end_to_end.training import Trainer

CLUSTER = ["--cluster", "h100-8"]
SIZES = "--context-parallel-size 8 --micro-batch-size 3 --seq-length 8192 --bf16".split()


@pytest.fixture
def plan(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command in this process, where Megatron is loaded; returns exit status, document and stderr."""

    def run(*words: str) -> tuple[int, Any, str]:
        capsys.readouterr()
        status = main(["plan", "--json", *words])
        out, err = capsys.readouterr()
        return status, json.loads(out) if status == 0 else out, err

    return run


def test_a_command_line_of_megatrons_is_planned_as_the_same_options_are(plan: Any) -> None:
    _, by_flags, _ = plan(*CLUSTER, "--model", "llama3.2-1b", "--ranks", "16", "--", *SIZES)
    words = "--ranks 16 --context-parallel-size 8 --micro-batch-size 3 --seq-length 8192 --model llama3.2-1b"
    _, by_options, _ = plan(*CLUSTER, *words.split())
    # Without tensor parallelism it does not matter, and Megatron has it off by default.
    assert by_flags["training"].pop("sequence_parallel") != by_options["training"].pop("sequence_parallel")
    assert by_flags == by_options and by_flags["training"]["data_parallel_size"] == 2


@pytest.mark.parametrize(
    "words",
    [
        "--ranks 8 --recompute-granularity full --data-parallel-sharding-strategy optim_grads_params",
        "--ranks 8 --recompute-granularity selective --data-parallel-sharding-strategy optim",
        "--ranks 64 --context-parallel-size 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        "--ranks 8 --precision fp8 --data-parallel-sharding-strategy optim_grads --basp-group-size 8",
        "--ranks 8 --precision fp32 --global-batch-size 12",
        "--ranks 8 --model qwen3-30b-a3b --expert-model-parallel-size 4 --recompute-granularity full "
        "--data-parallel-sharding-strategy optim_grads_params",
    ],
)
def test_the_printed_flags_ask_for_the_run_that_was_modelled(plan: Any, words: str) -> None:
    model = [] if "--model" in words else ["--model", "llama3.2-1b"]
    status, first, err = plan(*CLUSTER, *model, "--micro-batch-size", "2", "--seq-length", "8192", *words.split())
    assert status == 0, err
    ranks = words.split()[1]
    name = first["training"]["model"]
    status, again, err = plan("--model", name, "--ranks", ranks, "--", *first["choice"]["flags"].split())
    assert status == 0, err
    for found in (first, again):
        if found["training"]["tensor_model_parallel_size"] == 1:
            found["training"]["sequence_parallel"] = False
    assert again == first
    assert ("--moe-token-dispatcher-type alltoall" in first["choice"]["flags"]) == ("--model" in words)


@pytest.mark.parametrize("sharding", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_megatron_takes_both_commands(plan: Any, sharding: str, recompute: str, monkeypatch: Any) -> None:
    from megatron.training.arguments import validate_args

    from megatron_basp.megatron.command_line import CommandLine
    from megatron_basp.megatron.planned_flags import flags_of_model

    recomputed = [] if recompute == "none" else ["--recompute-granularity", recompute]
    words = "--ranks 8 --model llama3.2-1b --micro-batch-size 2 --seq-length 8192 --data-parallel-sharding-strategy"
    status, found, err = plan(*CLUSTER, *words.split(), sharding, *recomputed)
    assert status == 0, err
    # Megatron wants it set for context parallelism, and unset for FSDP.
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8" if "optim_grads" in sharding else "1")
    for flags in (found["choice"]["flags"], found["equivalent_flags"]):
        more = "--max-position-embeddings 8192 --train-iters 10 --lr 1e-3 --position-embedding-type rope"
        args = CommandLine([*flags_of_model(named_model("llama3.2-1b")), *more.split(), *flags.split()]).args
        args.rank, args.world_size = 0, 8
        validate_args(args)
        assert args.data_parallel_size * args.context_parallel_size == 8
        assert args.overlap_grad_reduce and args.global_batch_size == 2


def test_flags_stand_before_what_the_model_says_and_cluster_before_theirs(plan: Any) -> None:
    words = [*SIZES, "--num-layers", "4", "--basp-cluster", "a100-40gb-2x4"]
    status, found, err = plan("--model", "llama3.2-1b", "--", *words)
    assert status == 0, err
    assert found["training"]["cluster"] == "a100-40gb-2x4"
    _, whole, _ = plan("--model", "llama3.2-1b", "--", *SIZES, "--basp-cluster", "a100-40gb-2x4")
    assert (
        found["choice"]["across_node_bytes_per_rank_per_step"] * 4
        == (whole["choice"]["across_node_bytes_per_rank_per_step"])
    )
    _, other, _ = plan(*CLUSTER, "--model", "llama3.2-1b", "--", *words)
    assert other["training"]["cluster"] == "h100-8"


def test_a_stock_command_line_is_planned_as_it_is(plan: Any) -> None:
    status, found, err = plan(*CLUSTER, "--model", "llama3.2-1b", "--", *SIZES, "--cp-comm-type", "a2a")
    assert status == 0, err
    assert found["choice"]["waves"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--multi-latent-attention", "--multi-latent-attention (got True) is not modelled"),
        ("--window-size 128,0", "--window-size"),
        ("--mtp-num-layers 1", "--mtp-num-layers (got 1) is not modelled"),
        ("--recompute-granularity selective --recompute-modules mlp", "core_attn alone"),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 1", "--recompute-method"),
        (
            "--num-experts 8 --moe-layer-freq 2 --tokenizer-type NullTokenizer",
            "layers are modelled as all of one kind",
        ),
        ("--optimizer sgd", "only Adam's memory"),
        ("--num-experts 8 --expert-model-parallel-size 4", "--moe-token-dispatcher-type allgather is not modelled"),
        ("--yaml-cfg run.yaml", "--yaml-cfg (got run.yaml) is not modelled"),
        ("--help", "--help is none of them"),
        ("--basp-domain-size 4", "--basp-domain-size must be the 8 GPUs"),
        ("--fp16", "--fp16 (got True) is not supported"),
        ("--qk-clip", "--qk-clip"),
        ("--seq-length 1000", "S % (2·N)"),
        ("--no-such-flag", "--no-such-flag is none of them"),
    ],
)
def test_what_is_refused_in_training_or_not_modelled_is_named(plan: Any, words: str, said: str) -> None:
    status, out, err = plan(*CLUSTER, "--model", "llama3.2-1b", "--", *SIZES, *words.split())
    assert status == 2 and not out
    assert said in err and [line for line in err.splitlines() if not line.startswith("loading")] == [
        err.splitlines()[-1]
    ]


def test_without_a_model_the_flags_must_have_it(plan: Any) -> None:
    words = "--num-layers 4 --hidden-size 1024 --num-attention-heads 8".split()
    status, _, err = plan(*CLUSTER, "--", *SIZES, *words)
    assert status == 2 and "--vocab-size" in err
    status, found, err = plan(*CLUSTER, "--", *SIZES, *words, "--vocab-size", "1000")
    assert status == 0 and found["training"]["model"] == "the model of these flags", err


def test_a_cluster_is_needed(plan: Any) -> None:
    status, _, err = plan("--model", "llama3.2-1b", "--", *SIZES)
    assert status == 2 and "h100-8" in err


def test_every_name_that_is_not_modelled_is_an_argument_of_megatrons(trainer: Trainer) -> None:
    from megatron_basp.megatron.command_line import CommandLine
    from megatron_basp.megatron.planned_flags import NOT_MODELLED

    args = CommandLine([]).args
    assert not [name for name in NOT_MODELLED if not hasattr(args, name)]
    for name, (is_modelled, _) in NOT_MODELLED.items():
        assert is_modelled(getattr(args, name)), name


@pytest.mark.parametrize("name", names(MODELS))
def test_a_model_survives_megatrons_flags(trainer: Trainer, name: str) -> None:
    from megatron_basp.megatron.command_line import CommandLine
    from megatron_basp.megatron.planned_flags import flags_of_model

    model = named_model(name)
    try:
        assert model_from_flags(vars(CommandLine(flags_of_model(model)).args)) == model
    except ConfigurationError as error:
        pytest.fail(str(error))
