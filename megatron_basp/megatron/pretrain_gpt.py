"""A small GPT pre-training script, of the shape of Megatron-LM's `pretrain_gpt.py`, which the wheel does not bring.

It is stock Megatron: nothing in it knows of sequence-parallel modes, which come from the launcher's hooks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core import utils as core_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.training import get_args, get_timers, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage
from torch import Tensor

from megatron_basp.megatron import megatron_0_18
from megatron_basp.megatron.versions import megatron_minor

DOCUMENT_KEYS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids", *DOCUMENT_KEYS)


def has_mtp(args: Any, vp_stage: int | None) -> bool:
    """Whether this rank predicts several tokens, for which it needs ids as well as labels."""
    if args.mtp_num_layers is None:
        return False
    layout = core_transformer_config_from_args(args).pipeline_model_parallel_layout
    return mtp_on_this_rank(layout, args.mtp_num_layers, ignore_virtual=False, vp_stage=vp_stage)


def get_batch(data_iterator: Any, vp_stage: int | None = None) -> dict[str, Tensor | None]:
    """This rank's part of the next micro-batch; on pipeline stages in the middle, what says where its packed documents
    end, if they are packed, and else nothing."""
    args = get_args()
    packed = args.sft or args.dataloader_inter_document_masking
    with_mtp = has_mtp(args, vp_stage)
    in_the_middle = not (is_first_or_last_pipeline_stage(vp_stage) or with_mtp)
    if in_the_middle and not packed:
        return dict.fromkeys(BATCH_KEYS)
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch: dict[str, Any] = {}
    if tp_rank == 0:
        sample = next(data_iterator)
        batch = {key: sample[key].cuda(non_blocking=True) if key in sample else None for key in BATCH_KEYS}
    batch = core_utils.get_batch_on_this_tp_rank(
        batch,
        packed,  # has_cu_seqlens, in 0.18 is_sft
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=with_mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    cp_group = mpu.get_context_parallel_group()
    if not packed:
        return core_utils.get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=cp_group)
    batch = core_utils.flatten_batch_for_packed_sequences(batch)
    if in_the_middle:
        return dict.fromkeys(BATCH_KEYS) | {key: batch[key] for key in DOCUMENT_KEYS}
    return core_utils.get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=cp_group, use_per_sequence_balancing=not args.sft
    )


def packed_seq_params_of(batch: dict[str, Any]) -> PackedSeqParams | None:
    """What the model is told of the documents in the batch's rows, if they are packed."""
    if batch["cu_seqlens"] is None:
        return None
    documents, padded = batch["cu_seqlens"].squeeze(0), batch["cu_seqlens_padded"]
    update_seqlen_stats_from_cu_seqlens(documents)
    if padded is not None:
        documents = padded = padded.squeeze(0)
    longest = int(batch["max_seqlen"].item())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=documents,
        cu_seqlens_kv=documents,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        tokens_per_sample=get_args().seq_length,
    )


def loss_func(loss_mask: Tensor, output_tensor: Tensor, model: Any = None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Summed loss, number of tokens in it, and both for the report."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * mask)
    if get_args().check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(
            result=loss,
            rejection_func=torch.isnan,
            message="found NaN in local forward loss calculation",
            tolerance=0.0,
            fatal=True,
        )
    num_tokens = mask.sum().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.cat([loss.detach().view(1), num_tokens.view(1)])}


def forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Any]:
    """The model's output for the next micro-batch, and the function that makes a loss of it."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, core_utils.get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=packed_seq_params_of(batch),
    )
    return output, partial(loss_func, batch["loss_mask"], model=model)


def train_valid_test_datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> Any:
    """Megatron's GPT datasets, built on the ranks that read from them."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        **({"inter_document_masking": True} if args.dataloader_inter_document_masking else {}),  # not in 0.18
    )
    dataset_type = SFTDataset if args.sft else MockGPTDataset if args.mock_data else GPTDataset

    def is_built_here() -> bool:
        if mpu.get_tensor_model_parallel_rank() != 0:
            return False
        return args.sft or is_first_or_last_pipeline_stage(vp_stage) or has_mtp(args, vp_stage)

    return BlendedMegatronDatasetBuilder(dataset_type, num_samples, is_built_here, config).build()


def configuration() -> Any:
    """What `sys.argv` says in Megatron's flags, validated."""
    defaults = {"tokenizer_type": "GPT2BPETokenizer"}
    if megatron_minor() == "0.18":
        args = parse_and_validate_args(megatron_0_18.add_missing_arguments, args_defaults=defaults)
        return pretrain_cfg_container_from_args(args)
    from megatron.training.argument_utils import gpt_config_from_args

    args = parse_and_validate_args(args_defaults=defaults)
    return pretrain_cfg_container_from_args(args, gpt_config_from_args(args))


def train(config: Any) -> None:
    train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    build = (megatron_0_18.build_gpt_model,) if megatron_minor() == "0.18" else ()
    pretrain(config, train_valid_test_datasets_provider, *build, ModelType.encoder_or_decoder, forward_step)


def main() -> None:
    """Train as `sys.argv` says."""
    train(configuration())


if __name__ == "__main__":
    main()
