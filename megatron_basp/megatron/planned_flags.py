"""A whole command line of Megatron's as the run that `megatron-basp plan` models.

What training would refuse is refused here too; and so is what trains, but costs something that the model does not
know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from megatron_basp.errors import ConfigurationError
from megatron_basp.library import no_cluster
from megatron_basp.megatron.arguments import settings_from_arguments
from megatron_basp.megatron.command_line import CommandLine
from megatron_basp.model_spec import ModelSpec, model_from_flags
from megatron_basp.training_spec import Parallelism, Precision, Recompute, Sharding, TrainingSpec


def _one(value: Any) -> bool:
    return value in (None, 1)


# What trains, and is not modelled: whether a value is, and what is missing. `model_from_flags` knows of layers.
NOT_MODELLED: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("sft", "dataloader_inter_document_masking"), (lambda value: not value, "rows are modelled as one sequence")
    ),
    **dict.fromkeys(
        (
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "pipeline_model_parallel_layout",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        ),
        (lambda value: not value, "pipeline stages are modelled with the same number of layers"),
    ),
    "use_tp_pp_dp_mapping": (lambda value: not value, "ranks are modelled in Megatron's usual order"),
    "num_distributed_optimizer_instances": (_one, "replicas are modelled as one instance"),
    "optimizer": (lambda value: value == "adam", "only Adam's memory is modelled"),
    **dict.fromkeys(
        ("use_precision_aware_optimizer", "optimizer_cpu_offload"),
        (lambda value: not value, "the optimizer is modelled in fp32, on the GPU"),
    ),
    "recompute_modules": (
        lambda value: not value or set(value) == {"core_attn"},
        "selective recompute is modelled for core_attn alone",
    ),
    "yaml_cfg": (lambda value: not value, "flags are read, and no file of them"),
    "recompute_method": (lambda value: value in (None, "uniform"), "full recompute is modelled for all layers"),
    "recompute_num_layers": (_one, "full recompute is modelled layer by layer"),
}


def training_of_flags(
    words: Sequence[str], ranks: int | None, model: ModelSpec | None, cluster: str | None
) -> tuple[TrainingSpec, Any]:
    """Read a command line.

    Args:
        ranks: the world size, or None for the smallest.
        model: supplies what the flags do not say.
        cluster: its name or file, in place of `--basp-cluster`.

    Returns:
        the run, and Megatron's arguments.

    Raises:
        ConfigurationError: training would refuse it, or something of it is not modelled; or no cluster is named.
    """
    line = CommandLine([*(flags_of_model(model) if model else []), *words])
    # Stock's way of exchanging is one of those that the plan is compared with.
    if line.args.sequence_parallel_mode == "none":
        line.drop("--cp-comm-type")
    line.set("--sequence-parallel-mode", "basp")
    if cluster is not None:
        line.set("--basp-cluster", cluster)
    args = line.args
    model_ranks = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    args.world_size = ranks or model_ranks * args.context_parallel_size
    if args.basp_cluster is None:
        raise ConfigurationError(no_cluster())
    settings = settings_from_arguments(args)
    assert settings is not None and settings.exchange is not None
    _refuse_what_is_not_modelled(args)
    if args.vocab_size is None:
        args.vocab_size = args.padded_vocab_size
    training = TrainingSpec(
        model=model_from_flags(vars(args)),
        cluster=settings.exchange.cluster,
        parallelism=Parallelism(
            tensor_model_parallel_size=args.tensor_model_parallel_size,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            data_parallel_size=settings.data_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            sequence_parallel=args.sequence_parallel,
            virtual_stages=_virtual_stages(args),
            sharding=_sharding(args),
            recompute=_recompute(args),
        ),
        seq_length=settings.seq_length,
        micro_batch_size=settings.micro_batch_size,
        global_batch_size=settings.global_batch_size,
        precision=_precision(args),
        gradient_bytes=2 if args.grad_reduce_in_bf16 else 4,
    )
    return training, args


def flags_of_model(model: ModelSpec) -> list[str]:
    """The inverse of `model_from_flags`."""
    sizes = {
        "num-layers": model.layers,
        "hidden-size": model.hidden,
        "ffn-hidden-size": model.ffn,
        "num-attention-heads": model.heads,
        "kv-channels": model.head_size,
        "vocab-size": model.vocabulary,
    }
    if model.kv_heads != model.heads:
        sizes["num-query-groups"] = model.kv_heads
    if model.experts:
        sizes |= {
            "num-experts": model.experts,
            "moe-router-topk": model.experts_per_token,
            "moe-ffn-hidden-size": model.expert_ffn,
        }
    if model.shared_expert_ffn:
        sizes["moe-shared-expert-intermediate-size"] = model.shared_expert_ffn
    switches = {
        "group-query-attention": model.kv_heads != model.heads,
        "swiglu": model.gated,
        "untie-embeddings-and-output-weights": not model.tied,
    }
    words = [word for flag, size in sizes.items() for word in (f"--{flag}", str(size))]
    return words + [f"--{flag}" for flag, is_on in switches.items() if is_on]


def _refuse_what_is_not_modelled(args: Any) -> None:
    expert_tensor = getattr(args, "expert_tensor_parallel_size", None)
    if expert_tensor not in (None, args.tensor_model_parallel_size):
        raise ConfigurationError(
            f"--expert-tensor-parallel-size {expert_tensor} is not modelled where it is not the "
            f"--tensor-model-parallel-size: leave it out to plan"
        )
    expert_ranks = args.expert_model_parallel_size * args.tensor_model_parallel_size
    if args.num_experts and expert_ranks > 1 and args.moe_token_dispatcher_type != "alltoall":
        raise ConfigurationError(
            f"--moe-token-dispatcher-type {args.moe_token_dispatcher_type} is not modelled where EP·TP is more than "
            f"1, got {expert_ranks}: give alltoall to plan"
        )
    for name, (is_modelled, why) in NOT_MODELLED.items():
        value = getattr(args, name, None)
        if not is_modelled(value):
            flag = "--" + name.replace("_", "-")
            raise ConfigurationError(f"{flag} (got {value}) is not modelled: {why}; leave it out to plan")


def _virtual_stages(args: Any) -> int:
    if args.num_layers_per_virtual_pipeline_stage:
        stages = args.pipeline_model_parallel_size * args.num_layers_per_virtual_pipeline_stage
        if args.num_layers % stages:
            raise ConfigurationError(
                f"layers % (PP·layers of a virtual stage) must be 0, got {args.num_layers} and "
                f"{args.pipeline_model_parallel_size}·{args.num_layers_per_virtual_pipeline_stage}"
            )
        return args.num_layers // stages
    return args.num_virtual_stages_per_pipeline_rank or 1


def _sharding(args: Any) -> Sharding:
    if args.use_megatron_fsdp:
        return cast(Sharding, args.data_parallel_sharding_strategy)
    return "optim" if args.use_distributed_optimizer else "no_shard"


def _recompute(args: Any) -> Recompute:
    return "selective" if args.recompute_activations else args.recompute_granularity or "none"


def _precision(args: Any) -> Precision:
    return "fp8" if args.fp8 else "bf16" if args.bf16 else "fp32"
