"""What has to change inside Megatron so that it trains without CUDA; the rest of it is in `megatron_basp.cpu`."""

from __future__ import annotations

import copy
import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

from megatron_basp.megatron import fsdp_on_cpu
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
        ["tp_size"],
        lambda original: lambda tp_size=None: None,
        also_in=["megatron.training.training"],
    )
    replace("megatron.core.datasets.utils:compile_helpers", [], _unless_compiled)
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
    fsdp_on_cpu.install()


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
