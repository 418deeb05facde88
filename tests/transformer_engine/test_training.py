"""Real `pretrain()` on Transformer Engine's layers, with torch for its kernels, held to one process."""

from __future__ import annotations

import pytest

from tests.end_to_end.training import GQA, ROPE, Trainer, assert_same_samples, assert_same_training, batch, cp

FLAGS = {
    "Llama": "",
    "Qwen3": "--qk-layernorm",
    "layer norm and biases": "--normalization LayerNorm --add-qkv-bias",
    "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "fused operations": "--use-transformer-engine-op-fuser",
    "activations of Transformer Engine": "--use-te-activation-func --no-bias-swiglu-fusion",
}


@pytest.mark.parametrize("name", FLAGS)
def test_training_on_transformer_engines_layers_is_that_of_one_process(trainer: Trainer, name: str) -> None:
    flags = f"{GQA} {ROPE} --transformer-impl transformer_engine {FLAGS[name]} {batch(3)}"
    run, reference = trainer.planned(f"{flags} {cp(4)}", ranks=4), trainer.stock(flags)
    assert_same_training(run, reference)
    assert_same_samples(run, reference)
