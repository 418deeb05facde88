"""The flags, and their validation beside Megatron's own.

Everything that can be known from flags is checked before Megatron's `validate_args`, so that bad input gets one line
with a remedy rather than a bare assertion, on every rank and before any process group exists.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from megatron_basp.cluster import ClusterSpec
from megatron_basp.errors import ConfigurationError
from megatron_basp.exchange_cost import AttentionShape, ExchangeModel
from megatron_basp.library import named_cluster
from megatron_basp.megatron.conditions import check_chunks, check_mapping, check_transport, check_virtual_stages
from megatron_basp.megatron.fp8 import check_fp8
from megatron_basp.megatron.offloading import check_offloading
from megatron_basp.megatron.refusals import (
    refuse_capacity_of_shards,
    refuse_unsupported,
    refuse_unsupported_fsdp,
    refuse_unsupported_packing,
)
from megatron_basp.megatron.settings import Settings
from megatron_basp.megatron.transports import TRANSPORTS
from megatron_basp.placement import Placement
from megatron_basp.plan import Limits

MODES = ("none", "ulysses", "basp")


class _Untouched(list):
    """A default that can be told from the same value given by the user."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the `sequence parallelism by groups` flags to Megatron's parser."""
    group = parser.add_argument_group(
        "sequence parallelism by groups (megatron_basp)",
        "Spreads the sequences of a micro-batch over groups of context-parallel ranks: set --context-parallel-size N "
        "and --micro-batch-size B, and each sequence gets K ranks, N/B where B divides N.",
    )
    group.add_argument(
        "--sequence-parallel-mode",
        choices=MODES,
        default="none",
        help="none: stock Megatron. ulysses: every sequence over all N context-parallel ranks. basp: every sequence "
        "over as few ranks as the micro-batch allows.",
    )
    group.add_argument(
        "--basp-group-size",
        type=int,
        metavar="K",
        help="ranks that share one sequence. Unset, the planner chooses K for each micro-batch size. K must divide N, "
        "and N/K must divide the micro-batch size.",
    )
    group.add_argument(
        "--basp-domain-size",
        type=int,
        metavar="D",
        help="devices joined by fast links, where that is not the host's number (an NVLink rack, say). The planner "
        "keeps groups of K·TP devices inside a domain where it can.",
    )
    group.add_argument(
        "--basp-cluster",
        metavar="NAME|FILE",
        help="the cluster that this runs on: a name of configs/hardware, or a file like those, which `megatron-basp "
        "bench fabric` measures. The planner then goes by seconds; without, by bytes that leave a node, then by all.",
    )
    group.add_argument(
        "--basp-ledger",
        type=Path,
        metavar="FILE",
        help="write in every step what each rank sent, as JSON lines: a line for each kind of collective, ours and "
        "Megatron's, with bytes inside and across nodes and seconds; some 300 bytes a line. FILE gets the rank before "
        "its suffix: ledger.rank0.jsonl. Rank 0 prints the shares at the end.",
    )
    group.add_argument(
        "--basp-check",
        action="store_true",
        default=None,
        help="compare the plan between the ranks of each context-parallel group in every step, not only at the start "
        "and at a plan's first use. It costs one all-gather of 32 bytes a rank in each call of the schedule, and a "
        "wait for it, in which a GPU is given nothing to do: tens of microseconds inside a host.",
    )
    group.add_argument(
        "--basp-overlap-chunks",
        type=int,
        metavar="C",
        help="exchange a rank's heads in C parts, so that one travels while another is attended to. C must divide the "
        "query heads and the key-value heads of a rank in its group. It pays where links are slow and attention takes "
        "as long; each part has a latency of its own. Unset, the seconds on --basp-cluster decide; without it, 1.",
    )
    group.add_argument(
        "--basp-transport",
        choices=TRANSPORTS,
        help="what carries the exchange. nccl, the default: the all-to-all of the backend. symmetric-memory: the GPUs "
        "of a group read each other's memory (torch's all_to_all_nd; one node, NCCL); not measured yet. auto: that "
        "for each K for which a trial at the start shows that it works. The table at the start says which, and why.",
    )
    parser.set_defaults(cp_comm_type=_Untouched(parser.get_default("cp_comm_type")))
    return parser


def settings_from_arguments(args: argparse.Namespace) -> Settings | None:
    """Check the flags and take from them what this run's sequence parallelism is; None if it has none.

    Call before Megatron's `validate_args`; it sets nothing.

    Raises:
        ConfigurationError: one line with the formula, the values and the remedy.
    """
    mode = args.sequence_parallel_mode
    if mode == "none":
        for name, value in vars(args).items():
            if name.startswith("basp_") and value is not None:
                flag = "--" + name.replace("_", "-")
                raise ConfigurationError(
                    f"{flag} does nothing without --sequence-parallel-mode basp: add it, or drop {flag}"
                )
        return None
    refuse_unsupported(args, mode)
    refuse_unsupported_packing(args)
    refuse_unsupported_fsdp(args)
    check_offloading(args)
    check_transport(args)
    ranks = args.context_parallel_size
    if ranks < 2:
        raise ConfigurationError(
            f"--sequence-parallel-mode {mode} needs --context-parallel-size N of 2 or more to carve groups out of, "
            f"got {ranks}"
        )
    if not isinstance(args.cp_comm_type, _Untouched):
        raise ConfigurationError(
            f"--cp-comm-type (got {' '.join(args.cp_comm_type)}) says how stock context parallelism communicates, "
            f"which --sequence-parallel-mode {mode} replaces: leave it out"
        )
    if mode == "ulysses" and args.basp_group_size not in (None, ranks):
        raise ConfigurationError(
            f"--sequence-parallel-mode ulysses is K = N = {ranks}, got --basp-group-size {args.basp_group_size}: use "
            "basp"
        )
    for name in ("basp_group_size", "basp_domain_size"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ConfigurationError(f"--{name.replace('_', '-')} must be 1 or more, got {getattr(args, name)}")
    if args.basp_ledger is not None:
        _check_ledger(args.basp_ledger)
    settings = _settings(args, mode, ranks)
    check_mapping(args)
    check_virtual_stages(args, settings)
    if args.num_experts and settings.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        raise ConfigurationError(
            f"Megatron trains experts under --tensor-model-parallel-size {settings.tensor_model_parallel_size} with "
            f"--sequence-parallel only: add --sequence-parallel"
        )
    for batch_size in settings.batch_sizes():
        tokens = settings.plan(batch_size, settings.seq_length).tokens
        if args.sequence_parallel and tokens % settings.tensor_model_parallel_size:
            raise ConfigurationError(
                f"--sequence-parallel spreads the T = B·S/N tokens of a rank over TP ranks, so that T % TP must be 0, "
                f"got T = {batch_size}·{settings.seq_length}/{ranks} = {tokens} and "
                f"TP={settings.tensor_model_parallel_size}: use a --seq-length that is a multiple of "
                f"{ranks * settings.tensor_model_parallel_size}"
            )
    check_chunks(settings)
    refuse_capacity_of_shards(args, settings.group_sizes(), mode)
    check_fp8(args, settings)
    return settings


def _settings(args: argparse.Namespace, mode: str, ranks: int) -> Settings:
    batch_size = _positive(args, "micro_batch_size")
    eval_batch_size = batch_size if args.eval_micro_batch_size is None else _positive(args, "eval_micro_batch_size")
    seq_length = _positive(args, "seq_length")
    if seq_length % (2 * ranks):
        raise ConfigurationError(
            f"Megatron wants S % (2·N) to be 0 for N context-parallel ranks, got S={seq_length}, N={ranks} and "
            f"B={batch_size}: the next --seq-length that works is {-(-seq_length // (2 * ranks)) * 2 * ranks}"
        )
    tensor_parallel = _positive(args, "tensor_model_parallel_size")
    heads, kv_heads = _heads_per_rank(args, tensor_parallel)
    pipeline_parallel = _positive(args, "pipeline_model_parallel_size")
    model_ranks = tensor_parallel * pipeline_parallel * ranks
    if args.world_size % model_ranks:
        raise ConfigurationError(
            f"world size % (TP·PP·CP) must be 0, got {args.world_size} ranks and "
            f"{tensor_parallel}·{pipeline_parallel}·{ranks} = {model_ranks}: start a multiple of {model_ranks} ranks"
        )
    data_parallel = args.world_size // model_ranks
    global_batch_size = _global_batch_size(args, "global_batch_size", batch_size, data_parallel)
    if args.eval_global_batch_size is None and global_batch_size % (eval_batch_size * data_parallel):
        raise ConfigurationError(
            f"evaluation takes the global batch size {global_batch_size} of training, which is no multiple of B·DP = "
            f"{eval_batch_size}·{data_parallel}: set --eval-global-batch-size to a multiple of "
            f"{eval_batch_size * data_parallel}"
        )
    _global_batch_size(args, "eval_global_batch_size", eval_batch_size, data_parallel)
    attention, exchange = attention_shape(args, heads, kv_heads), None
    if args.basp_cluster is not None:
        # In one domain, until ranks have told each other where they are.
        together = Placement(((0,) * ranks,))
        exchange = ExchangeModel(_cluster(args), attention, together)
    return Settings(
        mode=mode,
        ranks=ranks,
        limits=Limits(heads, kv_heads, group_size=ranks if mode == "ulysses" else args.basp_group_size),
        seq_length=seq_length,
        micro_batch_size=batch_size,
        eval_micro_batch_size=eval_batch_size,
        global_batch_size=global_batch_size,
        data_parallel_size=data_parallel,
        tensor_model_parallel_size=tensor_parallel,
        domain_devices=args.basp_domain_size,
        attention=attention,
        exchange=exchange,
        per_token_loss=args.calculate_per_token_loss,
        packed=args.sft or args.dataloader_inter_document_masking,
        sft=args.sft,
        ledger=args.basp_ledger,
        check=bool(args.basp_check),
        overlap_chunks=None if args.basp_overlap_chunks is None else _positive(args, "basp_overlap_chunks"),
        transport=args.basp_transport or "nccl",
    )


def _global_batch_size(args: argparse.Namespace, name: str, batch_size: int, data_parallel: int) -> int:
    if getattr(args, name) is None:
        return batch_size * data_parallel
    size = _positive(args, name)
    if size % (batch_size * data_parallel):
        flag = f"--{name.replace('_', '-')}"
        raise ConfigurationError(
            f"{flag} % (B·DP) must be 0, got {size}, B={batch_size}, DP={data_parallel}: use a multiple of "
            f"{batch_size * data_parallel}"
        )
    return size


def _check_ledger(file: Path) -> None:
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    if not file.name or file.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigurationError(
            f"--basp-ledger {file} cannot be written: name a file in a folder that you can write to"
        )


def _positive(args: argparse.Namespace, name: str) -> int:
    value: Any = getattr(args, name)
    if value is None or value < 1:
        raise ConfigurationError(f"--{name.replace('_', '-')} must be 1 or more, got {value}")
    return value


def _heads_per_rank(args: argparse.Namespace, tensor_parallel: int) -> tuple[int, int]:
    heads = _positive(args, "num_attention_heads")
    kv_heads = _positive(args, "num_query_groups") if args.group_query_attention else heads
    if heads % tensor_parallel or (kv_heads % tensor_parallel and kv_heads > tensor_parallel):
        raise ConfigurationError(
            f"heads % TP must be 0, got {heads} attention heads, {kv_heads} query groups and TP={tensor_parallel}: "
            f"use a --tensor-model-parallel-size that divides both"
        )
    return heads // tensor_parallel, max(1, kv_heads // tensor_parallel)


def _cluster(args: argparse.Namespace) -> ClusterSpec:
    cluster = named_cluster(args.basp_cluster)
    if args.basp_domain_size not in (None, cluster.gpus_per_node):
        raise ConfigurationError(
            f"--basp-domain-size must be the {cluster.gpus_per_node} GPUs that fast links join on {cluster.name}, got "
            f"{args.basp_domain_size}: leave it out, or name another --basp-cluster"
        )
    return cluster


def attention_shape(args: argparse.Namespace, heads: int, kv_heads: int) -> AttentionShape:
    element_bytes = 2 if args.bf16 else 4
    if args.multi_latent_attention:
        # Keys have a head each, made from what is compressed (`core/transformer/multi_latent_attention.py`).
        query_head_size = args.qk_head_dim + args.qk_pos_emb_head_dim
        return AttentionShape(heads, heads, query_head_size, args.v_head_dim, element_bytes)
    head_size = args.kv_channels or args.hidden_size // args.num_attention_heads
    return AttentionShape(heads, kv_heads, head_size, head_size, element_bytes)
