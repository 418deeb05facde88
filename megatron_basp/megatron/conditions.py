"""Conditions on several flags together, Megatron's own among them, told before ranks meet."""

from __future__ import annotations

import argparse

from megatron_basp.errors import ConfigurationError
from megatron_basp.megatron.settings import Settings
from megatron_basp.overlap_cost import possible_chunks


def check_mapping(args: argparse.Namespace) -> None:
    """Megatron's own condition (`initialize_model_parallel`), told before ranks meet."""
    if not args.use_tp_pp_dp_mapping or args.pipeline_model_parallel_size == 1:
        return
    tensor_parallel, expert_tensor = args.tensor_model_parallel_size, args.expert_tensor_parallel_size
    attention = tensor_parallel * args.context_parallel_size
    experts = (expert_tensor or tensor_parallel) * args.expert_model_parallel_size
    if attention != experts:
        raise ConfigurationError(
            f"--use-tp-pp-dp-mapping with pipeline stages wants TP·CP to be the experts' TP·EP, got "
            f"{tensor_parallel}·{args.context_parallel_size} and {experts // args.expert_model_parallel_size}·"
            f"{args.expert_model_parallel_size}: leave it out, or choose --expert-model-parallel-size to fit"
        )


def check_transport(args: argparse.Namespace) -> None:
    """What is known without a device; the rest is tried out when groups are there."""
    if args.basp_transport == "symmetric-memory" and args.distributed_backend != "nccl":
        raise ConfigurationError(
            f"--basp-transport symmetric-memory needs --distributed-backend nccl, got {args.distributed_backend}: use "
            f"--basp-transport auto, or nccl, which is the backend's own all-to-all"
        )


def check_virtual_stages(args: argparse.Namespace, settings: Settings) -> None:
    """Megatron's own condition (`forward_backward_pipelining_with_interleaving`), which it meets with the first step,
    and with the first evaluation."""
    if not (args.num_layers_per_virtual_pipeline_stage or args.num_virtual_stages_per_pipeline_rank):
        return
    stages = args.pipeline_model_parallel_size
    group = args.microbatch_group_size_per_vp_stage or stages
    evaluated = settings.global_batch_size if args.eval_global_batch_size is None else args.eval_global_batch_size
    for use, samples, batch_size in (
        ("in training", settings.global_batch_size, settings.micro_batch_size),
        ("at evaluation", evaluated, settings.eval_micro_batch_size),
    ):
        data_parallel = settings.data_parallel_size
        microbatches = samples // (batch_size * data_parallel)
        if not stages <= group <= microbatches or 0 < microbatches % group < stages:
            raise ConfigurationError(
                f"virtual pipeline stages want M = samples/(B·DP) micro-batches to be a multiple of {group} "
                f"(PP={stages}), got M={microbatches} {use} from {samples}/({batch_size}·{data_parallel}): use a "
                f"global batch size that is a multiple of {group * batch_size * data_parallel}"
            )


def check_chunks(settings: Settings) -> None:
    limits = settings.limits
    for group_size, chunks in settings.chunks.items():
        possible = possible_chunks(limits, group_size)
        if chunks not in possible:
            raise ConfigurationError(
                f"--basp-overlap-chunks C must divide the heads of a rank at K={group_size}, "
                f"H/K={limits.heads // group_size} and Hkv/K={max(limits.kv_heads // group_size, 1)}, got {chunks}: "
                f"use one of {possible}"
            )
