"""Bad input ends with one line and exit code 2, before any process group exists."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_basp.local_ranks import run_ranks
from tests.end_to_end.training import GQA, MODEL, ROPE, TRAINING, Trainer

FLAGS = f"{GQA} {ROPE} --sequence-parallel-mode basp --context-parallel-size 4 --micro-batch-size 2"

REFUSED = {
    "--micro-batch-size 0": "--micro-batch-size must be 1 or more, got 0",
    "--seq-length 60 --max-position-embeddings 60": "the next --seq-length that works is 64",
    "--num-attention-heads 6 --num-query-groups 6 --kv-channels 8 --micro-batch-size 1": "must be a multiple of 2",
    "--basp-group-size 3": "N % K must be 0, got N=4 ranks and K=3",
    "--rampup-batch-size 2 2 8": "--rampup-batch-size (got [2, 2, 8]) is not supported",
    "--hybrid-context-parallel": "--hybrid-context-parallel (got True) is not supported",
    "--cp-comm-type p2p": "--cp-comm-type (got p2p)",
    "--reset-attention-mask": "--reset-attention-mask (got True) is not supported",
    "--spec some.module layer_spec": "--spec (got ['some.module', 'layer_spec']) is not supported",
    "--hybrid-layer-pattern M*": "Mamba layers",
    "--cuda-graph-impl local": "CUDA graphs",
    "--te-rng-tracker": "--te-rng-tracker (got True) is not supported",
    "--use-torch-fsdp2": "--use-torch-fsdp2 (got True) is not supported",
    "--eval-micro-batch-size 3": "set --eval-global-batch-size to a multiple of 3",
    "--data-path nowhere/text": "nowhere/text.bin: missing; make it with: python scripts/data/prepare_text.py",
}


def refusal(argv: list[str], folder: Path) -> list[tuple[str, str, bool]]:
    """For each of four ranks: kind and message of the error that ended `pretrain`, and whether there was a group."""

    def start(rank: int) -> tuple[str, str, bool]:
        import torch.distributed as dist

        from megatron_basp.megatron import hooks, pretrain_gpt

        hooks.install()
        sys.argv = ["pretrain_gpt", *argv]
        try:
            pretrain_gpt.main()
        except Exception as error:
            return type(error).__name__, str(error), dist.is_initialized()
        return "", "", dist.is_initialized()

    return run_ranks(start, 4, folder)


@pytest.mark.parametrize("flags", REFUSED)
def test_bad_input_is_refused_in_one_line_on_every_rank_before_any_group(
    trainer: Trainer, tmp_path: Path, flags: str
) -> None:
    argv = [*MODEL.split(), *TRAINING.split(), *trainer.data_flags, *FLAGS.split(), *flags.split()]
    for kind, message, grouped in refusal(argv, tmp_path):
        assert kind == "ConfigurationError"
        assert REFUSED[flags] in message and "\n" not in message
        assert not grouped


def test_a_half_written_data_file_is_named_with_the_command_that_makes_it(trainer: Trainer, tmp_path: Path) -> None:
    prefix = Path(trainer.data_flags[trainer.data_flags.index("--data-path") + 1])
    whole = Path(f"{prefix}.bin").read_bytes()
    (tmp_path / "text.bin").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.idx").write_bytes(Path(f"{prefix}.idx").read_bytes())
    flags = f"{FLAGS} --data-path {tmp_path}/text"
    argv = [*MODEL.split(), *TRAINING.split(), *trainer.data_flags, *flags.split()]
    for kind, message, grouped in refusal(argv, tmp_path):
        assert kind == "ConfigurationError" and not grouped
        assert f"{tmp_path}/text.bin: half-written, {len(whole) // 2} bytes" in message
        assert "scripts/data/prepare_text.py" in message
