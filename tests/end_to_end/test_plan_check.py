"""The model's bytes are those that real training counts: `megatron-basp plan --check`."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_basp.cli.main import main
from megatron_basp.ledger_file import file_of_rank
from tests.end_to_end.test_ledger import train
from tests.end_to_end.training import GQA, ROPE, Trainer, batch, cp


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        (f"{batch(3)} {cp(4)} --basp-domain-size 2", 4),
        (f"{batch(2)} {cp(4)} --recompute-granularity selective --basp-group-size 4 --basp-domain-size 2", 4),
        (
            f"{batch(3, micro_batches=4)} {cp(2)} --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 "
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            8,
        ),
    ],
    ids=["two waves", "recompute of attention", "stages, tensors, full recompute"],
)
def test_predicted_bytes_are_those_counted(
    trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, ranks: int
) -> None:
    train(trainer, f"{GQA} {ROPE} {flags} --sequence-parallel-mode basp", ranks, tmp_path)
    ledger = tmp_path / "ledgers" / "ledger.jsonl"
    capsys.readouterr()
    assert main(["plan", "--check", str(ledger), "--cluster", "a100-40gb-2x4"]) == 0
    out = capsys.readouterr().out
    assert "bytes: equal" in out and f"of {ranks} of {ranks} ranks in each of 2 training steps" in out

    # A tampered one is not taken.
    file = file_of_rank(ledger, 1)
    lines = file.read_text().splitlines(keepends=True)
    index = next(i for i, line in enumerate(lines) if '"exchange"' in line and '"training"' in line)
    lines[index] = lines[index].replace('"count": ', '"count": 1')
    file.write_text("".join(lines))
    assert main(["plan", "--check", str(ledger)]) == 1
    assert "rank 1, step 1" in capsys.readouterr().out
