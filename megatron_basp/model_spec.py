"""The shape of a decoder-only transformer, as far as it decides what a training step costs. Pure.

From our YAML under `configs/models/`, from Megatron's flags, or from a Hugging Face `config.json` on disk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from megatron_basp.errors import ConfigurationError


@dataclass(frozen=True)
class ModelSpec:
    """Sizes by Megatron's names; heads and experts of the whole model, not of a tensor-parallel rank.

    layers: num-layers. hidden: hidden-size. ffn: ffn-hidden-size of dense layers. heads: num-attention-heads, H.
    kv_heads: num-query-groups, Hkv. head_size: kv-channels, d. vocabulary: vocab-size.
    gated: whether the MLP has a gate (swiglu), hence three matrices.
    tied: whether the output layer shares the embedding's matrix.
    experts, experts_per_token, expert_ffn, shared_expert_ffn: of a mixture of experts; 0 in a dense model.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    gated: bool = True
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_expert_ffn: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "head_size", "vocabulary"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"a model needs {name} of 1 or more, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ConfigurationError(
                f"H % Hkv must be 0, got H={self.heads}, Hkv={self.kv_heads}: use a number of KV heads that divides "
                f"{self.heads}"
            )
        if self.experts and not (0 < self.experts_per_token <= self.experts and self.expert_ffn > 0):
            raise ConfigurationError(
                f"{self.experts} experts need 1 to {self.experts} experts per token and an FFN size, got "
                f"{self.experts_per_token} and {self.expert_ffn}: set --moe-router-topk and --moe-ffn-hidden-size"
            )

    @property
    def attention_parameters(self) -> int:
        """Of one layer: query, key and value projections, and the output's."""
        return self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """Of one layer; in a mixture, of all its experts, its shared expert and its router."""
        if not self.experts:
            return self._matrices(self.ffn)
        return self.expert_parameters + self._matrices(self.shared_expert_ffn) + self.hidden * self.experts

    @property
    def expert_parameters(self) -> int:
        """Of one layer: all that expert-parallel ranks divide among them."""
        return self.experts * self._matrices(self.expert_ffn)

    @property
    def active_mlp_parameters(self) -> int:
        """Of one layer: what one token is multiplied with."""
        if not self.experts:
            return self.mlp_parameters
        return (
            self.experts_per_token * self._matrices(self.expert_ffn)
            + self._matrices(self.shared_expert_ffn)
            + self.hidden * self.experts
        )

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding, or of the output layer."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All matrices; norms and biases, less than a thousandth, are left out."""
        tables = self.embedding_parameters * (1 if self.tied else 2)
        return self.layers * (self.attention_parameters + self.mlp_parameters) + tables

    def _matrices(self, ffn: int) -> int:
        return self.hidden * ffn * (3 if self.gated else 2)


# Of Megatron's flags, those of layers that cost something else.
_NOT_MODELLED = ("multi-latent-attention", "attention-output-gate", "mtp-num-layers", "window-size", "moe-latent-size")


def model_from_flags(flags: Mapping[str, Any]) -> ModelSpec:
    """From Megatron's flags without their dashes (`num-layers` or `num_layers`), as in our YAML files.

    Raises:
        ConfigurationError: names the key that is missing, whose value is not of its kind, or that is not modelled.
    """
    flags = {str(name).replace("_", "-"): value for name, value in flags.items() if value is not None}
    for name in _NOT_MODELLED:
        if flags.get(name):
            _refuse(f"--{name} (got {flags[name]})", "layers of that kind are not modelled")
    frequency = flags.get("moe-layer-freq", 1)
    if any(one != 1 for one in (frequency if isinstance(frequency, list) else [frequency])):
        _refuse(f"--moe-layer-freq (got {frequency})", "layers are modelled as all of one kind")

    def need(name: str) -> int:
        if name not in flags:
            raise ConfigurationError(f"the model has no {name}: give --{name}, or a file that has it")
        return _whole(flags, name, 0)

    hidden, heads = need("hidden-size"), need("num-attention-heads")
    gated = _switch(flags, "swiglu")
    has_experts = _whole(flags, "num-experts", 0) > 0
    # As Megatron sets them where they are left out (`validate_args` in `training/arguments.py`).
    ffn = _whole(flags, "ffn-hidden-size", int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden)
    return ModelSpec(
        layers=need("num-layers"),
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=_whole(flags, "num-query-groups", heads) if _switch(flags, "group-query-attention") else heads,
        head_size=_whole(flags, "kv-channels", hidden // max(1, heads)),
        vocabulary=need("vocab-size"),
        gated=gated,
        tied=not _switch(flags, "untie-embeddings-and-output-weights"),
        experts=_whole(flags, "num-experts", 0),
        experts_per_token=_whole(flags, "moe-router-topk", 2) if has_experts else 0,
        expert_ffn=_whole(flags, "moe-ffn-hidden-size", ffn) if has_experts else 0,
        shared_expert_ffn=_whole(flags, "moe-shared-expert-intermediate-size", 0),
    )


def _refuse(what: str, why: str) -> NoReturn:
    raise ConfigurationError(f"{what} is not modelled: {why}; leave it out to plan")


def _whole(content: Mapping[str, Any], name: str, otherwise: int) -> int:
    """A size; `otherwise` where there is none, or null."""
    value = content.get(name)
    if value is None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigurationError(f"the model's {name} must be a whole number, 0 or more, got {value!r}")
    return value


def _switch(content: Mapping[str, Any], name: str) -> bool:
    value = content.get(name)
    if value not in (None, True, False):
        raise ConfigurationError(f"the model's {name} must be true or false, got {value!r}")
    return bool(value)


def model_from_hugging_face(config: Mapping[str, Any]) -> ModelSpec:
    """From a Hugging Face `config.json` of the Llama, Mistral, Qwen2 and Qwen3 families, experts included.

    Raises:
        ConfigurationError: another family, a key that is missing, or a value that is not of its kind.
    """
    families = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
    family = config.get("model_type")
    if family not in families:
        raise ConfigurationError(
            f"model_type {family} is not known, only {', '.join(families)}: give Megatron's flags"
        )

    def need(name: str) -> int:
        if config.get(name) is None:
            raise ConfigurationError(f"the config.json of this {family} model has no {name}: is it the model's own?")
        return _whole(config, name, 0)

    if config.get("sliding_window") and config.get("use_sliding_window", family in ("mistral", "mixtral")):
        _refuse(f"sliding_window (got {config['sliding_window']})", "layers of that kind are not modelled")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        _refuse("mlp_only_layers or decoder_sparse_step", "layers are modelled as all of one kind")
    experts = _whole(config, "num_experts", 0) or _whole(config, "num_local_experts", 0)
    heads = need("num_attention_heads")
    return ModelSpec(
        layers=need("num_hidden_layers"),
        hidden=need("hidden_size"),
        ffn=need("intermediate_size"),
        heads=heads,
        kv_heads=_whole(config, "num_key_value_heads", heads),
        head_size=_whole(config, "head_dim", need("hidden_size") // max(1, heads)),
        vocabulary=need("vocab_size"),
        tied=_switch(config, "tie_word_embeddings"),
        experts=experts,
        experts_per_token=need("num_experts_per_tok") if experts else 0,
        expert_ffn=_whole(config, "moe_intermediate_size", need("intermediate_size")) if experts else 0,
    )


def load_model(name_or_file: str, folder: Path) -> ModelSpec:
    """A model of `configs/models/` by its stem, or from a file: our YAML, or a Hugging Face `config.json`.

    Raises:
        ConfigurationError: there is no such model (lists those there are), or the file is not one.
    """
    file = Path(name_or_file)
    if file.suffix not in (".yaml", ".yml", ".json"):
        file = folder / f"{name_or_file}.yaml"
    if not file.is_file():
        known = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
        raise ConfigurationError(f"there is no model {name_or_file}: use one of {known}, or a .yaml or .json file")
    try:
        content = json.loads(file.read_text()) if file.suffix == ".json" else yaml.safe_load(file.read_text())
    except ValueError as error:
        raise ConfigurationError(f"{file} cannot be read: {str(error).splitlines()[0]}") from None
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{file} is not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"{file} is no mapping of names to values")
    return model_from_hugging_face(content) if file.suffix == ".json" else model_from_flags(content)
