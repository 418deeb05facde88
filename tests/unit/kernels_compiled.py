"""What Triton compiles the kernel to, for GPUs that need not be there; started by test_kernels.py, not collected.

A stand-in for the driver names the GPU; all is real but the launch.
"""

from __future__ import annotations

import re

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from megatron_basp.kernels import Rotary, triton_pack

LLAMA = (4, ((32, 128), (8, 128), (8, 128)))
QWEN = (8, ((16, 128), (2, 128), (2, 128)))  # each KV head with four ranks
ODD = (4, ((16, 80), (16, 80), (16, 80)))
MLA = (4, ((16, 192), (16, 192), (16, 128)))


class Driver:
    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_device(self) -> int:
        return self.architecture  # a device for each: kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """The kernels that calls would have launched."""
    driver.set_active(Driver(90))
    kernels, run = [], triton_pack._move_tiles.run

    def only_compile(*args, **options):
        kernels.append(run(*args, **{**options, "warmup": True}))

    monkeypatch.setattr(triton_pack._move_tiles, "run", only_compile)
    return kernels


def call(ranks, shapes, tokens=64, columns=0, interleaved=False, back=False, dtype=torch.bfloat16):
    heads = [torch.empty(tokens, *shape, dtype=dtype) for shape in shapes]
    widths = [max(h, ranks) // ranks * d for h, d in shapes]
    buffer = torch.empty(ranks, tokens, sum(widths), dtype=dtype)
    parts = zip(buffer.split(widths, dim=2), shapes, strict=True)
    by_rank = [part.unflatten(2, (-1, d)) for part, (_, d) in parts]
    rotary = Rotary.from_angles(torch.zeros(tokens, columns), dtype, (0, 1), interleaved) if columns else None
    if back:
        triton_pack.unpack_heads(by_rank, heads, rotary)
    else:
        triton_pack.pack_heads(heads, by_rank, rotary)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(
    ("model", "columns", "interleaved", "dtype"),
    [
        (LLAMA, 0, False, torch.float32),
        (LLAMA, 128, False, torch.bfloat16),
        (LLAMA, 128, True, torch.float16),
        (QWEN, 64, False, torch.bfloat16),
        (ODD, 0, False, torch.bfloat16),
        (MLA, 0, False, torch.bfloat16),
    ],
)
def test_every_access_to_memory_is_of_16_bytes(compiled, model, columns, interleaved, dtype, back):
    call(*model, columns=columns, interleaved=interleaved, back=back, dtype=dtype)
    (kernel,) = compiled
    accesses = set(re.findall(r"(?:ld|st)\.(?:global|local)\S*", kernel.asm["ptx"]))
    assert accesses == {"ld.global.v4.b32", "st.global.v4.b32"}
    assert kernel.metadata.shared == 0


def test_it_compiles_for_an_a100_too(compiled):
    driver.set_active(Driver(80))
    call(*LLAMA, columns=128)
    assert "target sm_80" in compiled[0].asm["ptx"]


@pytest.mark.parametrize("back", [False, True])
def test_products_with_strides_have_64_bits(compiled, back):
    call(*QWEN, back=back)
    products = re.findall(r"arith\.muli .* : tensor<\S*x(i\d+)>", compiled[0].asm["ttir"])
    assert products and set(products) == {"i64"}


def test_another_number_of_tokens_compiles_nothing_anew(compiled):
    for tokens in (64, 65, 1, 48):
        call(*LLAMA, tokens=tokens, columns=128)
    assert len({id(kernel) for kernel in compiled}) == 1


def test_all_tensors_go_in_one_launch_and_no_tokens_in_none(compiled):
    call(*MLA, columns=64)
    call(*MLA, columns=64, tokens=0)
    assert len(compiled) == 1
