"""Models of Transformer Engine's layers pass our walk, and their checkpoints are stock's: both load the other's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_basp.megatron.settings import Settings
from megatron_basp.plan import Limits
from tests.settings import small_settings

RANKS = 2
LLAMA = {"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, **LLAMA}
# Arguments of the configuration, of the layer specification.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "layer norm and biases": ({}, {}),
    "Llama": (LLAMA, {}),
    "Qwen2.5: biases of QKV": ({"add_qkv_bias": True, **LLAMA}, {}),
    "Qwen3: norms of queries and keys": ({"qk_layernorm": True, **LLAMA}, {"qk_layernorm": True}),
    "experts": (EXPERTS, {"num_experts": 4}),
    "experts in grouped GEMMs, a shared one": (
        {"moe_grouped_gemm": True, "moe_shared_expert_intermediate_size": 32, **EXPERTS},
        {"num_experts": 4, "moe_grouped_gemm": True},
    ),
    "fused operations": ({"use_transformer_engine_op_fuser": True, **LLAMA}, {"use_te_op_fuser": True}),
    "activations of Transformer Engine": (
        {"use_te_activation_func": True, "bias_activation_fusion": False, **LLAMA},
        {"use_te_activation_func": True},
    ),
    "FP8": ({"fp8": "hybrid", "fp8_recipe": "delayed", **LLAMA}, {}),
}


def settings() -> Settings:
    return small_settings(ranks=RANKS, limits=Limits(heads=4, kv_heads=2), seq_length=16, eval_micro_batch_size=2)


def build(config_arguments: dict[str, Any], spec_arguments: dict[str, Any]) -> Any:
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    gated = config_arguments.get("gated_linear_unit")
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        ffn_hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        context_parallel_size=RANKS,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        activation_func=torch.nn.functional.silu if gated else torch.nn.functional.gelu,
        **config_arguments,
    )
    layers = get_gpt_layer_with_transformer_engine_spec(**spec_arguments)
    return GPTModel(config, layers, vocab_size=64, max_sequence_length=16, position_embedding_type="rope")


def keys_of_sharded_state(model: Any) -> set[str]:
    from megatron.core import parallel_state

    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    return set(model.sharded_state_dict(metadata=metadata))


@pytest.fixture(scope="module")
def built(on_ranks: Callable[..., list[Any]]) -> dict[str, dict[str, Any]]:
    """For each model what differs between stock's and ours, and how loading went."""

    def on_rank(rank: int) -> dict[str, dict[str, Any]]:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        from megatron_basp.attention import BaspAttention
        from megatron_basp.megatron import hooks

        def built_models() -> dict[str, Any]:
            parallel_state.initialize_model_parallel(context_parallel_size=RANKS)
            model_parallel_cuda_manual_seed(1)
            return {name: build(*arguments) for name, arguments in MODELS.items()}

        stock = built_models()
        sharded = {name: keys_of_sharded_state(model) for name, model in stock.items()}
        parallel_state.destroy_model_parallel()
        hooks.install().set_settings(settings())
        ours = built_models()
        return {
            name: {
                "attention": isinstance(ours[name].decoder.layers[0].self_attention.core_attention, BaspAttention),
                "added": set(ours[name].state_dict()) - set(stock[name].state_dict()),
                "missing": set(stock[name].state_dict()) - set(ours[name].state_dict()),
                "sharded": keys_of_sharded_state(ours[name]) ^ sharded[name],
                "loaded by ours": list(map(list, ours[name].load_state_dict(stock[name].state_dict(), strict=True))),
                "loaded by stock": list(map(list, stock[name].load_state_dict(ours[name].state_dict(), strict=True))),
            }
            for name in MODELS
        }

    return on_ranks(on_rank, RANKS)[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformer_engines_layers_is_built_and_walked(built: Any, name: str) -> None:
    assert built[name]["attention"]


@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_have_no_key_that_stock_lacks_and_load_both_ways(built: Any, name: str) -> None:
    model = built[name]
    assert not model["added"] and not model["sharded"]
    assert model["missing"] == {"decoder.layers.0.self_attention.core_attention._extra_state"}
    assert model["loaded by ours"] == model["loaded by stock"] == [[], []]
