"""The hooks: where an unmodified Megatron calls into megatron_basp. All of them are here, and do nothing in a run that
asked for no sequence-parallel mode."""

from __future__ import annotations

import atexit
import functools
import inspect
import json
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_basp.errors import ConfigurationError
from megatron_basp.ledger import Ledger
from megatron_basp.megatron.arguments import (
    add_arguments,
    check_data_files,
    check_environment,
    settings_from_arguments,
)
from megatron_basp.megatron.core_attention import MegatronBaspAttention, make_sdpa, make_te
from megatron_basp.megatron.model import check_model, read_positions_from_plan, without_context_parallelism
from megatron_basp.megatron.refusals import refuse_unsupported_config
from megatron_basp.megatron.report import print_plan
from megatron_basp.megatron.runtime import Runtime
from megatron_basp.megatron.schedule import PlannedSchedule, stream_of_batch
from megatron_basp.megatron.seam import check_version, replace
from megatron_basp.process_groups import aligned_domain_size, create_sequence_groups

Function = Callable[..., Any]


def install() -> Runtime:
    """Register the sequence-parallel modes in Megatron, for this process and those forked from it.

    Call once, before the training script imports from Megatron.

    Returns:
        what the hooks share, for those who want to read the ledger or the plans.

    Raises:
        MegatronMismatch: Megatron is not as this version of the plugin knows it.
        RuntimeError: they are in already.
    """
    from megatron.core import parallel_state

    check_version()
    if hasattr(parallel_state.destroy_model_parallel, "__wrapped__"):
        raise RuntimeError("the hooks are installed already: call install() once in a process, and keep its Runtime")
    runtime = Runtime()

    def hook(
        target: str, parameters: list[str], make: Callable[[Runtime, Function], Function], also_in: tuple = ()
    ) -> None:
        replace(target, parameters, lambda original: functools.wraps(original)(make(runtime, original)), also_in)

    hook("megatron.training.arguments:add_megatron_arguments", ["parser"], _add_arguments)
    hook("megatron.training.arguments:validate_args", ["args", "defaults"], _validate_arguments)
    hook("megatron.training.yaml_arguments:validate_yaml", ["args", "defaults"], _refuse_yaml)
    hook(
        "megatron.core.parallel_state:initialize_model_parallel",
        ["context_parallel_size", "distributed_timeout_minutes", "nccl_communicator_config_path"],
        _create_groups,
    )
    hook("megatron.core.parallel_state:destroy_model_parallel", [], _destroy_groups)
    hook(
        "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
        ["config", "transformer_layer_spec", "pg_collection"],
        _build_model,
    )
    hook("megatron.core.models.backends:LocalSpecProvider.core_attention", [], _core_attention)
    hook(
        "megatron.core.extensions.transformer_engine_spec_provider:TESpecProvider.core_attention", [], _core_attention
    )
    hook(
        "megatron.core.utils:get_batch_on_this_tp_rank",
        ["micro_batch_size"],
        _tensor_parallel_batch,
        also_in=("megatron.training.training",),
    )
    hook("megatron.core.utils:get_batch_on_this_cp_rank", ["batch"], _batch, also_in=("megatron.training.training",))
    hook(
        "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        [],
        _schedule,
        also_in=("megatron.core.pipeline_parallel", "megatron.training.training"),
    )
    return runtime


def _add_arguments(runtime: Runtime, original: Function) -> Function:
    return lambda parser: add_arguments(original(parser))


def _validate_arguments(runtime: Runtime, original: Function) -> Function:
    def validate_args(args: Any, defaults: Any = {}) -> Any:  # noqa: B006  (Megatron's own signature)
        settings = settings_from_arguments(args)
        if settings is not None:
            check_environment(args)
            check_data_files(args)
        args.cp_comm_type = list(args.cp_comm_type)  # the marked default has done its work
        result = original(args, defaults)
        if settings is not None:
            # The loader's S×S mask is 17 GB a row at 128K tokens, and causal attention needs none.
            args.create_attention_mask_in_dataloader = False
        runtime.set_settings(settings)
        return result

    return validate_args


def _refuse_yaml(runtime: Runtime, original: Function) -> Function:
    """With `--yaml-cfg` Megatron forgets the flags that were parsed, ours among them, and validates by other code."""

    def validate_yaml(args: Any, defaults: Any = {}) -> Any:  # noqa: B006  (Megatron's own signature)
        if given := [word for word in sys.argv if word.startswith(("--sequence-parallel-mode", "--basp-"))]:
            raise ConfigurationError(f"--yaml-cfg makes Megatron ignore {given[0]}: pass flags instead")
        return original(args, defaults)

    return validate_yaml


def _create_groups(runtime: Runtime, original: Function) -> Function:
    signature = inspect.signature(original)

    def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if not runtime.is_active:
            return
        from megatron.core import parallel_state

        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        config_path = bound.arguments["nccl_communicator_config_path"]
        timeout = timedelta(minutes=bound.arguments["distributed_timeout_minutes"])
        cp_group = parallel_state.get_context_parallel_group()
        if cp_group.size() != runtime.settings.ranks:
            raise ValueError(
                f"the context-parallel group has {cp_group.size()} ranks, and the run was planned for "
                f"{runtime.settings.ranks}"
            )

        # Where ranks sit is asked, not computed: launchers place them as they like.
        placement: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(placement, (tuple(dist.get_process_group_ranks(cp_group)), socket.gethostname()))
        cp_groups = sorted({cp_ranks for cp_ranks, _ in placement})
        hosts = [host for _, host in placement]
        devices = runtime.settings.domain_devices
        domain_of_rank = dict(enumerate(hosts if devices is None else (rank // devices for rank in range(len(hosts)))))
        runtime.set_settings(runtime.settings.with_domain(aligned_domain_size(cp_groups, domain_of_rank)))

        def new_group(ranks: list[int], description: str) -> dist.ProcessGroup:
            return parallel_state.create_group(
                ranks, timeout=timeout, pg_options=_nccl_options(config_path), group_desc=description
            )

        runtime.set_groups(create_sequence_groups(cp_groups, runtime.settings.group_sizes(), cp_group, new_group))
        if dist.get_rank() == 0:
            print_plan(runtime.settings, cp_groups, domain_of_rank)
        if runtime.settings.ledger is not None:
            # At exit, which Ctrl-C leads to as well.
            atexit.register(_write_ledger, runtime.ledger, runtime.settings.ledger, dist.get_rank())

    return initialize_model_parallel


def _write_ledger(ledger: Ledger, file: Path, rank: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"rank": rank, **ledger.as_dict()}, indent=2)
    file.with_suffix(f".rank{rank}{file.suffix}").write_text(text + "\n")


def _nccl_options(config_path: str | None) -> Any:
    """What the user configured for Megatron's `cp` communicator goes for those carved out of it."""
    if config_path is None:
        return None
    import yaml
    from megatron.core.parallel_state import get_nccl_options

    with open(config_path) as stream:
        return get_nccl_options("cp", yaml.safe_load(stream))


def _destroy_groups(runtime: Runtime, original: Function) -> Function:
    def destroy_model_parallel() -> None:
        runtime.destroy_groups()
        original()

    return destroy_model_parallel


def _build_model(runtime: Runtime, original: Function) -> Function:
    signature = inspect.signature(original)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if not runtime.is_active:
            return original(self, *args, **kwargs)
        from megatron.core.process_groups_config import ProcessGroupCollection

        arguments = signature.bind(self, *args, **kwargs).arguments
        refuse_unsupported_config(arguments["config"], runtime.settings.mode)
        groups = arguments.get("pg_collection") or ProcessGroupCollection.use_mpu_process_groups()
        arguments["config"], arguments["pg_collection"] = without_context_parallelism(
            arguments["config"], groups, runtime
        )
        original(**arguments)
        read_positions_from_plan(self, runtime)
        check_model(self)

    return __init__


def _core_attention(runtime: Runtime, original: Function) -> Function:
    def core_attention(self: Any) -> Any:
        from megatron.core.transformer.dot_product_attention import DotProductAttention

        stock = original(self)
        if not runtime.is_active:
            return stock
        make_kernel = make_sdpa if stock is DotProductAttention else make_te(stock)
        return functools.partial(MegatronBaspAttention, make_kernel, runtime)

    return core_attention


def _tensor_parallel_batch(runtime: Runtime, original: Function) -> Function:
    """Scripts allocate what tensor-parallel ranks receive for the micro-batch size of training, at evaluation too."""
    signature = inspect.signature(original)

    def get_batch_on_this_tp_rank(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        if runtime.is_active and runtime.plan_holder.is_set:
            arguments["micro_batch_size"] = len(runtime.plan_holder.plan.lengths)
        return original(**arguments)

    return get_batch_on_this_tp_rank


def _batch(runtime: Runtime, original: Function) -> Function:
    def get_batch_on_this_cp_rank(batch: Any, *args: Any, **kwargs: Any) -> Any:
        return stream_of_batch(runtime, batch) if runtime.is_active else original(batch, *args, **kwargs)

    return get_batch_on_this_cp_rank


def _schedule(runtime: Runtime, original: Function) -> Function:
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        forward_backward_func = original(*args, **kwargs)
        return PlannedSchedule(runtime, forward_backward_func) if runtime.is_active else forward_backward_func

    return get_forward_backward_func
