"""Which of Megatron's features sequence-parallel modes refuse, and why: nothing is silently ignored.

A feature leaves this list together with the end-to-end test that shows it to be exact.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megatron_basp.errors import ConfigurationError


class Refusal(NamedTuple):
    """One argument of Megatron's.

    name: the argument. allowed: whether its value is fine. why: reason and remedy. flag: if not as name.
    versions: the minor versions of Megatron that have the argument; None: all.
    """

    name: str
    allowed: Callable[[Any], bool]
    why: str
    flag: str | None = None
    versions: tuple[str, ...] | None = None


def _unset(value: Any) -> bool:
    return value in (None, False, [], 0)


def _one(value: Any) -> bool:
    return value in (None, 1)


def _made_for_linear_layers(recipe: Any) -> bool:
    return recipe in ("delayed", "tensorwise", "blockwise", "mxfp8")


def _looks_back(window: Any) -> bool:
    return window is None or (window[0] >= 0 and window[1] == 0)


_NOT_PROVEN = "not shown to be exact yet; leave it out, or use --sequence-parallel-mode none"
_OTHER_BATCH = (
    "its batches are not [B, S] rows of one length, which is what is planned; use --sequence-parallel-mode none"
)
_OTHER_MIXING = "it mixes along the sequence without core attention, so ranks would miss each other's tokens"
_OTHER_ORDER = "it writes what ranks hold in the order of the plan, not of stock context parallelism; leave it out"
_SINCE_0_19 = ("0.19", "0.20")
_SINCE_0_20 = ("0.20",)

# The flags with which rows hold several documents.
PACKING = ("--sft", "--dataloader-inter-document-masking")

REFUSALS = (
    # Data and batches.
    Refusal("rampup_batch_size", _unset, "Megatron parses it and ignores it; use --step-batch-size-schedule"),
    Refusal("hybrid_context_parallel", _unset, "it re-plans the context-parallel group itself; use one or the other"),
    Refusal("decoder_seq_length", _unset, _OTHER_BATCH),
    Refusal("hierarchical_context_parallel_sizes", _unset, "groups are carved by the plan instead; leave it out"),
    Refusal(
        "reset_attention_mask",
        _unset,
        "it is a mask of S×S tokens that the loader makes, and attention takes none: keep documents apart with "
        "--dataloader-inter-document-masking",
    ),
    Refusal("perform_rl_step", _unset, _OTHER_BATCH),
    Refusal(
        "full_validation",
        _unset,
        "Megatron 0.19 itself fails with it for one validation set, and several are not shown to be exact yet; use "
        "--eval-iters",
    ),
    Refusal("multiple_validation_sets", _unset, "it needs --full-validation; use --eval-iters and one set"),
    # Layers.
    Refusal("spec", _unset, "layers that bring their own attention would train without the exchange; leave it out"),
    Refusal("heterogeneous_layers_config_path", _unset, "its layers name their own attention; leave it out"),
    Refusal("heterogeneous_layers_config_encoded_json", _unset, "its layers name their own attention; leave it out"),
    Refusal("hybrid_layer_pattern", _unset, f"Mamba layers: {_OTHER_MIXING}"),
    Refusal("hybrid_override_pattern", _unset, f"Mamba layers: {_OTHER_MIXING}"),
    Refusal("experimental_attention_variant", _unset, _OTHER_MIXING),
    Refusal("window_size", _looks_back, "a causal window looks back only; pass LEFT,0 with LEFT of 0 or more"),
    Refusal("fused_residual_rmsnorm", _unset, _NOT_PROVEN),
    Refusal(
        "mtp_hsm", _unset, f"it draws for each token which hidden states to mix; {_NOT_PROVEN}", None, _SINCE_0_20
    ),
    Refusal("enable_mhc_connections", _unset, f"hyper-connections; {_NOT_PROVEN}", versions=_SINCE_0_20),
    Refusal("logit_dtype", _unset, _NOT_PROVEN, "--output-logit-dtype", _SINCE_0_20),
    Refusal("use_kitchen_attention", _unset, "it names its own attention; leave it out"),
    Refusal("qk_clip", _unset, _NOT_PROVEN),
    Refusal("log_max_attention_logit", _unset, _NOT_PROVEN),
    Refusal("apply_query_key_layer_scaling", _unset, _NOT_PROVEN),
    Refusal(
        "position_embedding_type",
        lambda value: value in ("rope", "yarn", "learned_absolute", "none"),
        "only rope, yarn, learned_absolute and none are supported",
    ),
    Refusal(
        "transformer_impl", lambda value: value in ("local", "transformer_engine"), "use local or transformer_engine"
    ),
    # Experts.
    Refusal(
        "moe_token_dispatcher_type",
        lambda value: value in (None, "allgather", "alltoall"),
        f"only allgather and alltoall are supported; others are {_NOT_PROVEN}",
    ),
    Refusal(
        "moe_router_load_balancing_type",
        lambda value: (
            set([value] if isinstance(value, str) else value or [])
            <= {"aux_loss", "seq_aux_loss", "global_aux_loss", "none"}
        ),
        f"only aux_loss, seq_aux_loss, global_aux_loss and none are supported; others are {_NOT_PROVEN}",
    ),
    Refusal(
        "moe_expert_rank_capacity_factor", _unset, f"capacity depends on which tokens a rank holds; {_NOT_PROVEN}"
    ),
    Refusal(
        "moe_router_force_load_balancing", _unset, f"random routing of ranks that share a sequence; {_NOT_PROVEN}"
    ),
    Refusal("moe_router_force_biased", _unset, f"random routing of ranks that share a sequence; {_NOT_PROVEN}"),
    Refusal("moe_input_jitter_eps", _unset, f"noise of ranks that share a sequence; {_NOT_PROVEN}"),
    Refusal("moe_use_grouped_tensor", _unset, _NOT_PROVEN, versions=_SINCE_0_20),
    Refusal("overlap_moe_expert_parallel_comm", _unset, "it schedules attention by itself; leave it out"),
    # Parallelism and precision.
    Refusal(
        "te_rng_tracker",
        _unset,
        "ranks of a group draw from streams of their own, which was not tried with Transformer Engine's tracker of "
        "states; leave it out",
    ),
    Refusal(
        "inference_rng_tracker",
        _unset,
        "its tracker keeps no random states, from which ranks of a group derive their own; leave it out",
    ),
    Refusal("inprocess_restart", _unset, f"a second start within the process; {_NOT_PROVEN}"),
    Refusal("fp16", _unset, f"its rounding; {_NOT_PROVEN}; or use --bf16"),
    Refusal("use_torch_fsdp2", _unset, _NOT_PROVEN),
    Refusal("outer_dp_sharding_strategy", lambda value: value in (None, "no_shard"), _NOT_PROVEN),
    Refusal("tp_comm_overlap", _unset, _NOT_PROVEN),
    Refusal("tensor_parallel_num_weight_shards", _one, _NOT_PROVEN, versions=_SINCE_0_19),
    Refusal("expert_tensor_parallel_num_weight_shards", _one, _NOT_PROVEN, versions=_SINCE_0_19),
    Refusal("fp8_recipe", _made_for_linear_layers, "use delayed, tensorwise, blockwise or mxfp8"),
    Refusal("fp8_output_proj", _unset, f"the output layer in FP8; {_NOT_PROVEN}"),
    Refusal("fp8_param_gather", _unset, f"parameters kept in FP8; {_NOT_PROVEN}"),
    Refusal("te_precision_config_file", _unset, f"a precision for each module; {_NOT_PROVEN}"),
    Refusal("fp4", _unset, _NOT_PROVEN, "--fp4-format"),
    Refusal("cuda_graph_impl", lambda value: value in (None, "none"), f"CUDA graphs; {_NOT_PROVEN}"),
    Refusal("enable_cuda_graph", _unset, f"CUDA graphs; {_NOT_PROVEN}"),
    Refusal("external_cuda_graph", _unset, f"CUDA graphs; {_NOT_PROVEN}"),
    Refusal("cpu_offloading_num_layers", _unset, _NOT_PROVEN),
    Refusal(
        "logits_save_dir",
        _unset,
        "it writes logits in the order of stock context parallelism; leave it out",
        versions=_SINCE_0_19,
    ),
    Refusal(
        "logits_load_dir",
        _unset,
        "it reads logits in the order of stock context parallelism; leave it out",
        versions=_SINCE_0_19,
    ),
    Refusal("save_activations_interval", _unset, _OTHER_ORDER),
    Refusal("save_dgrads_interval", _unset, _OTHER_ORDER),
    Refusal("moe_routing_trace_path", _unset, _OTHER_ORDER, versions=_SINCE_0_19),
)

# What is exact with the newest release, and not, or not shown to be, with these minor versions.
_NOT_TRIED = (
    Refusal("use_megatron_fsdp", _unset, "not tried with it; use megatron-core 0.19"),
    Refusal("fp8", _unset, "not tried with it; use megatron-core 0.19", "--fp8-format"),
    Refusal("fine_grained_activation_offloading", _unset, "not tried with it; use megatron-core 0.19"),
)
REFUSED_WITH = {
    "0.18": (
        *_NOT_TRIED,
        Refusal("softmax_type", lambda value: value in (None, "vanilla"), "attention sinks; use megatron-core 0.19"),
        Refusal("mtp_num_layers", _unset, "multi-token prediction; use megatron-core 0.19"),
        Refusal("sft", _unset, "packed rows; use megatron-core 0.19"),
        Refusal("moe_z_loss_coeff", _unset, "it is logged for one rank's tokens alone; use megatron-core 0.19"),
        Refusal("expert_tensor_parallel_size", _unset, "losses differed in a test; use megatron-core 0.19"),
    ),
    # Without Transformer Engine its layers cannot be built, so that nothing could be shown.
    "0.20": (*_NOT_TRIED, Refusal("mtp_num_layers", _unset, "multi-token prediction; use megatron-core 0.19")),
}
# Fields of a model's configuration that no flag sets.
CONFIG_REFUSALS = (
    Refusal("fp8_dot_product_attention", _unset, _NOT_PROVEN, "fp8_dot_product_attention"),
    Refusal("fp8_multi_head_attention", _unset, _NOT_PROVEN, "fp8_multi_head_attention"),
)


def refuse_unsupported(args: Namespace, mode: str) -> None:
    """Raise `ConfigurationError` for the first argument whose feature is not supported.

    Raises:
        AttributeError: this Megatron has no such argument, so that what it stood for may have another name.
    """
    for refusal in REFUSALS:
        if refusal.versions is None or hasattr(args, refusal.name):  # if not: `refuse_unsupported_with` knows
            _refuse(refusal, getattr(args, refusal.name), mode)


def refuse_unsupported_with(minor: str, args: Namespace, mode: str) -> None:
    """The same for what depends on the minor version of Megatron."""
    for refusal in REFUSALS:
        if refusal.versions is not None and minor in refusal.versions:
            _refuse(refusal, getattr(args, refusal.name), mode)
    for refusal in REFUSED_WITH.get(minor, ()):
        _refuse(refusal, getattr(args, refusal.name), f"{mode} and Megatron-Core {minor}")
    if minor == "0.18" and args.num_experts and args.calculate_per_token_loss:
        raise ConfigurationError(
            "--calculate-per-token-loss with --num-experts: Megatron-Core 0.18 scales auxiliary losses by the tokens "
            "of one rank, however many share a sequence; leave the flag out, or use megatron-core 0.19"
        )


def refuse_unsupported_config(config: Any, mode: str) -> None:
    """The same for a model's configuration, fields of which a script may have set after the arguments were parsed."""
    # Left unset, these stand for the tensor-parallel size by then.
    resolved = ("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards")
    for refusal in REFUSALS:
        if hasattr(config, refusal.name) and refusal.name not in resolved:
            _refuse(refusal, getattr(config, refusal.name), mode)
    for refusal in CONFIG_REFUSALS:
        _refuse(refusal, getattr(config, refusal.name), mode)


def refuse_capacity_of_shards(values: Any, group_sizes: Sequence[int], mode: str) -> None:
    """Raise `ConfigurationError` if experts drop tokens beyond a capacity where ranks hold parts of sequences.

    Capacity is counted over the tokens of one rank. At K = 1 those are whole sequences, as in a run with so much more
    data parallelism; the parts that ranks hold at K > 1 come together in no run of Megatron's, whose shards are other
    ones, so that there is nothing the result could be held to.

    Args:
        values: arguments or a model's configuration. group_sizes: the K that the run's plans choose.
    """
    factor = values.moe_expert_capacity_factor
    if factor is not None and factor >= 0 and max(group_sizes) > 1:
        raise ConfigurationError(
            f"--moe-expert-capacity-factor (got {factor}) is not supported with --sequence-parallel-mode {mode} where "
            f"K > 1 (here K in {list(group_sizes)}): each rank would drop tokens by what it holds of a sequence; make "
            f"the micro-batch a multiple of --context-parallel-size, in basp mode, or leave the factor out"
        )


def _refuse(refusal: Refusal, value: Any, mode: str) -> None:
    if not refusal.allowed(value):
        flag = refusal.flag or "--" + refusal.name.replace("_", "-")
        raise ConfigurationError(
            f"{flag} (got {value}) is not supported with --sequence-parallel-mode {mode}: {refusal.why}"
        )


def refuse_unsupported_packing(args: Namespace) -> None:
    """Raise `ConfigurationError` for what packed rows do not go with."""
    packing = next((flag for flag in PACKING if getattr(args, flag.lstrip("-").replace("-", "_"))), None)
    if packing is None:
        return
    for name in ("mtp_num_layers", "multi_latent_attention"):
        if getattr(args, name):
            raise ConfigurationError(f"{packing} with --{name.replace('_', '-')}: {_NOT_PROVEN}")
    if "seq_aux_loss" in (args.moe_router_load_balancing_type or ()):
        raise ConfigurationError(f"{packing} with seq_aux_loss: {_NOT_PROVEN}")
    stages = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    layout = (*stages, "pipeline_model_parallel_layout")
    if not args.sft and (args.pipeline_model_parallel_size > 2 or any(getattr(args, name) for name in layout)):
        raise ConfigurationError(
            f"{packing} with more than 2 pipeline stages: Megatron's script reads documents on each stage, and builds "
            f"data sets on the first and the last only: use --pipeline-model-parallel-size 1 or 2, without virtual "
            f"stages or a layout"
        )


def refuse_unsupported_fsdp(args: Namespace) -> None:
    """Raise `ConfigurationError` for what stock Megatron-FSDP 0.19 does not do, or does wrong without a word; it was
    run at CP = 1 and held to Megatron's DDP."""
    if not args.use_megatron_fsdp:
        return
    if args.pipeline_model_parallel_size > 1:
        raise ConfigurationError(
            f"--use-megatron-fsdp with --pipeline-model-parallel-size {args.pipeline_model_parallel_size}: Megatron "
            f"leaves pipeline stages out of its device mesh and stops: use 1 stage, or --use-distributed-optimizer"
        )
    if (args.num_distributed_optimizer_instances or 1) > 1 and not args.overlap_grad_reduce:
        raise ConfigurationError(
            f"--use-megatron-fsdp with --num-distributed-optimizer-instances "
            f"{args.num_distributed_optimizer_instances}: Megatron sums gradients over instances with "
            f"--overlap-grad-reduce only, else each trains on its part of the batch: add it"
        )
    if args.ddp_average_in_collective:
        raise ConfigurationError(
            "--use-megatron-fsdp with --ddp-average-in-collective: Megatron takes the size of a group of experts that "
            "is not there: leave it out"
        )
    ranks, tensor_parallel, expert_parallel = (
        getattr(args, name) for name in ("world_size", "tensor_model_parallel_size", "expert_model_parallel_size")
    )
    is_alone = expert_parallel > 1 and ranks <= tensor_parallel * expert_parallel
    if is_alone and not args.calculate_per_token_loss:
        raise ConfigurationError(
            f"--use-megatron-fsdp with --expert-model-parallel-size {expert_parallel}: where one rank alone holds an "
            f"expert Megatron scales its gradients anew with every micro-batch, so TP·EP must be below the number "
            f"of ranks, got {tensor_parallel}·{expert_parallel} and {ranks}: use less expert parallelism, or "
            f"--calculate-per-token-loss"
        )
    if args.save is not None and args.swiglu and not args.bf16:
        raise ConfigurationError(
            "--use-megatron-fsdp with --save, --swiglu and fp32: Megatron cannot write that checkpoint, since it "
            "looks for parameters behind the wrapper of mixed precision: use --bf16, or leave --save out"
        )
