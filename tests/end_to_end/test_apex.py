"""Apex present and absent: Megatron's fused parts are taken where they are there, and missed in Megatron's words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_basp.errors import RankFailed
from tests.end_to_end import training
from tests.end_to_end.training import GQA, ROPE, Trainer, batch, cp
from tests.end_to_end.with_apex import FUSION


@pytest.mark.slow
@pytest.mark.supports("Training", "Apex: gradient accumulation fusion, norms, optimizer (by a stand-in)")
def test_with_apex_its_fused_parts_are_used_and_training_is_the_same(tmp_path: Path) -> None:
    """In a process of its own: Megatron decides when it is imported."""
    command = [sys.executable, "-m", "tests.end_to_end.with_apex", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert {file.name for file in (tmp_path / "used").iterdir()} == {
        "FusedAdam",
        "FusedLayerNormAffineFunction",
        "multi_tensor_applier",
        "multi_tensor_l2norm",
        "multi_tensor_scale",
        "wgrad_gemm_accum_fp32",
    }


def test_without_apex_gradient_accumulation_fusion_fails_in_megatrons_words(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "MODEL", training.MODEL.replace(FUSION, ""))
    with pytest.raises(RankFailed, match="fused_weight_gradient_mlp_cuda module is not found"):
        trainer.planned(f"{GQA} {ROPE} {batch(2)} {cp(2)}", ranks=2)
