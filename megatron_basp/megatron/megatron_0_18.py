"""What Megatron 0.18 has in another form than later ones. To go when its support does."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from megatron_basp.errors import ConfigurationError

# Arguments that ask for other models than the one built here, or for another script.
_OTHERS = (
    *("spec", "mtp_num_layers", "experimental_attention_variant", "sft"),
    *("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"),
)


def add_missing_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Arguments that came later, as they are where nobody asks for them; there is no flag for them."""
    parser.set_defaults(dataloader_inter_document_masking=False)
    return parser


def build_gpt_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """One chunk of the model that Megatron's arguments describe, as `gpt_builders.py` of its 0.18 makes it.

    `pretrain()` of 0.18 takes a function that builds it, where later ones take its configuration.

    Raises:
        ConfigurationError: they describe another one.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    for name in _OTHERS:
        if getattr(args, name):
            raise ConfigurationError(
                f"with Megatron 0.18 this script does not know --{name.replace('_', '-')} (got {getattr(args, name)}):"
                " run the pretrain_gpt.py of a checkout, or use megatron-core 0.19"
            )
    config = config or core_transformer_config_from_args(args)
    layers = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=args.transformer_impl == "transformer_engine",
        normalization=args.normalization,
        qk_l2_norm=args.qk_l2_norm,
        vp_stage=vp_stage,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )
