"""The Triton kernel in Triton's interpreter, against the twin; started by test_kernels.py, not collected."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_basp.kernels import Rotary, torch_twin, triton_pack
from tests.kernel_cases import Case, cases

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def doubled(tensors):
    return [x.double() for x in tensors]


def exact(rotary: Rotary | None) -> Rotary | None:
    """The same tables, rounded as they are, in fp64."""
    return rotary and Rotary(rotary.cos.double(), rotary.sin.double(), rotary.rotated, rotary.interleaved)


def hold(found, reference, case: Case, copies_summed: bool) -> None:
    """One rounding to the dtype of what fp32 made, or nothing at all.

    By half an ulp; the interpreter cuts bf16 off, so there by a whole one.
    """
    for index, (x, wanted) in enumerate(zip(found, reference, strict=True)):
        kind = torch.finfo(x.dtype)
        if index not in case.rotated and not (copies_summed and x.shape[1] < case.ranks):
            assert torch.equal(x.double(), wanted)
        inside = min(kind.eps, torch.finfo(torch.float32).eps)
        rounding = kind.eps * (1 if x.dtype == torch.bfloat16 else 0.501)
        bound = rounding * wanted.abs() + 64 * case.ranks * inside + kind.smallest_normal * kind.eps
        assert ((x.double() - wanted).abs() <= bound).all()


@settings(max_examples=40)
@given(cases(), st.sampled_from(DTYPES))
def test_packing_equals_the_twin(case: Case, dtype: torch.dtype) -> None:
    sources, rotary = case.filled(case.sequence_side(dtype)), case.rotary(dtype)
    targets, reference = case.ranks_side(dtype), case.ranks_side(torch.float64)
    triton_pack.pack_heads(sources, targets, rotary)
    torch_twin.pack_heads(doubled(sources), reference, exact(rotary))
    hold(targets, reference, case, copies_summed=False)


@settings(max_examples=40)
@given(cases(), st.sampled_from(DTYPES))
def test_unpacking_equals_the_twin(case: Case, dtype: torch.dtype) -> None:
    sources, rotary = case.filled(case.ranks_side(dtype)), case.rotary(dtype)
    targets, reference = case.sequence_side(dtype), case.sequence_side(torch.float64)
    triton_pack.unpack_heads(sources, targets, rotary)
    torch_twin.unpack_heads(doubled(sources), reference, exact(rotary))
    hold(targets, reference, case, copies_summed=True)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("ranks", "shapes", "columns"),
    [
        (4, ((9, 16, 128), (9, 4, 128), (9, 4, 128)), 128),  # several tiles across and down
        (8, ((7, 16, 96), (7, 2, 96), (7, 2, 96)), 48),  # partial, replicated, not powers of two
        (2, ((19, 4, 192), (19, 4, 192), (19, 4, 128)), 64),  # multi-latent: d_qk ≠ d_v
    ],
)
def test_shapes_of_models_too(ranks, shapes, columns, interleaved) -> None:
    case = Case(ranks, shapes, ((0, 1), 0), True, columns, (0, 1), interleaved, 1.25, 1)
    test_packing_equals_the_twin.hypothesis.inner_test(case, torch.bfloat16)
    test_unpacking_equals_the_twin.hypothesis.inner_test(case, torch.bfloat16)


def test_a_gradient_expanded_from_one_number_is_a_source_like_any_other() -> None:
    target = torch.zeros(2, 3, 2, 4)
    triton_pack.pack_heads([torch.ones(()).expand(3, 4, 4)], [target])
    assert target.min() == 1
