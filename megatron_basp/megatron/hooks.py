"""Every place where an unmodified Megatron calls into megatron_basp, in one table.

The hooks do nothing in a run that asked for no sequence-parallel mode.
"""

from __future__ import annotations

import functools

from megatron_basp.megatron.batches import receiving_batch, taking_batch
from megatron_basp.megatron.core_attention import choosing_core_attention
from megatron_basp.megatron.model import building_model
from megatron_basp.megatron.monitoring import checking_throughput, logging_exchanges, monitoring_step
from megatron_basp.megatron.multi_token import rolling, weighing_losses
from megatron_basp.megatron.packed import packing_as_one_process, reading_documents
from megatron_basp.megatron.router import balancing_rows
from megatron_basp.megatron.runtime import Runtime
from megatron_basp.megatron.schedule import choosing_schedule
from megatron_basp.megatron.seam import Function, Hook, replace
from megatron_basp.megatron.start_up import (
    adding_arguments,
    creating_groups,
    destroying_groups,
    refusing_yaml,
    validating_arguments,
)
from megatron_basp.megatron.steps import evaluating, taking_step
from megatron_basp.megatron.versions import check_version
from megatron_basp.ranges import Ranges

HOOKS = (
    # From the command line to process groups.
    Hook("megatron.training.arguments:add_megatron_arguments", ("parser",), adding_arguments),
    Hook("megatron.training.arguments:validate_args", ("args", "defaults"), validating_arguments),
    Hook("megatron.training.yaml_arguments:validate_yaml", ("args", "defaults"), refusing_yaml),
    Hook(
        "megatron.core.parallel_state:initialize_model_parallel",
        ("context_parallel_size", "distributed_timeout_minutes", "nccl_communicator_config_path"),
        creating_groups,
    ),
    Hook("megatron.core.parallel_state:destroy_model_parallel", (), destroying_groups),
    # The model.
    Hook(
        "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
        ("config", "transformer_layer_spec", "pg_collection"),
        building_model,
    ),
    Hook("megatron.core.models.backends:LocalSpecProvider.core_attention", (), choosing_core_attention),
    Hook(
        "megatron.core.extensions.transformer_engine_spec_provider:TESpecProvider.core_attention",
        (),
        choosing_core_attention,
    ),
    Hook(
        "megatron.core.transformer.moe.router:TopKRouter._apply_seq_aux_loss",
        ("probs", "scores_for_aux_loss", "routing_map", "seq_length", "bsz", "with_padding_mask"),
        balancing_rows,
    ),
    Hook(
        "megatron.core.transformer.multi_token_prediction:roll_tensor",
        ("tensor", "shifts", "dims", "cp_group", "packed_seq_params"),
        rolling,
    ),
    Hook(
        "megatron.core.transformer.multi_token_prediction:process_mtp_loss",
        ("labels", "loss_mask", "compute_language_model_loss", "config", "cp_group"),
        weighing_losses,
        also_in=("megatron.core.models.gpt.gpt_model",),
    ),
    # Packed rows.
    Hook("megatron.core.models.gpt.gpt_model:GPTModel.forward", ("packed_seq_params",), reading_documents),
    Hook("megatron.training.datasets.sft_dataset:SFTDataset.__init__", ("config",), packing_as_one_process),
    # Batches, and the schedule that asks for them.
    Hook(
        "megatron.core.utils:get_batch_on_this_tp_rank",
        ("micro_batch_size",),
        receiving_batch,
        also_in=("megatron.training.training",),
    ),
    Hook(
        "megatron.core.utils:get_batch_on_this_cp_rank",
        ("batch",),
        taking_batch,
        also_in=("megatron.training.training",),
    ),
    Hook(
        "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        (),
        choosing_schedule,
        also_in=("megatron.core.pipeline_parallel", "megatron.training.training"),
    ),
    # What is counted and logged. The monitor is there before the step that it reads.
    Hook("megatron.training.training:train_step", (), taking_step),
    Hook("megatron.training.training:train_step", (), monitoring_step),
    Hook("megatron.training.training:evaluate", (), evaluating),
    Hook("megatron.training.training:training_log", ("iteration",), logging_exchanges),
    Hook(
        "megatron.training.one_logger_utils:track_e2e_metrics", ("log_throughput", "throughput"), checking_throughput
    ),
)


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
    from megatron.core.utils import nvtx_range_pop, nvtx_range_push

    check_version()
    if hasattr(parallel_state.destroy_model_parallel, "__wrapped__"):
        raise RuntimeError("the hooks are installed already: call install() once in a process, and keep its Runtime")
    runtime = Runtime()
    runtime.ranges = Ranges(nvtx_range_push, nvtx_range_pop)
    for hook in HOOKS:
        replace(hook.target, hook.parameters, functools.partial(_made, hook, runtime), hook.also_in, hook.versions)
    return runtime


def _made(hook: Hook, runtime: Runtime, original: Function) -> Function:
    return functools.wraps(original)(hook.make(runtime, original))
