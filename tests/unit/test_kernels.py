"""The packing kernels: the twin against a plain formula, Triton in its interpreter, and what Triton compiles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_basp.kernels import Rotary, moved_bytes, pack_heads, torch_twin, unpack_heads
from tests.kernel_cases import Case, cases, packed_by_the_formula

ROOT = Path(__file__).parents[2]


@given(cases(), st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
def test_packing_puts_each_head_where_the_formula_says_to_the_bit(case: Case, dtype: torch.dtype) -> None:
    sources, targets = case.filled(case.sequence_side(dtype)), case.ranks_side(dtype)
    expected = packed_by_the_formula(case, sources)
    pack_heads(sources, targets, case.rotary(dtype))
    for index, (target, wanted) in enumerate(zip(targets, expected, strict=True)):
        # A product rounded, a sum rounded, and tables that are rounded, of numbers up to 4·1.25.
        tolerance = 16 * torch.finfo(dtype).eps if index in case.rotated else 0
        assert torch.allclose(target.double(), wanted, rtol=0, atol=tolerance)
        passed = case.rotary_columns if index in case.rotated else 0
        assert torch.equal(target.double()[..., passed:], wanted[..., passed:])


@given(cases())
def test_unpacking_is_the_transpose_of_packing(case: Case) -> None:
    x, y = case.filled(case.sequence_side(torch.float64)), case.filled(case.ranks_side(torch.float64))
    packed, unpacked = case.ranks_side(torch.float64), case.sequence_side(torch.float64)
    rotary = case.rotary(torch.float64)
    pack_heads(x, packed, rotary)
    unpack_heads(y, unpacked, rotary)
    for a, to_ranks, b, back in zip(x, packed, y, unpacked, strict=True):
        assert torch.isclose((to_ranks * b).sum(), (a * back).sum(), rtol=0, atol=1e-12 * (1 + b.numel()))


@given(cases(), st.sampled_from([torch.bfloat16, torch.float16]))
def test_sums_over_copies_of_a_head_are_rounded_once(case: Case, dtype: torch.dtype) -> None:
    sources, targets = case.filled(case.ranks_side(dtype)), case.sequence_side(dtype)
    unpack_heads(sources, targets)
    for source, target in zip(sources, targets, strict=True):
        if target.shape[1] < case.ranks:
            exact = source.double().unflatten(0, (target.shape[1], -1)).sum(1)[:, :, 0].transpose(0, 1)
            bound = 0.5 * torch.finfo(dtype).eps * exact.abs() + 64 * torch.finfo(torch.float32).eps
            bound += torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
            assert ((target.double() - exact).abs() <= bound).all()


@given(cases())
def test_what_lies_between_the_rows_of_a_target_stays(case: Case) -> None:
    assume(case.layout[1] > 0)
    targets = case.sequence_side(torch.float32)
    unpack_heads(case.filled(case.ranks_side(torch.float32)), targets)
    for target in targets:
        around = torch.as_strided(target, (target.untyped_storage().nbytes() // 4,), (1,), 0)
        assert around.count_nonzero() <= target.numel()


def test_a_gradient_expanded_from_one_number_is_a_source_like_any_other() -> None:
    target = torch.zeros(2, 3, 2, 4)
    pack_heads([torch.ones(()).expand(3, 4, 4)], [target])
    assert target.min() == 1


def test_bytes_moved_are_each_input_once_and_each_output_once() -> None:
    sources = [torch.zeros(5, 4, 8), torch.zeros(5, 1, 6)]
    targets = [torch.zeros(4, 5, 1, 8), torch.zeros(4, 5, 1, 6)]
    assert moved_bytes(sources, targets) == 4 * (2 * 5 * 4 * 8 + 5 * 6 + 4 * 5 * 6)


@pytest.mark.parametrize(
    ("sources", "targets", "rotary", "message"),
    [
        ([(5, 4, 8)], [], None, "as many sources as targets are moved, got 1 and 0"),
        ([(5, 4, 8)], [(3, 5, 1, 8)], None, "tensor 0: heads % K or K % heads must be 0, got 4 heads and K=3"),
        ([(5, 4, 8)], [(2, 5, 1, 8)], None, r"is \[2, 5, 2, 8\] on the side of K=2 ranks"),
        ([(5, 4, 8), (6, 4, 8)], [(2, 5, 2, 8), (2, 6, 2, 8)], None, "tensor 1: .* with t=5 for all tensors"),
        ([(5, 4, 8)], [(2, 5, 2, 8)], (5, 10), r"r ≤ d, here \[5, ≤ 8\], got \[5, 10\]"),
        ([(5, 4, 8)], [(2, 5, 2, 8)], (5, 3), "r even"),
        ([(5, 4, 8)], [(2, 5, 2, 8)], (4, 8), r"got \[4, 8\]"),
    ],
)
def test_shapes_that_do_not_belong_together_are_refused(sources, targets, rotary, message) -> None:
    tables = Rotary.from_angles(torch.zeros(rotary), torch.float32, rotated=(0,)) if rotary else None
    with pytest.raises(ValueError, match=message):
        pack_heads([torch.zeros(x) for x in sources], [torch.zeros(x) for x in targets], tables)


def test_tables_for_a_tensor_that_is_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tensors \(0, 1\) cannot be rotated: there are 1"):
        tables = Rotary.from_angles(torch.zeros(5, 8), torch.float32)
        pack_heads([torch.zeros(5, 4, 8)], [torch.zeros(2, 5, 2, 8)], tables)


def test_a_target_whose_heads_are_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match="target 0: the columns of a head must be contiguous, got strides"):
        pack_heads([torch.zeros(5, 4, 8)], [torch.zeros(8, 2, 5, 2).permute(1, 2, 3, 0)])


def test_a_cpu_needs_no_triton() -> None:
    code = (
        "import sys, torch\nsys.modules['triton'] = None\nfrom megatron_basp.kernels import pack_heads\n"
        "pack_heads([torch.zeros(5, 4, 8)], [torch.zeros(2, 5, 2, 8)])"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "file", ["kernels_interpreted.py", pytest.param("kernels_compiled.py", marks=pytest.mark.slow)]
)
def test_the_triton_kernel(file: str, tmp_path: Path) -> None:
    """In a process of its own: Triton reads at import whether it interprets, and its driver is one for a process."""
    pytest.importorskip("triton")
    switches = {"TRITON_INTERPRET": str(int(file == "kernels_interpreted.py")), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"tests/unit/{file}"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **switches}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_the_twin_is_what_runs_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(torch_twin, "pack_heads", lambda *given: calls.append(given))
    pack_heads([torch.zeros(5, 4, 8)], [torch.zeros(2, 5, 2, 8)])
    assert len(calls) == 1
