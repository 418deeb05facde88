"""A user's command line, made small enough to be run several times on one machine, with a line for each change.

What decides whether a mode is exact stays: heads, KV heads, norms, biases, positions, experts, parallelism, B. What
only decides how long it takes gets smaller: layers, widths, vocabulary, S, the number of experts, steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from megatron_basp.errors import ConfigurationError
from megatron_basp.megatron.command_line import CommandLine

ITERATIONS = 10
SEQ_LENGTH = 64

# A run that checks something leaves nothing behind, and starts from nothing.
LEFT_OUT = dict.fromkeys(
    """
    --save --save-interval --load --pretrained-checkpoint --ckpt-step --use-checkpoint-args --finetune --async-save
    --non-persistent-save-interval --non-persistent-ckpt-type --exit-on-missing-checkpoint --no-load-optim
    --no-load-rng --use-mp-args-from-checkpoint-args --save-retain-interval --tensorboard-dir --wandb-project
    --wandb-exp-name --wandb-save-dir --basp-ledger --log-progress --profile --exit-interval --exit-signal-handler
    --exit-duration-in-mins --adlr-autoresume --skip-train --iterations-to-skip --enable-one-logger
    """.split(),
    "verify starts from nothing, takes a few steps and keeps nothing",
)
SCHEDULE = """
    --train-iters --train-samples --lr-decay-style --lr-decay-iters --lr-decay-samples --lr-wsd-decay-style
    --lr-wsd-decay-iters --lr-wsd-decay-samples --lr-warmup-iters --lr-warmup-samples --lr-warmup-fraction
    --lr-warmup-init --lr --min-lr --adam-eps --eval-iters --eval-interval --log-interval --step-batch-size-schedule
    --start-eval-at-iter
""".split()
DATA = """
    --data-path --train-data-path --valid-data-path --test-data-path --data-args-path --per-split-data-args-path
    --split --mock-data --data-cache-path --tokenizer-type --tokenizer-model --tokenizer-metadata
    --tokenizer-special-tokens --vocab-file --merge-file --vocab-size --padded-vocab-size --tiktoken-pattern
    --tiktoken-num-special-tokens --null-tokenizer-eod-id --null-tokenizer-pad-id --trust-remote-code
    --tokenizer-hf-no-use-fast --num-workers
""".split()
NOT_ON_A_CPU = {
    **dict.fromkeys(
        """
        --bf16 --fp16 --grad-reduce-in-bf16 --fp16-lm-cross-entropy --loss-scale --initial-loss-scale
        --first-last-layers-bf16 --use-precision-aware-optimizer --main-grads-dtype --main-params-dtype
        --exp-avg-dtype --exp-avg-sq-dtype --fp8-format --fp8-recipe --fp8-param-gather --fp4-format --fp4-recipe
        """.split(),
        "numbers are compared in fp32",
    ),
    **dict.fromkeys(
        """
        --use-flash-attn --attention-backend --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion
        --tp-comm-overlap --use-te-activation-func --use-transformer-engine-op-fuser --te-rng-tracker
        --fused-residual-rmsnorm --overlap-moe-expert-parallel-comm --cuda-graph-impl --enable-cuda-graph
        --use-nccl-ub --use-sharp --nccl-communicator-config-path --optimizer-cpu-offload --distributed-backend
        --use-fused-weighted-squared-relu --cpu-offloading-num-layers
        """.split(),
        "a CPU has no such thing",
    ),
    "--dataloader-inter-document-masking": "stock's attention takes no packed rows on a CPU",
}
NOT_COMPARED = dict.fromkeys(
    "--moe-expert-capacity-factor --moe-pad-expert-input-to-capacity --moe-token-drop-policy".split(),
    "which tokens experts drop depends on which rank holds them",
)
CPU_FLAGS = """
    --no-gradient-accumulation-fusion --no-rope-fusion --no-persist-layer-norm --no-masked-softmax-fusion
""".split()


class Scaling:
    """Changes a command line in place.

    changes: what was changed, one line each.
    """

    def __init__(self, line: CommandLine) -> None:
        self.line = line
        self.changes: list[str] = []

    @property
    def args(self) -> Any:
        return self.line.args

    def leave_out(self, flags: dict[str, str]) -> None:
        for flag in list(dict.fromkeys(self.line.flags)):
            if flag in flags and self.line.drop(flag):
                self.changes.append(f"{flag}: left out, {flags[flag]}")

    def shrink(self, flag: str, value: int, why: str = "") -> None:
        """Set a number that was given to a smaller one."""
        old = getattr(self.args, flag[2:].replace("-", "_"))
        if old is not None and value < old:
            self.put(flag, value, f"{old} → {value}{why and ', '}{why}")

    def put(self, flag: str, value: object, said: str) -> None:
        self.line.set(flag, value)
        self.changes.append(f"{flag}: {said}")


def run_on_cpu(scaling: Scaling) -> None:
    """Take out what needs a GPU."""
    known = {flag: why for flag, why in NOT_ON_A_CPU.items() if flag in scaling.line.flags}
    scaling.leave_out(known)
    if scaling.args.cross_entropy_fusion_impl != "native":
        scaling.put("--cross-entropy-fusion-impl", "native", "te → native, a CPU has no Transformer Engine")
    if scaling.args.transformer_impl != "local":
        scaling.put("--transformer-impl", "local", "a CPU has no Transformer Engine")
    for flag in CPU_FLAGS:
        scaling.line.set(flag)


def shorten(scaling: Scaling) -> None:
    """A few steps of training, an evaluation before and after, and no traces."""
    scaling.leave_out(LEFT_OUT | NOT_COMPARED)
    for flag in SCHEDULE:
        scaling.line.drop(flag)
    line = f"""
        --train-iters {ITERATIONS} --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --adam-eps 1e-5
        --eval-iters 2 --eval-interval {ITERATIONS + 1} --log-interval 1
    """.split()
    for flag, value in zip(line[::2], line[1::2], strict=True):
        scaling.line.set(flag, value)
    scaling.changes.append(f"schedule: {ITERATIONS} steps, --lr 1e-3 --lr-decay-style cosine --adam-eps 1e-5")
    for flag in ("--hidden-dropout", "--attention-dropout"):
        if getattr(scaling.args, flag[2:].replace("-", "_")):
            scaling.put(flag, 0, "→ 0, dropout draws other numbers on other ranks")


def use_data(scaling: Scaling, make: Callable[[], Sequence[str]]) -> None:
    """Train on a sample of text instead of the user's data, whose words a small vocabulary can't hold."""
    scaling.leave_out({"--sft": "the sample of text has no conversations"})
    for flag in DATA:
        scaling.line.drop(flag)
    words = [*make(), "--split", "90,10,0", "--num-workers", "0"]
    for flag, value in zip(words[::2], words[1::2], strict=True):
        scaling.line.set(flag, value)
    scaling.changes.append("data: text of Python's standard library, vocabulary 512")


def fit_ranks(scaling: Scaling, available: int, ranks: int | None) -> int:
    """Make N fit the machine, with B changed in proportion where that is a whole number.

    Args:
        available: processes that the machine can run.
        ranks: processes that the user asked for, or None.

    Returns:
        how many to start: a multiple of TP·PP·N.

    Raises:
        ConfigurationError: there is no such number.
    """
    args = scaling.args
    model_ranks = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    given = args.context_parallel_size
    limit = ranks or available
    if ranks is not None and ranks > available:
        raise ConfigurationError(f"--ranks {ranks}: this machine can run {available}")
    if ranks is not None and ranks % (model_ranks * given) == 0:
        return ranks
    fitting = [n for n in range(2, given + 1) if given % n == 0 and n * model_ranks <= limit]
    if ranks is not None:
        fitting = [n for n in fitting if ranks % (n * model_ranks) == 0]
    if not fitting:
        raise ConfigurationError(
            f"TP·PP·N must fit into {limit} ranks with N of 2 or more that divides {given}, got TP·PP = "
            f"{args.tensor_model_parallel_size}·{args.pipeline_model_parallel_size}: "
            f"give --ranks a multiple of {2 * model_ranks} (this machine can run {available}), or use less TP or PP"
        )
    batch_sizes = [size for size in (args.micro_batch_size, args.eval_micro_batch_size) if size]
    proportional = [n for n in fitting if all(size * n % given == 0 for size in batch_sizes)]
    size = max(proportional or fitting)
    if size == given:
        return model_ranks * size
    why = "to fit this machine"
    scaling.shrink("--context-parallel-size", size, why)
    if proportional:
        for flag, old in (
            ("--micro-batch-size", args.micro_batch_size),
            ("--eval-micro-batch-size", args.eval_micro_batch_size),
        ):
            if old:
                scaling.shrink(flag, old * size // given, "in proportion to N")
    else:
        scaling.changes.append(f"--micro-batch-size: stays {args.micro_batch_size}, not in proportion to N")
    if args.basp_group_size:
        if proportional and args.basp_group_size * size % given == 0:
            scaling.shrink("--basp-group-size", args.basp_group_size * size // given, "in proportion to N")
        else:
            scaling.leave_out({"--basp-group-size": f"N became {size}, and K follows from the plan"})
    scaling.leave_out({"--basp-domain-size": "this machine is one domain"})
    return model_ranks * size


def shrink_batches(scaling: Scaling, data_parallel: int) -> None:
    """A few micro-batches to a step: of each pipeline stage two, and enough for the reference of expert parallelism
    (`megatron_basp.cli.verify`)."""
    args = scaling.args
    rows = args.micro_batch_size * data_parallel
    micro_batches = 2 * args.pipeline_model_parallel_size * args.expert_model_parallel_size
    scaling.line.set("--global-batch-size", rows * micro_batches)
    scaling.changes.append(
        f"--global-batch-size: {rows * micro_batches} = B {args.micro_batch_size} · DP {data_parallel} · "
        f"{micro_batches} micro-batches"
    )
    if args.eval_micro_batch_size is not None and args.tensor_model_parallel_size > 1:
        scaling.leave_out({"--eval-micro-batch-size": "stock Megatron, the reference, crashes on it with TP > 1"})
    args = scaling.args
    scaling.line.drop("--eval-global-batch-size")
    if args.eval_micro_batch_size is not None:
        # The reference of expert parallelism has that many data-parallel ranks.
        expert_parallel = args.expert_model_parallel_size
        scaling.line.set("--eval-global-batch-size", args.eval_micro_batch_size * data_parallel * expert_parallel)


def shrink_model(scaling: Scaling) -> None:
    """Fewer and narrower layers of the same kinds, shorter sequences, fewer experts."""
    args = scaling.args
    _shrink_layers(scaling)
    _shrink_widths(scaling)
    length = 2 * args.context_parallel_size
    length *= -(-SEQ_LENGTH // length)
    scaling.shrink("--seq-length", length)
    scaling.line.set("--max-position-embeddings", max(length, scaling.args.seq_length))
    if args.window_size is not None and args.window_size[0] >= length // 2:
        window = f"{length // 4},{args.window_size[1]}"
        scaling.put("--window-size", window, f"{','.join(map(str, args.window_size))} → {window}")
    if args.num_experts is not None:
        step = math.lcm(args.expert_model_parallel_size, args.moe_router_num_groups or 1)
        experts = -(-max(4, 2 * args.moe_router_topk) // step) * step
        scaling.shrink("--num-experts", experts)


def _shrink_layers(scaling: Scaling) -> None:
    """At least one layer of each kind, and one for each pipeline stage."""
    args = scaling.args
    given = {
        flag: pattern
        for flag in ("--moe-layer-freq", "--window-attn-skip-freq", "--no-rope-freq")
        if (pattern := getattr(args, flag[2:].replace("-", "_"))) is not None
    }
    patterns = {flag: pattern for flag, pattern in given.items() if not isinstance(pattern, int)}
    kinds = list(dict.fromkeys(zip(*patterns.values(), strict=True)))
    layers = max([2, len(kinds), *(min(pattern, 6) for pattern in given.values() if isinstance(pattern, int))])
    stages = args.pipeline_model_parallel_size
    if args.num_layers_per_virtual_pipeline_stage or args.num_virtual_stages_per_pipeline_rank:
        scaling.leave_out({"--num-layers-per-virtual-pipeline-stage": "stages are counted instead"})
        scaling.put("--num-virtual-stages-per-pipeline-rank", 2, "2")
        stages *= 2
    uneven = """
        --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers --pipeline-model-parallel-layout
        --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
    """
    scaling.leave_out(dict.fromkeys(uneven.split(), "fewer layers are dealt out evenly"))
    layers = -(-layers // stages) * stages
    if args.num_layers is None or layers >= args.num_layers:
        return
    scaling.shrink("--num-layers", layers)
    for index, flag in enumerate(patterns):
        pattern = [kinds[layer % len(kinds)][index] for layer in range(layers)]
        scaling.put(flag, str(pattern).replace(" ", ""), f"{pattern}, a layer of each kind")
    if args.recompute_num_layers is not None:
        scaling.shrink("--recompute-num-layers", 1)


def _shrink_widths(scaling: Scaling) -> None:
    args = scaling.args
    if not args.num_attention_heads or not args.hidden_size:
        return
    heads, old_hidden = args.num_attention_heads, args.hidden_size
    head_size = args.kv_channels or old_hidden // heads
    small = min(head_size, 16 if heads <= 16 else 8)
    unit = 16 * args.tensor_model_parallel_size
    if args.kv_channels is None:
        hidden = heads * small
    else:
        scaling.shrink("--kv-channels", small)
        hidden = -(-old_hidden * small // head_size // unit) * unit
    scaling.shrink("--hidden-size", hidden)
    for flag in ("--ffn-hidden-size", "--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size"):
        width = getattr(args, flag[2:].replace("-", "_"))
        if width is not None:
            scaling.shrink(flag, -(-width * hidden // old_hidden // unit) * unit)
