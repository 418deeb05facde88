"""Transformer Engine without CUDA: its own Python, with torch in place of the kernels that it calls.

`install()` replaces functions of the extension module `transformer_engine_torch` by ones that compute the same on the
CPU, and lifts the two checks that ask for CUDA. What runs above them (layers, autograd functions, selection of
layouts, checkpoints, FP8 state, communication) is Transformer Engine's, unchanged.

Call it before anything imports Transformer Engine, which binds the kernels by name.
"""

from __future__ import annotations

import math
import os
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def install() -> None:
    os.environ["NVTE_PLUGIN"] = __name__
    import transformer_engine.pytorch  # noqa: F401
    import transformer_engine_torch as tex

    assert tex.generic_gemm is generic_gemm, "Transformer Engine was imported before, or its plugin seam has changed"
    _lift_checks_for_cuda()


def load_plugins() -> None:
    """What Transformer Engine calls of a plugin once its extension module is loaded, before it binds any kernel."""
    tex = sys.modules["transformer_engine_torch"]
    for kernel in (
        generic_gemm,
        rmsnorm_fwd,
        rmsnorm_bwd,
        layernorm_fwd,
        layernorm_bwd,
        swiglu,
        dswiglu,
        multi_tensor_adam,
        multi_tensor_l2norm,
        multi_tensor_scale,
        multi_tensor_scale_tensor,
    ):
        assert hasattr(tex, kernel.__name__)
        setattr(tex, kernel.__name__, kernel)


def _lift_checks_for_cuda() -> None:
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    construct = TransformerEngineBaseModule.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        # "TransformerEngine needs CUDA": answered for the length of the construction, since torch trusts the answer.
        is_available = torch.cuda.is_available
        torch.cuda.is_available = lambda: True
        try:
            construct(self, *args, **kwargs)
        finally:
            torch.cuda.is_available = is_available

    TransformerEngineBaseModule.__init__ = __init__
    # "TransformerEngine needs CUDA. Got input on device: cpu" and "DotProductAttention only supports CUDA tensors".
    torch.Tensor.is_cuda = property(lambda self: True)
    torch.cuda.is_current_stream_capturing = lambda: False


def use_unfused_attention() -> None:
    """Let attention be computed by Transformer Engine's own `UnfusedDotProductAttention`, which is written in torch.

    The choice between backends asks cuDNN; what goes into it is a part of the contract, not what comes out.
    """
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    utils.get_attention_backend = lambda params: (False, None, False, None, True, [False, False, True])


# Linear layers, norms, activations.


def generic_gemm(
    a: Tensor,
    transa: bool,
    b: Tensor,
    transb: bool,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    **comm: Any,
) -> tuple[Tensor, Tensor | None, None, None]:
    """op(B)·op(A), in the row-major terms of torch; B may have more than two dimensions if it is not transposed."""
    assert quantizer is None and not gelu and comm["comm_overlap"] is None
    flat = b.flatten(0, -2)
    result = (flat.t() if transb else flat) @ (a.flatten(0, -2).t() if transa else a.flatten(0, -2))
    bias_grad = None
    if bias is not None and grad:
        bias_grad = flat.sum(0)
    elif bias is not None:
        result = result + bias
    if not transb:
        result = result.unflatten(0, b.shape[:-1])
    if out is None:
        return result, bias_grad, None, None
    result = result.reshape(out.shape)
    out.copy_(out + result if accumulate else result)
    return out, bias_grad, None, None


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight + 1 if zero_centered else weight


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Any, quantizer: Any, dtype: Any, margin: int, zero_centered: bool
) -> tuple[Tensor, None, Tensor]:
    assert quantizer is None
    reciprocal = torch.rsqrt(x.square().mean(-1) + eps)
    return x * reciprocal[..., None] * _gamma(weight, zero_centered), None, reciprocal.flatten()


def rmsnorm_bwd(
    dy: Tensor, x: Tensor, reciprocal: Tensor, weight: Tensor, margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    normalized = x * reciprocal.view(*x.shape[:-1], 1)
    dy = dy.view_as(x)
    scaled = dy * _gamma(weight, zero_centered)
    dx = (scaled - normalized * (scaled * normalized).mean(-1, keepdim=True)) * reciprocal.view(*x.shape[:-1], 1)
    return dx, (dy * normalized).flatten(0, -2).sum(0)


def layernorm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    out: Any,
    quantizer: Any,
    dtype: Any,
    margin: int,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    assert quantizer is None
    mean = x.mean(-1)
    reciprocal = torch.rsqrt(x.var(-1, correction=0) + eps)
    output = F.layer_norm(x, x.shape[-1:], _gamma(weight, zero_centered), bias, eps)
    return output, mean.flatten(), reciprocal.flatten()


def layernorm_bwd(
    dy: Tensor, x: Tensor, mean: Tensor, reciprocal: Tensor, weight: Tensor, margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (*x.shape[:-1], 1)
    normalized = (x - mean.view(shape)) * reciprocal.view(shape)
    dy = dy.view_as(x)
    scaled = dy * _gamma(weight, zero_centered)
    centered = scaled - scaled.mean(-1, keepdim=True) - normalized * (scaled * normalized).mean(-1, keepdim=True)
    return centered * reciprocal.view(shape), (dy * normalized).flatten(0, -2).sum(0), dy.flatten(0, -2).sum(0)


def swiglu(x: Tensor, quantizer: Any, *options: Any) -> Tensor:
    assert quantizer is None
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


def dswiglu(dy: Tensor, x: Tensor, quantizer: Any, *options: Any) -> Tensor:
    assert quantizer is None
    inputs = x.detach().requires_grad_()
    with torch.enable_grad():
        output = swiglu(inputs, None)
    return torch.autograd.grad(output, inputs, dy)[0]


# Optimizer.


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: bool,
    bias_correction: bool,
    weight_decay: float,
) -> None:
    assert decoupled and bias_correction
    for gradient, parameter, average, square in zip(*tensor_lists, strict=True):
        average.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        update = (average / (1 - beta1**step)) / ((square / (1 - beta2**step)).sqrt() + eps)
        parameter.sub_(lr * (update + weight_decay * parameter))


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, None]:
    assert not per_tensor
    return torch.tensor([math.sqrt(sum(x.double().square().sum().item() for x in tensor_lists[0]))]), None


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: float) -> None:
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_scale_tensor(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: Tensor
) -> None:
    multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale.item())
