"""The flags: what they give, what they refuse, and whether the remedies in the messages work. Without Megatron."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_basp.errors import ConfigurationError
from megatron_basp.exchange_cost import AttentionShape
from megatron_basp.megatron.arguments import add_arguments, settings_from_arguments
from megatron_basp.megatron.refusals import CONFIG_REFUSALS, REFUSALS, refuse_unsupported_config

# Each refused argument: a value as Megatron has it by default (or as the remedy says), and one that must be refused.
FEATURES = {
    "rampup_batch_size": (None, [16, 16, 1000]),
    "hybrid_context_parallel": (False, True),
    "hierarchical_context_parallel_sizes": (None, [2, 4]),
    "decoder_seq_length": (None, 64),
    "reset_attention_mask": (False, True),
    "perform_rl_step": (False, True),
    "full_validation": (False, True),
    "multiple_validation_sets": (False, True),
    "moe_router_force_load_balancing": (False, True),
    "moe_router_force_biased": (None, 0.1),
    "spec": (None, ["module", "function"]),
    "heterogeneous_layers_config_path": (None, "layers.json"),
    "heterogeneous_layers_config_encoded_json": (None, "{}"),
    "hybrid_layer_pattern": (None, "M*M*"),
    "hybrid_override_pattern": (None, "M*M*"),
    "experimental_attention_variant": (None, "gated_delta_net"),
    "window_size": (None, (128, 1)),
    "fused_residual_rmsnorm": (False, True),
    "mtp_hsm": (False, True),
    "enable_mhc_connections": (False, True),
    "logit_dtype": (None, "fp32"),
    "moe_use_grouped_tensor": (False, True),
    "qk_clip": (False, True),
    "log_max_attention_logit": (False, True),
    "apply_query_key_layer_scaling": (False, True),
    "position_embedding_type": ("learned_absolute", "mrope"),
    "transformer_impl": ("transformer_engine", "inference_optimized"),
    "moe_token_dispatcher_type": ("allgather", "flex"),
    "moe_router_load_balancing_type": ("aux_loss", "sinkhorn"),
    "moe_expert_rank_capacity_factor": (None, 1.0),
    "moe_input_jitter_eps": (None, 0.01),
    "overlap_moe_expert_parallel_comm": (False, True),
    "te_rng_tracker": (False, True),
    "inference_rng_tracker": (False, True),
    "inprocess_restart": (False, True),
    "use_kitchen_attention": (False, True),
    "save_activations_interval": (None, 10),
    "save_dgrads_interval": (None, 10),
    "moe_routing_trace_path": (None, "trace"),
    "fp16": (False, True),
    "use_torch_fsdp2": (False, True),
    "outer_dp_sharding_strategy": ("no_shard", "optim"),
    "tp_comm_overlap": (False, True),
    "tensor_parallel_num_weight_shards": (None, 2),
    "expert_tensor_parallel_num_weight_shards": (None, 2),
    "fp8_recipe": ("delayed", "custom"),
    "fp8_output_proj": (False, True),
    "fp8_param_gather": (False, True),
    "te_precision_config_file": (None, "precision.yaml"),
    "fp4": (None, "e2m1"),
    "cuda_graph_impl": ("none", "local"),
    "enable_cuda_graph": (False, True),
    "external_cuda_graph": (False, True),
    "cpu_offloading_num_layers": (0, 2),
    "logits_save_dir": (None, "logits"),
    "logits_load_dir": (None, "logits"),
}
BASP = "--sequence-parallel-mode basp"
ULYSSES = "--sequence-parallel-mode ulysses"


def megatron_like_parser():
    """Those of Megatron's flags that ours depend on, with its defaults, and ours on top."""
    parser = argparse.ArgumentParser()
    for name in ("micro-batch", "eval-micro-batch", "global-batch", "eval-global-batch"):
        parser.add_argument(f"--{name}-size", type=int)
    for name in ("context-parallel", "tensor-model-parallel", "pipeline-model-parallel"):
        parser.add_argument(f"--{name}-size", type=int, default=1)
    parser.add_argument("--seq-length", type=int)
    parser.add_argument("--num-attention-heads", type=int)
    parser.add_argument("--num-query-groups", type=int, default=1)
    parser.add_argument("--group-query-attention", action="store_true")
    parser.add_argument("--distributed-backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--calculate-per-token-loss", action="store_true")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--use-tp-pp-dp-mapping", action="store_true")
    parser.add_argument("--expert-model-parallel-size", type=int, default=1)
    parser.add_argument("--num-distributed-optimizer-instances", type=int, default=1)
    for name in ("use-megatron-fsdp", "overlap-grad-reduce", "ddp-average-in-collective", "swiglu", "bf16"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--save")
    parser.add_argument("--sft", action="store_true")
    parser.add_argument("--fine-grained-activation-offloading", action="store_true")
    parser.add_argument("--offload-modules", nargs="+", default=[])
    parser.add_argument("--recompute-granularity")
    parser.add_argument("--dataloader-inter-document-masking", action="store_true")
    for name in ("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--pipeline-model-parallel-layout")
    parser.add_argument(
        "--microbatch-group-size-per-virtual-pipeline-stage", dest="microbatch_group_size_per_vp_stage"
    )
    parser.add_argument("--num-experts", type=int)
    parser.add_argument("--mtp-num-layers", type=int)
    parser.add_argument("--kv-channels", type=int)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--multi-latent-attention", action="store_true")
    parser.add_argument("--cp-comm-type", nargs="+", default=["p2p"])
    parser.add_argument("--expert-tensor-parallel-size", type=int)
    parser.add_argument("--moe-expert-capacity-factor", type=float)
    parser.add_argument("--fp8-format", dest="fp8")
    parser.set_defaults(**{name: good for name, (good, _) in FEATURES.items()})
    return add_arguments(parser)


def parse(flags, world_size=8, **attributes):
    """A run of 3 sequences of 64 tokens with 8 heads on 8 context-parallel ranks, but for what is given."""
    run = "--context-parallel-size 8 --micro-batch-size 3 --seq-length 64 --num-attention-heads 8"
    args = megatron_like_parser().parse_args(f"{run} {flags}".split())
    vars(args).update(attributes, world_size=world_size)
    return args


def accepted(flags, **attributes):
    return settings_from_arguments(parse(flags, **attributes))


def refused(flags, **attributes):
    """The message of a refusal, which is one line."""
    with pytest.raises(ConfigurationError) as caught:
        settings_from_arguments(parse(flags, **attributes))
    message = str(caught.value)
    assert message and "\n" not in message
    return message


def placed(settings, ranks_per_host):
    """The settings of 8 ranks on hosts of so many."""
    return settings.with_placement([range(8)], {rank: f"host{rank // ranks_per_host}" for rank in range(8)})


def waves(settings, micro_batch_size):
    plan = settings.plan(micro_batch_size, settings.seq_length)
    return [(len(wave.rows), wave.group_size) for wave in plan.waves]


# What a sound run gives.


def test_settings_hold_what_the_run_asked_for():
    settings = accepted(
        f"{BASP} --micro-batch-size 2 --eval-micro-batch-size 4 --global-batch-size 8 --tensor-model-parallel-size 2 "
        "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --calculate-per-token-loss "
        "--basp-domain-size 16 --basp-ledger sent.json",
        world_size=32,
    )
    assert (settings.mode, settings.ranks, settings.seq_length) == ("basp", 8, 64)
    assert (settings.micro_batch_size, settings.eval_micro_batch_size, settings.global_batch_size) == (2, 4, 8)
    assert (settings.tensor_model_parallel_size, settings.data_parallel_size) == (2, 2)
    assert (settings.limits.heads, settings.limits.kv_heads, settings.limits.group_size) == (16, 4, None)
    assert (settings.domain_devices, settings.ledger, settings.per_token_loss) == (16, Path("sent.json"), True)


def test_what_is_not_given_follows_from_the_rest():
    settings = accepted(BASP, world_size=16)
    assert (settings.eval_micro_batch_size, settings.global_batch_size, settings.data_parallel_size) == (3, 6, 2)
    assert (settings.limits.heads, settings.limits.kv_heads) == (8, 8), "without grouped queries Hkv = H"
    assert (settings.domain_devices, settings.ledger, settings.per_token_loss) == (None, None, False)


def test_key_value_heads_fewer_than_tensor_parallel_ranks_count_as_one_each():
    settings = accepted(
        f"{BASP} --tensor-model-parallel-size 4 --num-attention-heads 32 --group-query-attention --num-query-groups 2",
        world_size=32,
    )
    assert (settings.limits.heads, settings.limits.kv_heads) == (8, 1)


def test_groups_are_those_of_training_and_of_evaluation_and_no_others():
    settings = accepted(f"{BASP} --micro-batch-size 3 --eval-micro-batch-size 8 --eval-global-batch-size 8")
    assert settings.batch_sizes() == (3, 8)
    assert waves(settings, 3) == [(2, 4), (1, 8)] and waves(settings, 8) == [(8, 1)]
    assert settings.group_sizes() == (1, 4, 8)
    assert accepted(BASP).group_sizes() == (4, 8)
    assert accepted(f"{BASP} --eval-micro-batch-size 3").batch_sizes() == (3,)


def test_ulysses_is_one_wave_over_all_ranks_whatever_the_batch():
    for micro_batch_size in (1, 3, 8):
        settings = accepted(f"{ULYSSES} --micro-batch-size {micro_batch_size}")
        assert waves(settings, micro_batch_size) == [(micro_batch_size, 8)]


def test_rows_are_packed_with_either_flag():
    for flag, packed, sft in (
        ("", False, False),
        ("--sft", True, True),
        ("--dataloader-inter-document-masking", True, False),
    ):
        settings = accepted(f"{BASP} {flag}")
        assert (settings.packed, settings.sft) == (packed, sft)


def test_a_fixed_group_size_holds_for_all_rows():
    assert waves(accepted(f"{BASP} --micro-batch-size 4 --basp-group-size 4"), 4) == [(4, 4)]


def test_the_domain_that_was_learnt_bounds_the_plan_and_changes_nothing_else():
    settings = accepted(BASP)
    learnt = placed(settings, 4)
    assert (settings.limits.domain_size, learnt.limits.domain_size) == (None, 4)
    assert replace(learnt, limits=settings.limits) == settings


CLUSTER = "--basp-cluster a100-40gb-2x4"


def test_on_a_known_cluster_the_plan_goes_by_seconds_and_not_by_bytes():
    """Three short rows inside one node: two waves send less, one has less latency."""
    by_bytes, by_seconds = placed(accepted(BASP), 8), placed(accepted(f"{BASP} {CLUSTER}"), 8)
    assert waves(by_bytes, 3) == [(2, 4), (1, 8)]
    assert waves(by_seconds, 3) == [(3, 8)]
    long = placed(accepted(f"{BASP} {CLUSTER} --seq-length 65536"), 4)
    assert waves(long, 3) == [(2, 4), (1, 8)]


@pytest.mark.parametrize(
    ("flags", "attributes", "shape"),
    [
        ("", {}, AttentionShape(8, 8, 64, 64, 4)),
        ("--bf16 --group-query-attention --num-query-groups 2", {}, AttentionShape(8, 2, 64, 64, 2)),
        (
            "--kv-channels 128 --tensor-model-parallel-size 2 --micro-batch-size 4",
            {"world_size": 16},
            AttentionShape(4, 4, 128, 128, 4),
        ),
        (
            "--multi-latent-attention",
            {"qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 96},
            AttentionShape(8, 8, 192, 96, 4),
        ),
    ],
)
def test_the_exchange_is_modelled_with_the_heads_and_elements_of_the_run(flags, attributes, shape):
    assert accepted(f"{BASP} {CLUSTER} {flags}", **attributes).exchange.shape == shape


def test_a_cluster_that_is_not_known_is_refused_with_those_that_are():
    message = refused(f"{BASP} --basp-cluster cray-1")
    assert "there is no cluster cray-1: use one of a100-40gb-2x4" in message
    assert "megatron-basp bench fabric" in message


def test_a_domain_that_is_not_the_clusters_is_refused():
    message = refused(f"{BASP} {CLUSTER} --basp-domain-size 8")
    assert "--basp-domain-size must be the 4 GPUs that fast links join on a100-40gb-2x4, got 8" in message
    assert accepted(f"{BASP} {CLUSTER} --basp-domain-size 4").domain_devices == 4


def test_ranks_that_sit_as_they_cannot_on_the_cluster_are_refused():
    settings = accepted(f"{BASP} {CLUSTER}")
    settings.check_cluster({rank: f"host{rank // 4}" for rank in range(8)})
    with pytest.raises(ConfigurationError, match="a100-40gb-2x4 has 4 GPUs a node, and 8 ranks run on host0: name"):
        settings.check_cluster(dict.fromkeys(range(8), "host0"))
    with pytest.raises(ConfigurationError, match="a100-40gb-2x4 has 2 nodes, and the ranks run on 4"):
        settings.check_cluster({rank: f"host{rank // 2}" for rank in range(8)})
    accepted(BASP).check_cluster(dict.fromkeys(range(8), "host0"))


def test_without_a_mode_there_are_no_settings_and_megatrons_flags_are_its_own_business():
    assert accepted("") is None
    assert accepted("--sequence-parallel-mode none --micro-batch-size 0 --cp-comm-type a2a --seq-length 7") is None
    assert accepted("", **{name: bad for name, (_, bad) in FEATURES.items()}) is None


def test_checking_sets_nothing():
    args = parse(BASP)
    before = dict(vars(args))
    settings_from_arguments(args)
    assert vars(args) == before
    assert args.cp_comm_type == ["p2p"], "Megatron's default is still what it was"


@pytest.mark.parametrize("flags", ["--micro-batch-size 8", "--micro-batch-size 3 --moe-expert-capacity-factor -1"])
def test_experts_may_drop_tokens_where_ranks_hold_whole_sequences_and_not_where_they_hold_parts(flags):
    assert accepted(f"{BASP} --moe-expert-capacity-factor 1 {flags}")
    message = refused(f"{BASP} {flags} --micro-batch-size 3 --moe-expert-capacity-factor 0")
    assert "K > 1 (here K in [4, 8])" in message
    assert "K > 1" in refused(f"{ULYSSES} --micro-batch-size 8 --moe-expert-capacity-factor 1")
    evaluation = "--eval-micro-batch-size 2 --eval-global-batch-size 2"
    assert "K > 1" in refused(f"{BASP} --micro-batch-size 8 {evaluation} --moe-expert-capacity-factor 1")


# What is refused.


@pytest.mark.parametrize(
    "flag",
    ["micro-batch-size", "eval-micro-batch-size", "seq-length", "num-attention-heads", "pipeline-model-parallel-size"],
)
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_below_one_are_refused_by_flag_and_value(flag, value):
    assert refused(f"{BASP} --{flag} {value}") == f"--{flag} must be 1 or more, got {value}"


@pytest.mark.parametrize("name", ["micro_batch_size", "seq_length", "num_attention_heads"])
def test_sizes_left_out_are_refused_by_flag(name):
    assert refused(BASP, **{name: None}) == f"--{name.replace('_', '-')} must be 1 or more, got None"


def test_key_value_heads_below_one_are_refused_where_queries_are_grouped():
    message = refused(f"{BASP} --group-query-attention --num-query-groups 0")
    assert message == "--num-query-groups must be 1 or more, got 0"


def test_a_length_that_megatron_cannot_divide_gets_the_next_one_that_works():
    message = refused(f"{BASP} --seq-length 72")  # N divides it, 2·N does not
    assert "S % (2·N)" in message and "S=72, N=8 and B=3" in message and message.endswith(" 80")
    assert accepted(f"{BASP} --seq-length 80").seq_length == 80


def test_heads_that_no_group_size_fits_get_a_batch_and_a_number_of_ranks_that_work():
    message = refused(f"{BASP} --num-attention-heads 4")
    assert "B=3" in message and "H=4, Hkv=4" in message
    assert message.endswith("must be a multiple of 2: use 4, or --context-parallel-size 4")
    assert accepted(f"{BASP} --num-attention-heads 4 --micro-batch-size 4").group_sizes() == (2,)
    assert accepted(f"{BASP} --num-attention-heads 4 --context-parallel-size 4").group_sizes() == (2, 4)


def test_ulysses_over_more_ranks_than_heads_is_refused():
    message = refused(f"{ULYSSES} --num-attention-heads 4")
    assert "H=4" in message and "K=8" in message


def test_a_group_size_that_does_not_divide_the_ranks_gets_those_that_do():
    message = refused(f"{BASP} --micro-batch-size 8 --num-attention-heads 24 --basp-group-size 3")
    assert "N=8 ranks and K=3" in message and message.endswith("[1, 2, 4, 8]")
    for group_size in (1, 2, 4, 8):
        settings = accepted(f"{BASP} --micro-batch-size 8 --num-attention-heads 24 --basp-group-size {group_size}")
        assert settings.group_sizes() == (group_size,)


@pytest.mark.parametrize(
    "batches", ["--micro-batch-size 6", "--micro-batch-size 4 --eval-micro-batch-size 6 --eval-global-batch-size 12"]
)
def test_a_batch_that_a_fixed_group_size_does_not_deal_out_is_refused_in_training_and_at_evaluation(batches):
    message = refused(f"{BASP} {batches} --basp-group-size 2")
    assert "B=6, N=8, K=2 (N/K=4): use a micro-batch of 4 or 8, or leave the group size to the planner" in message
    for remedy in ("--micro-batch-size 4 --basp-group-size 2", "--micro-batch-size 8 --basp-group-size 2", batches):
        accepted(f"{BASP} {remedy}")


@pytest.mark.parametrize(
    "flag",
    [
        "--basp-group-size 4",
        "--basp-domain-size 8",
        "--basp-cluster a100-40gb-2x4",
        "--basp-ledger sent.json",
        "--basp-overlap-chunks 1",
        "--basp-transport auto",
    ],
)
def test_our_flags_without_a_mode_are_refused_by_name(flag):
    name = flag.split()[0]
    message = refused(flag)
    assert message.startswith(f"{name} does nothing without {BASP}") and message.endswith(f"or drop {name}")
    accepted(f"{BASP} --micro-batch-size 2 {flag}")


def test_symmetric_memory_without_nccl_is_refused_before_there_are_groups():
    message = refused(f"{BASP} --micro-batch-size 2 --basp-transport symmetric-memory --distributed-backend gloo")
    assert message.startswith("--basp-transport symmetric-memory needs --distributed-backend nccl, got gloo")


@pytest.mark.parametrize("given", ["p2p", "a2a", "p2p a2a"])
@pytest.mark.parametrize("mode", ["basp", "ulysses"])
def test_a_communication_type_given_by_the_user_is_refused_even_if_it_is_the_default(mode, given):
    message = refused(f"--sequence-parallel-mode {mode} --cp-comm-type {given}")
    assert message.startswith(f"--cp-comm-type (got {given})") and message.endswith("leave it out")


@pytest.mark.parametrize("mode", ["basp", "ulysses"])
def test_a_mode_without_context_parallelism_is_refused(mode):
    message = refused(f"--sequence-parallel-mode {mode} --context-parallel-size 1")
    assert f"--sequence-parallel-mode {mode} needs --context-parallel-size N of 2 or more" in message
    assert message.endswith("got 1")


def test_ulysses_with_another_group_size_is_refused_and_with_its_own_is_not():
    message = refused(f"{ULYSSES} --basp-group-size 4")
    assert "K = N = 8" in message and "--basp-group-size 4" in message and message.endswith("use basp")
    assert accepted(f"{ULYSSES} --basp-group-size 8").group_sizes() == (8,)


@pytest.mark.parametrize("flag", ["--basp-group-size", "--basp-domain-size", "--basp-overlap-chunks"])
def test_our_sizes_below_one_are_refused_by_flag_and_value(flag):
    assert refused(f"{BASP} {flag} 0") == f"{flag} must be 1 or more, got 0"


@pytest.mark.parametrize(
    ("heads", "chunks", "named"),
    [
        ("--num-attention-heads 8", 2, "K=8, H/K=1 and Hkv/K=1, got 2: use one of [1]"),
        ("--num-attention-heads 32", 3, "K=4, H/K=8 and Hkv/K=8, got 3: use one of [1, 2, 4, 8]"),
        ("--num-attention-heads 32", 8, "K=8, H/K=4 and Hkv/K=4, got 8: use one of [1, 2, 4]"),
        (
            "--num-attention-heads 32 --group-query-attention --num-query-groups 8",
            2,
            "K=8, H/K=4 and Hkv/K=1, got 2: use one of [1]",
        ),
    ],
)
def test_parts_that_do_not_divide_a_rank_s_heads_get_those_that_do(heads, chunks, named):
    message = refused(f"{BASP} {heads} --basp-overlap-chunks {chunks}")
    assert message.startswith("--basp-overlap-chunks C must divide the heads of a rank at ") and named in message


def test_parts_are_exchanged_in_groups_and_are_one_where_nobody_says_otherwise():
    heads = "--num-attention-heads 32"
    assert accepted(f"{BASP} {heads} --basp-overlap-chunks 4").chunks == {4: 4, 8: 4}
    assert accepted(f"{BASP} {heads} --basp-overlap-chunks 2 --micro-batch-size 9").chunks == {1: 1, 8: 2}
    assert accepted(f"{BASP} {heads}").chunks == {4: 1, 8: 1}


def test_a_world_that_does_not_divide_gets_the_number_of_ranks_to_start():
    message = refused(f"{BASP} --pipeline-model-parallel-size 2", world_size=24)
    assert "got 24 ranks and 1·2·8 = 16" in message and message.endswith("start a multiple of 16 ranks")
    assert accepted(f"{BASP} --pipeline-model-parallel-size 2", world_size=32).data_parallel_size == 2


def test_a_global_batch_that_does_not_divide_gets_what_it_must_be_a_multiple_of():
    message = refused(f"{BASP} --global-batch-size 9", world_size=16)
    assert "got 9, B=3, DP=2" in message and message.endswith("a multiple of 6")
    assert accepted(f"{BASP} --global-batch-size 12", world_size=16).global_batch_size == 12
    assert refused(f"{BASP} --global-batch-size -3") == "--global-batch-size must be 1 or more, got -3"


def test_a_global_batch_that_evaluation_does_not_divide_is_refused():
    message = refused(f"{BASP} --eval-micro-batch-size 5", world_size=16)
    assert "6" in message and message.endswith("set --eval-global-batch-size to a multiple of 10")
    accepted(f"{BASP} --eval-micro-batch-size 5 --eval-global-batch-size 10", world_size=16)
    message = refused(f"{BASP} --eval-micro-batch-size 5 --eval-global-batch-size 15", world_size=16)
    assert "--eval-global-batch-size" in message and message.endswith("a multiple of 10")


@pytest.mark.parametrize(
    "heads", ["--num-attention-heads 9", "--num-attention-heads 12 --group-query-attention --num-query-groups 3"]
)
def test_heads_that_tensor_parallelism_does_not_divide_are_refused(heads):
    message = refused(f"{BASP} --tensor-model-parallel-size 2 {heads}", world_size=16)
    assert message.startswith("heads % TP must be 0") and "TP=2" in message


def test_tokens_that_tensor_parallel_ranks_cannot_share_are_refused_with_a_length_that_works():
    flags = f"{BASP} --sequence-parallel --tensor-model-parallel-size 4 --num-attention-heads 32 --seq-length"
    message = refused(f"{flags} 16 --micro-batch-size 1", world_size=32)
    assert "T = 1·16/8 = 2 and TP=4" in message and message.endswith("multiple of 32")
    assert accepted(f"{flags} 32 --micro-batch-size 1", world_size=32).seq_length == 32


def test_a_mapping_that_puts_stages_before_replicas_wants_the_same_replicas_of_attention_and_experts():
    flags = f"{BASP} --use-tp-pp-dp-mapping --pipeline-model-parallel-size 2"
    assert "got 1·8 and 1·1" in refused(flags, world_size=16)
    assert accepted(f"{flags} --expert-model-parallel-size 8", world_size=16).ranks == 8
    assert accepted(f"{BASP} --use-tp-pp-dp-mapping").ranks == 8


@pytest.mark.parametrize(("recipe", "alignment"), [("delayed", 16), ("tensorwise", 16), ("mxfp8", 32)])
def test_fp8_wants_whole_blocks_of_tokens_on_a_rank_and_names_the_next_length(recipe, alignment):
    # B=3, N=8: T = 3·S/8, so that S must be a multiple of 8 times the alignment, at evaluation with B=4 of half that.
    message = refused(f"{BASP} --fp8-format hybrid --seq-length 80", fp8_recipe=recipe)
    assert f"T % {alignment} to be 0" in message and "T=30 from B=3, S=80 and N=8" in message
    length = int(message.split()[-1])
    assert length == 8 * alignment
    assert accepted(f"{BASP} --fp8-format hybrid --seq-length {length}", fp8_recipe=recipe).seq_length == length
    message = refused(
        f"{BASP} --micro-batch-size 8 --eval-micro-batch-size 3 --eval-global-batch-size 3 --fp8-format e4m3 "
        f"--seq-length {length + 4 * alignment}",
        fp8_recipe=recipe,
    )
    assert "B=3" in message, "evaluation is checked too"


def test_fp8_that_no_layer_would_use_is_refused():
    message = refused(f"{BASP} --fp8-format hybrid --seq-length 256", transformer_impl="local")
    assert "--fp8-format hybrid does nothing without Transformer Engine's layers" in message


@pytest.mark.parametrize(
    ("refused_flags", "remedied_flags"),
    [
        ("--pipeline-model-parallel-size 2", ""),
        ("--num-distributed-optimizer-instances 2", "--num-distributed-optimizer-instances 2 --overlap-grad-reduce"),
        ("--ddp-average-in-collective", ""),
        ("--expert-model-parallel-size 16", "--expert-model-parallel-size 8"),
        ("--expert-model-parallel-size 16", "--expert-model-parallel-size 16 --calculate-per-token-loss"),
        ("--swiglu --save folder", "--swiglu --save folder --bf16"),
    ],
)
def test_what_stock_fsdp_gets_wrong_is_refused_with_a_remedy(refused_flags, remedied_flags):
    fsdp = f"{BASP} --use-megatron-fsdp"
    assert refused(f"{fsdp} {refused_flags}", world_size=16).startswith("--use-megatron-fsdp with --")
    assert accepted(f"{fsdp} {remedied_flags}", world_size=16).ranks == 8
    assert accepted(f"{BASP} {refused_flags}", world_size=16).ranks == 8, "without FSDP it is fine"


def test_virtual_stages_with_too_few_micro_batches_are_refused_in_training_and_at_evaluation():
    flags = f"{BASP} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 12"
    assert accepted(flags, world_size=16).global_batch_size == 12
    for more in ("--global-batch-size 3", "--eval-micro-batch-size 12", "--global-batch-size 9"):
        message = refused(f"{flags} {more}", world_size=16)
        assert message.startswith("virtual pipeline stages want")
    assert "got M=1 at evaluation from 12/(12·1)" in refused(f"{flags} --eval-micro-batch-size 12", world_size=16)
    assert accepted(f"{flags} --eval-micro-batch-size 12 --eval-global-batch-size 24", world_size=16)


def test_experts_under_tensor_parallelism_want_sequence_parallel_norms():
    flags = f"{BASP} --tensor-model-parallel-size 2 --num-attention-heads 16 --num-experts 4"
    assert "add --sequence-parallel" in refused(flags, world_size=16)
    assert accepted(f"{flags} --sequence-parallel", world_size=16).ranks == 8


def test_an_unknown_mode_is_refused_by_the_parser(capsys):
    with pytest.raises(SystemExit):
        parse("--sequence-parallel-mode ring")
    assert "'none', 'ulysses', 'basp'" in capsys.readouterr().err


# Features.


def test_each_refusal_has_a_row_in_the_table():
    assert sorted(refusal.name for refusal in REFUSALS) == sorted(FEATURES)


@pytest.mark.parametrize("mode", ["basp", "ulysses"])
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_each_unsupported_feature_is_refused_by_name_with_value_reason_and_remedy(refusal, mode):
    bad = FEATURES[refusal.name][1]
    message = refused(f"--sequence-parallel-mode {mode}", **{refusal.name: bad})
    assert message.startswith(refusal.flag or "--" + refusal.name.replace("_", "-"))
    assert f"(got {bad})" in message and f"--sequence-parallel-mode {mode}" in message
    assert message.endswith(refusal.why) and refusal.why


@pytest.mark.parametrize("name", [refusal.name for refusal in CONFIG_REFUSALS])
def test_a_field_of_the_configuration_that_no_flag_sets_is_refused_by_name(name):
    config = argparse.Namespace(**{refusal.name: False for refusal in CONFIG_REFUSALS})
    refuse_unsupported_config(config, "basp")
    setattr(config, name, True)
    with pytest.raises(ConfigurationError, match=rf"^{name} \(got True\) is not supported"):
        refuse_unsupported_config(config, "basp")


@pytest.mark.parametrize("name", [refusal.name for refusal in REFUSALS if refusal.versions is None])
def test_an_argument_that_megatron_no_longer_has_is_not_passed_over(name):
    args = parse(BASP)
    delattr(args, name)
    with pytest.raises(AttributeError, match=name):
        settings_from_arguments(args)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("position_embedding_type", "rope"),
        ("position_embedding_type", "none"),
        ("transformer_impl", "local"),
        ("moe_router_load_balancing_type", "none"),
        ("moe_router_load_balancing_type", ["aux_loss", "seq_aux_loss", "none"]),
        ("moe_router_load_balancing_type", None),
        ("expert_model_parallel_size", None),
    ],
)
def test_other_values_that_are_supported_are_not_refused(name, value):
    assert accepted(BASP, **{name: value}).mode == "basp"


def test_one_unsupported_load_balancing_among_supported_ones_is_refused():
    assert "sinkhorn" in refused(BASP, moe_router_load_balancing_type=["aux_loss", "sinkhorn"])


def test_offloading_is_taken_for_modules_that_were_tried_and_without_full_recompute():
    offloading = f"{BASP} --fine-grained-activation-offloading --offload-modules core_attn"
    assert accepted(f"{offloading} attn_proj --recompute-granularity selective").mode == "basp"
    message = refused(f"{offloading} moe_act expert_fc1")
    assert message.startswith("--offload-modules expert_fc1 moe_act is not shown to be exact yet: use some of attn_")
    assert "--recompute-granularity selective" in refused(f"{offloading} --recompute-granularity full")
    stages = "--pipeline-model-parallel-size 2"
    assert accepted(f"{offloading} {stages}", world_size=16).mode == "basp"
    assert "use core_attn alone" in refused(f"{offloading} attn_proj {stages}", world_size=16)
    assert accepted(f"{BASP} --offload-modules moe_act --recompute-granularity full").mode == "basp"


# Help.


def test_help_says_what_each_flag_does_and_how_they_fit_together():
    text = " ".join(megatron_like_parser().format_help().split())
    for taught in (
        "set --context-parallel-size N and --micro-batch-size B, and each sequence gets K ranks",
        "N/B where B divides N",
        "--sequence-parallel-mode {none,ulysses,basp}",
        "none: stock Megatron. ulysses: every sequence over all N context-parallel ranks. basp:",
        "--basp-group-size K",
        "Unset, the planner chooses K for each micro-batch size.",
        "K must divide N, and N/K must divide the micro-batch size.",
        "--basp-domain-size D",
        "devices joined by fast links",
        "--basp-cluster NAME|FILE",
        "The planner then goes by seconds",
        "--basp-ledger FILE",
        "ledger.rank0.jsonl",
    ):
        assert taught in text


def test_without_our_flags_nothing_is_switched_on():
    args = megatron_like_parser().parse_args([])
    assert args.sequence_parallel_mode == "none"
    assert (args.basp_group_size, args.basp_domain_size, args.basp_ledger) == (None, None, None)
