"""Shapes of models: published sizes come out, and what is missing is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_basp.errors import ConfigurationError
from megatron_basp.model_spec import ModelSpec, load_model, model_from_flags, model_from_hugging_face

MODELS = Path(__file__).parents[2] / "configs" / "models"
# Billions of parameters as their makers publish them, to the digits that they give.
PUBLISHED = {
    "llama3.2-1b": 1.24,
    "llama3.2-3b": 3.21,
    "llama3.1-8b": 8.03,
    "llama3.1-70b": 70.6,
    "qwen1.5-1.8b": 1.84,
    "qwen2.5-3b": 3.09,
    "qwen3-8b": 8.2,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
}
HUGGING_FACE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}


def test_every_model_file_is_of_a_model_whose_size_is_published() -> None:
    assert sorted(file.stem for file in MODELS.glob("*.yaml")) == sorted(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_file_gives_the_published_number_of_parameters(name: str) -> None:
    assert load_model(name, MODELS).parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=5e-3)


def test_a_token_of_a_mixture_meets_the_published_part_of_it() -> None:
    model = load_model("qwen3-30b-a3b", MODELS)
    active = model.layers * (model.attention_parameters + model.active_mlp_parameters) + 2 * model.embedding_parameters
    assert active / 1e9 == pytest.approx(3.3, rel=2e-2)


def test_a_hugging_face_file_gives_the_same_model_as_ours(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HUGGING_FACE))
    assert load_model(str(tmp_path / "config.json"), MODELS) == load_model("qwen3-30b-a3b", MODELS)


def test_what_is_left_out_is_what_megatron_sets() -> None:
    flags = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100, "num_query_groups": 2}
    assert model_from_flags(flags) == ModelSpec(2, 64, 256, 4, 4, 16, 100, gated=False, tied=True)
    assert model_from_flags({**flags, "swiglu": True}).ffn == 128
    assert model_from_flags({**flags, "group-query-attention": True}).kv_heads == 2
    experts = model_from_flags({**flags, "num_experts": 4})
    assert (experts.experts, experts.experts_per_token, experts.expert_ffn) == (4, 2, 256)


@pytest.mark.parametrize("name", ["num-layers", "hidden-size", "num-attention-heads", "vocab-size"])
def test_a_missing_key_is_named(name: str) -> None:
    flags = {"num-layers": 2, "hidden-size": 64, "num-attention-heads": 4, "vocab-size": 100}
    flags.pop(name)
    with pytest.raises(ConfigurationError, match=f"the model has no {name}"):
        model_from_flags(flags)


@pytest.mark.parametrize("value", ["8", 1.5, True, float("inf"), -1, [], {}])
@pytest.mark.parametrize("name", ["num-layers", "num-attention-heads", "num-experts", "moe-router-topk", "vocab-size"])
def test_a_size_that_is_no_whole_number_is_named(name: str, value: object) -> None:
    flags = {"num-layers": 2, "hidden-size": 64, "num-attention-heads": 4, "vocab-size": 100, "num-experts": 4}
    with pytest.raises(ConfigurationError, match=f"the model's {name} must be a whole number"):
        model_from_flags({**flags, name: value})


def test_a_window_that_is_not_in_use_is_none() -> None:
    config = {**HUGGING_FACE, "sliding_window": 4096, "use_sliding_window": False, "mlp_only_layers": []}
    assert model_from_hugging_face(config) == model_from_hugging_face(HUGGING_FACE)


def test_a_switch_that_is_neither_on_nor_off_is_named() -> None:
    flags = {"num-layers": 2, "hidden-size": 64, "num-attention-heads": 4, "vocab-size": 100}
    with pytest.raises(ConfigurationError, match="the model's swiglu must be true or false, got 'no'"):
        model_from_flags({**flags, "swiglu": "no"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlp_only_layers": [0]}, "mlp_only_layers or decoder_sparse_step is not modelled"),
        ({"decoder_sparse_step": 2}, "mlp_only_layers or decoder_sparse_step is not modelled"),
        ({"sliding_window": 4096, "use_sliding_window": True}, r"sliding_window \(got 4096\) is not modelled"),
        ({"model_type": "mistral", "sliding_window": 4096}, r"sliding_window \(got 4096\) is not modelled"),
        ({"num_attention_heads": 0}, "a model needs heads of 1 or more, got 0"),
        ({"hidden_size": "2048"}, "the model's hidden_size must be a whole number"),
        ({"tie_word_embeddings": "no"}, "the model's tie_word_embeddings must be true or false"),
        ({"model_type": "mamba2"}, "model_type mamba2 is not known"),
        ({"hidden_size": None}, "the config.json of this qwen3_moe model has no hidden_size"),
        ({"num_key_value_heads": 5}, "H % Hkv must be 0, got H=32, Hkv=5"),
        ({"num_hidden_layers": 0}, "a model needs layers of 1 or more, got 0"),
        ({"num_experts_per_tok": 129}, "128 experts need 1 to 128 experts per token"),
    ],
)
def test_impossible_models_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        model_from_hugging_face({**HUGGING_FACE, **change})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nothing", None, "there is no model nothing: use one of llama3.1-70b, llama3.1-8b"),
        ("broken.json", "{", "broken.json cannot be read"),
        ("broken.yaml", "a: [", "broken.yaml is not YAML"),
        ("list.yaml", "- 1", "list.yaml is no mapping"),
        ("mla.yaml", "multi-latent-attention: true", "--multi-latent-attention .got True. is not modelled"),
        ("mixed.yaml", "moe-layer-freq: 2", "--moe-layer-freq .got 2. is not modelled"),
        ("numbers.yaml", "1: 2", "the model has no hidden-size"),
    ],
)
def test_a_file_that_is_no_model_is_refused_in_one_line(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
        name = str(tmp_path / name)
    with pytest.raises(ConfigurationError, match=message) as caught:
        load_model(name, MODELS)
    assert "\n" not in str(caught.value)
