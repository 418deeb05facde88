"""A process in which `import apex` succeeds: training with Apex's fused parts, held to one rank.

    python -m tests.end_to_end.with_apex FOLDER

NVIDIA's Apex has no wheel and needs a compiler for CUDA. What stands in for it here has the names that Megatron 0.19
imports and computes the same with torch, so that Megatron takes the paths it takes with Apex. Each part that was used
leaves a file of its name in FOLDER/used.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

# Megatron's default, which the other tests turn off because it needs Apex.
FUSION = "--no-gradient-accumulation-fusion"


def install_apex(used: Path) -> None:
    """Put the modules in place that Megatron looks for; call before it is imported."""

    def wgrad_gemm_accum_fp32(total_input: Any, grad_output: Any, main_grad: Any) -> None:
        (used / "wgrad_gemm_accum_fp32").touch()
        main_grad.addmm_(grad_output.t(), total_input)

    class FusedLayerNormAffineFunction:
        @staticmethod
        def forward(x: Any, weight: Any, bias: Any, shape: Any, eps: float) -> Any:
            (used / "FusedLayerNormAffineFunction").touch()
            return F.layer_norm(x, shape, weight, bias, eps)

        apply = forward

    class FusedAdam(torch.optim.AdamW):
        def __init__(self, params: Any, adam_w_mode: bool = True, **arguments: Any) -> None:
            assert adam_w_mode
            (used / "FusedAdam").touch()
            super().__init__(params, **arguments)

    def multi_tensor_applier(op: Any, noop_flag: Any, tensor_lists: Any, *arguments: Any) -> Any:
        (used / "multi_tensor_applier").touch()
        return op(2048 * 32, noop_flag, tensor_lists, *arguments)

    def multi_tensor_l2norm(chunk_size: int, noop_flag: Any, tensor_lists: Any, per_tensor: bool) -> Any:
        (used / "multi_tensor_l2norm").touch()
        return torch.stack([x.norm() for x in tensor_lists[0]]).norm().reshape(1), None

    def multi_tensor_scale(chunk_size: int, noop_flag: Any, tensor_lists: Any, scale: float) -> None:
        (used / "multi_tensor_scale").touch()
        for source, target in zip(*tensor_lists, strict=True):
            target.copy_(source * scale)

    for name, contents in {
        "apex": {},
        "apex.normalization": {},
        "apex.normalization.fused_layer_norm": {"FusedLayerNormAffineFunction": FusedLayerNormAffineFunction},
        "apex.optimizers": {"FusedAdam": FusedAdam, "FusedSGD": torch.optim.SGD},
        "apex.multi_tensor_apply": {"multi_tensor_applier": multi_tensor_applier},
        "amp_C": {"multi_tensor_l2norm": multi_tensor_l2norm, "multi_tensor_scale": multi_tensor_scale},
        "fused_weight_gradient_mlp_cuda": {"wgrad_gemm_accum_fp32": wgrad_gemm_accum_fp32},
    }.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(contents)


def main(folder: Path) -> None:
    from tests.end_to_end import training
    from tests.end_to_end.conftest import make_trainer

    used = folder / "used"
    used.mkdir(parents=True)
    install_apex(used)
    trainer = make_trainer(folder)
    training.MODEL = training.MODEL.replace(FUSION, "")
    flags = f"{training.GQA} {training.ROPE} --normalization LayerNorm"
    run = trainer.planned(f"{flags} {training.batch(3)} {training.cp(4)}", ranks=4)
    training.assert_same_training(run, trainer.stock(f"{flags} {training.batch(3)}"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
