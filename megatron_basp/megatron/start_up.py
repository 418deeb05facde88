"""From the command line to process groups: the hooks at the start and at the end of a run."""

from __future__ import annotations

import atexit
import inspect
import socket
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_basp.errors import ConfigurationError
from megatron_basp.megatron import megatron_0_18
from megatron_basp.megatron.arguments import add_arguments, settings_from_arguments
from megatron_basp.megatron.bookkeeping import Bookkeeper, header_of_run
from megatron_basp.megatron.prerequisites import check_data_files, check_environment
from megatron_basp.megatron.refusals import refuse_unsupported_with
from megatron_basp.megatron.report import print_plan
from megatron_basp.megatron.runtime import Runtime
from megatron_basp.megatron.seam import Function
from megatron_basp.megatron.transports import with_transports
from megatron_basp.megatron.versions import megatron_minor
from megatron_basp.placement import is_inside_domains
from megatron_basp.plan_agreement import check_agreement
from megatron_basp.process_groups import create_sequence_groups


def adding_arguments(runtime: Runtime, original: Function) -> Function:
    def add_megatron_arguments(parser: Any) -> Any:
        parser = add_arguments(original(parser))
        return megatron_0_18.add_missing_arguments(parser) if megatron_minor() == "0.18" else parser

    return add_megatron_arguments


def validating_arguments(runtime: Runtime, original: Function) -> Function:
    def validate_args(args: Any, defaults: Any = {}) -> Any:  # noqa: B006  (Megatron's own signature)
        settings = settings_from_arguments(args)
        if settings is not None:
            refuse_unsupported_with(megatron_minor(), args, settings.mode)
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


def refusing_yaml(runtime: Runtime, original: Function) -> Function:
    """With `--yaml-cfg` Megatron forgets the flags that were parsed, ours among them, and validates by other code."""

    def validate_yaml(args: Any, defaults: Any = {}) -> Any:  # noqa: B006  (Megatron's own signature)
        if given := [word for word in sys.argv if word.startswith(("--sequence-parallel-mode", "--basp-"))]:
            raise ConfigurationError(f"--yaml-cfg makes Megatron ignore {given[0]}: pass flags instead")
        return original(args, defaults)

    return validate_yaml


def creating_groups(runtime: Runtime, original: Function) -> Function:
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
        nodes = hosts if devices is None else [f"domain {rank // devices}" for rank in range(len(hosts))]
        domain_of_rank = dict(enumerate(nodes))
        runtime.settings.check_cluster(domain_of_rank)
        runtime.set_settings(runtime.settings.with_placement(cp_groups, domain_of_rank))
        # Before groups are made by the plans: ranks that want different ones would wait for each other.
        check_agreement(runtime.settings.plans(), runtime.settings.mode, cp_group)

        def new_group(ranks: list[int], description: str) -> dist.ProcessGroup:
            return parallel_state.create_group(
                ranks, timeout=timeout, pg_options=_nccl_options(config_path), group_desc=description
            )

        groups = create_sequence_groups(cp_groups, runtime.settings.group_sizes(), cp_group, new_group)
        communicator_bytes = groups.connect()
        inside = {size: is_inside_domains(cp_groups, size, domain_of_rank) for size in groups.by_size}
        groups, carried_by = with_transports(groups, runtime.settings, inside)
        runtime.set_groups(groups)
        if dist.get_rank() == 0:
            print_plan(runtime.settings, cp_groups, domain_of_rank, groups, communicator_bytes, carried_by)
        if runtime.settings.ledger is not None:
            header = header_of_run(runtime.settings, dist.get_process_group_ranks(cp_group), nodes)
            runtime.bookkeeper = Bookkeeper(runtime, header)
            # At exit, which Ctrl-C leads to as well; the groups are there until then, or until they are destroyed.
            atexit.register(runtime.close_books)

    return initialize_model_parallel


def _nccl_options(config_path: str | None) -> Any:
    """What the user configured for Megatron's `cp` communicator goes for those carved out of it."""
    if config_path is None:
        return None
    import yaml
    from megatron.core.parallel_state import get_nccl_options

    with open(config_path) as stream:
        return get_nccl_options("cp", yaml.safe_load(stream))


def destroying_groups(runtime: Runtime, original: Function) -> Function:
    def destroy_model_parallel() -> None:
        runtime.destroy_groups()
        original()

    return destroy_model_parallel
