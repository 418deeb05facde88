"""FP8 in linear layers: Transformer Engine is asked for the same recipe, over the same ranks, for as many tokens.

A contract, not numbers: there is no FP8 without a GPU. What Megatron asks for is written down where Transformer Engine
enters its FP8 region, and the region is then left in full precision.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.training import GQA, ROPE, Trainer, batch, cp

RECIPES = {
    "delayed": "DelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}


def write_down_fp8(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Each rank forked from here on writes what it asked for: recipe, ranks of the amax group, tokens of the GEMMs."""
    import torch.distributed as dist
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from transformer_engine.pytorch import LayerNormLinear, quantization

    for name in ("_FP8_SUPPORT", "_MXFP8_SUPPORT", "_FP8_BLOCK_SCALING_SUPPORT"):  # a question to the GPU
        assert hasattr(quantization, name)
        monkeypatch.setattr(quantization, name, (True, ""))
    enter, forward = quantization.FP8GlobalStateManager.autocast_enter, LayerNormLinear.forward

    def write(*what: Any) -> None:
        with (folder / f"{dist.get_rank()}.jsonl").open("a") as file:
            file.write(json.dumps(what) + "\n")

    def autocast_enter(enabled: bool, fp8_recipe: Any, fp8_group: Any, **rest: Any) -> None:
        assert not (fp8_recipe.fp8_dpa or fp8_recipe.fp8_mha)
        kinds = [kind.__name__ for kind in type(fp8_recipe).__mro__]
        write("region", enabled, kinds, str(fp8_recipe), dist.get_process_group_ranks(fp8_group))
        enter(enabled=False, fp8_recipe=fp8_recipe, fp8_group=fp8_group, **rest)

    def recording_forward(self: Any, x: Any, *arguments: Any, **options: Any) -> Any:
        write("gemm", self.in_features, x.numel() // x.shape[-1])
        return forward(self, x, *arguments, **options)

    def no_attention(self: Any, query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
        """Something of the right shape: attention is no part of this, and stock's needs kernels for its exchange."""
        return (query + 0 * (key.mean() + value.mean())).flatten(2)

    monkeypatch.setattr(TEDotProductAttention, "forward", no_attention)
    monkeypatch.setattr(quantization.FP8GlobalStateManager, "autocast_enter", staticmethod(autocast_enter))
    monkeypatch.setattr(LayerNormLinear, "forward", recording_forward)


def written(folder: Path) -> list[list[Any]]:
    return [[json.loads(line) for line in (folder / f"{rank}.jsonl").read_text().splitlines()] for rank in range(4)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_amax_group_and_tokens_are_those_of_stock_context_parallelism(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recipe: str
) -> None:
    flags = (
        f"{GQA} {ROPE} --transformer-impl transformer_engine --fp8-format hybrid --fp8-recipe {recipe} "
        f"--train-iters 1 {batch(1, data_parallel=2)} {cp(2)}"
    )
    asked = {}
    for kind, run in {"stock": trainer.stock, "planned": trainer.planned}.items():
        folder = tmp_path / kind
        folder.mkdir()
        with monkeypatch.context() as patches:
            write_down_fp8(patches, folder)
            run(flags, 4)
        asked[kind] = written(folder)
    assert asked["planned"] == asked["stock"]
    for calls in asked["planned"]:
        regions = [rest for what, *rest in calls if what == "region"]
        assert regions
        for enabled, kinds, _, ranks in regions:
            assert enabled and RECIPES[recipe] in kinds and ranks == [0, 1, 2, 3]
        assert {tokens for what, _, tokens, *_ in calls if what == "gemm"} == {32}
