"""What has to change inside Megatron so that it trains without CUDA; the rest of it is in `megatron_basp.cpu`."""

from __future__ import annotations

import copy
import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from megatron_basp.megatron import fsdp_on_cpu, offloading_on_cpu
from megatron_basp.megatron.seam import replace


def install() -> None:
    """Called by `megatron_basp.cpu.install`, after torch was patched."""
    # `initialize_megatron` asserts CUDA unless told otherwise, and `pretrain` has no way to tell it.
    replace(
        "megatron.training.initialize:initialize_megatron",
        ["allow_no_cuda"],
        lambda original: functools.partial(original, allow_no_cuda=True),
        also_in=["megatron.training", "megatron.training.training"],
    )
    replace("megatron.training.arguments:add_megatron_arguments", ["parser"], _with_defaults_for_gloo)
    replace("megatron.training.arguments:validate_args", ["args", "defaults"], _with_more_queues_for_fsdp)
    # The warm-up of fused functions draws from the CUDA generator, here the only one there is, and as many numbers as
    # S/CP asks for: runs that differ in CP would start from different random states.
    replace(
        "megatron.training.initialize:set_jit_fusion_options",
        [],
        lambda original: lambda *args, **kwargs: None,
        also_in=["megatron.training.training"],
    )
    replace("megatron.core.datasets.utils:compile_helpers", [], _unless_compiled)
    # The tracker warns, at each draw of dropout, that the CPU's state changed where the GPU's should; it is both here.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
    # Token dispatchers want split sizes on the host, and take them there only if `tensor.is_cuda`.
    replace(
        "megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
        ["tensor", "as_numpy"],
        _split_sizes_on_the_host,
        also_in=["megatron.core.transformer.moe.token_dispatcher"],
    )
    # Torch's norms, which stand for Apex's on a CPU, refuse --sequence-parallel.
    replace(
        "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        ["config"],
        _norm_that_marks_its_parameters,
    )
    # Multi-latent attention names its head sizes, which only Transformer Engine's core attention takes.
    replace(
        "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
        ["config", "layer_number"],
        _with_head_sizes,
    )
    # The distributed optimizer was written for the Adam of Transformer Engine or Apex, which are not there.
    optimizer = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
    replace(f"{optimizer}.state_dict", [], _with_state_before_the_first_step)
    replace(f"{optimizer}.load_state_dict", ["state_dict"], _with_a_step_for_each_parameter)
    replace(f"{optimizer}._set_main_param_and_optimizer_states", ["model_param", "tensors"], _without_step)
    # `--async-save`: a process that is not forked would not have these patches.
    replace(
        "megatron.training.async_utils:init_persistent_async_worker",
        ["rank", "mp_mode"],
        lambda original: lambda rank, mp_mode="fork": original(rank, "fork"),
        also_in=["megatron.training.initialize"],
    )
    replace(
        "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync.preload_tensors",
        ["write_buckets"],
        _copied_before_training_goes_on,
    )
    fsdp_on_cpu.install()
    offloading_on_cpu.install()


def _norm_that_marks_its_parameters(original: Callable[..., Any]) -> Callable[..., Any]:
    """With --sequence-parallel a tensor-parallel rank norms a part of the tokens, so that the gradients of the norm's
    parameters have to be summed over those ranks: Megatron does that for parameters which say so, as Apex's do
    (`_allreduce_non_tensor_model_parallel_grads` in `core/distributed/finalize_model_grads.py`)."""

    @functools.wraps(original)
    def __new__(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = original(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    return __new__


def _unless_compiled(compile_helpers: Callable[[], None]) -> Callable[[], None]:
    """The wheel brings the compiled helper, not the Makefile that would compile it; a checkout brings the Makefile."""
    return lambda: None if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") else compile_helpers()


def _with_defaults_for_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    """The default backend of `--distributed-backend` is nccl, and only nccl can scale gradients while it sums them
    (`_make_nccl_premul_sum`), which is Megatron-FSDP's default."""

    @functools.wraps(original)
    def add_megatron_arguments(parser: Any) -> Any:
        parser = original(parser)
        parser.set_defaults(distributed_backend="gloo", gradient_reduce_div_fusion=False)
        return parser

    return add_megatron_arguments


def _with_more_queues_for_fsdp(original: Callable[..., Any]) -> Callable[..., Any]:
    """For FSDP Megatron asserts that CUDA_DEVICE_MAX_CONNECTIONS is not what it asserts for CP > 1 without it."""

    @functools.wraps(original)
    def validate_args(args: Any, defaults: Any = {}) -> Any:  # noqa: B006  (Megatron's own signature)
        if args.use_megatron_fsdp or args.use_torch_fsdp2:
            os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
        return original(args, defaults)

    return validate_args


def _split_sizes_on_the_host(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        tensor = original(tensor, as_numpy, record_stream)
        return tensor.numpy() if as_numpy and hasattr(tensor, "numpy") else tensor

    return maybe_move_tensor_to_cpu


def _with_head_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, k_channels: Any = None, v_channels: Any = None, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if v_channels is not None:
            # The width of the output; the scale is passed in, and nothing else depends on head sizes.
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return __init__


def _with_state_before_the_first_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """To load a checkpoint its shape is asked of a fresh optimizer, and torch's Adam makes its state when it steps."""

    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        if not self.optimizer.state:
            for parameter in (parameter for group in self.optimizer.param_groups for parameter in group["params"]):
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        return original(self)

    return state_dict


def _with_a_step_for_each_parameter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron hands one tensor to all parameters, and torch's Adam counts it up for each of them."""

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    return load_state_dict


def _without_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """It comes with the groups of parameters; among the tensors it is missing, or that of the fresh optimizer.

    Without gradients, since the main parameter of an fp32 model is a view of the model's.
    """

    @functools.wraps(original)
    @torch.no_grad()
    def set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: Any) -> None:
        original(self, model_param, {**tensors, "step": None})

    return set_main_param_and_optimizer_states


def _copied_before_training_goes_on(original: Callable[..., Any]) -> Any:
    """The process that writes gets tensors by shared memory; what a GPU copies to the host lies there already, and
    training would go on to change it."""

    @functools.wraps(original)
    def preload_tensors(write_buckets: Any, non_blocking: bool = True) -> Any:
        return [
            (file, key, (data, [(item, tensor.clone()) for item, tensor in tensors]))
            for file, key, (data, tensors) in original(write_buckets, non_blocking)
        ]

    return staticmethod(preload_tensors)
